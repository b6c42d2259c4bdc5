"""Locks, events, queues, threads and clocks of a simulated world, under the names of ``asynccoll.host``.

``acquire``, ``set``, ``wait``, ``put``, ``get``, ``start``, ``join`` and sleeps are switch points. A thread
that is not simulated, such as the one that sets the world up, may use these objects but must never block.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from asynccoll.testing.scheduler import Scheduler, running
from asynccoll.testing.threads import SimulatedThread

__all__ = [
    "Condition",
    "Event",
    "Lock",
    "Queue",
    "RLock",
    "SimpleQueue",
    "Thread",
    "current_thread",
    "get_ident",
    "gethostname",
    "getpid",
    "give_way",
    "monotonic",
    "perf_counter",
    "sleep",
    "wall_clock",
]


def _point() -> None:
    scheduler = running()
    if scheduler is not None:
        scheduler.point()


def _unwinding() -> bool:
    """Whether what the caller does is ignored: its rank is gone, or the simulation is over."""
    scheduler = running()
    return scheduler is None or (scheduler.current is not None and scheduler.is_gone(scheduler.current))


def _until(scheduler: Scheduler, timeout: float | None) -> float:
    return math.inf if timeout is None or timeout < 0 else scheduler.now + timeout


class Queue(deque[SimulatedThread]):
    """The threads that wait for something, woken in FIFO order."""

    def wait(self, scheduler: Scheduler, until: float) -> bool:
        """Block until woken; return whether that was before ``until``."""
        me = scheduler.current
        assert me is not None
        self.append(me)
        try:
            return scheduler.wait(until)
        except BaseException:  # Ctrl-C: if it was woken before, that is now for the next one
            if me not in self:
                self.let_on()
            raise
        finally:
            if me in self:
                self.remove(me)

    def let_on(self, count: int = 1) -> None:
        scheduler = running() if self else None
        while self and count > 0 and scheduler is not None:
            scheduler.wake(self.popleft())
            count -= 1

    def let_all_on(self) -> None:
        self.let_on(len(self))


class Lock:
    """A simulated ``threading.Lock``."""

    def __init__(self) -> None:
        self._held = False
        self._queue = Queue()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = running()
        if scheduler is None:
            assert not self._held, "a thread that is not simulated would wait"
            self._held = True
            return True
        scheduler.point()
        if self._held:
            until = _until(scheduler, timeout)
            while self._held:
                if not blocking or (not self._queue.wait(scheduler, until) and self._held):
                    return False
        self._held = True
        if scheduler.stored:
            scheduler.fence()
        return True

    __enter__ = acquire

    def release(self, *_: object) -> None:
        if not self._held and not _unwinding():
            raise RuntimeError("release unlocked lock")
        self._held = False
        scheduler = running()
        if scheduler is not None and scheduler.stored:
            scheduler.fence()
        if self._queue:
            self._queue.let_on()

    __exit__ = release

    def locked(self) -> bool:
        return self._held

    def _at_fork_reinit(self) -> None:
        self._held = False


class RLock:
    """A simulated ``threading.RLock``."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _me()
        if self._owner is me and self._count:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = me, 1
        return True

    __enter__ = acquire

    def release(self, *_: object) -> None:
        if self._owner is not _me() or not self._count:
            if _unwinding():
                return
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    __exit__ = release

    def _let_go(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def _take_back(self, count: int) -> None:
        self._lock.acquire()
        self._owner, self._count = _me(), count


def _me() -> object:
    scheduler = running()
    return threading.get_ident() if scheduler is None else scheduler.current


class Condition:
    """A simulated ``threading.Condition``."""

    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = lock or RLock()
        self.acquire: Callable[..., bool] = self._lock.acquire
        self.release: Callable[[], None] = self._lock.release
        self._queue = Queue()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = running()
        assert scheduler is not None, "a thread that is not simulated would wait"
        count = self._lock._let_go()
        try:
            return self._queue.wait(scheduler, _until(scheduler, timeout))
        finally:
            self._lock._take_back(count)

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        scheduler = running()
        assert scheduler is not None, "a thread that is not simulated would wait"
        until = _until(scheduler, timeout)
        while not (found := predicate()):
            if scheduler.now >= until:
                break
            self.wait(until - scheduler.now)
        return found

    def notify(self, n: int = 1) -> None:
        self._queue.let_on(n)

    def notify_all(self) -> None:
        self._queue.let_all_on()


class Event:
    """A simulated ``threading.Event``."""

    def __init__(self) -> None:
        self._set = False
        self._queue = Queue()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        _point()
        if (scheduler := running()) is not None and scheduler.stored:
            scheduler.fence()
        self._set = True
        self._queue.let_all_on()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = running()
        assert scheduler is not None, "a thread that is not simulated would wait"
        scheduler.point()
        if not self._set:
            self._queue.wait(scheduler, _until(scheduler, timeout))
        return self._set


class SimpleQueue:
    """A simulated ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[object] = deque()
        self._queue = Queue()

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        _point()
        self._items.append(item)
        self._queue.let_on()

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        scheduler = running()
        assert scheduler is not None, "a thread that is not simulated would wait"
        scheduler.point()
        until = _until(scheduler, timeout)
        while not self._items:
            if not block or not self._queue.wait(scheduler, until):
                raise queue.Empty
        return self._items.popleft()


class Thread:
    """A simulated ``threading.Thread``."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._run = (target, args, kwargs or {})
        self._given = name
        self.daemon: bool = bool(daemon)
        self._thread: SimulatedThread | None = None

    @property
    def name(self) -> str:
        return self._given or (self._thread.name if self._thread else "Thread")

    @property
    def ident(self) -> int | None:
        return self._thread.ident or None if self._thread else None

    def start(self) -> None:
        scheduler = running()
        assert scheduler is not None and scheduler.current is not None, (
            "started by a thread that is not simulated"
        )
        rank = scheduler.current.rank

        def run() -> None:
            thread = self._thread
            assert thread is not None
            _objects[thread] = self
            target, args, kwargs = self._run
            try:
                if target is not None:
                    target(*args, **kwargs)
            except Exception as error:
                if scheduler.is_gone(thread):
                    return
                threading.excepthook(
                    threading.ExceptHookArgs((type(error), error, error.__traceback__, None))
                )
            finally:
                _objects.pop(thread, None)

        self._thread = scheduler.add(rank, self._given, run)
        scheduler.point()

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.ended

    def join(self, timeout: float | None = None) -> None:
        scheduler = running()
        thread = self._thread
        if scheduler is None or thread is None or (me := scheduler.current) is None:
            return
        scheduler.point()
        if not thread.ended:
            thread.joiners.append(me)
            try:
                scheduler.wait(_until(scheduler, timeout))
            finally:  # else the end of the thread would wake this one from a later sleep
                thread.joiners.remove(me)


#: What ``current_thread`` returns.
_objects: dict[SimulatedThread, Thread] = {}


def current_thread() -> object:
    scheduler = running()
    if scheduler is None or scheduler.current is None:
        return threading.current_thread()
    me = scheduler.current
    if me not in _objects:
        main = Thread(name="MainThread")
        main._thread = me
        _objects[me] = main
    return _objects[me]


def forget_threads() -> None:
    """Drop the threads of a simulation that is over."""
    _objects.clear()


get_ident: Callable[[], int] = threading.get_ident
#: The pid of rank 0; those of the other ranks follow.
FIRST_PID = 1000


def gethostname() -> str:
    """Return the same name on every machine."""
    return "simulated"


def getpid() -> int:
    """Return the rank's pid, as if each rank were a process."""
    scheduler = running()
    return 0 if scheduler is None or scheduler.current is None else FIRST_PID + scheduler.current.rank


def monotonic() -> float:
    scheduler = running()
    return 0.0 if scheduler is None else scheduler.now


perf_counter: Callable[[], float] = monotonic
wall_clock: Callable[[], float] = monotonic


def sleep(seconds: float) -> None:
    scheduler = running()
    if scheduler is None:
        return
    if seconds <= 0:
        scheduler.give_way()
    else:
        scheduler.park(scheduler.now + seconds)


def give_way() -> None:
    scheduler = running()
    if scheduler is not None:
        scheduler.give_way()
