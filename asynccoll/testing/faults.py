"""What goes wrong in a simulated world, and when.

A fault strikes when a rank makes a call of some number, or at some time. Calls are those of the transport,
counted from 1: one all_reduce of a tensor is one. What a fault does to the world is in ``Struck``.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import NoneType
from typing import Protocol

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import check, check_count

__all__ = [
    "Cancel",
    "Collect",
    "Delay",
    "Fail",
    "Fault",
    "Interrupt",
    "Kill",
    "Stall",
    "Stop",
    "StoreLost",
    "Struck",
]


class Struck(Protocol):
    """The world, as faults strike it."""

    def kill(self, rank: int, *, silent: bool) -> None:
        """Its process is gone."""

    def hold(self, rank: int, thread: str, seconds: float) -> None:
        """Threads of the rank whose name has ``thread`` in it stand still."""

    def delay(self, rank: int, call: int | None, seconds: float) -> None:
        """Its messages of this call, or of its next one, take longer."""

    def cancel(self, rank: int) -> None:
        """The task that runs its ``main`` is cancelled."""

    def interrupt(self, rank: int) -> None:
        """Ctrl-C."""

    def lose_store(self) -> None:
        """Nobody answers there any more."""

    def fail(self, rank: int) -> None:
        """The transport does not take the call that the rank makes just now, or its next one."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong: when call number ``after_call`` is made, or ``at`` so many seconds."""

    after_call: int | None = None
    at: float | None = None

    def __post_init__(self) -> None:
        if (self.after_call is None) == (self.at is None):
            raise InvalidArgumentError(f"{self} needs after_call= or at=, one of them")
        kind = type(self).__name__
        check_count(f"rank of {kind}", self.struck, 0)
        if self.after_call is not None:
            check_count(f"after_call of {kind}", self.after_call)
        for name in ("at", "seconds"):
            check(
                f"{name} of {kind}", getattr(self, name, None), (int, float, NoneType), "a number of seconds"
            )

    @property
    def struck(self) -> int:
        """The rank whose calls are counted."""
        rank: int = self.rank  # type: ignore[attr-defined]  # a field of every subclass, in first place
        return rank

    def strike(self, world: Struck) -> None:
        """Do it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kill(Fault):
    """The process of ``rank`` is killed; if ``silent``, its host lost power: its connections stay open."""

    rank: int
    silent: bool = False

    def strike(self, world: Struck) -> None:
        world.kill(self.rank, silent=self.silent)


@dataclass(frozen=True)
class Stop(Fault):
    """All of ``rank`` stands still for ``seconds``, as between SIGSTOP and SIGCONT."""

    rank: int
    seconds: float

    def strike(self, world: Struck) -> None:
        world.hold(self.rank, "", self.seconds)


@dataclass(frozen=True)
class Stall(Fault):
    """Threads of ``rank`` whose name has ``thread`` in it stand still for ``seconds``, the others go on.

    Names are those of the stacks in ``Report.deadlock``: "MainThread", "gloo" (which ends calls), and
    "asynccoll-..." of the library's own.
    """

    rank: int
    seconds: float
    thread: str = "MainThread"

    def strike(self, world: Struck) -> None:
        world.hold(self.rank, self.thread, self.seconds)


@dataclass(frozen=True)
class Delay(Fault):
    """What ``rank`` sends with that call, or with its next one, takes ``seconds`` longer."""

    rank: int
    seconds: float

    def strike(self, world: Struck) -> None:
        world.delay(self.rank, self.after_call, self.seconds)


@dataclass(frozen=True)
class Cancel(Fault):
    """The task that runs ``main`` on ``rank`` is cancelled."""

    rank: int

    def strike(self, world: Struck) -> None:
        world.cancel(self.rank)


@dataclass(frozen=True)
class Interrupt(Fault):
    """Ctrl-C on ``rank``: KeyboardInterrupt, where asyncio, trio or plain Python raise it."""

    rank: int

    def strike(self, world: Struck) -> None:
        world.interrupt(self.rank)


@dataclass(frozen=True)
class Fail(Fault):
    """The transport of ``rank`` raises RuntimeError instead of taking that call, or its next one."""

    rank: int

    def strike(self, world: Struck) -> None:
        world.fail(self.rank)


@dataclass(frozen=True)
class StoreLost(Fault):
    """The store at which ranks meet answers nobody any more, as if what serves it had died."""

    rank: int = 0

    def strike(self, world: Struck) -> None:
        world.lose_store()


@dataclass(frozen=True)
class Collect(Fault):
    """Garbage is collected in whichever thread of ``rank`` runs: finalizers run there, in mid-call."""

    rank: int

    def strike(self, world: Struck) -> None:
        gc.collect()
