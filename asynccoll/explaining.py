"""``explain``: the plan of a call for a payload, from the lane it would take its place on."""

from __future__ import annotations

from typing import Any

import torch

from asynccoll import dispatch
from asynccoll.backends import capabilities_of
from asynccoll.errors import InvalidArgumentError
from asynccoll.lane import Lane
from asynccoll.payload.scaling import Scaling
from asynccoll.spec import Op, Plan, Policy, ReduceOp, TensorSpec, Topology

__all__ = ["explain_call", "explain_offline"]


def explain_call(lane: Lane, name: str, x: Any, call: dict[str, Any]) -> Plan:
    """The plan of ``name`` for ``x`` on ``lane``."""
    op = Op.parse(name)
    if isinstance(x, torch.Tensor) and call.get("compression") is not None:
        x = Scaling(compression=call["compression"]).before(x)
    spec = TensorSpec.of(x) if isinstance(x, torch.Tensor) else TensorSpec(torch.uint8, (512,))
    reduce = ReduceOp.parse(call.get("op", "sum")) if op.reduces else None
    return dispatch.plan(op, spec, lane.group.topology(spec.device), lane.group.context.policy, reduce)


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
) -> Plan:
    """The plan of a call that nobody makes: no process group, no data (``asynccoll explain``)."""
    parsed = Op.parse(name)
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgumentError(f"unknown dtype {dtype!r}; expected a torch dtype such as 'float32'")
    topology = Topology(capabilities_of(backend, device), world_size)
    reduce = ReduceOp.parse(op) if parsed.reduces else None
    return dispatch.plan(parsed, TensorSpec(found, shape, device), topology, Policy(check), reduce)
