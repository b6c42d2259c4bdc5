"""What shared memory supports, as a row of capabilities for the planner: torch does the arithmetic."""

from __future__ import annotations

import torch

from asynccoll.backends.api import Capabilities, Op, ReduceOp

#: Why a group, or a world, of one rank does not use shared memory.
ALONE = "a single rank has no other rank to share memory with"

_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_MOVED = (torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128)

MEMORY = Capabilities(
    backend="memory",
    ops=frozenset(Op),
    reduce=(
        *((dtype, _ARITHMETIC | _BITWISE) for dtype in (*_INTEGERS, torch.bool)),
        *((dtype, _ARITHMETIC | {ReduceOp.AVG}) for dtype in _FLOATS),
    ),
    move=frozenset((*_INTEGERS, *_FLOATS, *_MOVED, torch.bool)),
    sparse=True,
    compares_splits=True,
    keeps_input=frozenset({Op.ALL_REDUCE, Op.REDUCE}),
)

#: The sizes from which a call among several hosts goes through the memory of each host. Smaller tensors are
#: faster in one exchange of gloo's (measured by benchmarks/nodes.py on two hosts of two ranks).
NEAR = (
    (Op.ALL_REDUCE, 4 << 10),
    (Op.BROADCAST, 1),
    (Op.ALL_GATHER, 256 << 10),
    (Op.REDUCE_SCATTER, 256 << 10),
)
