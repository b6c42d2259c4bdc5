"""The threads that move calls through memory: who is woken, and who calls the callbacks, in rare orders.

The steps are scripted, and so is what wakes threads; the simulated worlds try both for real.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynccoll.backends.memory.flight import InFlight
from asynccoll.backends.memory.layout import ASLEEP, BLOCK_WORDS, CLOSED, STATE, WATCHING
from asynccoll.backends.memory.moving import Mover
from asynccoll.backends.memory.watcher import Watcher
from asynccoll.errors import CollectiveError, PeerLostError
from asynccoll.memory import unfilled
from patience import patient
from struck import Strike


class Noted:
    """Bells that note what they are asked to do, and let no thread sleep."""

    crowded = True

    def __init__(self) -> None:
        self.dead: list[int] = []
        self.noted: list[str] = []
        self.in_sleep: Callable[[], object] = lambda: None

    def sleep(self, said: int, seconds: float) -> None:
        self.in_sleep()

    def wake(self, index: int) -> None:
        self.noted.append(f"wake {index}")

    def ring(self, index: int) -> None:
        self.noted.append(f"ring {index}")

    def watch(self, mover: Mover) -> None:
        pass

    def later(self, job: Callable[[], object]) -> None:
        job()

    def gone(self) -> Sequence[int]:
        return self.dead


class Scripted(Mover):
    """Rank 0 of two. Each step takes the next of ``steps``: a call that it ends, or nothing."""

    def __init__(self, bells: Noted) -> None:
        words = [0] * (2 * BLOCK_WORDS)
        region: Any = SimpleNamespace(words=words, mine=0, index=0, size=2, others=[BLOCK_WORDS])
        super().__init__(region, bells, "the world", [0, 1])
        self.words = words
        self.steps: list[InFlight | None] = []
        self.calls: list[InFlight] = []

    def call(self) -> InFlight:
        self.calls.append(InFlight(self))
        return self.calls[-1]

    def _step(self) -> bool:
        ended = self.steps.pop(0) if self.steps else None
        if ended is not None:
            self._over(ended, None)
        return ended is not None

    def _is_busy(self) -> bool:
        return not all(call.finished for call in self.calls)

    def _goes_on_by_itself(self) -> bool:
        return bool(self._listened)

    def _drop(self, error: CollectiveError) -> None:
        for call in self.calls:
            self._over(call, error)


@pytest.mark.parametrize("look", range(12))
def test_no_thread_sleeps_on_another_calls_callback(look: int) -> None:
    """Whichever look of a waiter ends another call, its callback is called before the waiter sleeps."""
    bells = Noted()
    mover = Scripted(bells)
    mine, other = mover.call(), mover.call()
    told: list[str] = []
    mover.listen(other, lambda: told.append("over"))
    mover.steps = [*[None] * look, other]

    def in_sleep() -> None:
        if other.finished:
            assert told == ["over"]
            mover.steps = [mine]

    bells.in_sleep = in_sleep
    assert mover.wait(mine, 60.0)
    assert told == ["over"]


def test_callbacks_of_calls_that_end_as_a_rank_is_lost_are_called() -> None:
    """What that rank had written before it ended completes the last call; nothing else rings the watcher."""
    bells = Noted()
    mover = Scripted(bells)
    call = mover.call()
    told: list[BaseException | None] = []
    mover.listen(call, lambda: told.append(call.error()))
    bells.noted.clear()
    bells.dead, mover.steps = [1], [None, call]  # not yet there when the watcher looks first
    mover.attend()
    if bells.noted.count("ring 0"):
        mover.attend()
    assert told == [None]


def test_the_watcher_does_not_rest_beside_a_rank_that_has_just_left() -> None:
    """That rank looked at the word before it said that nobody looks here, and rings nobody afterwards."""
    bells = Noted()
    mover = Scripted(bells)
    call = mover.call()
    told: list[BaseException | None] = []
    mover.listen(call, lambda: told.append(call.error()))
    bells.noted.clear()
    looked = mover._lost

    def leaves_afterwards() -> bool:
        lost = looked()
        mover.words[BLOCK_WORDS + STATE] = CLOSED
        return lost

    mover._lost = leaves_afterwards  # type: ignore[method-assign]
    mover.attend()
    if "ring 0" in bells.noted:
        mover.attend()
    assert isinstance(told[0], PeerLostError)


def test_a_wait_ends_in_time_while_another_call_moves_on_and_on() -> None:
    mover = Scripted(Noted())
    call = mover.call()
    mover._step = lambda: True  # type: ignore[method-assign]
    assert not mover.wait(call, 0.01)


def test_the_watcher_calls_callbacks_while_another_call_moves_on_and_on() -> None:
    mover = Scripted(Noted())
    call, told = mover.call(), threading.Event()
    call.add_callback(told.set)
    moved = iter(range(100))

    def step() -> bool:
        mover._over(call, None)
        return not told.is_set() and next(moved, None) is not None

    mover._step = step  # type: ignore[method-assign]
    mover.attend()
    assert next(moved, None) == 1, "the callback was called only when nothing moved any more"


def test_a_finalizer_that_runs_within_a_step_takes_no_lock() -> None:
    """Garbage collection runs in any thread, also in one that holds the lock: it would wait for itself."""
    mover = Scripted(Noted())
    call = mover.call()
    operation: Any = SimpleNamespace(completion=call, done=call.done)

    def step() -> bool:
        assert not call.done()
        unfilled.let_go(torch.zeros(1), (operation,))
        return False

    mover._step = step  # type: ignore[method-assign]
    thread = threading.Thread(target=mover.poke, daemon=True)
    thread.start()
    thread.join(patient(5))
    assert not thread.is_alive()
    call.end()


def test_ctrl_c_loses_no_callback_that_a_waiter_was_about_to_call() -> None:
    """It would be of another call, whose task would wait for ever. Signals are handled as a call returns."""
    for left in count(1):
        mover = Scripted(Noted())
        call, told = mover.call(), []
        for number in range(3):
            call.add_callback(partial(told.append, number))
        mover.steps = [call]
        assert mover._move_on()
        with suppress(KeyboardInterrupt), Strike(left):
            mover.tell()
            break
        mover.tell()
        assert told == [0, 1, 2], f"struck behind call {left}"
    assert left > 3


def test_an_interrupted_thread_wakes_ranks_whose_words_it_may_have_cleared() -> None:
    """Ctrl-C came after the word was cleared, and before its rank was woken."""
    bells = Noted()
    mover = Scripted(bells)
    call = mover.call()
    mover.words[BLOCK_WORDS + ASLEEP] = mover.words[BLOCK_WORDS + WATCHING] = 1
    woken = bells.wake

    def interrupted(index: int) -> None:
        bells.wake = woken  # type: ignore[method-assign]  # once
        raise KeyboardInterrupt

    bells.wake = interrupted  # type: ignore[method-assign]
    mover.steps = [call]
    with pytest.raises(KeyboardInterrupt):
        mover.wait(call, 60.0)
    assert {"wake 1", "ring 1"} <= set(bells.noted)


def test_the_watcher_outlives_an_error_and_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    """Its thread ended: nobody was told of any call any more. The log has the same error once."""
    told = threading.Event()

    class Raising:
        left = 2

        def attend(self) -> None:
            if self.left:
                self.left -= 1
                raise ZeroDivisionError("a callback's")
            told.set()

    engine, bell = Raising(), os.eventfd(0, os.EFD_NONBLOCK)
    watcher = Watcher(bell, {})
    try:
        watcher.add(engine)
        watcher.ring()
        assert told.wait(patient(10))
    finally:
        watcher.stop()
        os.close(bell)
    assert "a callback's" in caplog.text
    assert len(caplog.records) == 1
