"""One collective over whatever a user passes: a tensor, a number, a string, a tree of these.

Validates, dispatches by kind of payload, and puts trees back together. Roots and pairs are global
ranks here, and indices in the group from here on.
"""

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
from asynccoll.group import Group
from asynccoll.lane import Lane
from asynccoll.messages import (
    Message,
    all_gather_messages,
    broadcast_message,
    gather_messages,
    scatter_messages,
)
from asynccoll.spec import Op, ReduceOp, dtype_name
from asynccoll.trees import TreeSpec, flatten, is_tree, unflatten
from asynccoll.values import (
    as_number,
    check_number_reduction,
    from_message,
    is_number,
    is_value,
    reduce_numbers,
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


def _no_out(name: str, out: Any) -> None:
    if out is not None:
        raise InvalidArgumentError(f"{name}: out= is for a payload that is one tensor")


def require_tensor(name: str, x: Any, role: str = "a tensor") -> torch.Tensor:
    """``x`` if it is a dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise refuse(name, x, role)
    return x


# Trees


def _over_tree(
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


def _fused(
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


# Reductions


def all_reduce(
    lane: Lane, x: Any, op: Any, out: torch.Tensor | None, timeout: float | None
) -> Work[Any]:
    op = ReduceOp.parse(op)
    if isinstance(x, torch.Tensor):
        return all_reduce_tensor(lane, x, op, out, timeout)
    _no_out("all_reduce", out)
    x = as_number(x)
    if is_tree(x):
        return _over_tree(
            lane,
            "all_reduce",
            x,
            lambda xs: _fused(xs, lambda flat: all_reduce_tensor(lane, flat, op, None, timeout)),
            lambda leaf: _all_reduce_number(lane, leaf, op, timeout),
            lambda leaf: _check_reducible(lane, "all_reduce", Op.ALL_REDUCE, leaf, op),
        )
    return _all_reduce_number(lane, x, op, timeout)


def all_reduce_tensor(
    lane: Lane, x: torch.Tensor, op: ReduceOp, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """Of one tensor, differentiable where autograd is recording."""
    if out is None and autograd.tracked(x):
        return autograd.all_reduce(lane, x, op, timeout)
    return tensors.start_all_reduce(lane, x, op, out, timeout)


def _check_reducible(lane: Lane, name: str, op: Op, x: Any, reduce: ReduceOp) -> None:
    """Refuse a leaf that cannot be reduced."""
    if isinstance(x, torch.Tensor):
        tensors.plan_for(lane, op, x, reduce)
    elif is_number(x):
        check_number_reduction(x, reduce)
        to_message(x)
    else:
        raise refuse(name, x, "a tensor, a number, or a dict, list, tuple or dataclass of these")


def _check_sendable(lane: Lane, op: Op, x: Any) -> None:
    """Refuse a leaf that cannot be moved."""
    if isinstance(x, torch.Tensor):
        tensors.plan_for(lane, op, x)
    else:
        to_message(x)


def _check_gathered(lane: Lane, name: str, x: Any, dim: int, uneven: bool) -> None:
    _check_sendable(lane, Op.parse(name), x)
    if isinstance(x, torch.Tensor) and not uneven:
        _gathered_shape(name, lane, x, dim)


def _all_reduce_number(lane: Lane, x: Any, op: ReduceOp, timeout: float | None) -> Work[Any]:
    _check_reducible(lane, "all_reduce", Op.ALL_REDUCE, x, op)
    gathered = all_gather_messages(lane, "all_reduce", to_message(x), timeout, detail=f"{op.value} number")
    return gathered.map(lambda rows: reduce_numbers(_values(lane, rows), op))


def reduce(
    lane: Lane, x: Any, dst: int, op: Any, out: torch.Tensor | None, timeout: float | None
) -> Work[Any]:
    op = ReduceOp.parse(op)
    dst = lane.group.index(dst, "dst")
    here = lane.group.rank == dst
    if isinstance(x, torch.Tensor):
        return _reduce_tensor(lane, x, dst, op, out, timeout)
    _no_out("reduce", out)
    x = as_number(x)
    if not is_tree(x):
        return _reduce_number(lane, x, dst, op, timeout)
    whole = _over_tree(
        lane,
        "reduce",
        x,
        lambda xs: [_reduce_tensor(lane, leaf, dst, op, None, timeout) for leaf in xs],
        lambda leaf: _reduce_number(lane, leaf, dst, op, timeout),
        lambda leaf: _check_reducible(lane, "reduce", Op.REDUCE, leaf, op),
    )
    return whole if here else whole.map(lambda _: None)


def _reduce_tensor(
    lane: Lane,
    x: torch.Tensor,
    dst: int,
    op: ReduceOp,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Work[Any]:
    work = tensors.start_reduce(lane, x, dst, op, out, timeout)
    return _no_gradient(work, x, "reduce", "all_reduce")


def _reduce_number(lane: Lane, x: Any, dst: int, op: ReduceOp, timeout: float | None) -> Work[Any]:
    _check_reducible(lane, "reduce", Op.REDUCE, x, op)
    rows = gather_messages(
        lane, "reduce", to_message(x), dst, timeout, detail=f"{op.value} number dst={dst}"
    )
    return rows.map(lambda found: reduce_numbers(_values(lane, found), op) if found else None)


def _values(lane: Lane, rows: Sequence[Message]) -> list[Any]:
    device = lane.group.context.backend.device
    return [from_message(row, device) for row in rows]


def _no_gradient(work: Work[Any], x: torch.Tensor, name: str, instead: str) -> Work[Any]:
    """If autograd is recording, a result whose backward raises instead of being silently wrong."""
    if not autograd.tracked(x):
        return work
    return work.map(
        lambda y: autograd.without_gradient(y, name, instead) if isinstance(y, torch.Tensor) else y
    )


def reduce_scatter(
    lane: Lane, x: Any, op: Any, dim: int, out: torch.Tensor | None, timeout: float | None
) -> Work[Any]:
    op = ReduceOp.parse(op)
    if is_tree(x):
        _no_out("reduce_scatter", out)
        return _over_tree(
            lane,
            "reduce_scatter",
            x,
            lambda xs: [reduce_scatter(lane, leaf, op, dim, None, timeout) for leaf in xs],
            lambda leaf: reduce_scatter(lane, leaf, op, dim, None, timeout),
            lambda leaf: _check_scattered(lane, leaf, op, dim),
        )
    size = lane.group.size
    dim = _check_scattered(lane, x, op, dim)
    rows = split_rows(x, dim, size)
    if out is None and autograd.tracked(rows):
        return autograd.reduce_scatter(lane, rows, op, timeout)
    return tensors.start_reduce_scatter(lane, rows, op, out, timeout)


def _check_scattered(lane: Lane, x: Any, op: ReduceOp, dim: int) -> int:
    """Refuse what cannot be shared out evenly; ``dim`` from the front."""
    x = require_tensor("reduce_scatter", x, "a tensor whose dim divides by the number of ranks")
    tensors.plan_for(lane, Op.REDUCE_SCATTER, x, op)
    size = lane.group.size
    dim = normal_dim("reduce_scatter", x, dim)
    if x.shape[dim] % size:
        raise InvalidArgumentError(
            f"reduce_scatter: dim {dim} of {dtype_name(x.dtype)}{list(x.shape)} has {x.shape[dim]} "
            f"entries, which {size} ranks cannot share evenly; pad it to a multiple of {size}"
        )
    return dim


def normal_dim(name: str, x: torch.Tensor, dim: int) -> int:
    """``dim`` counted from the front; an error that tells the dimensions there are."""
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise InvalidArgumentError(
            f"{name}: dim={dim!r} is not a dimension of a tensor of shape {list(x.shape)}"
        )
    return dim % x.dim()


def split_rows(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``x`` (..., n*k, ...) as (n, ..., k, ...): row r is the part of rank r."""
    if dim == 0:
        return x.reshape(size, x.shape[0] // size, *x.shape[1:])
    return torch.stack(x.chunk(size, dim)) if x.shape[dim] else x.unsqueeze(0).expand(size, *x.shape)


def join_rows(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """(n, *shape) concatenated along ``dim`` of shape; of 0-d parts, the rows themselves."""
    if rows.dim() == 1:
        return rows
    if dim == 0:
        return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])
    return torch.cat(rows.unbind(0), dim)


# Gathering


def all_gather(
    lane: Lane,
    x: Any,
    dim: int,
    uneven: bool,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Work[Any]:
    if isinstance(x, torch.Tensor) and not uneven:
        return _all_gather_tensor(lane, x, dim, out, timeout)
    _no_out("all_gather", out)
    x = as_number(x)
    if is_tree(x):
        return _over_tree(
            lane,
            "all_gather",
            x,
            lambda xs: [all_gather(lane, leaf, dim, uneven, None, timeout) for leaf in xs],
            lambda leaf: all_gather(lane, leaf, dim, uneven, None, timeout),
            lambda leaf: _check_gathered(lane, "all_gather", leaf, dim, uneven),
        )
    kind = _message_kind("all_gather", x)
    rows = all_gather_messages(
        lane, "all_gather", to_message(x), timeout, device=_device_of(lane, x), detail=kind
    )
    return rows.map(lambda found: _values(lane, found))


def _message_kind(name: str, x: Any) -> str:
    """What a signature says of a payload that travels as a message; refuses what cannot."""
    if isinstance(x, torch.Tensor):
        return f"{dtype_name(x.dtype)} of any shape"
    if not is_value(x):
        raise refuse(name, x)
    return type(x).__name__


def _device_of(lane: Lane, x: Any) -> torch.device:
    """Where the body of a message travels: a device tensor stays on the device."""
    return x.device if isinstance(x, torch.Tensor) else torch.device("cpu")


def _all_gather_tensor(
    lane: Lane, x: torch.Tensor, dim: int, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    dim, shape = _gathered_shape("all_gather", lane, x, dim)
    if out is None and autograd.tracked(x):
        # The local rearrangement is autograd's own; record it whatever the waiter's grad mode is.
        def joined(rows: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return join_rows(rows, dim)

        return autograd.all_gather(lane, x, timeout).map(joined)
    tensors.check_out(out, x, shape)
    work = tensors.start_all_gather(lane, x, out if dim == 0 else None, timeout)
    if out is None:
        return work.map(lambda rows: join_rows(rows, dim))
    return work.map(lambda rows: tensors.deliver(join_rows(rows, dim), out))


def gather(
    lane: Lane, x: Any, dst: int, dim: int, out: torch.Tensor | None, timeout: float | None
) -> Work[Any]:
    index = lane.group.index(dst, "dst")
    here = lane.group.rank == index
    if isinstance(x, torch.Tensor):
        work = _gather_tensor(lane, x, index, dim, out, timeout)
        return _no_gradient(work, x, "gather", "all_gather")
    _no_out("gather", out)
    x = as_number(x)
    if is_tree(x):
        whole = _over_tree(
            lane,
            "gather",
            x,
            lambda xs: [gather(lane, leaf, dst, dim, None, timeout) for leaf in xs],
            lambda leaf: gather(lane, leaf, dst, dim, None, timeout),
            lambda leaf: _check_gathered(lane, "gather", leaf, dim, False),
        )
        return whole if here else whole.map(lambda _: None)
    kind = _message_kind("gather", x)
    rows = gather_messages(lane, "gather", to_message(x), index, timeout, detail=f"{kind} dst={dst}")
    return rows.map(lambda found: _values(lane, found) if here else None)


def _gather_tensor(
    lane: Lane,
    x: torch.Tensor,
    dst: int,
    dim: int,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Work[Any]:
    dim, shape = _gathered_shape("gather", lane, x, dim)
    tensors.check_out(out, x, shape)
    return tensors.start_gather(lane, x, dst, timeout).map(
        lambda rows: None if rows is None else tensors.deliver(join_rows(rows, dim), out)
    )


def _gathered_shape(
    name: str, lane: Lane, x: torch.Tensor, dim: int
) -> tuple[int, list[int]]:
    """``dim`` from the front, and the shape of all ranks' ``x`` joined along it."""
    size = lane.group.size
    if x.dim() == 0 and dim in (0, -1):
        return 0, [size]
    dim = normal_dim(name, x, dim)
    shape = list(x.shape)
    shape[dim] *= size
    return dim, shape


# Spreading


def broadcast(
    lane: Lane,
    x: Any,
    src: int,
    safe_mode: bool,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Work[Any]:
    index = lane.group.index(src, "src")
    if safe_mode:
        _no_out("broadcast(safe_mode=True)", out)
        return _broadcast_anything(lane, x, index, timeout)
    if isinstance(x, torch.Tensor):
        return broadcast_tensor(lane, x, index, out, timeout)
    _no_out("broadcast", out)
    x = as_number(x)
    if is_tree(x):
        return _over_tree(
            lane,
            "broadcast",
            x,
            lambda xs: _fused(xs, lambda flat: broadcast_tensor(lane, flat, index, None, timeout)),
            lambda leaf: broadcast(lane, leaf, src, False, None, timeout),
            lambda leaf: _check_sendable(lane, Op.BROADCAST, leaf),
        )
    kind = _message_kind("broadcast", x)
    message = to_message(x) if lane.group.rank == index else None
    work = broadcast_message(lane, "broadcast", message, index, timeout, detail=f"{kind} src={src}")
    return work.map(lambda found: _values(lane, [found])[0])


def broadcast_tensor(
    lane: Lane, x: torch.Tensor, src: int, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    """Of one tensor, differentiable where autograd is recording."""
    if out is None and autograd.tracked(x):
        return autograd.broadcast(lane, x, src, timeout)
    return tensors.start_broadcast(lane, x, src, out, timeout)


def _broadcast_anything(lane: Lane, x: Any, src: int, timeout: float | None) -> Work[Any]:
    """Others may pass anything: what is sent describes itself, also the shape of a tree."""
    from asynccoll.codecs import SAFE

    here = lane.group.rank == src
    x = as_number(x)
    message = to_message(x, SAFE if is_tree(x) else None) if here else None
    work = broadcast_message(
        lane, "broadcast", message, src, timeout, device=torch.device("cpu"), detail=f"safe src={src}"
    )
    device = lane.group.context.backend.device
    return work.map(lambda found: from_message(found, device, SAFE))


def scatter(
    lane: Lane, x: Any, src: int, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    size = lane.group.size
    index = lane.group.index(src, "src")
    messages = None
    tracked = False
    if lane.group.rank == index:
        parts = scatter_parts(x, size)
        tracked = any(autograd.tracked(part) for part in parts)
        messages = [to_message(part) for part in parts]
    elif x is not None:
        raise InvalidArgumentError(
            f"scatter: only src={src} passes the tensors; pass None on the others, got a "
            f"{type(x).__name__}"
        )
    work = scatter_messages(lane, "scatter", messages, index, timeout, detail=f"src={src}")
    device = lane.group.context.backend.device
    received = work.map(lambda message: from_message(message, device))
    if out is not None:
        received = received.map(lambda part: _into(part, out))
    if tracked:
        received = received.map(lambda y: autograd.without_gradient(y, "scatter", "all_to_all"))
    return received


def _into(part: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    tensors.check_out(out, part, part.shape)
    return out.copy_(part)


def scatter_parts(x: Any, size: int) -> list[torch.Tensor]:
    """One tensor for each rank, from a list of them or from one to be cut along dim 0."""
    if isinstance(x, torch.Tensor):
        if x.dim() == 0 or x.shape[0] % size:
            raise InvalidArgumentError(
                f"scatter: a tensor of shape {list(x.shape)} cannot be cut into {size} equal parts along "
                f"dim 0; pass a list of {size} tensors, or one whose dim 0 divides by {size}"
            )
        return list(x.chunk(size)) if x.shape[0] else [x] * size
    if not isinstance(x, (list, tuple)) or not all(isinstance(part, torch.Tensor) for part in x):
        raise refuse("scatter", x, f"a list of {size} tensors (or one to cut along dim 0) on src; other objects by scatter_object")
    if len(x) != size:
        raise InvalidArgumentError(
            f"scatter: got {len(x)} tensors for {size} ranks; pass one for each rank of the group"
        )
    return list(x)


def all_to_all(
    lane: Lane,
    x: Any,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Work[Any]:
    x = require_tensor("all_to_all", x, "a tensor whose dim 0 is split among the ranks")
    size = lane.group.size
    if x.dim() == 0:
        raise InvalidArgumentError("all_to_all: a 0-d tensor has no dim 0 to split; pass x.reshape(1)")
    in_splits = check_splits("input_split_sizes", input_split_sizes, size, x.shape[0])
    if input_split_sizes is None and x.shape[0] % size:
        raise InvalidArgumentError(
            f"all_to_all: dim 0 of shape {list(x.shape)} cannot be split evenly among {size} ranks; pass "
            "input_split_sizes"
        )
    out_splits = check_splits("output_split_sizes", output_split_sizes, size, None)
    if in_splits is None:
        in_splits = [x.shape[0] // size] * size
        out_splits = in_splits if out_splits is None else out_splits
    if autograd.tracked(x) and out is None:
        if out_splits is None:
            raise InvalidArgumentError(
                "all_to_all: with gradients, output_split_sizes is needed beside input_split_sizes"
            )
        return autograd.all_to_all(lane, x, in_splits, out_splits, timeout)
    return tensors.start_all_to_all(lane, x, in_splits, out_splits, timeout, out)


def check_splits(
    name: str, splits: Sequence[int] | None, size: int, total: int | None
) -> list[int] | None:
    """The split sizes as a list of one count for each rank that add up to ``total``."""
    if splits is None:
        return None
    listed = list(splits)
    whole = all(isinstance(count, int) and count >= 0 for count in listed)
    if len(listed) != size or not whole or (total is not None and sum(listed) != total):
        wanted = f", adding up to {total}" if total is not None else ""
        raise InvalidArgumentError(
            f"all_to_all: {name}={listed!r}; expected {size} counts of rows, none negative{wanted}"
        )
    return listed


def permute(
    lane: Lane, x: Any, pairs: Any, out: torch.Tensor | None, timeout: float | None
) -> Work[Any]:
    listed = check_pairs(lane.group, pairs)
    if is_tree(x):
        _no_out("permute", out)
        return _over_tree(
            lane,
            "permute",
            x,
            lambda xs: [permute(lane, leaf, listed, None, timeout) for leaf in xs],
            lambda leaf: permute(lane, leaf, listed, None, timeout),
            lambda leaf: require_tensor("permute", leaf),
        )
    x = require_tensor("permute", x)
    ranks = lane.group.ranks
    me = ranks[lane.group.rank]
    to = next((ranks.index(target) for source, target in listed if source == me), None)
    origin = next((ranks.index(source) for source, target in listed if target == me), None)
    if out is None and autograd.tracked(x):
        return autograd.permute(lane, x, to, origin, timeout)
    return tensors.start_permute(lane, x, to, origin, out, timeout)


def check_pairs(group: Group, pairs: Any) -> list[tuple[int, int]]:
    """Pairs of (source, destination), each end of them in the group and used once."""
    try:
        listed = [(source, destination) for source, destination in pairs]
    except (TypeError, ValueError):
        raise PayloadTypeError(
            f"permute: pairs must be (source, destination) ranks, got {pairs!r}"
        ) from None
    for role, end in (("source", 0), ("destination", 1)):
        used = [pair[end] for pair in listed]
        for rank in used:
            group.index(rank, role)
            if used.count(rank) > 1:
                raise InvalidArgumentError(f"permute: rank {rank} is a {role} more than once in {listed}")
    return listed


# Messages between two ranks


def send(lane: Lane, x: Any, dst: int, tag: int, timeout: float | None) -> Work[None]:
    x = require_tensor("send", x)
    return tensors.start_send(lane, x, _peer(lane, dst, "dst"), _check_tag(tag), timeout)


def recv(
    lane: Lane, like: Any, src: int, tag: int, out: torch.Tensor | None, timeout: float | None
) -> Work[torch.Tensor]:
    like = require_tensor("recv", like, "a tensor like the one that is sent")
    return tensors.start_recv(lane, like, _peer(lane, src, "src"), _check_tag(tag), out, timeout)


def _peer(lane: Lane, rank: int, role: str) -> int:
    """The index of another rank."""
    index = lane.group.index(rank, role)
    if index == lane.group.rank:
        raise InvalidArgumentError(f"{role}={rank} is this rank itself; messages go to another one")
    return index


def _check_tag(tag: int) -> int:
    if isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag < 2**31 - 1:
        return tag
    raise InvalidArgumentError(f"tag must be an int from 0 to {2**31 - 2}, got {tag!r}")
