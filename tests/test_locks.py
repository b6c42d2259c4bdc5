"""The locks of the library: Ctrl-C comes before one is taken, or in the block that releases it."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asynccoll.host import locks


@pytest.fixture
def _threads_run_until_they_wait() -> Iterator[None]:
    before, handler = sys.getswitchinterval(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)
    signal.signal(signal.SIGINT, handler)


def free(lock: Any) -> bool:
    """Whether another thread can take it."""
    seen: list[bool] = []

    def take() -> None:
        seen.append(lock.acquire(False))
        if seen[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.usefixtures("_threads_run_until_they_wait")
@pytest.mark.parametrize("kind", [locks.Lock, locks.RLock])
def test_ctrl_c_as_a_lock_is_taken_leaves_it_to_others(kind: Callable[[], Any]) -> None:
    lock, taken, go = kind(), threading.Semaphore(0), threading.Lock()
    go.acquire()

    def other() -> None:
        with lock:
            taken.release()
            go.acquire()
            _thread.interrupt_main()  # the main thread waits for the lock by now, or this one would not run

    def take() -> None:
        go.release()
        with lock:
            pass

    thread = threading.Thread(target=other)
    thread.start()
    taken.acquire()
    with pytest.raises(KeyboardInterrupt):
        take()
    thread.join()
    assert free(lock)


@pytest.mark.parametrize("kind", [locks.Lock, locks.RLock])
def test_a_lock_is_held_for_its_block(kind: Callable[[], Any]) -> None:
    lock = kind()
    for _ in range(2):
        with lock as taken:
            assert taken
            assert not free(lock)
        assert free(lock)
    with pytest.raises(RuntimeError):
        lock.release()


def test_a_condition_of_one_that_may_be_taken_twice_waits_without_it() -> None:
    changed = threading.Condition(locks.RLock())
    with changed, changed:
        thread = threading.Thread(target=lambda: [changed.acquire(), changed.notify(), changed.release()])
        thread.start()
        assert changed.wait(60.0)
    thread.join()
    assert free(changed)
