"""torch's dtypes and our reductions in MPI's terms, and tensors as the buffers that MPI calls take.

Data is moved as bytes. It is reduced in the dtypes in which MPI's result is what torch's would be (``_row``
in ``backend`` names the same ones); the planner widens the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from mpi4py import MPI

from asynccoll.backends.api import ReduceOp

BYTE: MPI.Datatype = MPI.BYTE

TYPES: dict[torch.dtype, object] = {
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T,
    torch.uint16: MPI.UINT16_T,
    torch.int32: MPI.INT32_T,
    torch.uint32: MPI.UINT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint64: MPI.UINT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
OPS: dict[ReduceOp, object] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}

#: A Python view of memory at an address: no copy, whatever the tensor's dtype.
address: Callable[..., MPI.buffer] = MPI.buffer.fromaddress


def memory(x: torch.Tensor) -> object:
    """Return the memory of a contiguous tensor."""
    return address(x.data_ptr(), x.nbytes)


def bytes_of(x: torch.Tensor, limit: int) -> tuple[object, int, object]:
    """Return the argument for a contiguous tensor that is moved; ``limit`` is the largest count."""
    size = x.nbytes
    if size <= limit:
        return address(x.data_ptr(), size), size, BYTE
    return address(x.data_ptr(), size), 1, run_of_bytes(size, limit)


@lru_cache(maxsize=256)
def run_of_bytes(size: int, limit: int) -> object:
    """Return a datatype of ``size`` bytes, built from counts that do not exceed ``limit``."""
    if size <= limit:
        return MPI.BYTE.Create_contiguous(size).Commit()
    rows, rest = divmod(size, limit)
    whole = MPI.BYTE.Create_contiguous(limit).Create_contiguous(rows)
    if not rest:
        return whole.Commit()
    return MPI.Datatype.Create_struct([1, rest], [0, rows * limit], [whole, MPI.BYTE]).Commit()


def offsets(parts: Sequence[torch.Tensor]) -> tuple[int, list[int]]:
    """Return the lowest address of ``parts``, and the offset of each from it, in bytes."""
    places = [part.data_ptr() for part in parts if part.nbytes]
    base = min(places, default=0)
    return base, [part.data_ptr() - base if part.nbytes else 0 for part in parts]


def spread(parts: Sequence[torch.Tensor]) -> int:
    """Return the bytes from the start of the first of ``parts`` in memory to the end of the last."""
    _, places = offsets(parts)
    return max((place + part.nbytes for place, part in zip(places, parts, strict=True)), default=0)
