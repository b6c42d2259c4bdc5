"""What gloo, nccl and other backends support, as rows of capabilities for the planner."""

from __future__ import annotations

from dataclasses import replace

import torch

from asynccoll.backends.api import Capabilities, Op, ReduceOp

_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
#: The dtypes that gloo may average. It divides the sum, which in half precision may overflow although the
#: average would not.
_AVERAGED = frozenset({torch.float32, torch.float64})
#: gloo supports AVG from torch 2.11 on; before that, we divide the sum.
_GLOO_AVERAGES = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 11)

GLOO = Capabilities(
    backend="gloo",
    ops=frozenset(Op),
    reduce=(
        *((dtype, _ARITHMETIC | _BITWISE) for dtype in (*_INTEGERS, torch.bool)),
        *(
            (d, _ARITHMETIC | ({ReduceOp.AVG} if _GLOO_AVERAGES and d in _AVERAGED else set()))
            for d in _FLOATS
        ),
    ),
    move=frozenset((*_INTEGERS, *_FLOATS, torch.bool)),
    sparse=True,
    # gloo's reduce_scatter is made of all_reduces, has no future, and is slower than an exchange.
    compose=frozenset({Op.REDUCE_SCATTER}),
    # gloo's all_reduce is a ring of 2(n-1) hops, each of which takes longer than sending 100 KiB.
    exchange_bytes=128 << 10,
    hop_bytes=128 << 10,
    steps_hops=8,
)
#: Any other backend that is registered with torch: as gloo, but it may know nodes itself.
OTHER = replace(GLOO, hop_bytes=0)
NCCL = Capabilities(
    backend="nccl",
    ops=frozenset(Op),
    reduce=(
        *((dtype, _ARITHMETIC) for dtype in _INTEGERS),
        *((dtype, _ARITHMETIC | {ReduceOp.AVG}) for dtype in _FLOATS),
    ),
    move=frozenset((*_INTEGERS, *_FLOATS)),
    devices=frozenset({"cuda"}),
)
