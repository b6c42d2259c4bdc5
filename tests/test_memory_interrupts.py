"""Ctrl-C at any moment of the engine that moves memory leaves none of its locks held."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from asynccoll.backends.memory.moving import Mover

INTERRUPTS = 100


class Moving:
    """The engine's own steps, with nothing to move: the locks are taken all the time."""

    _move_on = Mover._move_on
    _tell_others = Mover._tell_others
    _look_again = Mover._look_again

    def __init__(self) -> None:
        self._fence = threading.Lock()
        self._lock = threading.Lock()
        self._bases: list[tuple[int, int]] = []
        self._words: list[int] = []

    def _move(self) -> bool:
        return True

    def run(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        while True:
            self._move_on()  # type: ignore[misc]  # it is no Mover, and has what these methods need


@pytest.fixture
def _interrupted() -> Iterator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.usefixtures("_interrupted")
def test_no_lock_stays_held() -> None:
    """Python handles signals right after a call returns: ``acquire`` before its ``try`` is too late."""
    drawn = random.Random(7)
    held = 0
    for _ in range(INTERRUPTS):
        moving = Moving()
        with pytest.raises(KeyboardInterrupt):
            moving.run(drawn.uniform(5e-5, 2e-4))
        held += moving._fence.locked() or moving._lock.locked()
    assert held == 0, f"after {held} of {INTERRUPTS} interrupts"
