"""A world of one rank: every collective is local and completes immediately. No process group, no thread."""

from __future__ import annotations

from collections.abc import Sequence

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

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        return READY

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        return READY

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        return READY

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        out.copy_(x)
        return READY

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        assert out is not None
        out[0].copy_(x)
        return READY

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        assert x is not None
        out.copy_(x[0])
        return READY

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        out.copy_(x)
        return READY

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> Completion:
        out.copy_(x)
        return READY

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        raise AssertionError("nobody else is there: refused before")

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        raise AssertionError("nobody else is there: refused before")

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """Do nothing: there is no receiver."""

    def barrier(self) -> Completion:
        return READY

    def retire(self) -> bool:
        return True

    def inherit(self, previous: SerialCommunicator) -> None:
        """Do nothing: there are no messages."""

    def close(self) -> None:
        """Nothing to close."""

    def abort(self) -> None:
        """Do nothing: no call is ever in flight."""


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


#: What ``create`` takes besides the arguments of every backend.
OPTIONS: tuple[str, ...] = ()


def create(request: Request) -> Context:
    """Make a world of one rank, asked for by name."""
    request.take_options(*OPTIONS)
    if (request.world_size or 1) != 1:
        raise InvalidArgumentError(
            f"backend 'serial' is a world of one, got world_size={request.world_size}; name another backend"
        )
    return Context(SerialBackend(), Identity(), timeout=request.timeout, check="off")
