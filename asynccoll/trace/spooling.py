"""``ASYNCCOLL_TRACE=DIR``: every rank of a program is recorded from ``initialize`` on, into a file there.

The file is written at intervals and at the end, so that a rank that hangs or is killed has left its part.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING

from asynccoll import host
from asynccoll.runtime.process import when_joined
from asynccoll.trace.parts import Writer
from asynccoll.trace.timeline import Timeline, start

if TYPE_CHECKING:
    from asynccoll.world.context import Context

__all__ = ["VARIABLE", "file_name", "install", "recordings"]

VARIABLE = "ASYNCCOLL_TRACE"
_EVERY_SECONDS = 0.5


def recordings(directory: Path) -> list[Path]:
    """What ranks have left there, in their order."""
    return sorted(directory.glob("rank-[0-9][0-9][0-9][0-9][0-9].jsonl"))


def install() -> None:
    """Record the worlds that this process joins, if its environment asks for it."""
    if os.environ.get(VARIABLE):
        when_joined(lambda context: _record(context, Path(os.environ[VARIABLE])))


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.jsonl"


def _record(context: Context, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    timeline = Timeline(context.rank, context.world_size)
    end = start(timeline, context, marks=True)
    writer = Writer(timeline.recorder, context, directory / file_name(context.rank))
    over = host.Event()

    def write_at_intervals() -> None:
        while not over.wait(_EVERY_SECONDS):
            writer.write()

    host.Thread(target=write_at_intervals, name="asynccoll trace", daemon=True).start()

    def finish() -> None:
        over.set()
        end()
        writer.write()

    atexit.register(finish)
