"""Which tensors are memory with an address, and which share it."""

from __future__ import annotations

import torch

__all__ = ["has_memory", "may_overlap", "overlap", "same_memory", "same_storage"]


def has_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` is memory with an address; a lazy tensor (XLA) is a value that is computed some day."""
    return x.device.type != "xla"


def same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors begin at one address. Of lazy ones, which have none, it is never said."""
    return x.data_ptr() == y.data_ptr() and has_memory(x)


def may_overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are views of one memory."""
    return has_memory(x) and same_storage(x, y)


def same_storage(x: torch.Tensor, y: torch.Tensor) -> bool:
    """The same of two that are known to be memory."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two contiguous tensors have bytes in common."""
    at, other = x.data_ptr(), y.data_ptr()
    return at < other + y.nbytes and other < at + x.nbytes
