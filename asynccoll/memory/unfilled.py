"""Memory that a call fills (``out=``). No other call may use it before the first one has been waited for.

Native operations on the same memory may run concurrently (gloo has several threads). And if the received
bytes are not yet the result (a packed tree, strides, an average), the waiter finishes it. A call that read
such memory too early would silently send wrong data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch

from asynccoll import host
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.call_number import numbered
from asynccoll.host.call_site import Spot
from asynccoll.memory.aliasing import Claim, Claims


class Written(Protocol):
    """The completion of an operation that fills memory."""

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once the operation is over."""

    def writing(self) -> bool:
        """Whether a native operation may still write."""


class Filling(Protocol):
    """An operation that fills memory."""

    sequence: int

    @property
    def completion(self) -> Written:
        """The completion of its native operation."""

    @property
    def name(self) -> str:
        """The name of the collective."""

    @property
    def place(self) -> object:
        """The line that called it."""

    def done(self) -> bool:
        """Whether the operation is over for its waiters."""


class Unsent(Protocol):
    """A work of a coalescing block that has no operation yet."""

    @property
    def spot(self) -> Spot:
        """Where the call was made."""


class Filler(Claim, Protocol):
    """A work whose ``out`` is still to be filled."""

    @property
    def operations(self) -> tuple[Filling, ...]:
        """The operations that fill ``out``."""

    @property
    def pending(self) -> bool:
        """Whether the work has not been waited for yet."""


#: The works whose ``out`` no other call may use.
claims: Claims = host.per_process(Claims, forked=Claims.unlock)


class _Dropped:
    """The claim that replaces a work that its user dropped while its operations were in flight."""

    __slots__ = ("__weakref__", "operations", "out")

    def __init__(self, out: object, operations: tuple[Filling, ...]) -> None:
        self.out = out
        self.operations = operations

    @property
    def claims(self) -> bool:
        return any(not one.done() or one.completion.writing() for one in self.operations)


#: The claims of dropped works, which nothing else keeps alive.
_kept: dict[_Dropped, None] = host.per_process(dict)


def let_go(out: object, operations: tuple[Filling, ...]) -> None:
    """Keep ``out`` claimed for the ``operations`` of a dropped work, which may still write to it.

    Takes no lock, as garbage collection may call this in a thread that holds any lock. So the operations get
    no callback: the claim is kept until a later call asks whether they are over.
    """
    left = _Dropped(out, operations)
    _kept[left] = None
    claims.add(left)


def _forget_over() -> None:
    for left in list(_kept):  # not of pairs: to make these may collect garbage, which may add another claim
        if not left.claims:
            _kept.pop(left, None)


def filler_of(xs: Iterable[torch.Tensor], but: Claim | None = None) -> Claim | None:
    """Return the claim of an earlier call, other than ``but``, that is still filling memory of ``xs``."""
    if _kept:
        _forget_over()
    return claims.find(xs, but)


def refuse_unfilled(name: str, xs: Iterable[torch.Tensor], but: Claim | None = None) -> None:
    """Refuse to read or fill memory that an earlier call, other than ``but``, is still filling."""
    claim = filler_of(xs, but)
    if claim is None:
        return
    found = cast("Filler | _Dropped", claim)
    first = next(iter(found.operations), None)
    by = (
        f"{first.name} {numbered(first.sequence)} at {first.place}"
        if first
        else f"the call at {cast('Unsent', found).spot.place} in a coalescing block"
    )
    why = "and that call has not been waited for yet; await it first"
    if isinstance(found, _Dropped) or not found.pending:
        why = "a call that is no longer waited for but may still write to it; pass other memory"
    raise InvalidArgumentError(f"{name} was passed memory that {by} fills (out=), {why}")
