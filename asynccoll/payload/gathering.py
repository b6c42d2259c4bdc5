"""all_gather and gather of whatever a user passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asynccoll import tensors
from asynccoll.memory.plain import plain_tensor
from asynccoll.modes.captured import uncast
from asynccoll.order.lane import Lane
from asynccoll.payload.common import (
    check_filled,
    check_sendable,
    columns,
    message_kind,
    message_kinds,
    no_gradient,
    no_out,
    normal_dim,
    one_by_one,
    over_tree,
    values_of,
)
from asynccoll.payload.messages import gather_messages
from asynccoll.payload.values import as_number, to_message, values_message
from asynccoll.plan.spec import Op
from asynccoll.plan.trees import is_tree
from asynccoll.tensors import autograd
from asynccoll.waiting.started import Started


def all_gather(
    lane: Lane,
    x: object,
    dim: int,
    uneven: bool,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Started[Any]:
    if isinstance(x, torch.Tensor):
        x = plain_tensor("all_gather", x)
        check_filled("all_gather", out)
        if not uneven:
            return _all_gather_tensor(lane, x, dim, out, timeout)
    no_out("all_gather", out)
    return _gather_messages(
        lane,
        "all_gather",
        x,
        None,
        dim,
        uneven,
        timeout,
        lambda leaf: all_gather(lane, leaf, dim, uneven, None, timeout),
    )


def _all_gather_tensor(
    lane: Lane, x: torch.Tensor, dim: int, out: torch.Tensor | None, timeout: float | None
) -> Started[torch.Tensor]:
    dim, shape = _gathered_shape("all_gather", lane, x, dim)
    if dim == 0:
        return autograd.all_gather(lane, x, out, timeout, tuple(shape))
    if out is None:
        return autograd.all_gather(lane, x, None, timeout).then(lambda rows: join_rows(rows, dim))
    autograd.records("all_gather", (x,), (out,))
    tensors.check_out(out, x, shape)
    call = tensors.all_gather_call(lane, x, None)
    return call.then(lambda rows: tensors.deliver(join_rows(rows, dim), out)).begin(lane, timeout)


def gather(
    lane: Lane,
    x: object,
    dst: int,
    dim: int,
    uneven: bool,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Started[object]:
    index = lane.group.index(dst, "dst")
    if isinstance(x, torch.Tensor):
        x = plain_tensor("gather", x)
        check_filled("gather", out)
        if not uneven:
            started = _gather_tensor(lane, x, index, dim, out, timeout)
            return no_gradient(started, x, "gather", "all_gather")
    no_out("gather", out)
    return _gather_messages(
        lane,
        "gather",
        x,
        dst,
        dim,
        uneven,
        timeout,
        lambda leaf: gather(lane, leaf, dst, dim, uneven, None, timeout),
    )


def _gather_messages(
    lane: Lane,
    name: str,
    x: object,
    dst: int | None,
    dim: int,
    uneven: bool,
    timeout: float | None,
    each: Callable[[torch.Tensor], Started[object]],
) -> Started[Any]:
    """Gather a value, or a tensor of any shape, in messages; and a tree, ``each`` of its tensors by a call.

    The result is on ``dst``, or on every rank if that is None.
    """
    index = None if dst is None else lane.group.index(dst, "dst")
    here, whose = index in (None, lane.group.rank), "" if dst is None else f" dst={dst}"

    def of_values(values: list[Any]) -> Started[list[Any]]:
        return gather_messages(
            lane,
            name,
            values_message(values),
            index,
            timeout,
            then=lambda found: columns(values_of(lane, found)) if here else [None] * len(values),
            detail=f"{message_kinds(name, values)}{whose}",
        )

    x = as_number(x)
    if is_tree(x):
        return over_tree(
            lane,
            name,
            x,
            one_by_one(each),
            of_values,
            lambda leaf: _check_gathered(lane, name, leaf, dim, uneven),
            uneven=uneven,
            here=here,
        )
    kind = message_kind(name, x)
    started = gather_messages(
        lane,
        name,
        to_message(x),
        index,
        timeout,
        then=lambda found: values_of(lane, found) if here else None,
        device=x.device if isinstance(x, torch.Tensor) else torch.device("cpu"),
        detail=f"{kind}{whose}",
    )
    return no_gradient(started, x, f"{name}(uneven=True)", "all_gather of tensors of one shape")


def _gather_tensor(
    lane: Lane,
    x: torch.Tensor,
    dst: int,
    dim: int,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Started[object]:
    dim, shape = _gathered_shape("gather", lane, x, dim)
    if out is not None:
        autograd.records("gather", (x,), (out,))
    tensors.check_out(out, x, shape)
    call = tensors.gather_call(lane, x, dst)
    if lane.group.rank == dst:
        call.then(lambda rows: tensors.deliver(join_rows(rows, dim), out))
    return call.begin(lane, timeout)


def _gathered_shape(name: str, lane: Lane, x: torch.Tensor, dim: int) -> tuple[int, list[int]]:
    """Return ``dim`` counted from the front, and the shape of all ranks' ``x`` joined along it."""
    size = lane.group.size
    if x.dim() == 0 and dim in (0, -1):
        return 0, [size]
    dim = normal_dim(name, x, dim)
    shape = list(x.shape)
    shape[dim] *= size
    return dim, shape


def _check_gathered(lane: Lane, name: str, x: object, dim: int, uneven: bool) -> None:
    check_sendable(lane, Op.parse(name), x)
    if isinstance(x, torch.Tensor) and not uneven:
        _gathered_shape(name, lane, x, dim)


def join_rows(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate the rows of (n, *shape) along ``dim`` of shape; rows of 0-d parts stay as they are."""
    if rows.dim() == 1:
        return rows
    if dim == 0:
        return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])
    return uncast(torch.cat, rows.unbind(0), dim)
