"""What a call is, as a line of text that is the same in every process."""

from __future__ import annotations

import torch

from asynccoll.plan.spec import dtype_name

__all__ = ["shown"]


def shown(what: object) -> str:
    """``all_reduce sum float32 [4, 8]``: names and values in their order, without those that are empty."""
    if isinstance(what, torch.dtype):
        return dtype_name(what)
    if isinstance(what, (torch.Size, list)):
        return str(list(what))
    if isinstance(what, tuple):
        return " ".join(text for text in map(shown, what) if text)
    return "" if what is None else str(getattr(what, "value", what))
