"""How ranks end, seen by their launcher: who was first, and what the ranks that are left should know.

Each rank is looked at through a process descriptor (Linux), which turns readable at its end. How it ended is
written into the rank's flight recorder, which its peers have open: so they can tell that it was killed, or
ended with exit code 0. mpiexec kills the other ranks within milliseconds of a death and does not always tell
which it was; who ended first is known here.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from asynccoll import flight, host
from asynccoll.flight import Flight, registry
from asynccoll.host import shared_memory

__all__ = ["Witness"]

#: A rank that dies sooner after it has joined its world leaves no record here.
_LOOK_SECONDS = 0.02
#: A change as recent as this may be followed by one with the same time: the clock of files is coarse.
_COARSE_NS = 100_000_000


@dataclass(slots=True)
class _Seen:
    """A process of a rank, and the recorder it has, once it has one."""

    rank: int
    pid: int
    descriptor: int
    memory: memoryview | None = None


class Witness:
    """Watches the processes that ``RANK.pid`` in a directory names, and those of ranks registered there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: dict[int, _Seen] = {}  # by process
        self._ended: list[int] = []
        self._changed = -1
        self._poll = select.poll()
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

    def flights(self) -> dict[int, Flight]:
        """What is recorded by each rank that has joined its world, also of those that are gone."""
        found = {}
        for seen in list(self._seen.values()):
            recorded = None if seen.memory is None else flight.read(seen.memory)
            if recorded is not None:
                found[seen.rank] = recorded
        return dict(sorted(found.items()))

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look()
            for descriptor, _ in self._poll.poll(_LOOK_SECONDS * 1000):
                self._saw_end(descriptor)
        for descriptor, _ in self._poll.poll(0):
            self._saw_end(descriptor)
        for seen in self._seen.values():
            if seen.descriptor >= 0:
                os.close(seen.descriptor)

    def _look(self) -> None:
        """Get to know who is new in the directory."""
        try:
            changed = self._directory.stat().st_mtime_ns
        except OSError:  # it goes away with the job
            return
        if changed == self._changed:
            return
        self._changed = changed if time.time_ns() - changed > _COARSE_NS else -1
        for note in self._directory.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                self._watch(int(note.stem), int(note.read_text()))
        for rank, told in registry.registered(self._directory).items():
            seen = self._watch(rank, told.get("pid", 0))
            if seen is not None and seen.memory is None:
                seen.memory = shared_memory.look(seen.pid, told.get("memory", -1), write=True)

    def _watch(self, rank: int, pid: int) -> _Seen | None:
        if pid not in self._seen:
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                return None
            self._seen[pid] = _Seen(rank, pid, descriptor)
            self._poll.register(descriptor, select.POLLIN)
        return self._seen[pid]

    def _saw_end(self, descriptor: int) -> None:
        seen = next(one for one in self._seen.values() if one.descriptor == descriptor)
        code = _exit_code(seen)
        if seen.memory is not None and (code is not None or _says_nothing(seen.memory)):
            flight.mark_ended(seen.memory, "exited", code, host.monotonic())
        self._ended.append(seen.rank)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        seen.descriptor = -1


def _says_nothing(memory: memoryview) -> bool:
    recorded = flight.read(memory)
    return recorded is not None and recorded.ending == "running"


def _exit_code(seen: _Seen) -> int | None:
    """How it ended, left for its parent to reap; None where that is not known here, or no longer."""
    try:
        found = os.waitid(os.P_PIDFD, seen.descriptor, os.WEXITED | os.WNOWAIT)
    except OSError:  # somebody else's child, or waited for already
        return shared_memory.exit_code(seen.pid)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
