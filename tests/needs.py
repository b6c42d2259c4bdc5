"""Requirements of some tests on the machine: Debian programs, and permission to make network namespaces.

If a requirement is missing, the tests skip and say how to get it. On CI, which runs as root and has installed
everything (`tools/system.py`), a missing requirement is a failure.
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

#: Includes the directories of daemons, which are not on every user's path.
PATH = system.SEARCH


def need(*names: str) -> None:
    """Skip or fail unless the Debian packages ``names`` are installed."""
    packages = [one for one in system.missing() if one.name in names]
    if packages:
        absent(
            f"{', '.join(one.name for one in packages)} not installed", f"as root: {system.command(packages)}"
        )


def need_package(name: str, backend: str, where: str) -> None:
    """Skip without a Python package; if its backend is under test, fail instead."""
    if under_test(backend):
        importlib.import_module(name)
    else:
        pytest.importorskip(name, reason=where, exc_type=ImportError)


def need_package_of(group: str, name: str) -> Any:
    """Import a package of a group of requirements, or skip; fail if this environment has the group."""
    having = [row for row in ENVIRONMENTS.values() if group in row.groups]
    if any(envbuild.directory(row).name == Path(sys.prefix).name for row in having):
        return importlib.import_module(name)
    where = f"environments that have {name}: {', '.join(row.name for row in having)}"
    return pytest.importorskip(name, reason=where, exc_type=ImportError)


def has_package(name: str, backend: str) -> bool:
    """Whether a package is installed, without importing it; raise if it is missing but under test."""
    found = importlib.util.find_spec(name) is not None
    if not found and under_test(backend):
        raise ImportError(f"{name} is not there, in the environment that is to test {backend}")
    return found


def under_test(backend: str) -> bool:
    """Whether this run is to test ``backend``."""
    return backend in os.environ.get("ASYNCCOLL_TEST_BACKENDS", "").split(",")


def need_root(purpose: str) -> None:
    """Skip or fail unless run as root."""
    if os.geteuid() != 0:
        absent(f"{purpose} takes root", "sudo make test")


def absent(what: str, cure: str) -> NoReturn:
    """Skip, or fail on CI, where nothing may be missing."""
    if os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(f"{what} ({cure})")
    pytest.skip(f"{what} ({cure})")


def which(name: str) -> str:
    """Return the path of a program that ``need`` has found."""
    found = shutil.which(name, path=PATH)
    assert found is not None, f"{name} is nowhere on {PATH}"
    return found
