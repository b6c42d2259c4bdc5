"""How elements look on the wire: which dtype carries them, and what a reduction of theirs is there.

Decided for a dtype and a backend's row of capabilities; ``tensors.encoding`` does what is decided here.
"""

from __future__ import annotations

import torch

from asynccoll.errors import UnsupportedOpError
from asynccoll.plan.spec import HALF, Capabilities, ReduceOp, Wire, dtype_name

__all__ = ["arithmetic", "carrier_of"]

_LOGICAL = {ReduceOp.AND: ReduceOp.MIN, ReduceOp.OR: ReduceOp.MAX}

#: What each reduction is on truth values: a sum is an or, a product an and (as torch's own + and *).
_ON_BOOL = {
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

#: The next wider dtype whose arithmetic, taken back, is the narrow dtype's own.
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
    torch.complex32: torch.float32,  # torch adds no complex32, and a rounding is saved
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
#: What has as many bytes, for dtypes that a backend cannot move as they are.
_CARRIERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: What a local reduction has arithmetic for.
_LOCAL = frozenset(
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
    """The dtype as which ``dtype`` is moved where the backend cannot move it as it is."""
    carrier = _CARRIERS.get(dtype.itemsize)
    return carrier if carrier is not None and carrier in known.move else torch.uint8


def arithmetic(
    dtype: torch.dtype, reduce: ReduceOp, known: Capabilities
) -> tuple[Wire, torch.dtype, ReduceOp, bool, tuple[str, ...]]:
    """How a reduction of ``dtype`` is done: (wire, dtype there, reduction there, divide, why)."""
    name = dtype_name(dtype)
    why: tuple[str, ...]
    if dtype is torch.bool:
        on_wire = _ON_BOOL[reduce]
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
    if dtype in _LOCAL:
        return Wire.SAME, dtype, reduce, False, ()
    raise UnsupportedOpError(f"{reduce.value} of {name} is not supported: convert it to float32 first")


def _average(
    dtype: torch.dtype, known: Capabilities
) -> tuple[Wire, torch.dtype, ReduceOp, bool, tuple[str, ...]]:
    """The same for an average that the backend has not: a sum, divided."""
    why: tuple[str, ...]
    if dtype in HALF:
        why = (f"{dtype_name(dtype)} is averaged in float32 and rounded once: its sum could overflow",)
        return Wire.CAST, torch.float32, ReduceOp.SUM, True, why
    wire, wire_dtype, on_wire, _, why = arithmetic(dtype, ReduceOp.SUM, known)
    return wire, wire_dtype, on_wire, True, (*why, "average as a sum, divided afterwards")
