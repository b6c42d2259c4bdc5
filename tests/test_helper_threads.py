"""Threads that a world waits for when it ends (``host.helpers``), and pools (``transport.waiters``)."""

from __future__ import annotations

import itertools
import threading
from unittest.mock import Mock

import pytest

from asynccoll import host
from asynccoll.host.helpers import Helpers, start_once
from asynccoll.transport.waiters import Waiters
from patience import patient
from struck import Strike


def test_one_that_is_yet_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot be joined before it has started; the thread that ends the world need not know that."""
    begun, go_on, joining = threading.Event(), threading.Event(), threading.Event()
    done: list[str] = []

    class Late(threading.Thread):
        def start(self) -> None:
            begun.set()
            assert go_on.wait(patient(10))
            super().start()

    helpers = Helpers()

    def end() -> None:
        joining.set()
        helpers.join(patient(10))
        done.append("joined")

    monkeypatch.setattr(host, "Thread", Late)
    starting = threading.Thread(target=helpers.start, args=("late", lambda: done.append("ran")))
    starting.start()
    assert begun.wait(patient(10))
    ending = threading.Thread(target=end)
    ending.start()
    assert joining.wait(patient(10))
    go_on.set()
    for thread in (starting, ending):
        thread.join(patient(10))
    assert done == ["ran", "joined"]


def test_one_that_ends_the_world_itself_does_not_wait_for_itself() -> None:
    helpers, ended = Helpers(), threading.Event()

    def end() -> None:
        helpers.join(patient(10))
        ended.set()

    helpers.start("ends it", end)
    assert ended.wait(patient(5))


def test_those_that_have_ended_are_forgotten() -> None:
    helpers = Helpers()
    for _ in range(3):
        helpers.start("short", lambda: None)
    helpers.join(patient(10))
    assert not helpers._running


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_where_no_thread_starts_there_is_none_to_wait_for(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The caller does without: there are too many, or the interpreter ends."""
    helpers = Helpers()
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=error))
    assert helpers.start("refused", lambda: None) is None
    helpers.join(0.0)
    assert not helpers._running


def test_one_that_runs_when_ctrl_c_strikes_is_waited_for() -> None:
    struck, left = True, 0
    while struck:
        left += 1
        helpers, go_on, ran = Helpers(), threading.Event(), list[str]()

        def action(go_on: threading.Event = go_on, ran: list[str] = ran) -> None:
            assert go_on.wait(patient(10))
            ran.append("ran")

        struck = False
        try:
            with Strike(left, Helpers.start.__code__):
                helpers.start("struck", action)
        except KeyboardInterrupt:
            struck = True
        runs = any(thread.name == "struck" for thread in threading.enumerate())
        go_on.set()
        helpers.join(patient(10))
        assert ran == ["ran"] * runs
    assert left > 1


def test_a_job_that_raises_does_not_keep_later_ones_from_running() -> None:
    """That includes jobs with the same key, which wait for its thread."""

    def raises() -> None:
        begun.wait(patient(10))
        raise RuntimeError("a callback's")

    waiters, begun, ran = Waiters("asynccoll-raises"), threading.Event(), threading.Event()
    waiters.submit("key", raises)
    waiters.submit("key", ran.set)
    begun.set()
    assert ran.wait(patient(10))


def test_one_that_ctrl_c_keeps_from_starting_is_started_by_the_next_call() -> None:
    """It was kept though it never ran: a lane never opened, say. One that does run must not run twice."""
    ended = set()
    for left in itertools.count(1):
        ran: list[str] = []
        kept: list[threading.Thread | None] = []
        struck = False
        try:
            with Strike(left, threading.Thread.start.__code__):
                start_once("once", lambda ran=ran: ran.append("ran"), kept.append)
        except KeyboardInterrupt:
            struck = True
        ended.add((struck, kept[-1] is None))
        if kept[-1] is None:
            start_once("again", lambda ran=ran: ran.append("ran"), kept.append)
        thread = kept[-1]
        assert thread is not None
        thread.join(patient(10))
        assert ran == ["ran"]
        if not struck:
            break
    assert ended >= {(True, True), (False, False)}
