"""Memory that a call fills (``out=``), which no other call may use before somebody has waited for that one.

Native operations on the same memory run at the same time (gloo has several threads), and where the bytes that
arrive are not the result (a packed tree, strides, an average) the rest is done by the waiter. A call that
reads such memory meanwhile would send anything, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch

from asynccoll.aliasing import Claims
from asynccoll.errors import InvalidArgumentError

if TYPE_CHECKING:
    from asynccoll.operation import Operation
    from asynccoll.work import Work

__all__ = ["claims", "let_go", "refuse_unfilled"]

#: Works whose ``out`` is nobody else's.
claims = Claims()


class _Dropped:
    """What is left of a work of which its user let go with its operations under way."""

    __slots__ = ("__weakref__", "operations", "out")

    def __init__(self, out: Any, operations: tuple[Operation, ...]) -> None:
        self.out = out
        self.operations = operations

    @property
    def claims(self) -> bool:
        return any(not one.done() or one.completion.writing() for one in self.operations)

    def over(self) -> None:
        """One of them is: they keep this alive until then."""


def let_go(out: Any, operations: tuple[Operation, ...]) -> None:
    """The work of these was dropped, and they may still be writing to ``out``."""
    left = _Dropped(out, operations)
    for operation in operations:
        operation.completion.add_callback(left.over)
    claims.add(left)


def refuse_unfilled(name: str, xs: Iterable[torch.Tensor], but: Work[Any] | None = None) -> None:
    """Refuse what an earlier call, ``but`` one, is still to fill, for whoever reads or fills it now."""
    found = cast("Work[Any] | _Dropped | None", claims.find(xs, but))
    if found is None:
        return
    first = next(iter(found.operations), None)
    by = (
        f"{first.name} #{first.sequence} at {first.place}"
        if first
        else "an earlier call of a coalescing block"
    )
    why = "and nobody has waited for that one yet; await it first"
    if isinstance(found, _Dropped) or not found.pending:
        why = "which nobody waits for any more, and which may still be written to; pass other memory"
    raise InvalidArgumentError(f"{name} was passed memory that {by} fills (out=), {why}")
