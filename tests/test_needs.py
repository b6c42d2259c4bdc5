"""A dependency that is under test and missing is a failure, never a skip."""

from __future__ import annotations

import sys

import pytest

import envbuild
import needs
from envs import ENVIRONMENTS


def test_what_is_under_test_may_not_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In other environments the tests that need it skip, and say where it is."""
    monkeypatch.setenv("ASYNCCOLL_TEST_BACKENDS", "mpi,smoke")
    with pytest.raises(ImportError, match="smoke_signals"):
        needs.need_package("smoke_signals", "smoke", "on hills")
    with pytest.raises(ImportError, match="smoke_signals"):
        needs.has_package("smoke_signals", "smoke")
    monkeypatch.setenv("ASYNCCOLL_TEST_BACKENDS", "mpi")
    assert not needs.has_package("smoke_signals", "smoke")
    with pytest.raises(pytest.skip.Exception, match="on hills"):
        needs.need_package("smoke_signals", "smoke", "on hills")


def test_what_an_environment_is_made_of_may_not_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not in environments that have the group; elsewhere the tests skip, and say which have it."""
    monkeypatch.setattr(sys, "prefix", str(envbuild.directory(ENVIRONMENTS["demo"])))
    with pytest.raises(ImportError, match="smoke_signals"):
        needs.need_package_of("demo", "smoke_signals")
    with pytest.raises(pytest.skip.Exception, match=r"environments that have smoke_signals: test$"):
        needs.need_package_of("notebook", "smoke_signals")
    monkeypatch.setattr(sys, "prefix", "/usr")
    with pytest.raises(pytest.skip.Exception, match=r"test, demo, xla$"):
        needs.need_package_of("demo", "smoke_signals")
