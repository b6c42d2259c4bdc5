"""The pure planner: (operation, tensor, topology, policy) -> Plan. It decides, and executes nothing.

All differences between backends are decided here, from a backend's row of capabilities: which calls are
native, which are composed of others, and (in ``wire``) how elements are sent. No process group, no I/O, and
no state except the cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from asynccoll.errors import PayloadTypeError, UnsupportedOpError
from asynccoll.plan.spec import (
    DEQUANTIZED,
    DTYPES_BY_NAME,
    HALF,
    Capabilities,
    Op,
    Plan,
    Policy,
    ReduceOp,
    TensorSpec,
    Topology,
    Wire,
    dtype_name,
)
from asynccoll.plan.wire import LOCAL, arithmetic, carrier_of

_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
#: The dtypes of sparse tensors whose values torch can add (``coalesce``).
_SPARSE = LOCAL | {torch.bool, torch.complex64, torch.complex128}
#: The call that replaces a native reduction that cannot be used: it moves the data, and receivers reduce it.
_EXCHANGE = {
    Op.ALL_REDUCE: Op.ALL_GATHER,
    Op.REDUCE: Op.GATHER,
    Op.REDUCE_SCATTER: Op.ALL_TO_ALL,
}


@lru_cache(maxsize=4096)
def plan(
    op: Op,
    spec: TensorSpec,
    topology: Topology,
    policy: Policy = Policy(),
    reduce: ReduceOp | None = None,
) -> Plan:
    """Return the plan for ``op`` on a tensor like ``spec`` in ``topology``.

    Raises ``PayloadTypeError`` for an operation that is not defined (an average of integers), and
    ``UnsupportedOpError`` for one that this backend lacks and that cannot be composed from its calls.
    """
    _refuse_quantized(op, spec)
    refuse_meaningless(op, spec, reduce)
    _refuse_sparse(op, spec, topology.capabilities, reduce)
    chosen = (
        _plan_reduction(op, spec, topology, policy, reduce or ReduceOp.SUM)
        if op.reduces
        else _plan_movement(op, spec, topology, policy)
    )
    return _staged(chosen, spec, topology, policy)


def _refuse_quantized(op: Op, spec: TensorSpec) -> None:
    if op is not Op.BARRIER and dtype_name(spec.dtype) not in DTYPES_BY_NAME:
        raise PayloadTypeError(
            f"{op.value} of a quantized tensor ({dtype_name(spec.dtype)}) is not supported, {DEQUANTIZED}"
        )


def refuse_meaningless(op: Op, spec: TensorSpec, reduce: ReduceOp | None) -> None:
    """Raise ``PayloadTypeError`` for a reduction that is not defined for this dtype."""
    if not op.reduces or reduce is None:
        return
    dtype = spec.dtype
    real = dtype.is_floating_point
    meaning = {
        ReduceOp.AVG: (real or dtype.is_complex, "reduce with sum, or convert to a float first"),
        ReduceOp.ADASUM: (real, "it is for gradients; convert to a float first"),
        ReduceOp.MIN: (not dtype.is_complex, "complex numbers have no order"),
        ReduceOp.MAX: (not dtype.is_complex, "complex numbers have no order"),
    }
    meaning |= dict.fromkeys(
        _BITWISE, (not (real or dtype.is_complex), "bitwise reductions are for integers and bool")
    )
    allowed, advice = meaning.get(reduce, (True, ""))
    if not allowed:
        raise PayloadTypeError(f"{op.value}: {reduce.value} of {dtype_name(dtype)} is not defined; {advice}")


def _refuse_sparse(op: Op, spec: TensorSpec, capabilities: Capabilities, reduce: ReduceOp | None) -> None:
    if not spec.sparse:
        return
    if op is Op.ALL_REDUCE and capabilities.sparse and reduce is ReduceOp.SUM:
        if spec.dtype in _SPARSE:
            return
        raise UnsupportedOpError(
            f"{op.value} of a sparse tensor of {dtype_name(spec.dtype)} is not supported, since torch cannot "
            "add its values; convert it to float32 or int64 first"
        )
    raise UnsupportedOpError(
        f"{op.value} of a sparse tensor is not supported on {capabilities.backend} "
        "(only all_reduce with op='sum' is, on gloo, mpi, horovod and through memory); pass x.to_dense()"
    )


def _plan_movement(op: Op, spec: TensorSpec, topology: Topology, policy: Policy) -> Plan:
    known = topology.capabilities
    refuse_missing(op, known)
    native, has = _native_call(op, known)
    via = "native"
    if topology.goes_through_nodes(op, spec.size_bytes, policy.by_node):
        via, has = "nodes", _by_memory(topology)
    if op is Op.BARRIER or spec.dtype in known.move:
        return Plan(op, known.backend, native, via, why=(has,))
    carrier = carrier_of(spec.dtype, known)
    return Plan(
        op,
        known.backend,
        native,
        via,
        wire=Wire.VIEW,
        wire_dtype=carrier,
        why=(
            has,
            f"{known.backend} cannot copy {dtype_name(spec.dtype)}: it is sent as {dtype_name(carrier)}",
        ),
    )


def refuse_missing(op: Op, known: Capabilities) -> None:
    """Refuse an operation that moves data if the backend has no call for it."""
    if op is Op.BARRIER or op in known.ops:
        return
    advice = ""
    if op in (Op.SEND, Op.RECV):
        advice = (
            "; gloo, nccl and mpi support it, and permute or broadcast can replace it "
            "if all ranks of a group call them"
        )
    raise UnsupportedOpError(f"{op.value} is not supported on {known.backend}{advice}")


def _native_call(op: Op, known: Capabilities) -> tuple[str, str]:
    """Return the name of the backend's native call for ``op``, and a sentence that says so."""
    other = {Op.PERMUTE: Op.ALL_TO_ALL.value, **dict(known.built_of)}.get(op)
    if other is None:
        return op.value, f"{known.backend} has {op.value}"
    return other, f"{known.backend} has no {op.value} of its own: it is composed of {other}"


