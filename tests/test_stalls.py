"""In each stall that is drawn (`stalls`), every waiter is told which rank stalls, in which call and where."""

from __future__ import annotations

import pytest

import stalls
import worlds
from patience import patient


@pytest.mark.processes
@pytest.mark.skipif("gloo" not in worlds.BACKENDS, reason="of gloo")
@pytest.mark.parametrize("size", [2, 5])
def test_every_waiter_is_told_who_stalls(size: int) -> None:
    late = stalls.run(8, 20 + size, (size,))
    assert len(late) == 8 * (size - 1)
    assert max(late) < patient(stalls.TOLD_S)


@pytest.mark.parametrize("seed", range(12))
def test_every_waiter_is_told_in_whatever_order_threads_go_on(seed: int) -> None:
    assert max(stalls.simulated(seed)) < stalls.TOLD_S
