"""A backend that is to be tested and is not there is a failure, never a skip."""

from __future__ import annotations

import pytest

import needs


def test_what_is_under_test_may_not_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the tests that need it skip, and say where it is."""
    monkeypatch.setenv("ASYNCCOLL_TEST_BACKENDS", "mpi,smoke")
    with pytest.raises(ImportError, match="smoke_signals"):
        needs.need_package("smoke_signals", "smoke", "on hills")
    with pytest.raises(ImportError, match="smoke_signals"):
        needs.has_package("smoke_signals", "smoke")
    monkeypatch.setenv("ASYNCCOLL_TEST_BACKENDS", "mpi")
    assert not needs.has_package("smoke_signals", "smoke")
    with pytest.raises(pytest.skip.Exception, match="on hills"):
        needs.need_package("smoke_signals", "smoke", "on hills")
