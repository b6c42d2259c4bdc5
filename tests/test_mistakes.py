"""The mistakes that are planted to see whether tests find them: each has to have its place in the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mistakes import SEEDED, TRAINING, Mistake


@pytest.mark.parametrize("table", [SEEDED, TRAINING])
def test_each_can_be_planted(table: Callable[[], list[Mistake]]) -> None:
    """A line that was rewritten had no mistake of its own any more, and none of the table was planted."""
    assert table()
