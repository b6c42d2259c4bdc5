"""Ctrl-C at any moment while a work is being finished: the next waiter finishes it, no wait is endless."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import threading
import types
from collections.abc import Callable, Generator

import anyio
import pytest
import torch
import trio

import asynccoll as ac
from asynccoll.ops import anysource
from asynccoll.order import operation
from asynccoll.runtime.process import current
from asynccoll.transport import Promise, completion
from asynccoll.transport.waiters import Waiters
from asynccoll.waiting import loops
from asynccoll.waiting import work as module
from asynccoll.waiting.loops import AddWaker
from patience import patient
from struck import Strike, Struck, nth


def begun() -> ac.Work[float]:
    return ac.all_reduce(torch.ones(2)).map(lambda total: float(total[0]))


def test_the_next_waiter_finishes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work = begun()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_claim", Struck(nth(1)))
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    assert work.wait() == 1.0


def test_one_that_was_not_made_to_the_end_goes_in_silence(unraisable: list[object]) -> None:
    """Its finalizer would otherwise clutter the output of a program that was interrupted."""
    work: ac.Work[object] = ac.Work.__new__(ac.Work)
    del work
    assert not unraisable


def test_a_thread_that_waits_for_who_is_struck_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C strikes between the claim and the wake-up; the second waiter wakes all the same."""
    entered, go_on, got = threading.Event(), threading.Event(), []

    def finishing(total: torch.Tensor) -> float:
        entered.set()
        assert go_on.wait(patient(30))
        return float(total[0])

    work = ac.all_reduce(torch.ones(2)).map(finishing)
    monkeypatch.setattr(
        module, "_claim", Struck(nth(4))
    )  # uses: the claim, the second waiter's two, and the wake-up

    def first() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            work.wait()

    def second() -> None:
        got.append(work.wait())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(patient(30))
    threads[1].start()
    while not module._finishing:  # until the second waiter sleeps
        pass
    go_on.set()
    for thread in threads:
        thread.join(patient(30))
    assert got == [1.0]


def test_other_waiters_are_told_all_the_same() -> None:
    """A call has two waiters, and Ctrl-C strikes in the callback that wakes the first."""
    promise, told = Promise(), []

    def struck() -> None:
        raise KeyboardInterrupt

    promise.add_callback(struck)
    promise.add_callback(lambda: told.append("the second"))
    with pytest.raises(KeyboardInterrupt):
        promise.settle()
    assert told == ["the second"]


