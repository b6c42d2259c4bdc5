"""Who died first, of processes that are somebody else's children.

mpiexec kills the other ranks within milliseconds of a death and does not always tell which it was. So
each rank is looked at through a process descriptor (Linux), which turns readable at its end.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path

__all__ = ["Witness"]

_LOOK_SECONDS = 0.05


class Witness:
    """Watches the processes whose numbers appear as ``RANK.pid`` in a directory."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._directory = directory
        self._unknown = set(range(ranks))
        self._ended: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asynccoll-witness", daemon=True)
        if hasattr(os, "pidfd_open"):
            self._thread.start()

    def ended(self) -> list[int]:
        """The ranks that have ended, the first one first; ends the watching."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        return self._ended

    def _run(self) -> None:
        watched: dict[int, int] = {}
        poll = select.poll()
        while not self._stop.is_set():
            for rank in sorted(self._unknown):
                descriptor = self._open(rank)
                if descriptor is not None:
                    watched[descriptor] = rank
                    poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(_LOOK_SECONDS * 1000):
                poll.unregister(descriptor)
                os.close(descriptor)
                self._ended.append(watched.pop(descriptor))
        for descriptor in watched:
            os.close(descriptor)

    def _open(self, rank: int) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.pidfd_open(int(self._directory.joinpath(f"{rank}.pid").read_text()))
            self._unknown.discard(rank)
            return descriptor
        return None
