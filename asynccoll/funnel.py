"""The one thread that may call a library which takes calls from no other.

MPI is one, below ``MPI_THREAD_SERIALIZED``. Other threads hand over what is to be done there. It is done
whenever that thread waits for an operation of ours: in place, or in its event loop, which is then asked for
a turn. While it does neither, nothing moves.

It must not know what is handed over.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

from asynccoll.actors import trio_task

__all__ = ["Funnel", "funnel_here", "notice_loop"]

T = TypeVar("T")

_LONGEST_NAP_SECONDS = 0.01


class Funnel:
    """The thread that makes it, and what it has been handed."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._jobs: deque[Callable[[], object]] = deque()
        self._came = threading.Event()
        self._ask: Callable[[Callable[[], object]], object] | None = None  # its event loop for a turn
        self._asked = False
        _funnels[self._thread] = self

    def here(self) -> bool:
        """Whether the caller is that thread."""
        return threading.get_ident() == self._thread

    def hand_over(self, job: Callable[[], object]) -> None:
        """Have ``job``, which must not raise, done there, after those that came before."""
        self._jobs.append(job)
        self._came.set()
        ask = self._ask
        if ask is not None and not self._asked:
            self._asked = True
            try:
                ask(self._turn)
            except RuntimeError:  # that loop has ended
                self._ask, self._asked = None, False

    def run(self, call: Callable[..., T], *args: Any) -> T:
        """``call(*args)``, made there; waits for it."""
        if self.here():
            return call(*args)
        result: Future[T] = Future()

        def carry_out() -> None:
            try:
                result.set_result(call(*args))
            except BaseException as error:  # belongs to whoever has asked
                result.set_exception(error)

        self.hand_over(carry_out)
        return result.result()

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """In that thread: do what is handed over until ``done()``, or for ``seconds``; whether it is done."""
        deadline = monotonic() + seconds
        while not done():
            self._came.clear()
            if self._work():
                continue
            left = deadline - monotonic()
            if left <= 0:
                return False
            self._came.wait(min(left, _LONGEST_NAP_SECONDS))
        return True

    def notice(self) -> None:
        """Remember the event loop that runs in that thread, from there."""
        ask = _ask_here()
        if ask is not None:
            # A turn that an earlier loop was asked for may never come.
            self._ask, self._asked = ask, False
            if self._jobs:
                self._asked = True
                ask(self._turn)

    def _turn(self) -> None:
        self._asked = False
        self._work()

    def _work(self) -> bool:
        """Do what is there now; whether there was anything."""
        jobs = self._jobs
        count = len(jobs)
        for _ in range(count):
            if not jobs:  # what was done has waited, and so done the rest
                break
            jobs.popleft()()
        return count > 0


_funnels: dict[int, Funnel] = {}


def funnel_here() -> Funnel | None:
    """That of the calling thread, if some library takes calls from it alone."""
    return _funnels.get(threading.get_ident()) if _funnels else None


def notice_loop() -> None:
    """Somebody is about to sleep in the calling thread's event loop."""
    if _funnels and (funnel := funnel_here()) is not None:
        funnel.notice()


def _ask_here() -> Callable[[Callable[[], object]], object] | None:
    """How any thread asks the event loop that runs here to call something."""
    if "trio" in sys.modules and trio_task() is not None:
        ask: Callable[[Callable[[], object]], object]
        ask = sys.modules["trio"].lowlevel.current_trio_token().run_sync_soon
        return ask
    loop = asyncio._get_running_loop()
    return None if loop is None else loop.call_soon_threadsafe


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_funnels.clear)
