"""Ctrl-C in a thread that drives a lane's queue: no call is lost, made twice, or left without its result.

An interrupt comes between two bytecodes, so also as a lock is taken or released, and as a call of C returns.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import pytest

import asynccoll as ac
from asynccoll.backends.serial.backend import SerialBackend
from asynccoll.order.job import Job
from asynccoll.order.lane import Lane
from asynccoll.order.operation import Estimate, Operation
from asynccoll.order.stepping import Stepping
from asynccoll.payload.messages import _Slots
from asynccoll.testing import simulate
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import READY, Completion, Promise
from asynccoll.transport.progress import progress
from asynccoll.waiting.work import Work
from asynccoll.world.context import Context, Identity
from patience import patient
from struck import Strike, Struck, nth


class Armed:
    """Is due once, after it has been armed."""

    armed = False

    def __call__(self) -> bool:
        due, self.armed = self.armed, False
        return due


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lane:
    monkeypatch.setattr(progress, "watch", lambda _: None)
    made: Any = Context(SerialBackend(), Identity(), check="off").world.lane("struck")
    made.open()
    lane: Lane = made
    return lane


def program_of(step: Promise, last: Callable[[], Completion] = lambda: READY) -> Any:
    def program(_: Communicator) -> Generator[Completion, None, Completion]:
        yield step
        return last()

    return program


@pytest.mark.parametrize("when", ["taken", "released"])
@pytest.mark.parametrize("by", ["a waiter", "a callback"])
def test_the_last_call_of_a_program_has_its_result(lane: Lane, when: str, by: str) -> None:
    """Its completion was known only to the thread that was interrupted."""
    step, due, calls = Promise(), Armed(), []

    def last() -> Completion:
        calls.append("last")
        due.armed = True
        return READY

    operation = lane.run("program", program_of(step, last), awaited_soon=by == "a waiter", timeout=patient(5))
    work: Work[Any] = Work((operation,), lambda: "result")
    lane.queue.lock = Struck(due, when=when)  # type: ignore[assignment]  # as much of a lock as is used
    if by == "a waiter":
        threading.Timer(0.05, step.settle).start()
    with pytest.raises(KeyboardInterrupt):
        (work.wait if by == "a waiter" else step.settle)()
    assert work.wait() == "result"
    assert calls == ["last"]


@pytest.mark.parametrize("when", ["taken", "released"])
def test_a_queued_call_is_made_once(lane: Lane, when: str) -> None:
    step, due, calls = Promise(), Armed(), []

    def start(_: Communicator) -> Completion:
        due.armed = not calls
        calls.append("queued")
        return READY

    lane.run("program", program_of(step), timeout=patient(5))
    operation = lane.issue(Estimate("queued"), start, timeout=patient(5))
    lane.queue.lock = Struck(due, when=when)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        step.settle()
    Work((operation,), None).wait()
    assert calls == ["queued"]


def test_a_call_that_was_just_taken_from_the_queue_is_made_before_the_next(lane: Lane) -> None:
    """Else this rank would make its next call where the others make this one."""
    step, due, calls = Promise(), nth(1), []

    class Popped(deque[Job]):
        def popleft(self) -> Job:
            first = super().popleft()
            if due():
                raise KeyboardInterrupt
            return first

    lane.run("program", program_of(step), timeout=patient(5))
    operation = lane.issue(Estimate("queued"), lambda _: calls.append("queued") or READY, timeout=patient(5))
    lane.queue._jobs = Popped(lane.queue._jobs)
    with pytest.raises(KeyboardInterrupt):
        step.settle()
    lane.issue(Estimate("next"), lambda _: calls.append("next") or READY, timeout=patient(5))
    Work((operation,), None).wait()
    assert calls == ["queued", "next"]


def test_an_interrupted_thread_leaves_another_that_drives_alone(lane: Lane) -> None:
    """It had stopped driving, and the other began before it was interrupted."""
    step, calls = Promise(), []
    inside, go = threading.Event(), threading.Event()
    others: list[threading.Thread] = []

    def start(_: Communicator) -> Completion:
        calls.append(threading.current_thread().name)
        inside.set()
        go.wait(patient(5))
        return READY

    def due() -> bool:
        if others or threading.current_thread() is not threading.main_thread() or lane.queue._driver:
            return False
        others.append(threading.Thread(target=step.settle, name="other"))
        others[0].start()
        return inside.wait(patient(5))

    lane.run("program", program_of(step), timeout=patient(5))
    job = Job(start, None)
    job.place = 2
    lane.queue.extend((job,))
    lane.queue.lock = Struck(due)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        lane.queue.drive()
    go.set()
    others[0].join()
    assert calls == ["other"]


@pytest.mark.parametrize("when", ["taken", "released"])
def test_a_block_that_was_about_to_begin_leaves_its_lane_as_it_was(lane: Lane, when: str) -> None:
    """Later calls would all be parts of one call, as on no other rank."""
    lane._lock = Struck(nth(1), when=when)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), lane.together(name="tree"):
        raise AssertionError("not reached")
    first, second = (lane.issue(Estimate(name), lambda _: READY) for name in ("first", "second"))
    assert second.sequence == first.sequence + 1


@pytest.mark.parametrize("last", [False, True], ids=["a step", "the last call"])
def test_a_program_that_was_being_handed_over_goes_on(
    lane: Lane, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its waiter drove it after that, nor its completions."""
    watched: list[Any] = []
    monkeypatch.setattr(progress, "watch", watched.append)
    for left in itertools.count(1):
        step, end = Promise(), Promise()
        operation = lane.run("program", program_of(step, lambda end=end: end), awaited_soon=True)
        promise: Any = operation.completion
        if last:
            step.settle()
            assert not promise.wait(0.0)
        struck = False
        try:
            with Strike(left, Stepping.hand_over.__code__, at="opcode"):
                promise.hand_over()
        except KeyboardInterrupt:
            struck = True
            watched[-1].poll()  # as the progress thread does
        step.settle()
        end.settle()
        assert promise.done(), f"struck at {left}"
        if not struck:
            assert left > 5
            break


