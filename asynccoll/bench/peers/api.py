"""What a peer is."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from asynccoll.bench.operations import Case

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


def not_installed(package: str, cure: str) -> str:
    """Return why a package cannot be measured; empty if it is installed."""
    return f"not installed: {cure}" if importlib.util.find_spec(package) is None else ""


def blocking(call: Callable[[], object]) -> Way:
    """Return a blocking call as a way."""

    async def run() -> object:
        return call()

    return run


def _itself(x: torch.Tensor) -> Any:
    return x


def own_memory(
    call: Callable[[Any], object], case: Case, *, given: Callable[[torch.Tensor], Any] = _itself
) -> dict[str, Way]:
    """Return the ways of a blocking call that works in its input: on a copy, and on the input.

    ``given``: makes what the call takes from a tensor; of existing memory this is made beforehand.
    """
    x, again = case.input(), case.input()
    view = given(again)

    def fresh() -> object:
        copy = x.clone()
        call(given(copy))
        return copy

    def filled() -> object:
        call(view)
        return again

    return {OUT: blocking(fresh), IN: blocking(filled)}


def with_output(
    call: Callable[[Any, Any], object], case: Case, *, given: Callable[[torch.Tensor], Any] = _itself
) -> dict[str, Way]:
    """Return the ways of a blocking call with an output and an input; ``given`` as above."""
    x, out = case.input(), case.output()
    sent, view = given(x), given(out)

    def fresh() -> object:
        made = x.new_empty(case.received)
        call(given(made), sent)
        return made

    def filled() -> object:
        call(view, sent)
        return out

    return {OUT: blocking(fresh), IN: blocking(filled)}
