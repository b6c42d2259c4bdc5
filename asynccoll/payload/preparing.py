"""The calls of a prepared operation: planned, checked, and given memory once, for any number of starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from asynccoll import tensors
from asynccoll.errors import InvalidArgumentError
from asynccoll.order.lane import Lane
from asynccoll.payload.common import check_filled, leaves_of, normal_dim, of_each, require_tensor, tree_out
from asynccoll.payload.exchanging import check_splits
from asynccoll.payload.reducing import split_rows
from asynccoll.plan.spec import Op, ReduceOpLike, reduce_op
from asynccoll.plan.trees import is_tree, unflatten
from asynccoll.tensors import Call, autograd, check_out
from asynccoll.tensors.bucketing import buckets
from asynccoll.tensors.fusing import Fuse, Parcel

#: The calls, and a function that makes the tree of results once they are done. For one tensor it is None:
#: the result is that of the one call.
Calls = tuple[list[Call], Callable[[], object] | None]


def prepared_calls(lane: Lane, op: Op, like: object, call: dict[str, object]) -> Calls:
    """Make the calls for a prepared ``op`` on payloads like ``like``; ``call`` has its further arguments.

    All checks that do not depend on the data are made here, before the first start.
    """
    try:
        make = PREPARES[op]
    except KeyError:
        known = ", ".join(op.value for op in PREPARES)
        raise InvalidArgumentError(f"{op.value} cannot be prepared; {known} can") from None
    try:
        return make(lane, like, **call)
    except TypeError as error:
        if "keyword argument" in str(error):
            raise InvalidArgumentError(f"prepare: {op.value}{str(error).partition('()')[2]}") from None
        raise


def _check(name: str, given: object) -> torch.Tensor:
    x = require_tensor(f"prepare: {name}", given)
    if x.layout is not torch.strided or not x.is_contiguous():
        raise InvalidArgumentError(
            f"prepare: {name} of a tensor that is not contiguous; pass x.contiguous(), and write to that one"
        )
    check_untracked(name, [x])
    return x


def check_untracked(name: str, xs: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that autograd records, since their gradient would be lost.

    Called again at each start: autograd may have begun to record since the operation was prepared.
    """
    if autograd.any_tracked(xs):
        raise InvalidArgumentError(
            f"prepare: a prepared {name} has no gradient; pass x.detach(), start it under torch.no_grad(), "
            f"or call ac.{name} each time"
        )


def _result_for(x: torch.Tensor, out: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    """Return the caller's ``out`` once checked, or new memory that all starts share."""
    check_filled("prepare", out)
    check_out(out, x, shape)
    return torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out


def _alone(call: Call) -> Calls:
    return [call], None


def _elementwise(lane: Lane, fuse: Fuse, like: object, out: Any) -> Calls:
    name = fuse.name
    if not is_tree(like):
        x = _check(name, like)
        return _alone(fuse.call(x, _result_for(x, out, x.shape)))
    leaves, spec = leaves_of(f"prepare: {name}", like)
    op = Op(name)
    of_each(spec, range(len(leaves)), lambda i: tensors.plan_for(lane, op, _check(name, leaves[i]), fuse.op))
    outs = None if out is None else tree_out(name, leaves, spec, out)
    parcels = [Parcel(bucket, leaves, outs) for bucket in buckets(leaves)]
    calls = [parcel.keep(fuse.call) for parcel in parcels]

    def results() -> object:
        found: dict[int, torch.Tensor] = {}
        for parcel in parcels:
            found.update(zip(parcel.indices, parcel.results(), strict=True))
        return unflatten(spec, [found[i] for i in range(len(leaves))]) if out is None else out

    return calls, results


def _all_reduce(lane: Lane, like: object, *, op: ReduceOpLike = "sum", out: object = None) -> Calls:
    return _elementwise(lane, tensors.all_reduce_fuse(lane, reduce_op(op)), like, out)


def _broadcast(lane: Lane, like: object, *, src: int = 0, out: object = None) -> Calls:
    index = lane.group.index(src, "src")
    return _elementwise(lane, tensors.broadcast_fuse(lane, index), like, out)


def _all_gather(lane: Lane, like: object, *, out: torch.Tensor | None = None) -> Calls:
    x = _check("all_gather", like)
    size = lane.group.size
    shape = (size * x.shape[0], *x.shape[1:]) if x.dim() else (size,)
    return _alone(tensors.all_gather_call(lane, x, _result_for(x, out, shape), shape))


def _reduce_scatter(
    lane: Lane, like: object, *, op: ReduceOpLike = "sum", out: torch.Tensor | None = None
) -> Calls:
    x = _check("reduce_scatter", like)
    size = lane.group.size
    normal_dim("reduce_scatter", x, 0)
    if x.shape[0] % size:
        raise InvalidArgumentError(
            f"reduce_scatter: {x.shape[0]} rows cannot be split evenly among {size} ranks; pad to a multiple"
        )
    into = _result_for(x, out, (x.shape[0] // size, *x.shape[1:]))
    return _alone(tensors.reduce_scatter_call(lane, split_rows(x, 0, size), reduce_op(op), into))


def _all_to_all(
    lane: Lane,
    like: object,
    *,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> Calls:
    x = _check("all_to_all", like)
    size = lane.group.size
    normal_dim("all_to_all", x, 0)
    if (input_split_sizes is None) != (output_split_sizes is None):
        raise InvalidArgumentError(
            "prepare: all_to_all takes both input_split_sizes and output_split_sizes, or neither"
        )
    if input_split_sizes is None and x.shape[0] % size:
        raise InvalidArgumentError(
            f"all_to_all: dim 0 of shape {list(x.shape)} cannot be split evenly among {size} ranks; pass "
            "input_split_sizes and output_split_sizes"
        )
    even = [x.shape[0] // size] * size
    sent = check_splits("input_split_sizes", input_split_sizes, size, x.shape[0]) or even
    received = check_splits("output_split_sizes", output_split_sizes, size, None) or even
    into = _result_for(x, out, (sum(received), *x.shape[1:]))
    return _alone(tensors.all_to_all_call(lane, x, sent, received, into, even=input_split_sizes is None))


PREPARES: dict[Op, Callable[..., Calls]] = {
    Op.ALL_REDUCE: _all_reduce,
    Op.BROADCAST: _broadcast,
    Op.ALL_GATHER: _all_gather,
    Op.REDUCE_SCATTER: _reduce_scatter,
    Op.ALL_TO_ALL: _all_to_all,
}
