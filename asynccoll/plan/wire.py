"""How elements are sent: as which dtype, and which reduction of that dtype gives theirs.

Decided from a dtype and a backend's row of capabilities; ``tensors.encoding`` does the encoding.
"""

from __future__ import annotations

import torch

from asynccoll.errors import UnsupportedOpError
from asynccoll.plan.spec import HALF, Capabilities, ReduceOp, Wire, dtype_name

_LOGICAL = {ReduceOp.AND: ReduceOp.MIN, ReduceOp.OR: ReduceOp.MAX}

#: The reduction of 0 and 1 for each reduction of bool: a sum is an or, a product an and (as torch's + and *).
ON_BOOL = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.OR: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.AND: ReduceOp.MIN,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BXOR: ReduceOp.BXOR,
}

#: The wider dtype as which a backend reduces one that it does not support; the result is converted back.
_WIDER = {
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.float32
    ),
}
_REAL = {
    torch.complex32: torch.float32,  # torch cannot add complex32; float32 also saves a rounding
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
#: Dtypes by size in bytes, as which others of that size are sent if a backend cannot move these.
_CARRIERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The dtypes that a local reduction can compute with.
LOCAL = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


def carrier_of(dtype: torch.dtype, known: Capabilities) -> torch.dtype:
    """Return the dtype as which ``dtype`` is moved if the backend cannot move it as it is."""
    carrier = _CARRIERS.get(dtype.itemsize)
    return carrier if carrier is not None and carrier in known.move else torch.uint8


def arithmetic(
    dtype: torch.dtype, reduce: ReduceOp, known: Capabilities
) -> tuple[Wire, torch.dtype, ReduceOp, bool, tuple[str, ...]]:
    """Return how a reduction of ``dtype`` is done: (wire, dtype sent, reduction of that, divide, why)."""
    name = dtype_name(dtype)
    why: tuple[str, ...]
    if dtype is torch.bool:
        on_wire = ON_BOOL[reduce]
        why = (f"{reduce.value} of bool is {on_wire.value} of 0 and 1",)
        if known.reduces(torch.bool, on_wire):
            return Wire.SAME, torch.bool, on_wire, False, why
        return Wire.VIEW, torch.uint8, on_wire, False, (*why, "bool is sent as uint8")
    if reduce in _LOGICAL:
        on_wire = _LOGICAL[reduce]
        why = (f"{reduce.value} is {on_wire.value} of (x != 0), as uint8",)
        return Wire.LOGICAL, torch.uint8, on_wire, False, why
    if known.reduces(dtype, reduce):
        return Wire.SAME, dtype, reduce, False, ()
    if reduce is ReduceOp.AVG:
        return _average(dtype, known)
    if dtype in _REAL:
        return Wire.REAL, _REAL[dtype], reduce, False, (f"{name} is sent as pairs of reals",)
    if dtype is torch.uint64:
        ordered = reduce in (ReduceOp.MIN, ReduceOp.MAX)
        wire = Wire.FLIPPED if ordered else Wire.VIEW
        return wire, torch.int64, reduce, False, ("uint64 is reduced as int64 of the same bits",)
    wider = _WIDER.get(dtype)
    if wider is not None:
        why = (f"{known.backend} cannot reduce {name}: it is sent as {dtype_name(wider)}",)
        return Wire.CAST, wider, reduce, False, why
    if dtype in LOCAL:
        return Wire.SAME, dtype, reduce, False, ()
    raise UnsupportedOpError(f"{reduce.value} of {name} is not supported: convert it to float32 first")


def _average(
    dtype: torch.dtype, known: Capabilities
) -> tuple[Wire, torch.dtype, ReduceOp, bool, tuple[str, ...]]:
    """Do what ``arithmetic`` does for an average that the backend lacks: a sum that is divided afterwards."""
    why: tuple[str, ...]
    if dtype in HALF:
        why = (f"{dtype_name(dtype)} is averaged in float32 and rounded once: its sum could overflow",)
        return Wire.CAST, torch.float32, ReduceOp.SUM, True, why
    wire, wire_dtype, on_wire, _, why = arithmetic(dtype, ReduceOp.SUM, known)
    return wire, wire_dtype, on_wire, True, (*why, "average as a sum, divided afterwards")
