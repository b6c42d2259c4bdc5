"""The mistakes planted to see whether tests find them: each must still have its place in the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mistakes import SEEDED, TRAINING, Mistake


@pytest.mark.parametrize("table", [SEEDED, TRAINING])
def test_each_can_be_planted(table: Callable[[], list[Mistake]]) -> None:
    """Once, a rewritten line no longer had its mistake, and nothing of the table could be planted."""
    assert table()
