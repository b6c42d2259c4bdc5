"""Replaces ``host`` by a simulated one for a while, and gives each rank its own per-process state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import asynccoll.public  # noqa: F401  # whatever a program imports, before the host is replaced
from asynccoll import host
from asynccoll.flight import dumps
from asynccoll.host import answering, forks, lines, primitives, shared_memory, state
from asynccoll.host import network as real_network
from asynccoll.testing import device, network
from asynccoll.testing import primitives as simulated
from asynccoll.transport import streams

__all__ = ["exchanged", "processes"]

_LINES = ("connect", "is_open", "listen")


@contextmanager
def processes(world_size: int) -> Iterator[Callable[[int], None]]:
    """Replace the host for the block. Yields a function to call with the rank whose thread runs next."""
    with (
        exchanged(host, primitives.__all__, simulated),
        exchanged(lines, _LINES, network),
        exchanged(real_network, ("own_address",), network),
        exchanged(answering, ("Answers", "ask"), network),
        exchanged(shared_memory, ("Memory", "exit_code", "look", "process_state"), network),
        exchanged(dumps, ("directory_for",), network),
        _simulated_locks(),
        exchanged(streams, ("recorded", "order_after"), device),
    ):
        kept = [one for one, _ in state.kept]
        real = _exchange(kept, [_new(make()) for _, make in state.kept])
        of_rank = [[_new(make()) for _, make in state.kept] for _ in range(world_size)]
        entered: list[int] = []

        def enter(rank: int) -> None:
            if (entered and entered[0] == rank) or rank < 0:
                return
            before = _exchange(kept, of_rank[rank])
            if entered:
                of_rank[entered.pop()] = before
            entered.append(rank)

        try:
            yield enter
        finally:
            _exchange(kept, real)


@contextmanager
def exchanged(module: object, names: Sequence[str], other: object) -> Iterator[None]:
    """Replace ``names`` of ``module`` by those of ``other``, for the block."""
    before = {name: getattr(module, name) for name in names}
    for name in names:
        setattr(module, name, getattr(other, name))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def _simulated_locks() -> Iterator[None]:
    """Simulate modules' own locks for the block. All ranks share them, as no thread blocks holding one."""
    places = _locks()
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, simulated.Lock())
    try:
        yield
    finally:
        for (module, name), lock in zip(places, before, strict=True):
            setattr(module, name, lock)


@cache
def _locks() -> list[tuple[object, str]]:
    """Return modules and names of the locks. Code that can use a lock has imported its module by now."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if (getattr(module, "__name__", None) or "").startswith("asynccoll.")
        for name, value in list(vars(module).items())
        if any(value is lock for lock in forks.renewed)
    ]


def _new(made: object) -> dict[Any, object]:
    """Return the contents of an object: of a dict itself, else its attributes."""
    return made if isinstance(made, dict) else made.__dict__


def _exchange(kept: list[object], contents: list[dict[Any, object]]) -> list[dict[object, object]]:
    """Give the objects ``kept`` new contents, and return the old ones."""
    before: list[dict[Any, object]] = []
    for one, content in zip(kept, contents, strict=True):
        if not isinstance(one, dict):
            before.append(one.__dict__)
            one.__dict__ = content
        elif one or content:
            before.append(dict(one))
            one.clear()
            one.update(content)
        else:
            before.append(content)
    return before
