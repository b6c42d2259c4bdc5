"""Memory that a call fills (``out=``), which no other call may use before somebody has waited for that one.

Native operations on the same memory run at the same time (gloo has several threads), and where the bytes that
arrive are not the result (a packed tree, strides, an average) the rest is done by the waiter. A call that
reads such memory meanwhile would send anything, without a word.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from asynccoll.aliasing import Extents
from asynccoll.errors import InvalidArgumentError
from asynccoll.forks import renew
from asynccoll.trees import flatten, is_tree

if TYPE_CHECKING:
    from asynccoll.operation import Operation
    from asynccoll.work import Work

__all__ = ["fills", "refuse_unfilled"]


class _Filling(NamedTuple):
    """A call that fills memory; whoever dropped it keeps nothing alive here."""

    work: weakref.ref[Work[Any]]
    operations: tuple[weakref.ref[Operation], ...]


def _is_over(filling: _Filling) -> bool:
    """Whether somebody has its result, or it was dropped and nothing is written any more."""
    work = filling.work()
    if work is not None:
        return not work.pending
    return all(operation is None or operation.landed() for operation in (ref() for ref in filling.operations))


_lock = threading.RLock()  # a collection of garbage may run anything
renew(_lock)
_filling: Extents[_Filling] = Extents(_is_over)


def fills(work: Work[Any], operations: tuple[Operation, ...], out: Any) -> None:
    """``work``, of these ``operations``, fills the tensor or tree ``out``: others have to wait for it."""
    filling = _Filling(weakref.ref(work), tuple(map(weakref.ref, operations)))
    with _lock:
        for x in flatten(out)[0] if is_tree(out) else (out,):
            _filling.add(x, filling)


def refuse_unfilled(name: str, xs: Iterable[torch.Tensor]) -> None:
    """Refuse what an earlier call is still to fill, for whoever reads or fills it now."""
    if not _filling:
        return
    with _lock:
        for x in xs:
            for filling in _filling.owners(x):
                raise InvalidArgumentError(
                    f"{name} was passed memory that {_described(filling)} fills (out=), and nobody has "
                    "waited for that one yet; await it first"
                )


def _described(filling: _Filling) -> str:
    first = filling.operations[0]() if filling.operations else None
    if first is None:
        return "an earlier call of a coalescing block"
    return f"{first.name} #{first.sequence} at {first.place}"
