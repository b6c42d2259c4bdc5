"""Waiters, and waits that end early: interrupted while finishing, cancelled, or out of file descriptors."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

import asynccoll as ac
import worlds
from asynccoll.health import watchdog as watch
from asynccoll.order.operation import Estimate, Operation
from asynccoll.transport.completion import Promise
from patience import patient
from ranks import Rank


def test_ctrl_c_while_a_work_is_finished_is_the_waiters_own() -> None:
    """The interrupt is raised in its own waiter; the next one finishes the work and has the result."""
    turns: list[int] = []

    def finish() -> str:
        turns.append(len(turns))
        if len(turns) == 1:
            raise KeyboardInterrupt
        return "finished"

    work: ac.Work[str] = ac.Work((), finish)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.wait() == work.result() == "finished"
    assert turns == [0, 1]


def test_who_waits_for_another_that_is_interrupted_finishes_itself() -> None:
    """A thread that waits while another one finishes is not left waiting."""
    begun, go_on = threading.Event(), threading.Event()
    heard: list[BaseException | str] = []

    def finish() -> str:
        if begun.is_set():
            return "finished"
        begun.set()
        go_on.wait()
        raise KeyboardInterrupt

    work: ac.Work[str] = ac.Work((), finish)

    def wait() -> None:
        try:
            heard.append(work.wait())
        except KeyboardInterrupt as error:
            heard.append(error)

    first, second = threading.Thread(target=wait), threading.Thread(target=wait)
    first.start()
    begun.wait()
    second.start()
    go_on.set()
    for thread in (first, second):
        thread.join(patient(10))
    assert sorted(type(one).__name__ for one in heard) == ["KeyboardInterrupt", "str"]


async def cancelled_often(me: Rank) -> None:
    if me.rank == 1:
        me.see("cancelled")
    work = ac.all_reduce(1)
    if me.rank == 0:
        for _ in range(100):
            await give_up_on(me, work)
        (operation,) = work._operations
        assert len(operation._wakers or ()) <= 1
        me.show("cancelled")
    assert await work == me.size


async def give_up_on(me: Rank, work: Any) -> None:
    if me.runner == "trio":
        import trio

        with trio.move_on_after(0.002):
            await work
        return
    import asyncio

    async def awaits() -> None:
        await work

    task = asyncio.create_task(awaits())
    await asyncio.wait([task], timeout=0.002)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("runner", ["asyncio", "trio"])
def test_an_await_that_is_cancelled_leaves_nothing(runner: str) -> None:
    """This holds however often it is repeated while the operation is in flight."""
    worlds.world("gloo", 2).run(cancelled_often, runner=runner, timeout=60)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyError("a mistake of ours")])
def test_the_watch_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """After a failed question, such as for lack of descriptors, the next follows; a bug is logged once."""
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.01)
    asked_again = threading.Event()
    asked: list[object] = []

    def loss(lane: object) -> None:
        asked.append(lane)
        if len(asked) < 3:
            raise error
        asked_again.set()

    parts = {
        "has_peers": True,
        "loss": loss,
        "store_answers": lambda: False,
        "backend": SimpleNamespace(ends_alone=False),
    }
    context = cast("Any", SimpleNamespace(**parts, stall_seconds=0.0))
    lane = SimpleNamespace(group=SimpleNamespace(ranks=(0, 1)))

    class InFlight:
        started, part = 0.0, 1

        def __init__(self) -> None:
            self.lane = cast("Any", _Named(lane))

        def done(self) -> bool:
            return False

    looks = watch.Watch(context)
    looks.begin()
    looks.add(cast("Any", InFlight()))
    try:
        assert asked_again.wait(patient(10)), f"asked {len(asked)} times"
    finally:
        looks.stop()
    assert len(caplog.records) == isinstance(error, KeyError)


def test_the_watch_asks_after_what_was_waited_for_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits again and again for a moment at a time must still hear of a refusal."""
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.01)
    asked = threading.Event()
    parts = {
        "has_peers": True,
        "loss": lambda lane: asked.set(),
        "store_answers": lambda: False,
        "backend": SimpleNamespace(ends_alone=False),
    }
    looks = watch.Watch(cast("Any", SimpleNamespace(**parts, stall_seconds=0.0)))
    looks.begin()
    lane = _Named(SimpleNamespace(group=SimpleNamespace(ranks=(0, 1))))

    class InFlight:
        started, part = 0.0, 1

        def __init__(self) -> None:
            self.lane = lane

        def done(self) -> bool:
            return False

    operation = cast("Any", InFlight())
    looks.add(operation)
    looks.discard(operation)
    try:
        assert asked.wait(patient(10))
    finally:
        looks.stop()


