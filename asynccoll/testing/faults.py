"""What goes wrong in a simulated world, and when.

A fault strikes when a rank makes its n-th call, or at a given time. Calls are those of the transport, counted
from 1: an all_reduce of one tensor is one call. ``Struck`` lists what faults can do to the world.
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
    """The world as a fault sees it."""

    def kill(self, rank: int, *, silent: bool) -> None:
        """Kill the process of ``rank``; if ``silent``, its connections stay open."""

    def hold(self, rank: int, thread: str, seconds: float) -> None:
        """Keep the rank's threads whose name contains ``thread`` from running for ``seconds``."""

    def delay(self, rank: int, call: int | None, seconds: float) -> None:
        """Delay the messages of the rank's call number ``call``, or of its next one, by ``seconds``."""

    def cancel(self, rank: int) -> None:
        """Cancel the task that runs the rank's ``main``."""

    def interrupt(self, rank: int) -> None:
        """Interrupt the rank, as by Ctrl-C."""

    def lose_store(self) -> None:
        """Have the store stop answering."""

    def fail(self, rank: int) -> None:
        """Have the transport refuse the call that the rank is just making, or its next one."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong: when call number ``after_call`` is made, or ``at`` a time in seconds."""

    after_call: int | None = None
    at: float | None = None

    def __post_init__(self) -> None:
        if (self.after_call is None) == (self.at is None):
            raise InvalidArgumentError(f"{self} needs either after_call= or at=")
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
        rank: int = self.rank  # type: ignore[attr-defined]  # the first field of every subclass
        return rank

    def strike(self, world: Struck) -> None:
        """Do to ``world`` what the fault does."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kill(Fault):
    """The process of ``rank`` is killed; if ``silent``, its host loses power: connections stay open."""

    rank: int
    silent: bool = False

    def strike(self, world: Struck) -> None:
        world.kill(self.rank, silent=self.silent)


@dataclass(frozen=True)
class Stop(Fault):
    """All threads of ``rank`` stop for ``seconds``, as between SIGSTOP and SIGCONT."""

    rank: int
    seconds: float

    def strike(self, world: Struck) -> None:
        world.hold(self.rank, "", self.seconds)


@dataclass(frozen=True)
class Stall(Fault):
    """The threads of ``rank`` whose name contains ``thread`` stop for ``seconds``; its others keep running.

    Names are those of the stacks in ``Report.deadlock``: "MainThread", "gloo" (which completes calls), and
    "asynccoll-..." for the library's own threads.
    """

    rank: int
    seconds: float
    thread: str = "MainThread"

    def strike(self, world: Struck) -> None:
        world.hold(self.rank, self.thread, self.seconds)


@dataclass(frozen=True)
class Delay(Fault):
    """The messages that ``rank`` sends in that call, or in its next one, take ``seconds`` longer."""

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
    """The transport of ``rank`` raises RuntimeError instead of accepting that call, or its next one."""

    rank: int

    def strike(self, world: Struck) -> None:
        world.fail(self.rank)


@dataclass(frozen=True)
class StoreLost(Fault):
    """The store through which ranks rendezvous stops answering, as if its server had died."""

    rank: int = 0

    def strike(self, world: Struck) -> None:
        world.lose_store()


@dataclass(frozen=True)
class Collect(Fault):
    """Garbage is collected in the thread of ``rank`` that makes the call: finalizers run there, mid-call."""

    rank: int

    def strike(self, world: Struck) -> None:
        gc.collect()
