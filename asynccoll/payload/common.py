"""What all payloads share: which leaves there are, what is refused, and how a tree travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from asynccoll import autograd, tensors
from asynccoll.checks import compare, signature
from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.fusion import buckets, pack, unpack
from asynccoll.lane import Lane
from asynccoll.messages import (
    Message,
)
from asynccoll.spec import Op, ReduceOp, dtype_name
from asynccoll.trees import TreeSpec, flatten, unflatten
from asynccoll.values import (
    as_number,
    check_number_reduction,
    from_message,
    is_number,
    is_value,
    to_message,
)
from asynccoll.work import Work, combine

_EXPECTED = (
    "a tensor, a number, a str, a pathlib.Path, or a dict, list, tuple or dataclass of these; other "
    "objects travel by the *_object functions"
)


def refuse(name: str, x: Any, expected: str = _EXPECTED) -> PayloadTypeError:
    """The error for a payload that ``name`` cannot carry."""
    hint = " (convert it with torch.as_tensor)" if hasattr(x, "__array__") else ""
    return PayloadTypeError(f"{name} got a {type(x).__name__}{hint}; expected {expected}")


def no_out(name: str, out: Any) -> None:
    if out is not None:
        raise InvalidArgumentError(f"{name}: out= is for a payload that is one tensor")


def require_tensor(name: str, x: Any, role: str = "a tensor") -> torch.Tensor:
    """``x`` if it is a dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise refuse(name, x, role)
    return x


def over_tree(
    lane: Lane,
    name: str,
    x: Any,
    of_tensors: Callable[[list[torch.Tensor]], list[Work[Any]]],
    of_value: Callable[[Any], Work[Any]],
    check: Callable[[Any], object],
) -> Work[Any]:
    """The works of all leaves as one work for the tree: tensors together, values one by one.

    Every leaf passes ``check`` before any is sent, and all take one place in the lane's order: a tree
    is refused as a whole, here and for the peers.
    """
    leaves, spec = flatten(x)
    leaves = [as_number(leaf) for leaf in leaves]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and not is_value(leaf):
            raise refuse(name, leaf)
        check(leaf)
    with lane.together():
        works = _start_leaves(lane, name, spec, leaves, of_tensors, of_value)
    return combine(works, lambda: unflatten(spec, [work.result() for work in works[1:]]))


def _start_leaves(
    lane: Lane,
    name: str,
    spec: TreeSpec,
    leaves: list[Any],
    of_tensors: Callable[[list[torch.Tensor]], list[Work[Any]]],
    of_value: Callable[[Any], Work[Any]],
) -> list[Work[Any]]:
    """A work for the comparison of structures (with ``check="full"``), and one for each leaf."""
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    compared = compare(lane, signature(name, detail=f"of the tree {spec}"))
    works: list[Work[Any]] = [compared] * len(leaves)
    for i, work in zip(positions, of_tensors([leaves[i] for i in positions]), strict=True):
        works[i] = work
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            works[i] = of_value(leaf)
    return [compared, *works]


def fused(
    xs: list[torch.Tensor], start: Callable[[torch.Tensor], Work[torch.Tensor]]
) -> list[Work[torch.Tensor]]:
    """An elementwise collective of many tensors, a bucket at a time; one work for each tensor."""
    works: dict[int, Work[torch.Tensor]] = {}
    for bucket in buckets(xs):
        members = [xs[i] for i in bucket.indices]
        if len(members) == 1:
            works[bucket.indices[0]] = start(members[0])
            continue
        parts = start(pack(members)).map(partial(_unpacked, [x.shape for x in members]))
        for position, i in enumerate(bucket.indices):
            works[i] = parts.map(itemgetter(position))
    return [works[i] for i in range(len(xs))]


def _unpacked(shapes: list[torch.Size], flat: torch.Tensor) -> list[torch.Tensor]:
    return unpack(flat, shapes)


def check_reducible(lane: Lane, name: str, op: Op, x: Any, reduce: ReduceOp) -> None:
    """Refuse a leaf that cannot be reduced."""
    if isinstance(x, torch.Tensor):
        tensors.plan_for(lane, op, x, reduce)
    else:
        check_number(name, x, reduce)
        to_message(x)


def check_number(name: str, x: Any, reduce: ReduceOp) -> None:
    """Refuse what is no number, or none that can be reduced so."""
    if not is_number(x):
        raise refuse(name, x, "a tensor, a number, or a dict, list, tuple or dataclass of these")
    check_number_reduction(x, reduce)


def check_sendable(lane: Lane, op: Op, x: Any) -> None:
    """Refuse a leaf that cannot be moved."""
    if isinstance(x, torch.Tensor):
        tensors.plan_for(lane, op, x)
    else:
        to_message(x)


def message_kind(name: str, x: Any) -> str:
    """What a signature says of a payload that travels as a message; refuses what cannot."""
    if isinstance(x, torch.Tensor):
        return f"{dtype_name(x.dtype)} of any shape"
    if not is_value(x):
        raise refuse(name, x)
    return type(x).__name__


def values_of(lane: Lane, rows: Sequence[Message]) -> list[Any]:
    device = lane.group.context.backend.device
    return [from_message(row, device) for row in rows]


def no_gradient(work: Work[Any], x: torch.Tensor, name: str, instead: str) -> Work[Any]:
    """If autograd is recording, a result whose backward raises instead of being silently wrong."""
    if not autograd.tracked(x):
        return work
    return work.map(
        lambda y: autograd.without_gradient(y, name, instead) if isinstance(y, torch.Tensor) else y
    )


def normal_dim(name: str, x: torch.Tensor, dim: int) -> int:
    """``dim`` counted from the front; an error that tells the dimensions there are."""
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise InvalidArgumentError(
            f"{name}: dim={dim!r} is not a dimension of a tensor of shape {list(x.shape)}"
        )
    return dim % x.dim()
