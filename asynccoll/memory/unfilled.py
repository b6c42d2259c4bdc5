"""Memory that a call fills (``out=``), which no other call may use before somebody has waited for that one.

Native operations on the same memory run at the same time (gloo has several threads), and where the bytes that
arrive are not the result (a packed tree, strides, an average) the rest is done by the waiter. A call that
reads such memory meanwhile would send anything, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch

from asynccoll import host
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.call_number import numbered
from asynccoll.memory.aliasing import Claim, Claims

__all__ = ["claims", "let_go", "refuse_unfilled"]


class Written(Protocol):
    """The completion of an operation that fills memory."""

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call it once the operation is over."""

    def writing(self) -> bool:
        """Whether a native operation may still write."""


class Filling(Protocol):
    """An operation that fills memory."""

    sequence: int

    @property
    def completion(self) -> Written:
        """When it is over."""

    @property
    def name(self) -> str:
        """Of the collective."""

    @property
    def place(self) -> object:
        """The line that called it."""

    def done(self) -> bool:
        """Whether waiting for it is over."""


class Filler(Claim, Protocol):
    """A work whose ``out`` is still to be filled."""

    @property
    def operations(self) -> tuple[Filling, ...]:
        """What does it."""

    @property
    def pending(self) -> bool:
        """Whether somebody has still to wait for it."""


#: Works whose ``out`` is nobody else's.
claims: Claims = host.per_process(Claims, forked=Claims.unlock)


class _Dropped:
    """What is left of a work of which its user let go with its operations under way."""

    __slots__ = ("__weakref__", "operations", "out")

    def __init__(self, out: object, operations: tuple[Filling, ...]) -> None:
        self.out = out
        self.operations = operations

    @property
    def claims(self) -> bool:
        return any(not one.done() or one.completion.writing() for one in self.operations)

    def over(self) -> None:
        """One of them is: they keep this alive until then."""


def let_go(out: object, operations: tuple[Filling, ...]) -> None:
    """The work of these was dropped, and they may still be writing to ``out``."""
    left = _Dropped(out, operations)
    for operation in operations:
        operation.completion.add_callback(left.over)
    claims.add(left)


def refuse_unfilled(name: str, xs: Iterable[torch.Tensor], but: Claim | None = None) -> None:
    """Refuse to read or fill what an earlier call, other than ``but``, is still to fill."""
    claim = claims.find(xs, but)
    if claim is None:
        return
    found = cast("Filler | _Dropped", claim)
    first = next(iter(found.operations), None)
    by = (
        f"{first.name} {numbered(first.sequence)} at {first.place}"
        if first
        else "an earlier call of a coalescing block"
    )
    why = "and nobody has waited for that one yet; await it first"
    if isinstance(found, _Dropped) or not found.pending:
        why = "which nobody waits for any more, and which may still be written to; pass other memory"
    raise InvalidArgumentError(f"{name} was passed memory that {by} fills (out=), {why}")
