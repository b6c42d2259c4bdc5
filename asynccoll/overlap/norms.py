"""The norm of gradients that are divided among the ranks, and clipping by it.

The parts of all ranks together are the gradients, and no element is on two ranks. Knows nothing else about
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from asynccoll.errors import InvalidArgumentError
from asynccoll.ops.collectives import all_reduce
from asynccoll.overlap.steps import Steps

__all__ = ["agree_on_overflow", "clip"]

PIECE = 4096


def clip(
    parts: Sequence[nn.Parameter], max_norm: float, norm_type: float, **call: Any
) -> Steps[torch.Tensor]:
    """Scale the ``.grad`` of ``parts`` so that the norm over all ranks is at most ``max_norm``.

    Returns the norm before that, as float64 if a part is, else as float32. (Parts without a gradient count,
    since ranks may differ in those.) A norm that is not finite makes the gradients NaN on every rank, so that
    a gradient scaler skips the step on all of them.
    """
    if not norm_type > 0:
        raise InvalidArgumentError(
            f"norm_type must be positive (math.inf for the largest), got {norm_type!r}"
        )
    own = [part.grad for part in parts if part.grad is not None]
    local = _local(own, norm_type)
    if math.isinf(norm_type):  # as a number: some backends lose a NaN in a maximum of tensors
        norm = local.new_tensor((yield all_reduce(local.item(), op="max", **call)))
    else:
        norm = (yield all_reduce(local, op="sum", **call)).pow(1 / norm_type)
    # torch's clamp keeps a NaN. An infinite norm would give a factor of zero, and NaN on some ranks only.
    nn.utils.clip_grads_with_norm_(parts, max_norm, norm if norm.isfinite() else norm * math.nan)
    is_wide = any(part.dtype in (torch.float64, torch.complex128) for part in parts)
    return norm if is_wide else norm.float()


def agree_on_overflow(parts: Sequence[nn.Parameter], **call: Any) -> Steps[None]:
    """If a gradient of any rank is not finite, make those of all ranks NaN."""
    own = [_real(part.grad) for part in parts if part.grad is not None]
    finite = yield all_reduce(all(bool(x.isfinite().all()) for x in own), op="and", **call)
    if not finite:
        for x in own:
            x.fill_(math.nan)


def _real(gradient: torch.Tensor) -> torch.Tensor:
    """Return a complex gradient as pairs of reals, others as they are."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _local(own: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return this rank's share: the largest magnitude, or the sum of the powers, in float64."""
    own = [x for x in own if x.numel()]
    if not own:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    together = torch.cat([norm for x in own for norm in _of_pieces(x, norm_type)])
    return together.max() if math.isinf(norm_type) else together.pow(norm_type).sum()


def _of_pieces(x: torch.Tensor, norm_type: float) -> Iterator[torch.Tensor]:
    """Yield the norms of pieces of ``x``, since torch's norm of many float32 elements is inexact on the CPU.

    Over 3 million it is off by 6e-5, and flat parts are longer than single parameters.
    """
    flat, whole = x.reshape(-1), x.numel() // PIECE * PIECE
    if x.is_complex():
        flat = flat.abs()
    dtype = torch.float64 if flat.dtype is torch.float64 else torch.float32
    for pieces in (flat[:whole].view(-1, PIECE), flat[whole:].view(1, -1)):
        if pieces.numel():
            yield torch.linalg.vector_norm(pieces, norm_type, dim=1, dtype=dtype).double()
