"""What some tests need of the machine: programs from Debian, and leave to make network namespaces.

Where a person runs the tests and it is not there, these tests skip and say how to get it. On CI, which
runs as root and has installed it (`tools/system.py`), its absence is a failure.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

import envbuild
import system
from envs import ENVIRONMENTS

#: With the directories of the daemons, which are not on everybody's path.
PATH = system.SEARCH


def need(*names: str) -> None:
    """Go on only with the Debian packages ``names``."""
    packages = [one for one in system.missing() if one.name in names]
    if packages:
        absent(
            f"{', '.join(one.name for one in packages)} not installed", f"as root: {system.command(packages)}"
        )


def need_package(name: str, backend: str, where: str) -> None:
    """Go on only with a package of Python; where its backend is under test, its absence is an error."""
    if under_test(backend):
        importlib.import_module(name)
    else:
        pytest.importorskip(name, reason=where, exc_type=ImportError)


def need_package_of(group: str, name: str) -> Any:
    """A package of a group of requirements; in an environment that has the group its absence is an error."""
    having = [row for row in ENVIRONMENTS.values() if group in row.groups]
    if any(envbuild.directory(row).name == Path(sys.prefix).name for row in having):
        return importlib.import_module(name)
    where = f"environments that have {name}: {', '.join(row.name for row in having)}"
    return pytest.importorskip(name, reason=where, exc_type=ImportError)


def has_package(name: str, backend: str) -> bool:
    """Whether it is there, without loading it; where its backend is under test, its absence is an error."""
    found = importlib.util.find_spec(name) is not None
    if not found and under_test(backend):
        raise ImportError(f"{name} is not there, in the environment that is to test {backend}")
    return found


def under_test(backend: str) -> bool:
    """Whether this run is to test ``backend``."""
    return backend in os.environ.get("ASYNCCOLL_TEST_BACKENDS", "").split(",")


def need_root(purpose: str) -> None:
    """Go on only as root."""
    if os.geteuid() != 0:
        absent(f"{purpose} takes root", "sudo make test")


def absent(what: str, cure: str) -> NoReturn:
    """Skip, or fail on CI, where nothing may be absent."""
    if os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(f"{what} ({cure})")
    pytest.skip(f"{what} ({cure})")


def which(name: str) -> str:
    """The path of a program that ``need`` has found."""
    found = shutil.which(name, path=PATH)
    assert found is not None, f"{name} is nowhere on {PATH}"
    return found
