"""Replaces ``host`` by a simulated one for a while, and gives each rank its own per-process state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import repeat
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
_DICT = repeat("__dict__")


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
        real, of_rank = _Contents(new=False), [_Contents() for _ in range(world_size)]
        _Contents().set()
        entered: list[_Contents] = []

        def enter(rank: int) -> None:
            if rank < 0 or (entered and entered[0] is of_rank[rank]):
                return
            if entered:
                entered.pop().keep()
            of_rank[rank].set()
            entered.append(of_rank[rank])

        try:
            yield enter
        finally:
            real.set()


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


class _Contents:
    """What the objects of ``state.kept`` contain for one rank, or did before there were ranks.

    Ranks change often: all is set within few calls of C.
    """

    def __init__(self, *, new: bool = True) -> None:
        self._dicts: list[tuple[dict[Any, object], dict[Any, object]]] = []
        self._objects: list[object] = []
        self._attributes: list[dict[str, object]] = []
        for one, make in state.kept:
            like = make() if new else one
            if isinstance(one, dict) and isinstance(like, dict):
                self._dicts.append((one, dict(like)))
            else:
                self._objects.append(one)
                self._attributes.append(like.__dict__)

    def set(self) -> None:
        """Give the objects these contents."""
        any(map(setattr, self._objects, _DICT, self._attributes))
        for one, content in self._dicts:
            if one or content:
                one.clear()
                one.update(content)

    def keep(self) -> None:
        """Note what the objects contain. Attributes are in the objects' ``__dict__``, which is set itself."""
        for one, content in self._dicts:
            if one or content:
                content.clear()
                content.update(one)
