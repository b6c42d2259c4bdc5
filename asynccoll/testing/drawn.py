"""Randomly drawn faults, for explorations that need some faults of a kind, at any time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from asynccoll.errors import InvalidArgumentError
from asynccoll.testing.faults import (
    Cancel,
    Collect,
    Delay,
    Fail,
    Fault,
    Interrupt,
    Kill,
    Stall,
    Stop,
    StoreLost,
)

__all__ = ["drawn_faults"]

#: A fault strikes at one of a rank's first calls, up to this number.
_CALLS = 12
#: From about what a message takes to about what the library waits for.
_SHORT_SECONDS = (1e-4, 5.0)

#: Parts of the names of threads to stall: those that wait, that complete calls, and that monitor them.
_THREADS = (
    "MainThread",
    "gloo",
    *(f"asynccoll-{one}" for one in ("watch", "settle", "open", "progress", "memory")),
)

_KINDS: dict[str, Callable[[int, int, float], Fault]] = {
    "kill": lambda rank, call, seconds: Kill(rank, after_call=call),
    "silence": lambda rank, call, seconds: Kill(rank, silent=True, after_call=call),
    "stop": lambda rank, call, seconds: Stop(rank, seconds, after_call=call),
    "stall": lambda rank, call, seconds: Stall(rank, seconds, after_call=call),
    "delay": lambda rank, call, seconds: Delay(rank, seconds, after_call=call),
    "cancel": lambda rank, call, seconds: Cancel(rank, after_call=call),
    "interrupt": lambda rank, call, seconds: Interrupt(rank, after_call=call),
    "store": lambda rank, call, seconds: StoreLost(rank, after_call=call),
    "collect": lambda rank, call, seconds: Collect(rank, after_call=call),
    "fail": lambda rank, call, seconds: Fail(rank, after_call=call),
}


@dataclass(frozen=True)
class drawn_faults:  # noqa: N801  # called like a function
    """For ``explore(faults=)``: draws one fault per simulation, of one of ``kinds``, at some rank's call."""

    kinds: tuple[str, ...]

    def __init__(self, *kinds: str) -> None:
        """``kinds``: any of kill, silence, stop, stall, delay, cancel, interrupt, store, collect, fail.

        By default all of them.

        Raises:
            InvalidArgumentError: there is no such kind.
        """
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _KINDS:
                raise InvalidArgumentError(f"there is no fault {kind!r}; expected one of {', '.join(_KINDS)}")
        object.__setattr__(self, "kinds", kinds or tuple(_KINDS))

    def __call__(self, chance: random.Random, world_size: int) -> Sequence[Fault]:
        least, most = _SHORT_SECONDS
        seconds = least * (most / least) ** chance.random()
        kind = chance.choice(self.kinds)
        fault = _KINDS[kind](chance.randrange(world_size), chance.randint(1, _CALLS), seconds)
        return [replace(fault, thread=chance.choice(_THREADS)) if isinstance(fault, Stall) else fault]
