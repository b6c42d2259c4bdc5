"""Many calls of all kinds through memory: right values, whatever size, dtype and number in flight."""

from __future__ import annotations

import pytest

import soaks
import worlds
from ranks import Rank


async def mixed(me: Rank, calls: int, seed: int) -> soaks.Found:
    return await soaks.mixed(me.rank, calls, seed)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_soak(size: int) -> None:
    """`make soak` runs longer, and also checks what grows."""
    found = worlds.world("memory", size).run(mixed, 300, 1, runner="asyncio")
    assert [wrong for _, wrong in found] == [[]] * size
    assert [samples[-1].calls for samples, _ in found] == [300] * size
