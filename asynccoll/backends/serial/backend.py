"""A world of one rank: every collective is local and completes immediately. No process group, no thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asynccoll.backends.api import (
    READY,
    Backend,
    Capabilities,
    Completion,
    Context,
    Identity,
    Op,
    Opening,
    ReduceOp,
    Request,
)
from asynccoll.errors import InvalidArgumentError

__all__ = ["SerialBackend"]

_NUMERIC = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
_OTHER = (
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
#: Reducing one value leaves it unchanged, in any dtype (the planner turns ``and``/``or`` into min and max).
CAPABILITIES = Capabilities(
    backend="serial",
    ops=frozenset(Op),
    reduce=tuple((dtype, frozenset(ReduceOp)) for dtype in (*_NUMERIC, *_OTHER)),
    move=frozenset((*_NUMERIC, *_OTHER)),
    devices=frozenset({"cpu", "cuda", "mps", "xpu", "xla"}),
    sparse=True,
)


class SerialCommunicator:
    """The operations over one rank."""

    def _stays(self, *_: Any, **__: Any) -> Completion:
        return READY

    all_reduce = reduce = broadcast = barrier = _stays

    def _copied(self, out: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Completion:
        out.copy_(x)
        return READY

    all_gather = reduce_scatter = all_to_all = _copied

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        assert out is not None
        out[0].copy_(x)
        return READY

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        assert x is not None
        out.copy_(x[0])
        return READY

    def _refused(self, *_: Any, **__: Any) -> Completion:
        raise AssertionError("nobody else is there: refused before")

    send = recv = _refused

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no receiver, there are no messages, and no call is ever in flight."""

    refuse = inherit = close = abort = _nothing

    def retire(self) -> bool:
        return True


class SerialBackend(Backend):
    """The default until a world is made, and the backend that ``initialize("serial")`` names."""

    name = "serial"
    open_waits = False
    survives_fork = True

    def __init__(self) -> None:
        self.device: torch.device = (
            torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        )

    def capabilities(self, device: str) -> Capabilities:
        return CAPABILITIES

    def open(self, opening: Opening) -> SerialCommunicator:
        return SerialCommunicator()

    def close(self, *, abort: bool) -> None:
        """Nothing to close."""


def capabilities(name: str, device: str) -> Capabilities:
    """Return the backend's one row."""
    return CAPABILITIES


def create(request: Request) -> Context:
    """Make a world of one rank, asked for by name."""
    request.take_options()
    if (request.world_size or 1) != 1:
        raise InvalidArgumentError(
            f"backend 'serial' is a world of one, got world_size={request.world_size}; name another backend"
        )
    return Context(SerialBackend(), Identity(), timeout=request.timeout, check="off")
