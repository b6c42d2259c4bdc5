"""Timelines: operations on their lanes beside compute, on one rank and on all of them.

``recording`` takes down one rank; ``gather``, ``load`` and ``asynccoll trace run`` make one trace of all. On
top of what it shows, and beside it: nobody below knows of this package, which sees operations as an observer.
"""

from __future__ import annotations

from asynccoll.trace.hooks import Finished, add_hook
from asynccoll.trace.merged import Trace, gather, load
from asynccoll.trace.otel import opentelemetry
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
