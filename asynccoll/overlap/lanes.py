"""Numbers for objects that each need a lane of their own, such as optimizers whose backwards take turns."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from asynccoll.runtime.process import current

__all__ = ["number_of", "numbered"]

#: How many objects of a kind have been made, in each context: all ranks make them in one order.
_made: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def number_of(kind: str) -> int:
    """A number for one more of that ``kind``: the same on every rank that makes them in the same order."""
    made = _made.setdefault(current(), Counter())
    made[kind] += 1
    return made[kind]


def numbered(kind: str) -> str:
    """The same as a name: ``"async_optim 2"``."""
    return f"{kind} {number_of(kind)}"