def test_the_watch_looks_for_refusals_also_while_this_rank_waits_for_a_moment_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own calls may be over where peers need its statement, though it never waits for long."""
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(watch, "IDLE_SECONDS", 0.0)
    looked = threading.Event()
    parts = {
        "has_peers": True,
        "store_answers": lambda: True,
        "look_for_refusals": looked.set,
        "backend": SimpleNamespace(ends_alone=True),
    }
    looks = watch.Watch(cast("Any", SimpleNamespace(**parts, stall_seconds=0.0)))
    looks.begin()
    lane = _Named(SimpleNamespace(group=SimpleNamespace(ranks=(0, 1))))
    just_started = time.monotonic() + 1000
    looks.add(cast("Any", SimpleIdentity(started=just_started, part=1, lane=lane, done=lambda: False)))
    try:
        assert looked.wait(patient(5))
    finally:
        looks.stop()


def test_once_a_lane_was_lost_with_a_rank_other_waits_for_it_are_asked_about_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the waiters of each lane would hear of it only after a second of their own waiting."""
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 1000.0)
    asked: queue.Queue[object] = queue.Queue()
    parts = {
        "has_peers": True,
        "loss": asked.put,
        "store_answers": lambda: False,
        "backend": SimpleNamespace(ends_alone=False),
    }
    looks = watch.Watch(cast("Any", SimpleNamespace(**parts, stall_seconds=0.0)))
    looks.begin()

    def in_flight(*ranks: int) -> Any:
        lane = _Named(SimpleNamespace(group=SimpleNamespace(ranks=ranks)))
        return SimpleIdentity(started=time.monotonic(), part=1, lane=lane, done=lambda: False)

    before, without, later = in_flight(0, 1), in_flight(0, 2), in_flight(0, 1, 2)
    try:
        for operation in (without, before):
            looks.add(operation)
        looks.lost((1,))
        assert asked.get(timeout=patient(10)) is before.lane
        looks.add(later)
        assert asked.get(timeout=patient(10)) is later.lane
        assert asked.empty()
    finally:
        looks.stop()


class SimpleIdentity(SimpleNamespace):
    """A SimpleNamespace that can be a dict key."""

    __hash__ = object.__hash__


class _Named:
    """The parts of a lane that the watch uses."""

    def __init__(self, lane: SimpleNamespace) -> None:
        self.group = lane.group


class Collecting:
    """A callback that collects garbage where it is compared with another one, as an allocation there may."""

    def __eq__(self, other: object) -> bool:
        gc.collect()
        return False

    def __hash__(self) -> int:
        return 0

    def __call__(self) -> None:
        """Do nothing."""


def _of_promise() -> Callable[[], object]:
    promise = Promise()
    promise.add_callback(Collecting())
    return lambda: promise._forget(print)


def _of_operation() -> Callable[[], object]:
    operation = Operation(
        cast("Any", None), Estimate("barrier"), 1, Promise(), cast("Any", None), 1.0, 0.0, 1
    )
    operation.add_waker(Collecting())
    return operation.add_waker(print)


@pytest.mark.parametrize("made", [_of_promise, _of_operation])
def test_garbage_collection_may_end_a_waiter_within_another(made: Callable[[], Callable[[], object]]) -> None:
    """A coroutine that was dropped while it waited ends where it is collected: in any thread."""

    def waits() -> Iterator[None]:
        try:
            yield
        finally:
            forget()
            ended.set()

    forget, ended = made(), threading.Event()
    gc.disable()  # so that it is collected only where a callback does that
    try:
        dropped: list[object] = [waits()]
        next(cast("Any", dropped[0]))
        dropped.append(dropped)
        del dropped
        thread = threading.Thread(target=forget, daemon=True)
        thread.start()
        thread.join(patient(5))
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert ended.is_set()
