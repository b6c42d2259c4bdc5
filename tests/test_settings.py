"""Ranks that disagree on a common setting are all refused when they meet; the error says who set what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asynccoll.backends.api.assembly import Member
from patience import patient
from ports import free_port
from worlds import rank_environment

#: Joins the world with the settings of its own rank, and prints the outcome.
PROGRAM = """
import sys, json
import asynccoll as ac
rank, size = map(int, sys.argv[1:3])
where, version, options = *sys.argv[3:5], json.loads(sys.argv[5])
ac.__version__ = version or ac.__version__
try:
    ac.initialize("gloo", init_method=where, rank=rank, world_size=size, timeout=20, **options)
except ac.AsyncCollError as error:
    print(type(error).__name__, error)
else:
    print("joined", ac.all_reduce(1).wait())
"""


def joined(where: str, options: list[str], versions: tuple[str, ...] = ("", "", "")) -> list[str]:
    """What each of ``len(options)`` ranks prints."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(len(options)), where, versions[rank], said],
            env=rank_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, said in enumerate(options)
    ]
    try:
        return [one.communicate(timeout=patient(30))[0].strip() for one in running]
    finally:
        for one in running:
            one.kill()


@pytest.fixture(params=[pytest.param("tcp", marks=pytest.mark.nightly), "file"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An init method: a file, or a TCP address."""
    return f"file://{tmp_path}/meet" if request.param == "file" else f"tcp://127.0.0.1:{free_port()}"


def test_ranks_that_differ_in_memory(where: str) -> None:
    """Every rank's error says which ranks had which value."""
    for said in joined(where, ["{}", '{"memory": false}', "{}"]):
        assert said.startswith("InvalidArgumentError"), said
        assert "memory=: True on ranks 0, 2; False on rank 1" in said
        assert "ASYNCCOLL_MEMORY" in said


def test_ranks_that_differ_in_check() -> None:
    for said in joined(f"tcp://127.0.0.1:{free_port()}", ['{"check": "full"}', "{}", '{"check": "full"}']):
        assert said.startswith("InvalidArgumentError"), said
        assert "check=: 'full' on ranks 0, 2; 'local' on rank 1" in said


def test_ranks_of_different_versions() -> None:
    """The version is compared before any other setting."""
    options = ["{}", "{}", '{"check": "off"}']
    for said in joined(f"tcp://127.0.0.1:{free_port()}", options, ("", "", "9.9")):
        assert said.startswith("LaunchEnvironmentError"), said
        assert "9.9 on rank 2" in said
        assert " on ranks 0, 1" in said


def test_ranks_that_are_alike(where: str) -> None:
    assert joined(where, ['{"memory": false}'] * 3) == ["joined 3"] * 3


def test_what_an_unknown_version_tells_is_read() -> None:
    """Unknown fields are ignored, and missing ones have defaults."""
    read = Member.read({"host": "there", "colour": "red"})
    assert (read.host, read.version) == ("there", "an unknown one")
