"""``explain``: the plan of a call for a payload, without making the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from asynccoll.backends.choosing import capabilities_among
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.words import plural
from asynccoll.order.lane import Lane
from asynccoll.payload.common import check_number, refuse
from asynccoll.payload.kinds import is_number, is_value
from asynccoll.payload.scaling import Scaling
from asynccoll.payload.values import as_number, to_message
from asynccoll.plan import dispatch
from asynccoll.plan.spec import Op, Plan, Policy, ReduceOp, TensorSpec, Topology, equal_nodes
from asynccoll.plan.trees import flatten, is_tree
from asynccoll.tensors.bucketing import BUCKET_BYTES, buckets, dense_bytes
from asynccoll.tensors.fusing import direct_buckets


def explain_call(lane: Lane, name: str, x: object, call: dict[str, Any]) -> Plan:
    """Return the plan of the collective ``name`` for ``x`` on ``lane``; ``call`` has its other arguments."""
    op = Op.parse(name)
    leaves = flatten(x)[0] if is_tree(x) else [x]
    if (how := _described(op, x, call)) is not None:
        return _plan_of_messages(lane, op, how)
    _check(op, leaves)
    values = [leaf for leaf in map(as_number, leaves) if is_value(leaf)]
    of_values = _plan_of_values(lane, op, values, call) if values and op in TAKE_VALUES else None
    if is_tree(x) and (xs := [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]):
        largest = max(xs, key=dense_bytes)
        chosen = explain_call(lane, name, largest, call)
        how = fusion_of(lane, xs) if op in FUSED else "its tensors are sent one by one"
        beside = of_values.why[:1] if of_values is not None else ()
        why = (f"of a tree of {plural(len(xs), 'tensor')}: {how}", *beside, *chosen.why)
        return replace(chosen, why=why)
    if of_values is not None:
        return of_values
    if isinstance(x, torch.Tensor) and call.get("compression") is not None:
        x = Scaling(compression=call["compression"]).before(x)
    spec = TensorSpec.of(x) if isinstance(x, torch.Tensor) else TensorSpec(torch.uint8, (512,))
    reduce = ReduceOp.parse(call.get("op", "sum")) if op.reduces else None
    if reduce is ReduceOp.AVG and call.get("compression") is not None:
        reduce = ReduceOp.SUM  # as in ``payload.scaling``, which divides before it converts
    return dispatch.plan(op, spec, lane.group.topology(spec.device), lane.world.policy, reduce)


def _check(op: Op, leaves: Sequence[object]) -> None:
    """Refuse payloads that the call itself would refuse."""
    for leaf in map(as_number, leaves):
        if isinstance(leaf, torch.Tensor):
            continue
        if op not in TAKE_VALUES:
            raise refuse(op.value, leaf, "a tensor")
        if not is_value(leaf):
            raise refuse(op.value, leaf)


def _described(op: Op, x: object, call: dict[str, Any]) -> str | None:
    """Return a text on how a payload is sent if receivers do not know its kind or shape; None if they do."""
    if op is Op.BROADCAST and call.get("safe_mode"):
        return "all of it in one message that describes its content (safe_mode=True)"
    if op in (Op.ALL_GATHER, Op.GATHER) and call.get("uneven") and isinstance(x, torch.Tensor):
        return "in a message that contains its dtype and shape (uneven=True)"
    if op is Op.SCATTER or (op is Op.ALL_TO_ALL and isinstance(x, (list, tuple))):
        return "each part in a message that describes its content"
    return None


#: The collectives that take numbers, strings and paths, and send those of a call in one message.
TAKE_VALUES = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.ALL_GATHER, Op.GATHER, Op.BROADCAST})


def _plan_of_values(lane: Lane, op: Op, values: list[Any], call: dict[str, Any]) -> Plan:
    """Return the plan of a call for numbers, strings and paths, which are sent as bytes and reduced here."""
    reduce = ReduceOp.parse(call.get("op", "sum")) if op.reduces else None
    for x in values:
        if reduce is not None:
            check_number(op.value, x, reduce)
        to_message(x)
    what = plural(len(values), "number" if all(map(is_number, values)) else "value")
    how = f"{what} in one message" + (", reduced by Python in rank order" if reduce is not None else "")
    return _plan_of_messages(lane, op, how, reduce)


def _plan_of_messages(lane: Lane, op: Op, how: str, reduce: ReduceOp | None = None) -> Plan:
    """Return the plan of a call whose ranks send messages: these are bytes, and never go node by node."""
    native = op if op in (Op.BROADCAST, Op.SCATTER, Op.ALL_TO_ALL) else Op.ALL_GATHER
    slot = TensorSpec(torch.uint8, (512,))
    policy = replace(lane.world.policy, by_node=False)
    sent = dispatch.plan(native, slot, lane.group.topology(slot.device), policy)
    via = "all_gather" if reduce is not None else sent.via
    return replace(sent, op=op, reduce=reduce, via=via, why=(how, *sent.why))


#: The collectives that pack the tensors of a tree into buckets.
FUSED = frozenset({Op.ALL_REDUCE, Op.BROADCAST})


def fusion_of(lane: Lane, leaves: list[torch.Tensor]) -> str:
    """Return a text on how many buckets the tensors of a tree are packed into, and the costs behind that."""
    total_bytes = sum(map(dense_bytes, leaves))
    if direct_buckets(lane, leaves) is not None:
        return f"{total_bytes} bytes are sent packed, in a bucket for each dtype"
    cost = lane.cost or lane.group.cost
    if lane.group.size > 1 and cost is None:
        return "they are sent packed, in buckets whose size is measured in the first such call"
    limit = BUCKET_BYTES if cost is None else cost.bucket_bytes(total_bytes)
    why = "" if cost is None else f"; in this group {cost}"
    return (
        f"{total_bytes} bytes are sent packed, {len(buckets(leaves, limit))} buckets of at most {limit}{why}"
    )


def explain_offline(
    name: str,
    *,
    backend: str,
    world_size: int,
    shape: tuple[int, ...] = (),
    dtype: str = "float32",
    device: str = "cpu",
    op: str = "sum",
    check: bool = False,
    nodes: int = 1,
    memory: bool = True,
) -> Plan:
    """Return the plan of a call, without a process group or data (for ``asynccoll explain``).

    ``memory`` is that of ``initialize``; if it is true, the ranks of each host are assumed to share memory.
    """
    parsed = Op.parse(name)
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgumentError(f"unknown dtype {dtype!r}; expected a torch dtype such as 'float32'")
    if world_size % nodes:
        raise InvalidArgumentError(f"{world_size} ranks cannot be divided evenly among {nodes} nodes")
    of_rank = [rank * nodes // world_size for rank in range(world_size)]
    known, way = capabilities_among(backend, device, world_size=world_size, nodes=nodes, memory=memory)
    topology = Topology(known, world_size, equal_nodes(of_rank), way)
    reduce = ReduceOp.parse(op) if parsed.reduces else None
    return dispatch.plan(parsed, TensorSpec(found, shape, device), topology, Policy(check), reduce)
