"""The one thread that may call a library: it does what others hand over, wherever it waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import trio

from asynccoll import funnel as module
from asynccoll.completion import Promise
from asynccoll.funnel import Funnel, funnel_here, notice_loop
from patience import patient


@pytest.fixture
def funnel() -> Iterator[Funnel]:
    """This thread."""
    yield Funnel()
    module._funnels.clear()


@pytest.fixture
def other() -> Iterator[Callable[..., Any]]:
    """Runs a function in another thread; a future."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


def where() -> int:
    return threading.get_ident()


def test_a_wait_in_place_does_what_is_handed_over(funnel: Funnel, other: Callable[..., Any]) -> None:
    """In this thread, in the order it came, and the one who has asked gets the result."""
    done: list[int] = []

    def ask() -> int:
        assert not funnel.here()
        for number in range(3):
            funnel.hand_over(lambda number=number: done.append(number))
        return funnel.run(where)

    asked = other(ask)
    assert funnel.wait(asked.done, 10.0)
    assert asked.result() == where()
    assert done == [0, 1, 2]
    assert funnel.run(where) == where(), "at once, in the thread itself"


def test_what_a_call_raises_is_told_to_who_asked(funnel: Funnel, other: Callable[..., Any]) -> None:
    """And the thread goes on."""
    asked = other(lambda: funnel.run(int, "no number"))
    assert funnel.wait(asked.done, 10.0)
    assert isinstance(asked.exception(), ValueError)


def test_a_wait_ends_in_time(funnel: Funnel) -> None:
    """With nothing to do, too."""
    assert not funnel.wait(lambda: False, 0.02)


def test_the_thread_that_waits_for_a_promise_does_what_is_handed_over(
    funnel: Funnel, other: Callable[..., Any]
) -> None:
    """What settles the promise may be its own to do."""
    promise = Promise()
    other(lambda: funnel.hand_over(promise.settle)).result()
    assert funnel_here() is funnel
    assert promise.wait(patient(10))


def test_an_event_loop_that_sleeps_there_is_asked_for_turns(
    funnel: Funnel, other: Callable[..., Any]
) -> None:
    """asyncio's, then trio's, then another of asyncio's: the one that runs."""

    async def on_asyncio() -> int:
        notice_loop()
        return await asyncio.wrap_future(other(funnel.run, where))

    async def on_trio() -> int:
        notice_loop()
        return await trio.to_thread.run_sync(funnel.run, where)

    for _ in range(2):
        assert asyncio.run(on_asyncio()) == where()
        assert trio.run(on_trio) == where()


def test_what_came_before_the_loop_is_done_in_it(funnel: Funnel, other: Callable[..., Any]) -> None:
    """A loop that has ended is forgotten; what nobody did in it waits for the next."""

    async def nothing() -> None:
        notice_loop()

    asyncio.run(nothing())
    asked = other(funnel.run, where)
    while not funnel._jobs:
        pass

    async def waits() -> int:
        notice_loop()
        return await asyncio.wrap_future(asked)

    assert asyncio.run(waits()) == where()
