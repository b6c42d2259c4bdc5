"""Ctrl-C at any moment in the memory engine: no lock stays held, and no other rank is forgotten."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import asynccoll as ac
from asynccoll.backends.memory.engine import Engine
from asynccoll.backends.memory.exchanges import AllReduce, Barrier
from asynccoll.backends.memory.layout import CLOSED, LEFT, WATCHING, Layout
from asynccoll.backends.memory.moving import Mover
from asynccoll.backends.memory.pair import Pair
from asynccoll.backends.memory.region import Region

INTERRUPTS = 100


class Moving:
    """The engine's own steps, with nothing to move: the locks are acquired and released all the time."""

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
            self._move_on()  # type: ignore[misc]  # it is no Mover, but has what these methods need


@pytest.fixture
def _interrupted() -> Iterator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.skipif(
    "COVERAGE_PROCESS_START" in os.environ, reason="what measures has a lock, which would stay held"
)
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


class Rung:
    """The bells of a rank: rung bells are recorded, and no other rank hears them."""

    crowded = True

    def __init__(self) -> None:
        self.rung: list[int] = []

    def sleep(self, said: int, seconds: float) -> None:
        raise AssertionError("nobody would wake it")

    def wake(self, index: int) -> None:
        """Do nothing: no thread sleeps."""

    def ring(self, index: int) -> None:
        self.rung.append(index)

    def watch(self, mover: Mover) -> None:
        """Do nothing: there is no watcher."""

    def later(self, job: Callable[[], object]) -> None:
        raise AssertionError("nothing is left to other threads here")

    def gone(self) -> tuple[int, ...]:
        return ()


@pytest.fixture
def engines() -> list[Engine]:
    """Make the engines of a lane of two ranks, in memory of this process."""
    layout = Layout.for_size(2, smallest=True)
    buffer = bytearray(layout.total_bytes)
    return [Engine(Region(buffer, layout, rank), Rung(), "the lane", (0, 1)) for rank in range(2)]


def _call() -> Any:
    return 7, b"a call", 1, False, lambda place, error: None


def _struck() -> None:
    raise KeyboardInterrupt


def test_callbacks_of_others_are_called_by_the_watcher(engines: list[Engine]) -> None:
    """Ctrl-C strikes in the callback before them, of the same call or of an earlier one."""
    mine, theirs = engines
    calls = [mine.start(Barrier(mine, _call())) for _ in range(2)]
    told: list[str] = []
    calls[0].add_callback(_struck)
    calls[0].add_callback(lambda: told.append("of the same call"))
    calls[1].add_callback(lambda: told.append("of the next"))
    others = [theirs.start(Barrier(theirs, _call())) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        calls[0].wait(0.0)
    bells: Any = mine._bells
    assert 0 in bells.rung
    mine.attend()
    assert told == ["of the same call", "of the next"]
    assert calls[1].finished
    assert all(other.wait(0.0) for other in others)


class Striking:
    """Words of a region: Ctrl-C arrives right after the given one was cleared."""

    def __init__(self, words: Any, place: int) -> None:
        self._words = words
        self._place: int | None = place

    def __getitem__(self, place: Any) -> Any:
        return self._words[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._words[place] = value
        if place == self._place and not value:
            self._place = None
            raise KeyboardInterrupt


def test_a_waiter_that_is_struck_leaves_its_calls_to_the_watcher(engines: list[Engine]) -> None:
    """This holds even if it had just told the others that it looks itself."""
    mine, _ = engines
    x = torch.ones(4096)
    call = mine.start(AllReduce(mine, _call(), x, x, ac.ReduceOp.SUM))
    words = mine._words
    assert words[mine._mine + WATCHING], "further steps of it are to be posted, with or without a waiter"
    striking: Any = Striking(words, mine._mine + WATCHING)
    mine._words = striking
    with pytest.raises(KeyboardInterrupt):
        call.wait(0.0)
    assert words[mine._mine + WATCHING]


def _struck_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that Ctrl-C arrives at the end of its first call."""
    calls = iter([True])

    def call(*given: Any) -> Any:
        result = function(*given)
        if next(calls, False):
            raise KeyboardInterrupt
        return result

    return call


def test_a_difference_that_ctrl_c_kept_from_being_told_is_found_again(engines: list[Engine]) -> None:
    """In calls of several parts another thread reports a mismatch; nothing moves after that."""
    mine, theirs = engines
    jobs: list[Callable[[], object]] = []

    def later(job: Callable[[], object]) -> None:
        mine._bells.later = jobs.append  # type: ignore[method-assign]
        raise KeyboardInterrupt

    mine._bells.later = later  # type: ignore[method-assign]
    call = mine.start(Barrier(mine, (7, b"a call", 1, True, lambda place, error: None)))
    theirs.start(Barrier(theirs, (8, b"another", 1, True, lambda place, error: None)))
    with pytest.raises(KeyboardInterrupt):
        call.wait(0.0)
    call.wait(0.0)
    (job,) = jobs
    job()
    assert isinstance(call.error(), ac.CollectiveMismatchError)


@pytest.fixture(params=["engine", "pair"])
def waited_for(request: pytest.FixtureRequest, engines: list[Engine]) -> tuple[Any, list[Any]]:
    """Return a rank's engine or messages, and calls on it that the other rank does not make."""
    mine: Any = engines[0]
    if request.param == "engine":
        return mine, [mine.start(Barrier(mine, _call())) for _ in range(3)]
    mine = Pair(mine.region, Rung(), "the lane", (0, 1), tuple)
    return mine, [mine.recv(torch.ones(1), tag) for tag in range(3)]


def test_who_is_struck_while_it_leaves_has_left(waited_for: tuple[Any, list[Any]]) -> None:
    """No waiter is forgotten, and the memory is released."""
    mine, calls = waited_for
    mine._over = _struck_once(mine._over)
    gone = ac.AbortedError("its lane was closed")
    with pytest.raises(KeyboardInterrupt):
        mine.stop(CLOSED, gone)
    assert [call.error() for call in calls] == [gone] * 3
    assert mine._words[mine._mine + LEFT]


def test_who_is_struck_while_calls_fail_leaves_the_others_to_the_next(
    waited_for: tuple[Any, list[Any]],
) -> None:
    mine, calls = waited_for
    mine._step = _struck_once(lambda: 1 / 0)
    mine._over = _struck_once(mine._over)
    with pytest.raises(KeyboardInterrupt):
        mine._move()
    assert mine._move()
    assert all(isinstance(call.error(), ac.CollectiveError) for call in calls)
    assert not mine._move()
