"""The mpi backend if mpi4py or its library is missing: errors give the command to type."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asynccoll as ac
from asynccoll.launch import mpiexec

INSTALL = "pip install mpi4py mpich"


@pytest.fixture
def no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look like an environment without mpi4py."""
    find = importlib.util.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name.startswith("mpi4py") else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mpi4py", None)


@pytest.mark.usefixtures("no_mpi4py")
def test_the_error_has_the_line_to_type() -> None:
    """Without mpi4py, the error has the exact pip command, and the backend is not listed."""
    with pytest.raises(ac.BackendNotFoundError, match=INSTALL):
        ac.initialize("mpi")
    assert "mpi" not in ac.available_backends()
    assert not ac.is_initialized()


def test_a_missing_library_is_told_like_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """If mpi4py is installed but cannot load a libmpi, the error has the same command."""
    from asynccoll.backends.mpi import library as mpi_library

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("cannot load MPI library\nlibmpi.so: no such file")

    monkeypatch.setitem(sys.modules, "mpi4py", Broken())
    with pytest.raises(ac.BackendNotFoundError, match=INSTALL) as caught:
        mpi_library.load()
    assert "cannot load MPI library" in str(caught.value)


def test_no_mpiexec_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error has the command to type; `asynccoll run` turns it into exit code 2."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mpiexec, "_beside_python", lambda: None)
    monkeypatch.setattr(mpiexec, "_of_wheel", lambda name: None)
    mpiexec.find.cache_clear()
    with pytest.raises(ac.BackendNotFoundError, match=INSTALL):
        mpiexec.find()
    mpiexec.find.cache_clear()


def test_an_mpiexec_that_cannot_be_run_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    monkeypatch.setattr(mpiexec, "_beside_python", lambda: str(broken))
    mpiexec.find.cache_clear()
    with pytest.raises(ac.BackendNotFoundError, match=f"{broken} cannot be run: No such file"):
        mpiexec.find()


@pytest.mark.parametrize(
    ("said", "family", "flags"),
    [
        ("mpiexec (Open MPI) 5.0.11", "openmpi", ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]),
        (
            "mpiexec (OpenRTE) 4.1.5\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
            "openmpi",
            ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"],
        ),
        ("HYDRA build details:\n CC: /opt/intel/bin/icx", "mpich", ["-rmk", "user", "-launcher", "fork"]),
        ("of nobody that is known", "other", []),
        ("Intel(R) MPI Library for Linux* OS", "intel", ["-launcher", "fork", "-hosts", "localhost"]),
    ],
)
def test_each_family_is_told_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, said: str, family: str, flags: list[str]
) -> None:
    """More ranks than cores are allowed, and none is bound to a core; as root, Open MPI is allowed to run."""
    monkeypatch.setattr(mpiexec, "_beside_python", lambda: "/bin/mpiexec")
    told = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(mpiexec.subprocess, "run", lambda *args, **kwargs: told)
    monkeypatch.setattr(mpiexec.os, "geteuid", lambda: 0)
    mpiexec.find.cache_clear()
    found = mpiexec.find()
    mpiexec.find.cache_clear()
    assert found.family == family
    assert found.command(3, ["python", "x.py"]) == ["/bin/mpiexec", *flags, "-n", "3", "python", "x.py"]
    added = set(found.environment({})) >= {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}
    assert added == (family == "openmpi")
