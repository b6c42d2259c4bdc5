"""The table of what ran, made from the records of a separate pytest run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ran
import records
from patience import patient

HERE = Path(__file__).parent
TOOLS = HERE.parent / "tools"

CONFTEST = """
import sys
sys.path.insert(0, {here!r})
import records

def pytest_configure(config):
    records.register(config)
"""
TESTS = """
import os, pathlib, pytest

def test_well(): pass

def test_twice():
    once = pathlib.Path("once")
    if not once.exists():
        once.touch()
        assert False

def test_not(): assert False

def test_absent(): pytest.skip("no such thing (pip install it)")

@pytest.fixture
def spoilt():
    yield
    raise OSError

def test_spoilt(spoilt): pass
"""


def run(directory: Path, *arguments: str, **variables: str) -> str:
    environ = {**os.environ, "ASYNCCOLL_TEST_RECORDS": str(directory / "records"), **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environ,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_what_ran_is_told_by_backend(tmp_path: Path) -> None:
    """A test that passes the second time has passed, one whose teardown fails has not; absences are named."""
    tmp_path.joinpath("conftest.py").write_text(CONFTEST.format(here=str(HERE)))
    tmp_path.joinpath("test_some.py").write_text(TESTS)
    tmp_path.joinpath("test_slurm_here.py").write_text("def test_it(): pass")
    tmp_path.joinpath("test_whole.py").write_text(
        "import pytest; pytest.skip('a whole file', allow_module_level=True)"
    )
    run(tmp_path, "-m", "pytest", "-q", ASYNCCOLL_TEST_BACKENDS="horovod")
    run(tmp_path, "-m", "pytest", "-q", "--lf", "--lfnf=none", ASYNCCOLL_TEST_BACKENDS="horovod")
    rows = run(tmp_path, str(TOOLS / "ran.py"), str(tmp_path / "records")).splitlines()
    told = {row[:16].strip(): row[16:].split() for row in rows}
    assert told["what ran"] == ["passed", "failed", "skipped", "seconds"]
    assert told["horovod"][:3] == ["2", "2", "2"]
    assert told["slurm"][:3] == ["1", "0", "0"]
    assert told["gloo"][:2] == ["not", "run:"]
    assert told["nccl"][:2] == ["not", "run:"]
    assert told["memory"] == ["not", "run:", "make", "memory"]
    assert "skipped     1: no such thing (pip install it)" in rows
    assert "skipped     1: a whole file" in rows
    again = [row for row in rows if "second time" in row]
    assert again == ["passed the second time only: test_some.py::test_twice (horovod)"]


#: The backends of each environment, its package, and the label under which its tests count.
KINDS = {
    "test": (None, None, "gloo"),
    "memory": ("memory", None, "memory"),
    "mpich": ("mpi", "mpich", "mpi, MPICH"),
    "openmpi": ("mpi", "openmpi", "mpi, Open MPI"),
    "xla": ("xla-tpu", "torch_xla", "xla"),
    "xla-on-gloo": (None, "torch_xla", "gloo, old torch"),
}


@pytest.mark.parametrize(("backends", "package", "label"), KINDS.values(), ids=KINDS)
def test_each_environment_has_a_row(monkeypatch: pytest.MonkeyPatch, backends, package, label: str) -> None:
    """The table thus shows it if nothing ran in an environment."""

    def version(name: str) -> str:
        if name != package:
            raise records.importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(records.importlib.metadata, "version", version)
    monkeypatch.delenv("ASYNCCOLL_TEST_BACKENDS", raising=False)
    if backends is not None:
        monkeypatch.setenv("ASYNCCOLL_TEST_BACKENDS", backends)
    assert records.label() == label
    assert label in ran.BACKENDS
