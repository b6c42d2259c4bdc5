"""Starting threads: once, or again and again for one thing each, which a world waits for when it ends."""

from __future__ import annotations

from collections.abc import Callable

from asynccoll import host

__all__ = ["Helpers", "start_once"]


def start_once(thread: host.Thread, keep: Callable[[host.Thread | None], object]) -> None:
    """Start ``thread`` after ``keep(thread)``: in a start, Ctrl-C can strike once the thread runs.

    A second one must not follow. If there are too many threads, ``keep(None)``, so that the next call tries
    again.
    """
    keep(thread)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        keep(None)
        raise


class Helpers:
    """Those that run. One that is in native code while the interpreter ends would abort the process."""

    def __init__(self) -> None:
        self._lock = host.Lock()
        self._running: dict[host.Thread, None] = {}

    def start(self, name: str, action: Callable[[], object]) -> None:
        """Run ``action`` on a thread of this name."""

        def run() -> None:
            try:
                action()
            finally:
                with self._lock:
                    self._running.pop(host.current_thread(), None)

        thread = host.Thread(target=run, name=name, daemon=True)
        with self._lock:  # until it has started: a thread that has not cannot be joined
            thread.start()
            self._running[thread] = None

    def join(self, seconds: float) -> None:
        """Wait for each that runs, for so long at most."""
        with self._lock:
            running = list(self._running)
        for thread in running:
            if thread is not host.current_thread():
                thread.join(seconds)
