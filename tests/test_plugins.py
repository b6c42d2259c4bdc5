"""Backends of other packages, found through the entry-point group `asynccoll.backends`."""

from __future__ import annotations

from pathlib import Path

import pytest

import scripts

BACKEND = """
from asynccoll.backends.api import Context, Identity
from asynccoll.backends.serial.backend import SerialBackend


def create(request):
    options = request.take_options("flavour")
    backend = SerialBackend()
    backend.name = f"toy of {options['flavour']}" if options else "toy"
    return Context(backend, Identity(), check=request.check)
"""
METADATA = "Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Install a package with a working backend `toy` and a broken one; return an environment with it."""
    home = tmp_path / "site"
    info = home / "toy_backend-1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(METADATA)
    info.joinpath("entry_points.txt").write_text(
        "[asynccoll.backends]\nToy = toy_backend:create\nbroken = toy_backend_that_is_not:create\n"
    )
    home.joinpath("toy_backend.py").write_text(BACKEND)
    return {"PYTHONPATH": f"{home}:{scripts.rank_environment()['PYTHONPATH']}"}


USES = """
    import sys, asynccoll as ac
    print("toy" in ac.available_backends(), "toy_backend" in sys.modules)
    ac.initialize("TOY", flavour="mint")
    print(ac.backend(), ac.all_reduce(5).wait())
    ac.finalize()
    try:
        ac.initialize("toy", colour="red")
    except ac.InvalidArgumentError as error:
        print("colour" in str(error), "flavour" in str(error))
    try:
        ac.initialize("gloom")
    except ac.BackendNotFoundError as error:
        print("toy" in str(error))
"""


def test_a_backend_of_another_package(tmp_path: Path, installed: dict[str, str]) -> None:
    """It is listed without being loaded, asked for in any case, has its own options; errors name it."""
    (ended,) = scripts.run(tmp_path, USES, launched=False, env=installed)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["True False", "toy of mint 5", "True True", "True"]


BROKEN = """
    import asynccoll as ac
    try:
        ac.initialize("broken")
    except ac.BackendNotFoundError as error:
        print(error)
"""


def test_a_backend_that_does_not_load(tmp_path: Path, installed: dict[str, str]) -> None:
    """The error is typed and says which package to reinstall."""
    (ended,) = scripts.run(tmp_path, BROKEN, launched=False, env=installed)
    assert ended.code == 0, ended.err
    assert "toy_backend_that_is_not" in ended.out
    assert "pip install toy-backend" in ended.out


ON_SYNC = """
    import asynccoll.sync as idist
    print("toy" in idist.available_backends())
    idist.initialize("toy")
    print(idist.backend(), idist.model_name(), idist.get_world_size(), idist.all_reduce(5))
    idist.finalize()
    print(idist.backend())
"""


def test_sync_takes_a_backend_of_another_package(tmp_path: Path, installed: dict[str, str]) -> None:
    """It is accepted by name, and has its own computation model."""
    (ended,) = scripts.run(tmp_path, ON_SYNC, launched=False, env=installed)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["True", "toy toy-dist 1 5", "None"]


EXPLAINS = """
    from asynccoll.cli.entry import main
    import sys
    sys.argv = ["asynccoll", "explain", "all_reduce", "--backend", "toy", "--world-size", "2"]
    sys.exit(main())
"""


def test_explain_of_a_backend_that_does_not_tell(tmp_path: Path, installed: dict[str, str]) -> None:
    """It prints one line that says what its package lacks, and returns exit code 2."""
    (ended,) = scripts.run(tmp_path, EXPLAINS, launched=False, env=installed)
    assert ended.code == 2, ended.err
    assert "capabilities(name, device)" in ended.err
    assert "Traceback" not in ended.err
