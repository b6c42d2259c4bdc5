"""What a program did, by rank and lane: recorded, measured, drawn.

Watches operations from outside; must not change what they do, and nothing below knows of it.
"""

from asynccoll.trace.spans import Span
from asynccoll.trace.timeline import Timeline, recording

__all__ = ["Span", "Timeline", "recording"]
