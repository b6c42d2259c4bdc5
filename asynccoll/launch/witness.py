"""How ranks end, seen by their launcher: which was first, and what the remaining ranks should know.

Each rank is watched through a process descriptor (Linux), which becomes readable when it ends. How it ended
is written into the rank's flight recorder, which its peers have open, so they can tell that it was killed, or
exited with code 0. mpiexec kills the other ranks within milliseconds of a death and does not always say which
rank it was; this module knows which ended first.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asynccoll import flight, host
from asynccoll.flight import Flight
from asynccoll.host import handing, shared_memory

#: A rank that dies sooner than this after its start, before it has joined its world, may be missed.
_LOOK_SECONDS = 0.02
#: How often to reap processes that ranks have left to this one.
_REAP_SECONDS = 1.0
#: MPICH ends the other ranks once a rank's sockets are closed, a moment before its own end is seen here.
_TOGETHER_SECONDS = 0.005
#: A change as recent as this may be followed by one with the same timestamp: the clock of files is coarse.
_COARSE_NS = 100_000_000


@dataclass(slots=True)
class _Seen:
    """A rank's process: its process descriptor (-1: none, or closed), and what it has handed over."""

    rank: int
    pid: int
    descriptor: int
    ended: bool = False
    memory: memoryview | None = None


class Witness:
    """Watches the processes that ``RANK.pid`` in a directory names, and those that hand over their memory."""

    def __init__(self, directory: Path, failed: Callable[[], object] = bool) -> None:
        """Prepare to see ranks that are started in ``directory`` from now on, once ``watch`` is called.

        ``failed`` is called on the witness's thread when a rank has ended with another exit code than 0.
        """
        self._failed = failed
        self.directory: Path = directory
        self._seen: dict[int, _Seen] = {}  # by process
        self._earlier = 0  # how many of them are of earlier attempts
        self._ended: list[int] = []
        self._changed = -1
        self._poll = select.poll()
        self._listening = handing.listen(directory)
        if self._listening is not None:
            self._poll.register(self._listening, select.POLLIN)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asynccoll-witness", daemon=True)

    def watch(self) -> Witness:
        """Watch until ``ended`` is called. Returns ``self``."""
        if hasattr(os, "pidfd_open"):
            self._thread.start()
        return self

    def ended(self) -> list[int]:
        """Stop watching; returns the ranks that have ended, the first one first."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._listening is not None:
            self._listening.close()
        return self._ended

    def restarted(self) -> None:
        """Leave the ranks so far out of ``flights``: they are about to be started again."""
        self._earlier = len(self._seen)

    def flights(self) -> dict[int, Flight]:
        """Return what each rank that has joined its world has recorded, including those that are gone."""
        found = {}
        for seen in list(self._seen.values())[self._earlier :]:
            recorded = None if seen.memory is None else flight.read(seen.memory)
            if recorded is not None:
                found[seen.rank] = recorded
        return dict(sorted(found.items()))

    def _run(self) -> None:
        reaped = time.monotonic()
        while not self._stop.is_set():
            self._look()
            if time.monotonic() - reaped >= _REAP_SECONDS:
                reaped = time.monotonic()
                self._reap()
            self._see(_LOOK_SECONDS)
        self._see(0)
        for seen in self._seen.values():
            if seen.descriptor >= 0:
                os.close(seen.descriptor)

    def _look(self) -> None:
        """Watch the ranks that are new in the directory."""
        try:
            changed = self.directory.stat().st_mtime_ns
        except OSError:  # removed with the job
            return
        if changed == self._changed:
            return
        self._changed = changed if time.time_ns() - changed > _COARSE_NS else -1
        for note in self.directory.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                self._watch(int(note.stem), int(note.read_text()))

    def _reap(self) -> None:
        """Reap processes that ranks had started in the background and left to this one.

        Only those in a process group that a rank leads, and never a rank: others wait for ranks.
        """
        for seen in list(self._seen.values()):
            with contextlib.suppress(ChildProcessError):  # there is none
                found = os.waitid(os.P_PGID, seen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None and found.si_pid not in self._seen:
                    os.waitid(os.P_PID, found.si_pid, os.WEXITED | os.WNOHANG)

    def _see(self, seconds: float) -> None:
        """Wait up to ``seconds``, then take what ranks have handed over and note which have ended."""
        if self._poll.poll(seconds * 1000):
            time.sleep(_TOGETHER_SECONDS)
        ready = {descriptor for descriptor, _ in self._poll.poll(0)}
        if self._listening is not None:
            for rank, pid, descriptor in handing.handed(self._listening):
                self._take(self._watch(rank, pid), shared_memory.taken(descriptor, write=True))
        ended = [one for one in self._seen.values() if one.descriptor in ready]
        # Of those that ended together, ranks that waited for others come last: they ended because of a peer.
        for seen in sorted(ended, key=_waited):
            self._saw_end(seen)

    def _watch(self, rank: int, pid: int) -> _Seen:
        """Watch the process from now on, unless it has ended."""
        if pid not in self._seen:
            seen = self._seen[pid] = _Seen(rank, pid, -1)
            try:
                seen.descriptor = os.pidfd_open(pid)
                self._poll.register(seen.descriptor, select.POLLIN)
            except ProcessLookupError:
                seen.ended = True
            except OSError:  # not permitted, or no descriptor is left: its end stays unknown
                pass
        return self._seen[pid]

    def _take(self, seen: _Seen, memory: memoryview | None) -> None:
        is_first = seen.memory is None
        seen.memory = memory
        if seen.ended and is_first:  # before it was seen
            _mark(seen)
            self._ended.append(seen.rank)

    def _saw_end(self, seen: _Seen) -> None:
        if _mark(seen):
            self._failed()
        self._ended.append(seen.rank)
        self._poll.unregister(seen.descriptor)
        os.close(seen.descriptor)
        seen.descriptor, seen.ended = -1, True


def _mark(seen: _Seen) -> int | None:
    """Record, where its peers read it, that the process has ended; return its exit code, if known."""
    code = _exit_code(seen)
    if seen.memory is not None and (code is not None or _says_nothing(seen.memory)):
        flight.mark_ended(seen.memory, "exited", code, host.monotonic())
    return code


def _waited(seen: _Seen) -> bool:
    """Whether the process had a call in flight when it ended."""
    recorded = None if seen.memory is None else flight.read(seen.memory)
    return recorded is not None and any(call.is_open for call in recorded.calls)


def _says_nothing(memory: memoryview) -> bool:
    recorded = flight.read(memory)
    return recorded is not None and recorded.ending == "running"


def _exit_code(seen: _Seen) -> int | None:
    """Return how it ended, and leave it for its parent to reap; None if that is not known here."""
    if seen.descriptor < 0:
        return None
    try:
        found = os.waitid(os.P_PIDFD, seen.descriptor, os.WEXITED | os.WNOWAIT)
    except OSError:  # another process's child, or reaped already
        return shared_memory.exit_code(seen.pid)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
