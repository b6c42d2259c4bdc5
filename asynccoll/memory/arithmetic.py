"""Reductions of several ranks' tensors with torch, in rank order, so that all ranks get the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asynccoll.plan.spec import HALF, ReduceOp

#: ``f(a, b, out=)``, where ``out`` may be ``a`` or ``b``
_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def reduce_chunks(
    chunks: Sequence[torch.Tensor], op: ReduceOp, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduce the chunks of all ranks in rank order, so that every rank gets the same bits.

    Half precision is accumulated in float32 and rounded once. ``AVG`` divides by ``len(chunks)``.
    ``out`` may be the memory of one of the first two chunks.
    """
    first = chunks[0]
    if first.dtype in HALF:
        wide = reduce_chunks([chunk.float() for chunk in chunks], op)
        return wide.to(first.dtype) if out is None else out.copy_(wide)
    if op is ReduceOp.AVG:
        return reduce_chunks(chunks, ReduceOp.SUM, out).div_(len(chunks))
    if len(chunks) == 1:
        return first.clone() if out is None else out.copy_(first)
    combine = _COMBINE[op]
    into = combine(first, chunks[1], out=out)
    for chunk in chunks[2:]:
        combine(into, chunk, out=into)
    return into
