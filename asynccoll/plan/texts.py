"""What a call is, as a line of text that is the same in every process; and what does not fit together."""

from __future__ import annotations

import torch

from asynccoll.errors import CollectiveMismatchError
from asynccoll.plan.spec import dtype_name

__all__ = ["shown", "unlike"]


def shown(what: object) -> str:
    """``all_reduce sum float32 [4, 8]``: names and values in their order, without those that are empty."""
    if isinstance(what, torch.dtype):
        return dtype_name(what)
    if isinstance(what, torch.Size):
        return str(list(what))
    if isinstance(what, list):
        return f"[{', '.join(map(shown, what))}]"
    if isinstance(what, tuple):
        return " ".join(text for text in map(shown, what) if text)
    return "" if what is None else str(getattr(what, "value", what))


def unlike(count: int, dtype: torch.dtype, wanted: int, wanted_dtype: torch.dtype) -> CollectiveMismatchError:
    """The error for a message of ``count`` elements that came to a receive of another size or dtype."""
    sent, fits = f"{count} elements of {dtype_name(dtype)}", f"{wanted} of {dtype_name(wanted_dtype)}"
    return CollectiveMismatchError(
        f"the sender's message has {sent}, but `like` has {fits} (the message was taken and dropped; the "
        "channel is still usable)"
    )
