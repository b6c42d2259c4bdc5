"""``explain``: the plan of a call for a payload, without making the call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from asynccoll.backends.choosing import capabilities_among
from asynccoll.errors import InvalidArgumentError
from asynccoll.order.lane import Lane
from asynccoll.payload.scaling import Scaling
from asynccoll.plan import dispatch
from asynccoll.plan.spec import Op, Plan, Policy, ReduceOp, TensorSpec, Topology, equal_nodes
from asynccoll.plan.trees import flatten, is_tree
from asynccoll.tensors.bucketing import BUCKET_BYTES, buckets, dense_bytes
from asynccoll.tensors.fusing import direct_buckets

__all__ = ["explain_call", "explain_offline"]


def explain_call(lane: Lane, name: str, x: object, call: dict[str, Any]) -> Plan:
    """Return the plan of the collective ``name`` for ``x`` on ``lane``; ``call`` has its other arguments."""
    op = Op.parse(name)
    if is_tree(x) and (leaves := [leaf for leaf in flatten(x)[0] if isinstance(leaf, torch.Tensor)]):
        largest = max(leaves, key=dense_bytes)
        chosen = explain_call(lane, name, largest, call)
        how = fusion_of(lane, leaves) if op in FUSED else "its tensors are sent one by one"
        return replace(chosen, why=(f"of a tree of {len(leaves)} tensors: {how}", *chosen.why))
    if isinstance(x, torch.Tensor) and call.get("compression") is not None:
        x = Scaling(compression=call["compression"]).before(x)
    spec = TensorSpec.of(x) if isinstance(x, torch.Tensor) else TensorSpec(torch.uint8, (512,))
    reduce = ReduceOp.parse(call.get("op", "sum")) if op.reduces else None
    if reduce is ReduceOp.AVG and call.get("compression") is not None:
        reduce = ReduceOp.SUM  # as ``payload.scaling``, which divides before it converts
    return dispatch.plan(op, spec, lane.group.topology(spec.device), lane.world.policy, reduce)


#: The collectives that pack the tensors of a tree into buckets.
FUSED = frozenset({Op.ALL_REDUCE, Op.BROADCAST})


def fusion_of(lane: Lane, leaves: list[torch.Tensor]) -> str:
    """Say into how many buckets the tensors of a tree are packed, and by which measured costs."""
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

    ``memory`` is that of ``initialize``; if it is true, the ranks of each host are taken to share memory.
    """
    parsed = Op.parse(name)
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgumentError(f"unknown dtype {dtype!r}; expected a torch dtype such as 'float32'")
    if world_size % nodes:
        raise InvalidArgumentError(f"{world_size} ranks cannot be equally many on {nodes} nodes")
    of_rank = [rank * nodes // world_size for rank in range(world_size)]
    known, way = capabilities_among(backend, device, world_size=world_size, nodes=nodes, memory=memory)
    topology = Topology(known, world_size, equal_nodes(of_rank), way)
    reduce = ReduceOp.parse(op) if parsed.reduces else None
    return dispatch.plan(parsed, TensorSpec(found, shape, device), topology, Policy(check), reduce)
