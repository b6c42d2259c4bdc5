"""The timeline of this rank: operations on their lanes, and spans of compute.

    with ac.trace.recording() as timeline:
        for x, y in first_batches:
            loss_fn(model(x), y).backward()                 # marked automatically: forward, backward
            await gradients
            optimizer.step()                                # and the end of a step
    timeline.plot(f"timeline-{ac.get_rank()}.png")          # a picture of this rank; needs matplotlib
    trace = await ac.trace.gather(timeline)                 # all ranks, with their clocks aligned

An operation is recorded from the moment it is accepted to the moment it completes, stamped by the
completing thread. Outside of ``recording()`` nothing is recorded, and the only cost is one check of an
empty tuple. Times are the host's: on a device that orders operations by stream (nccl) an operation
completes when it is enqueued, so look at those with ``torch.profiler``.

Data flows one way: lane -> context.observers -> Recorder -> Timeline -> file.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import NoneType

from asynccoll.host.misfits import check, fitting
from asynccoll.host.profiling import annotation
from asynccoll.runtime.process import current, existing
from asynccoll.trace import findings
from asynccoll.trace.marking import marking
from asynccoll.trace.perfetto import write_events
from asynccoll.trace.recorder import Recorder
from asynccoll.trace.spans import Span
from asynccoll.world.context import Context


class Timeline:
    """What one rank did while it was recorded. Made by ``recording()``; any thread may add to it."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.recorder: Recorder = Recorder()

    def __repr__(self) -> str:
        count = len(self.recorder.entries)
        return f"<Timeline of rank {self.rank}: {count} spans in {self.seconds:.3f} s>"

    def span(self, name: str, *, row: str | None = None) -> AbstractContextManager[None]:
        """Mark a block of compute called ``name``: ``with timeline.span("validate"):``.

        It appears in the row of the calling thread, or in ``row``. Inside the block nothing is marked
        automatically. Do not mark blocks that only wait: ``hidden_fraction`` counts communication as waited
        for where there is no span.
        """
        _check_names(name, row)
        return self.recorder.span(name, row)

    def step(self) -> None:
        """Mark the end of a step of the program. Without such marks, each ``optimizer.step()`` ends one."""
        self.recorder.step()

    @property
    def spans(self) -> tuple[Span, ...]:
        """Everything recorded so far, by start."""
        return self.recorder.spans

    @property
    def steps(self) -> tuple[float, ...]:
        """When each step ended, in seconds since the recording began."""
        return self.recorder.steps

    @property
    def seconds(self) -> float:
        """How long the recording lasted, or has lasted so far."""
        return self.recorder.seconds

    def hidden_fraction(self) -> float:
        """Return the share of the time with an operation in flight during which this rank computed.

        1.0 means that communication costs nothing, 0.0 that all of it is waited for; ``nan`` if there is
        none, or if no compute is marked, as then the share is unknown. The result depends on what is marked
        as much as on what is hidden.
        """
        return findings.hidden_fraction(self.spans, 0.0, self.seconds)

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
        """Draw the timeline into ``path`` (``.png``, ``.svg`` or ``.pdf``); returns the path.

        Rows of compute are at the top, one per thread; rows of communication below, one per lane, with
        communication that is hidden behind compute set off from communication that is waited for.

        Raises:
            BackendNotFoundError: matplotlib is missing; the text has the line that installs it.
        """
        from asynccoll.trace.plot import draw

        shown = self._title() if title is None else title
        return draw(Path(path), self.spans, self.seconds, shown)

    def _title(self) -> str:
        where = f"Rank {self.rank} of {self.world_size}"
        hidden = self.hidden_fraction()
        if math.isnan(hidden):
            sent = any(span.is_operation for span in self.spans)
            return f"{where}: nothing is marked as compute" if sent else where
        return f"{where}: {hidden:.0%} of the communication is hidden behind compute"

    def to_chrome(self, path: str | os.PathLike[str]) -> Path:
        """Write Chrome trace JSON for ``ui.perfetto.dev`` or ``chrome://tracing``; returns the path.

        It contains this rank only; ``ac.trace.gather(timeline)`` has all ranks, on one clock.
        """
        return write_events(
            Path(path), [(self.rank, self.world_size, self.recorder.began, self.seconds, self.spans)]
        )


#: The recordings that are running in this process.
_open: list[Timeline] = []


@fitting
@contextmanager
def recording(*, marks: bool = True) -> Iterator[Timeline]:
    """Record every operation of this rank, and its compute, while the block runs.

    With ``marks``, module calls are marked as "forward", the backward passes through them as "backward", and
    optimizer steps as "optimizer". What you mark yourself, with ``span``, is added, and inside it nothing is
    marked automatically. Recordings may nest and overlap. An operation in flight at the end stays open until
    it completes. A recording covers the world that exists when it begins: if another world is joined inside
    the block, nothing of that is recorded, and a warning says so.

    Raises:
        NotInitializedError: under a launcher, before ``ac.initialize()``.
    """
    context = current()
    timeline = Timeline(context.rank, context.world_size)
    end = start(timeline, context, marks=marks)
    try:
        yield timeline
    finally:
        end()
        now = existing()
        if now is not None and now is not context and now.joined:
            warnings.warn(
                f"this recording began before {now!r} was joined, and contains nothing of it: begin a "
                "recording after ac.initialize(), one for each world",
                stacklevel=3,
            )


def start(timeline: Timeline, context: Context, *, marks: bool) -> Callable[[], None]:
    """Have ``timeline`` record ``context`` until the returned function is called."""
    ending = ExitStack()
    ending.callback(timeline.recorder.end)
    ending.callback(context.observe(timeline.recorder.observe))
    if marks:
        ending.enter_context(marking(timeline.recorder))
    _open.append(timeline)
    ending.callback(_open.remove, timeline)
    return ending.close


@fitting
@contextmanager
def span(name: str, *, row: str | None = None) -> Iterator[None]:
    """Mark a block of compute called ``name``, in every running recording, and in ``torch.profiler``.

    For code that does not know whether it is being recorded (``asynccoll trace run``): if it is not, this
    does nothing.

    >>> with ac.trace.span("validate"):
    ...     validate(model)
    """
    _check_names(name, row)
    with ExitStack() as spans:
        for timeline in tuple(_open):  # a copy, as other threads begin and end theirs
            spans.enter_context(timeline.span(name, row=row))
        if not _open:
            spans.enter_context(annotation(name))
        yield


def _check_names(name: object, row: object) -> None:
    check("the name of a span", name, str, "a string")
    check("row", row, (str, NoneType), "a string")


def step() -> None:
    """Mark the end of a step of the program, in every running recording."""
    for timeline in tuple(_open):
        timeline.step()
