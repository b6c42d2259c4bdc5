"""all_reduce, reduce and reduce_scatter of whatever a user passes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from asynccoll import tensors
from asynccoll.errors import InvalidArgumentError
from asynccoll.memory.plain import plain_tensor
from asynccoll.modes.captured import uncast
from asynccoll.order.lane import Lane
from asynccoll.payload.common import (
    check_filled,
    check_number,
    check_reducible,
    message_kinds,
    no_gradient,
    no_out,
    normal_dim,
    one_by_one,
    over_tree,
    require_tensor,
)
from asynccoll.payload.kinds import number_row, numbers_of
from asynccoll.payload.messages import all_gather_rows
from asynccoll.payload.values import as_number, reduce_numbers
from asynccoll.plan.spec import Op, ReduceOp, ReduceOpLike, dtype_name, reduce_op
from asynccoll.plan.trees import is_tree
from asynccoll.tensors import autograd
from asynccoll.waiting.started import Started


def all_reduce(lane: Lane, x: object, op: ReduceOpLike, out: Any, timeout: float | None) -> Started[Any]:
    op = reduce_op(op)
    if isinstance(x, torch.Tensor):
        x = plain_tensor("all_reduce", x)
        check_filled("all_reduce", out, x)
        return autograd.all_reduce(lane, x, op, out, timeout)
    x = as_number(x)
    if is_tree(x):
        return over_tree(
            lane,
            "all_reduce",
            x,
            lambda xs, outs: autograd.fused(lane, tensors.all_reduce_fuse(lane, op), xs, outs, timeout),
            lambda values: _reduce_numbers(lane, "all_reduce", values, None, op, timeout),
            lambda leaf: check_reducible(lane, "all_reduce", Op.ALL_REDUCE, leaf, op),
            out=out,
            alike=True,
        )
    no_out("all_reduce", out)
    check_number("all_reduce", x, op)
    return _reduce_numbers(lane, "all_reduce", [x], None, op, timeout).then(itemgetter(0))


def _reduce_numbers(
    lane: Lane, name: str, xs: Sequence[Any], dst: int | None, op: ReduceOp, timeout: float | None
) -> Started[list[Any]]:
    """Reduce each of ``xs``, which were checked; all of them take one native call.

    If there is a ``dst``, the others get None for each.
    """
    here = dst in (None, lane.group.rank)
    whose = "" if dst is None else f" dst={dst}"
    return all_gather_rows(
        lane,
        name,
        b"".join(map(number_row, xs)),
        timeout,
        then=lambda rows: [
            reduce_numbers(numbers_of(rows, i, len(xs)), op) if here else None for i in range(len(xs))
        ],
        detail=f"{op.value} {message_kinds(name, xs)}{whose}",
    )


def reduce(
    lane: Lane, x: object, dst: int, op: ReduceOpLike, out: torch.Tensor | None, timeout: float | None
) -> Started[object]:
    op = reduce_op(op)
    dst = lane.group.index(dst, "dst")
    if isinstance(x, torch.Tensor):
        x = plain_tensor("reduce", x)
        check_filled("reduce", out, x)
        return _reduce_tensor(lane, x, dst, op, out, timeout)
    no_out("reduce", out)
    x = as_number(x)
    if not is_tree(x):
        check_number("reduce", x, op)
        return _reduce_numbers(lane, "reduce", [x], dst, op, timeout).then(itemgetter(0))
    return over_tree(
        lane,
        "reduce",
        x,
        one_by_one(lambda leaf: _reduce_tensor(lane, leaf, dst, op, None, timeout)),
        lambda values: _reduce_numbers(lane, "reduce", values, dst, op, timeout),
        lambda leaf: check_reducible(lane, "reduce", Op.REDUCE, leaf, op),
        here=lane.group.rank == dst,
    )


def _reduce_tensor(
    lane: Lane,
    x: torch.Tensor,
    dst: int,
    op: ReduceOp,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Started[object]:
    if out is not None:
        autograd.records("reduce", (x,), (out,))
    call = tensors.reduce_call(lane, x, dst, op, out)
    return no_gradient(call.begin(lane, timeout), x, "reduce", "all_reduce")


def reduce_scatter(
    lane: Lane, x: object, op: ReduceOpLike, dim: int, out: torch.Tensor | None, timeout: float | None
) -> Started[Any]:
    op = reduce_op(op)
    if is_tree(x):
        no_out("reduce_scatter", out)
        return over_tree(
            lane,
            "reduce_scatter",
            x,
            one_by_one(lambda leaf: reduce_scatter(lane, leaf, op, dim, None, timeout)),
            None,
            lambda leaf: _check_scattered(lane, leaf, op, dim),
        )
    size = lane.group.size
    check_filled("reduce_scatter", out)
    x = require_tensor("reduce_scatter", x, "a tensor whose dim is divisible by the number of ranks")
    dim = _scattered_dim(lane, x, op, dim)
    rows = split_rows(x, dim, size)
    return autograd.reduce_scatter(lane, rows, op, out, timeout)


def _check_scattered(lane: Lane, x: Any, op: ReduceOp, dim: int) -> None:
    """Refuse a leaf that cannot be reduced, or that the ranks cannot share evenly."""
    _scattered_dim(lane, x, op, dim)
    tensors.plan_for(lane, Op.REDUCE_SCATTER, x, op)


def _scattered_dim(lane: Lane, x: object, op: ReduceOp, dim: int) -> int:
    """Return ``dim`` counted from the front; refuse a tensor that the ranks cannot share evenly along it."""
    x = require_tensor("reduce_scatter", x, "a tensor whose dim is divisible by the number of ranks")
    if x.layout is not torch.strided:
        tensors.plan_for(lane, Op.REDUCE_SCATTER, x, op)  # refuses a layout without rows
    return even_dim(x, dim, lane.group.size)


def even_dim(x: torch.Tensor, dim: int, size: int) -> int:
    """Return ``dim`` counted from the front; refuse ``x`` if ``size`` ranks cannot share it evenly there."""
    dim = normal_dim("reduce_scatter", x, dim)
    if x.shape[dim] % size:
        raise InvalidArgumentError(
            f"reduce_scatter: dim {dim} of {dtype_name(x.dtype)}{list(x.shape)} has {x.shape[dim]} "
            f"entries, which cannot be split evenly among {size} ranks; pad it to a multiple of {size}"
        )
    return dim


def split_rows(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return ``x`` (..., n*k, ...) as (n, ..., k, ...), whose row r is the part of rank r."""
    if dim == 0:
        return x.reshape(size, x.shape[0] // size, *x.shape[1:])
    return uncast(torch.stack, x.chunk(size, dim)) if x.shape[dim] else x.unsqueeze(0).expand(size, *x.shape)