def test_an_interrupted_wait_leaves_its_program_to_completions(lane: Lane) -> None:
    """As for a call that no waiter drives: it goes on, and may be waited for again."""
    calls: list[str] = []

    class Interrupted(Promise):
        def wait(self, seconds: float) -> bool:
            raise KeyboardInterrupt

    step = Interrupted()

    def last() -> Completion:
        calls.append("last")
        return READY

    operation = lane.run("program", program_of(step, last), awaited_soon=True, timeout=patient(5))
    work: Work[Any] = Work((operation,), lambda: "result")
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        work.wait()
    progress_thread_polls(operation)
    step.settle()
    assert calls == ["last"]
    assert work.wait() == "result"


def progress_thread_polls(operation: Operation) -> None:
    promise: Any = operation.completion
    assert not promise.attended
    promise.poll()


def test_ctrl_c_in_the_middle_of_a_step_is_said_in_full_on_all_ranks() -> None:
    """The other ranks were told "KeyboardInterrupt: " and nothing more."""

    def main(rank: int) -> list[str]:
        work = ac.all_gather_object("x" * 10_000)  # in two rounds, the second of which is not begun
        said = []
        if not rank:
            with pytest.raises(KeyboardInterrupt) as caught, Strike(1, _Slots.read.__code__):
                work.wait()
            said.append(str(caught.value))
        with pytest.raises(ac.CollectiveError) as refused:
            work.wait()
        said.append(str(refused.value))
        assert ac.all_gather_object(rank).wait() == [0, 1]
        return said

    report = simulate(main, world_size=2, loop="none", check="off")
    report.check()
    for text in (*report.results[0], *report.results[1]):
        assert "Ctrl-C came while a step of the call ran, and no step can run twice" in text
