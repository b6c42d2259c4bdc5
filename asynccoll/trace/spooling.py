"""``ASYNCCOLL_TRACE=DIR``: record every rank of a program from ``initialize`` on, into a file in ``DIR``.

The file is written at intervals, after a failure and at the end, so that a rank that hangs or is killed
leaves its part behind.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from asynccoll import host
from asynccoll.host.store import Waiting
from asynccoll.runtime.process import when_joined
from asynccoll.trace.parts import Writer
from asynccoll.trace.timeline import Timeline, start
from asynccoll.world.context import Context

VARIABLE = "ASYNCCOLL_TRACE"
_EVERY_SECONDS = 0.5
#: The key under which rank 0 says, in the store through which the ranks met, which of the program's worlds
#: this is.
_NUMBER = "trace/world"
#: How long the other ranks wait for that: rank 0 says nothing if the variable is not set for it.
_PATIENCE_SECONDS = 30.0


def recordings(directory: Path) -> list[Path]:
    """Return the files that ranks have left in ``directory``, by rank."""
    return sorted(directory.glob("rank-[0-9][0-9][0-9][0-9][0-9].jsonl"))


def install() -> None:
    """Record the worlds that this process joins, if its environment asks for it."""
    if directory := os.environ.get(VARIABLE):
        when_joined(_Recordings(Path(directory)).record)


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.jsonl"


def later_worlds(directory: Path) -> list[Path]:
    """Return the directories in which ranks have recorded the worlds that they joined after the first."""
    return sorted(directory.glob("world-*"), key=lambda one: (len(one.name), one.name))


class _Recordings:
    """The recordings of this process: one for each world that it joins, one after another or in threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: list[tuple[Context, Callable[[], None]]] = []
        self._made: dict[int, int] = {}  # the latest world's number, by rank if ranks are threads
        atexit.register(self._finish)

    def record(self, context: Context) -> None:
        """Record what happens in ``context``, which this process has just joined."""
        self._finish(lambda earlier: earlier.closed)
        self._directory.mkdir(parents=True, exist_ok=True)
        who = context.rank if context.thread_rank else -1
        own = self._made[who] = self._made.get(who, 0) + 1
        if context.rank == 0 and context.clients is not None:
            with context.clients.borrow() as store:
                store.set(_NUMBER, str(own))

        def path() -> Path:
            number = own if context.rank == 0 or context.clients is None else _told(context, own)
            self._made[who] = max(number, self._made[who])
            directory = self._directory if number == 1 else self._directory / f"world-{number}"
            directory.mkdir(exist_ok=True)
            return directory / file_name(context.rank)

        self._open.append((context, _record(context, path)))

    def _finish(self, which: Callable[[Context], bool] = lambda _context: True) -> None:
        for one in [one for one in self._open if which(one[0])]:
            try:
                self._open.remove(one)
            except ValueError:  # another rank, a thread of this process, is finishing it
                continue
            _, finish = one
            finish()


def _told(context: Context, own: int) -> int:
    """Return which of the program's worlds this is, as rank 0 counts: others may have joined later.

    If rank 0 says nothing, it is this rank's ``own`` count.
    """
    assert context.clients is not None
    store = Waiting(context.clients, _PATIENCE_SECONDS, lambda: context.closed)
    try:
        return int(store.get(_NUMBER))
    except RuntimeError:  # it took too long, or the store is gone, or this rank has left
        if not context.closed:
            warnings.warn(
                f"rank 0 is not recorded, or has not joined for {_PATIENCE_SECONDS:.0f} s: {VARIABLE} has to "
                f"be set for all ranks; this rank is recorded as part of the program's world {own}",
                stacklevel=2,
            )
        return own


def _record(context: Context, path: Callable[[], Path]) -> Callable[[], None]:
    """Write what happens in ``context`` to ``path()`` until the returned function is called.

    ``path`` is called in another thread, as it may wait for rank 0, which adopts torch's world when it first
    uses it.
    """
    timeline = Timeline(context.rank, context.world_size)
    end = start(timeline, context, marks=True)
    due, process = host.Event(), host.getpid()
    timeline.recorder.when_failed = due.set  # the launcher may soon end this rank

    def write_at_intervals() -> None:
        try:
            writer = Writer(timeline.recorder, context, path())
        except OSError as error:
            end()
            warnings.warn(f"rank {context.rank} is not recorded: {error}", stacklevel=1)
            return
        while timeline.recorder.ended is None:
            due.wait(_EVERY_SECONDS)
            due.clear()
            writer.write()
        writer.end()

    thread = host.Thread(target=write_at_intervals, name="asynccoll trace", daemon=True)
    thread.start()

    def finish() -> None:
        if host.getpid() != process:  # a forked child: the file is the parent's, and so may be a lock
            return
        end()
        due.set()
        thread.join()

    return finish
