"""Whether somebody has written to what a call reads before it was waited for.

Some transports copy an input at the call, others read it later, so that such a write gives other numbers
on other backends, without a word. Torch counts the writes to a tensor, those to all views of one memory
together: of a view that is a part of its base nothing can be said, as of what has no count because it was
made in inference mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from asynccoll.memory.aliasing import may_overlap
from asynccoll.memory.plain import ORDINARY

__all__ = ["Read", "counted", "counted_of", "is_empty", "writes_to"]

#: What a call reads: one tensor, or several that are not empty.
Read: TypeAlias = "torch.Tensor | list[torch.Tensor]"

_version = attrgetter("_version")


def counted(x: Any, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """``x`` if torch counts the writes to it, and to nothing else; not what is filled itself, as ``out``.

    Nor what is on a lazy device: a call there has what its input was.
    """
    if type(x) not in ORDINARY or x.is_xla or (x._is_view() and _is_a_part(x)):
        return None
    if out is not None and (out is x or may_overlap(x, out)):
        return None
    found: torch.Tensor = x
    return found


def _is_a_part(view: torch.Tensor) -> bool:
    base = view._base
    return base is None or base.numel() > view.numel()


def counted_of(xs: Iterable[object]) -> list[torch.Tensor] | None:
    """Those of ``xs`` that are; None if there are none."""
    return [x for x in map(counted, xs) if x is not None and x.numel() and not x.is_inference()] or None


def writes_to(read: Read) -> int:
    """How often somebody has written to it so far."""
    try:
        count: int = sum(map(_version, read)) if type(read) is list else _version(read)
    except RuntimeError:  # made in inference mode: never
        return 0
    return count


def is_empty(read: Read) -> bool:
    """Whether there is nothing in it that could be written to."""
    return type(read) is not list and not read.numel()  # type: ignore[union-attr]  # of a list only what holds some
