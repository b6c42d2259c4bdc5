"""Whether the input of a call was written to before the call was waited for.

Some transports copy the input when called, others read it later, so such a write silently gives different
results on different backends. Torch counts the writes to a tensor; all views of one memory share a count. So
writes cannot be detected for a view of a part of its base, or for tensors made in inference mode, which have
no count.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from asynccoll.memory.aliasing import may_overlap
from asynccoll.memory.plain import ORDINARY

#: What a call reads: one tensor, or several that are not empty.
Read: TypeAlias = "torch.Tensor | list[torch.Tensor]"

_version = attrgetter("_version")


def counted(x: Any, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return ``x`` if torch counts exactly the writes to it; else None.

    Also None if ``out`` overlaps ``x``, since the call itself writes there, and for a lazy tensor, since a
    call uses the value that the tensor has at the time of the call.
    """
    if out is x or type(x) not in ORDINARY or x.is_xla or (x._is_view() and _is_a_part(x)):
        return None
    if out is not None and may_overlap(x, out):
        return None
    found: torch.Tensor = x
    return found


def _is_a_part(view: torch.Tensor) -> bool:
    base = view._base
    return base is None or base.numel() > view.numel()


def counted_of(xs: Iterable[object]) -> list[torch.Tensor] | None:
    """Return those of ``xs`` whose writes are counted (``counted``) and that are not empty; None if none."""
    return [x for x in map(counted, xs) if x is not None and x.numel() and not x.is_inference()] or None


def beside(xs: Iterable[torch.Tensor], outs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of ``xs`` that do not overlap their ``out``, to which the call itself writes."""
    return [x for x, out in zip(xs, outs, strict=True) if x is not out and not may_overlap(x, out)]


def writes_to(read: Read) -> int:
    """Return how often ``read`` has been written to so far."""
    try:
        count: int = sum(map(_version, read)) if type(read) is list else _version(read)
    except RuntimeError:  # made in inference mode: writes are not counted
        return 0
    return count


def is_empty(read: Read) -> bool:
    """Whether ``read`` has no elements that could be written to."""
    return type(read) is not list and not read.numel()  # type: ignore[union-attr]  # of a list only what holds some