@pytest.mark.parametrize("when", ["taken", "released"])
def test_who_settles_again_tells_those_that_ctrl_c_kept_from_being_told(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It struck before the first was told; those who repair what it interrupted settle again."""
    promise, told = Promise(), []
    for name in ("first", "second"):
        promise.add_callback(lambda name=name: told.append(name))
    with monkeypatch.context() as patch:
        patch.setattr(completion, "_settling", Struck(nth(1), when=when))
        with pytest.raises(KeyboardInterrupt):
            promise.settle()
    promise.settle()
    assert told == ["first", "second"]
    promise.settle()
    assert told == ["first", "second"]


def test_later_waiters_are_told_though_the_first_was_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C strikes while the first registers its waker with the operation."""
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    work, told = ac.adopt(future), []
    with monkeypatch.context() as patch:
        patch.setattr(operation, "_wakers_lock", Struck(nth(1)))
        with pytest.raises(KeyboardInterrupt):
            work.add_done_callback(lambda _: None)
    work.add_done_callback(lambda done: told.append(done.result()))
    future.set_result(3)
    assert told == [3]


def test_a_lane_goes_on_where_who_drives_its_queue_was_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread had begun to drive, which keeps other threads from driving."""
    queue = current().world.lane().queue
    with monkeypatch.context() as patch:
        patch.setattr(queue, "lock", Struck(nth(1)))
        with pytest.raises(KeyboardInterrupt):
            queue.drive()
    assert ac.all_reduce(torch.ones(2)).wait(timeout=patient(5)).tolist() == [1.0, 1.0]


def test_a_message_from_any_source_stays_the_first() -> None:
    taking = anysource.AnySource._taken.__wrapped__.__code__  # type: ignore[attr-defined]  # of the generator
    for struck_at in range(1, 20):
        messages = anysource.AnySource(lambda source: ac.all_reduce(float(source)), range(3))
        first = []
        with contextlib.suppress(KeyboardInterrupt), Strike(struck_at, taking, at="line"):
            first = [next(messages)]
        assert [*first, *messages] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert first, "no line was left to strike at"


def test_who_was_struck_while_it_left_a_job_to_a_thread_leaves_jobs_to_it_again() -> None:
    """They have the same key and run in order. Python handles signals right after a call returns."""
    struck = True
    for struck_at in range(1, 20):
        waiters, ran, over = Waiters("asynccoll-struck"), [], threading.Event()
        with contextlib.suppress(KeyboardInterrupt), Strike(struck_at, Waiters.submit.__code__):
            waiters.submit("key", lambda ran=ran: ran.append("first"))
            struck = False
        waiters.submit("key", lambda ran=ran: ran.append("second"))
        waiters.submit("key", over.set)
        assert over.wait(patient(10)), f"after Ctrl-C behind call {struck_at}"
        assert ran in (["first", "second"], ["second"])
        if not struck:
            break
    assert not struck, "there are more calls to strike behind"


def test_a_message_from_any_source_is_taken_off_as_a_whole() -> None:
    taking_off = anysource.AnySource._take_off.__code__
    for struck_at in range(1, 100):
        messages = anysource.AnySource(lambda source: ac.all_reduce(float(source)), range(3))
        done = None
        with contextlib.suppress(KeyboardInterrupt), Strike(struck_at, taking_off, at="opcode"):
            done = next(messages)
        assert sorted(messages._arrivals.sources) == sorted(messages.sources), f"at instruction {struck_at}"
        assert list(messages)[-2:] == [(1, 1.0), (2, 2.0)]
        if done:
            break
    assert done, "there are more instructions to strike at"


@pytest.mark.parametrize("loop", [False, True], ids=["for", "async for"])
def test_a_message_that_was_requested_as_ctrl_c_came_is_found_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    """Nobody is told that it has arrived; the iteration asked without end."""
    messages = anysource.AnySource(lambda source: ac.all_reduce(float(source), timeout=0.1), ())

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(operation.Operation, "add_waker", struck)
        with pytest.raises(KeyboardInterrupt):
            messages.again(5)
    if loop:
        assert asyncio.run(asyncio.wait_for(anext(messages), patient(10))) == (5, 5.0)
    else:
        assert next(messages) == (5, 5.0)


class Elsewhere:
    """A work that another thread is finishing, until ``go_on``."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.work = ac.all_reduce(torch.ones(2)).map(self._finish)
        self._thread = threading.Thread(target=self.work.wait)

    def _finish(self, total: torch.Tensor) -> float:
        self.entered.set()
        assert self.go_on.wait(patient(30))
        return float(total[0])

    def __enter__(self) -> Elsewhere:
        self._thread.start()
        assert self.entered.wait(patient(30))
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self._thread.join()


def test_a_wait_has_its_time_limit_while_another_thread_makes_the_result() -> None:
    with Elsewhere() as elsewhere:
        with pytest.raises(ac.CollectiveTimeoutError, match="another thread is still making its result"):
            elsewhere.work.wait(timeout=0.05)
        elsewhere.go_on.set()
        assert elsewhere.work.wait(timeout=patient(10)) == 1.0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_loop_goes_on_while_another_thread_makes_the_result(backend: str) -> None:
    """The function that makes it may need the loop."""

    async def main() -> None:
        with Elsewhere() as elsewhere:
            async with anyio.create_task_group() as tasks:

                async def go_on() -> None:
                    await anyio.sleep(0)
                    elsewhere.go_on.set()

                tasks.start_soon(go_on)
                with anyio.fail_after(patient(10)):
                    assert await elsewhere.work == 1.0

    anyio.run(main, backend=backend)


def test_a_fork_does_not_wait_for_what_a_thread_of_its_parent_was_making() -> None:
    with Elsewhere() as elsewhere:
        child = os.fork()
        if not child:
            code = 1
            try:
                elsewhere.work.wait()
            except ac.ForkedProcessError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


@types.coroutine
def parked(add_waker: AddWaker) -> Generator[object, object, None]:
    loop = loops.here()
    assert loop is not None
    yield from loop.park(add_waker, 10.0)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_task_that_was_struck_before_it_slept_is_not_woken_elsewhere() -> None:
    """The wake-up came late on trio: where the task slept next, which ended that sleep, or the run."""

    def over(wake: Callable[[], object]) -> Callable[[], object]:
        wake()
        return lambda: None

    async def main() -> None:
        for left in itertools.count(1):
            came = True
            with contextlib.suppress(KeyboardInterrupt), Strike(left, type(loops.here()).park.__code__):
                await parked(over)
                came = False
            await trio.sleep(0.001)
            if not came:
                break
        assert left > 5

    trio.run(main)
