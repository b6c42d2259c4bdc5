"""Starting threads: one that must be started only once, or short-lived ones that a world joins at its end.

A thread may not start: there may be too many, and from Python 3.12 on none starts in exit hooks (in 3.12.0
and 3.12.1, none once the main thread has ended). So what a program needs at its end is started before that,
as the watchdog is, or by ``Helpers``, whose callers can do without a thread.
"""

from __future__ import annotations

from collections.abc import Callable

from asynccoll import host


def start_once(name: str, action: Callable[[], object], keep: Callable[[host.Thread | None], object]) -> None:
    """Run ``action`` on a new thread of this name, after ``keep(thread)``.

    If the thread does not start (there are too many, or Ctrl-C came first), call ``keep(None)``, so that the
    next call tries again. Ctrl-C can also come when the thread already runs: then no second one may be
    started.
    """
    left = iter((action,))  # taken by the thread, or by this one if it gives up: never by both

    def run() -> None:
        for mine in left:
            mine()

    thread = host.Thread(target=run, name=name, daemon=True)
    try:
        keep(thread)
        thread.start()
    except BaseException:
        if next(left, None) is not None:
            keep(None)
        raise


class Helpers:
    """The running helper threads. One in native code while the interpreter ends would abort the process."""

    def __init__(self) -> None:
        self._lock = host.Lock()
        self._running: dict[host.Thread, None] = {}

    def forget_parent(self) -> None:
        """Reset it in a forked child, which has none of the parent's threads."""
        self.__init__()  # type: ignore[misc]  # the same object: others refer to it

    def start(self, name: str, action: Callable[[], object]) -> host.Thread | None:
        """Run ``action`` on a new thread of this name, and return it; None if no thread can be started."""

        def run() -> None:
            try:
                action()
            finally:
                with self._lock:
                    self._running.pop(host.current_thread(), None)

        thread = host.Thread(target=run, name=name, daemon=True)
        with self._lock:  # held until the thread has started: before that it cannot be joined
            self._running[thread] = None  # first: Ctrl-C may come once it runs
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                del self._running[thread]
                return None
        return thread

    def join(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the running threads."""
        deadline = host.monotonic() + seconds
        with self._lock:
            running = [thread for thread in self._running if thread.is_alive()]  # Ctrl-C: not started
        for thread in running:
            if thread is not host.current_thread():
                thread.join(max(0.0, deadline - host.monotonic()))
