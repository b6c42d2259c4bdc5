"""Tracing and timelines: operations on their lanes, next to compute, on one rank or on all of them.

``recording`` records one rank; ``gather``, ``load`` and ``asynccoll trace run`` make one trace of all ranks.
This package sees operations only as an observer: no layer below knows about it.
"""

from __future__ import annotations

from asynccoll.trace.hooks import Finished, add_hook, opentelemetry
from asynccoll.trace.merged import Trace, gather, load
from asynccoll.trace.spans import Span
from asynccoll.trace.spooling import install
from asynccoll.trace.timeline import Timeline, recording, span, step

__all__ = [
    "Finished",
    "Span",
    "Timeline",
    "Trace",
    "add_hook",
    "gather",
    "load",
    "opentelemetry",
    "recording",
    "span",
    "step",
]

install()
