"""What a peer is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from asynccoll.bench.operations import Case

__all__ = ["IN", "OUT", "Library", "Way", "Ways", "blocking", "nothing"]

#: The result is in fresh memory; allocating it in each call is part of the time.
OUT = "out-of-place"
#: The result is in existing memory: the input's own, if the operation can do that.
IN = "in-place"

Way: TypeAlias = Callable[[], Awaitable[object]]
#: By operation: the ways of one case, by ``OUT`` and ``IN``.
Ways: TypeAlias = Mapping[str, Callable[[Case], dict[str, Way]]]


def nothing() -> None:
    """Do nothing: there is nothing to join, or to leave."""


@dataclass(frozen=True, slots=True)
class Library:
    """A library that is measured."""

    name: str
    #: why it cannot be measured in this process, with the line that would help; empty if it can
    missing: Callable[[], str]
    ways: Ways
    #: joins the library's world on the ranks of ours; returns what leaves it again
    join: Callable[[], Callable[[], object]] = lambda: nothing


def blocking(call: Callable[[], object]) -> Way:
    """Return a blocking call as a way."""

    async def run() -> object:
        return call()

    return run