def _plan_reduction(op: Op, spec: TensorSpec, topology: Topology, policy: Policy, reduce: ReduceOp) -> Plan:
    known = topology.capabilities
    if reduce is ReduceOp.ADASUM and not (op is Op.ALL_REDUCE and known.reduces(spec.dtype, reduce)):
        raise UnsupportedOpError(
            f"{op.value} with adasum of {dtype_name(spec.dtype)} is not supported on {known.backend}; "
            "horovod supports it for all_reduce of floats, if it is built with MPI or NCCL"
        )
    wire, dtype, on_wire, divide, why = arithmetic(spec.dtype, reduce, known)
    native = _has_native(op, spec, known) and known.reduces(dtype, on_wire)
    if wire is Wire.REAL and on_wire is not ReduceOp.SUM:
        native = False  # complex numbers are sent as pairs of reals, and only a sum can be taken by component
    dense = op is Op.ALL_REDUCE and not spec.sparse
    size = (spec.numel, spec.dtype.itemsize)
    through_memory = not spec.sparse and topology.goes_through_nodes(op, spec.size_bytes, policy.by_node)
    small = dense and topology.exchanges(*size) and not through_memory
    if op is Op.REDUCE_SCATTER and through_memory and dtype not in HALF:  # HALF must be rounded only once
        native = known.reduces(dtype, on_wire) and not (wire is Wire.REAL and on_wire is not ReduceOp.SUM)
        by_node = native
    else:
        native = native and not small
        by_node = dense and native and (through_memory or topology.sums_nodes_first(*size, policy.by_node))
    if not native and wire is Wire.CAST and spec.dtype in LOCAL & known.move:
        wire, dtype, on_wire, divide = Wire.SAME, spec.dtype, reduce, False
        why = (f"{dtype_name(dtype)} is accumulated in float32 and rounded once",) if dtype in HALF else ()
    transport = op if native else Op.ALL_TO_ALL if small else _EXCHANGE[op]
    if transport not in known.ops:
        raise UnsupportedOpError(
            f"{op.value} with {reduce.value} of {dtype_name(spec.dtype)} is not supported on "
            f"{known.backend}, and it lacks {transport.value} to compose it from"
        )
    call = transport.value
    if native:
        call, has = _native_call(op, known)
        why = (f"{has} with {on_wire.value}", *why)
        if by_node:
            why = (_nodes_first(topology, policy), *why)
    else:
        lacks = _why_composed(op, spec, known, f"{on_wire.value} of {dtype_name(dtype)}", small=small)
        why = (f"{lacks}: {transport.value}, then a local reduction in rank order", *why)
    return Plan(
        op,
        known.backend,
        call,
        via="nodes" if by_node else "native" if native else transport.value,
        wire=wire,
        wire_dtype=None if wire is Wire.SAME else dtype,
        reduce=reduce,
        wire_reduce=on_wire,
        divide=divide,
        why=why,
    )


def _why_composed(op: Op, spec: TensorSpec, known: Capabilities, reduction: str, *, small: bool) -> str:
    """Return why no native call of the backend is used."""
    if spec.sparse:
        return "the indices of sparse tensors may differ between ranks"
    if small:
        return f"for so few bytes the hops of an all_reduce on {known.backend} cost more than the data"
    if op in known.compose:
        return f"the {op.value} of {known.backend} is slower than the composition, or cannot be awaited"
    return f"{known.backend} has no {reduction} for {op.value}"


def _has_native(op: Op, spec: TensorSpec, known: Capabilities) -> bool:
    """Whether the backend has a native call for ``op`` that should be used."""
    return op in known.ops and op not in known.compose and not spec.sparse


def _nodes_first(topology: Topology, policy: Policy) -> str:
    """Return a sentence on how an all_reduce by node is composed, and why."""
    if topology.capabilities.near:  # chosen by the thresholds in it, or by the policy
        return _by_memory(topology)
    each = topology.world_size // topology.nodes
    chosen = (
        "as requested in initialize"
        if policy.by_node
        else "at this size they cost more than the additional bytes"
    )
    return (
        f"{topology.nodes} nodes of {each} ranks: each part is reduced within the nodes, then between them, "
        f"and distributed within them, which saves hops of a ring of {topology.world_size} ({chosen})"
    )


def _by_memory(topology: Topology) -> str:
    """Return a sentence on how a call by node is composed if the ranks of each node share memory."""
    each = topology.world_size // topology.nodes
    return (
        f"{topology.nodes} hosts of {each} ranks: through memory that the ranks of each share, and between "
        f"hosts by {topology.backend}"
    )


def _staged(chosen: Plan, spec: TensorSpec, topology: Topology, policy: Policy) -> Plan:
    """Return the plan, completed with what all operations have in common: staging, contiguity, check."""
    known = topology.capabilities
    why, stage = list(chosen.why), None
    if topology.way and chosen.via != "nodes":
        why.insert(0, topology.way)
    if spec.device not in known.devices:
        stage = min(known.devices)
        why.append(f"a {spec.device} tensor is staged through {stage}, where {known.backend} works")
    if not spec.contiguous:
        why.append("a contiguous copy is sent")
    if policy.check:
        why.append("signatures of all ranks are compared before the data moves (check='full')")
    return replace(chosen, stage=stage, why=tuple(why))
