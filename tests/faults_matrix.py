"""What goes wrong, in which call, on which backend, however one waits: as data, with what others are told.

Each cell is tried in fresh processes (`test_faults_matrix.py`): the other ranks raise the error that stands
here, which names rank 1, within the time. A backend is a row of `PLACES`, a fault one of `FAULTS`.
Run as a program, it prints the table of docs/faults.md.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import asynccoll as ac
from ranks import Rank

#: After which a call that waits in vain gives up, and how much later at most its waiter must have been told.
TIMEOUT_S = 1.5
TOLD_S = 1.0
#: Until a rank that is gone is missed: its connections end, or somebody asks after a second.
LOST_S = 3.0
CULPRIT = 1

#: What a call can be of: elements, dtype, reduction, root.
USUAL = {"n": 4, "dtype": torch.float32, "op": "sum", "root": 0}


def _ones(said: dict[str, Any], times: int = 1) -> torch.Tensor:
    return torch.ones(said["n"] * times, dtype=said["dtype"])


#: By name: the call, of a payload as ``USUAL`` says, and which of its words it has.
OPERATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "all_reduce": (
        lambda size, said, **more: ac.all_reduce(_ones(said), op=said["op"], **more),
        "n dtype op",
    ),
    "broadcast": (
        lambda size, said, **more: ac.broadcast(_ones(said), src=said["root"], **more),
        "n dtype root",
    ),
    "all_gather": (lambda size, said, **more: ac.all_gather(_ones(said), **more), "dtype"),
    "reduce_scatter": (
        lambda size, said, **more: ac.reduce_scatter(_ones(said, size), op=said["op"], **more),
        "n dtype op",
    ),
    "all_to_all": (lambda size, said, **more: ac.all_to_all(_ones(said, size), **more), "dtype"),
    "barrier": (lambda size, said, **more: ac.barrier(**more), ""),
    "a tree": (
        lambda size, said, **more: ac.all_reduce(
            {"a": _ones(said), "b": torch.ones(2)}, op=said["op"], **more
        ),
        "n op",
    ),
    "an object": (lambda size, said, **more: ac.all_gather_object({"n": said["n"]}, **more), ""),
}
WAYS = ("asyncio", "trio", "blocking")

#: Where it is tried: the backend's name, and what `initialize` is told besides.
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "memory": ("gloo", {"memory": True}),
    "gloo": ("gloo", {"memory": False}),
    "mpi": ("mpi", {}),
    "horovod": ("horovod", {}),
}

Heard = tuple[str, tuple[int, ...], float, str]


def call(me: Rank, operation: str, *, lane: str = "tried", **other: Any) -> Any:
    """The call of a cell, begun; ``other``: what is not as usual."""
    made, _ = OPERATIONS[operation]
    return made(me.size, {**USUAL, **other}, lane=lane, timeout=TIMEOUT_S)


async def hear(me: Rank, work: Callable[[], Any]) -> Heard:
    """What becomes of it, and when."""
    start = time.monotonic()
    try:
        await me.get(work())
    except ac.AsyncCollError as error:
        ranks = getattr(error, "ranks", ())
        return type(error).__name__, tuple(ranks), time.monotonic() - start, str(error)
    return "", (), time.monotonic() - start, ""


def _others(me: Rank) -> list[int]:
    return [rank for rank in range(me.size) if rank != CULPRIT]


def _await_others(me: Rank, sign: str) -> None:
    for rank in _others(me):
        me.see(f"{rank} {sign}")


# What rank 1 does


async def _is_killed(me: Rank, _operation: str) -> None:
    _await_others(me, "calls")
    os.kill(os.getpid(), signal.SIGKILL)


async def _exits(me: Rank, _operation: str) -> None:
    _await_others(me, "calls")
    os._exit(0)


async def _leaves(me: Rank, _operation: str) -> None:
    ac.finalize()
    _await_others(me, "has heard")


async def _fails(me: Rank, _operation: str) -> None:
    try:
        raise LookupError("between two calls")
    except LookupError:
        ac.finalize(abort=True)
    _await_others(me, "has heard")


async def _is_stopped(me: Rank, _operation: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 kills it


async def _is_late(me: Rank, _operation: str) -> None:
    _await_others(me, "has heard")


async def _is_in_native_code(me: Rank, _operation: str) -> None:
    import ctypes

    while not me.shown("0 has heard"):
        ctypes.PyDLL(None).usleep(200_000)  # with the interpreter's lock held, for most of the time


async def _calls_another_lane(me: Rank, operation: str) -> Heard:
    return await hear(me, lambda: call(me, operation, lane="another"))


async def _refuses(me: Rank, _operation: str) -> Heard:
    return await hear(me, lambda: ac.all_reduce(object(), lane="tried"))  # type: ignore[arg-type]


def _with(**other: Any) -> Callable[[Rank, str], Awaitable[Heard]]:
    async def calls(me: Rank, operation: str) -> Heard:
        return await hear(me, lambda: call(me, operation, **other))

    return calls


async def _calls_another_operation(me: Rank, operation: str) -> Heard:
    other = "barrier" if operation != "barrier" else "all_reduce"
    return await hear(me, lambda: call(me, other))


@dataclass(frozen=True)
class Fault:
    """``does``: rank 1, instead of the call. ``error``: what the others are told, within ``seconds``.

    ``own``: what rank 1 hears itself, None if nothing. ``word``: it is about such calls only. ``names``:
    whether the error's ``ranks`` say who it was.
    """

    does: Callable[[Rank, str], Awaitable[Any]]
    error: str
    seconds: float
    own: str | None = None
    dies: bool = False
    word: str = ""
    names: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    only: str = ""
    """The place where it is told so."""


FULL = {"check": "full"}
_LATE = TIMEOUT_S + TOLD_S
FAULTS: dict[str, Fault] = {
    "kill -9": Fault(_is_killed, "PeerLostError", LOST_S, dies=True),
    "exit 0": Fault(_exits, "PeerLostError", LOST_S, dies=True),
    "finalize": Fault(_leaves, "PeerLostError", LOST_S),
    "exception between calls": Fault(_fails, "PeerLostError", LOST_S),
    "SIGSTOP": Fault(_is_stopped, "CollectiveTimeoutError", _LATE, dies=True),
    "skipped call": Fault(_is_late, "CollectiveTimeoutError", _LATE),
    "stuck in native code": Fault(_is_in_native_code, "CollectiveTimeoutError", _LATE),
    "other lane": Fault(_calls_another_lane, "CollectiveTimeoutError", _LATE, own="CollectiveTimeoutError"),
    "refused call": Fault(_refuses, "PeerRefusedError", LOST_S, own="PayloadTypeError"),
}
#: Calls that differ: by what of them does. Ranks of one host that share memory always see that; others
#: compare signatures with ``check="full"`` only.
DIFFERENT = {
    "operation": (_calls_another_operation, ""),
    "shape": (_with(n=5), "n"),
    "dtype": (_with(dtype=torch.int64), "dtype"),
    "reduction": (_with(op="max"), "op"),
    "root": (_with(root=1), "root"),
}
for _what, (_does, _word) in DIFFERENT.items():
    for _name, _options, _only in (("", {}, "memory"), (", check=full", FULL, "")):
        FAULTS[f"other {_what}{_name}"] = Fault(
            _does,
            "CollectiveMismatchError",
            LOST_S,
            own="CollectiveMismatchError",
            word=_word,
            names=False,
            options=_options,
            only=_only,
        )


@dataclass(frozen=True)
class Cell:
    """One of them all."""

    fault: str
    operation: str
    place: str
    way: str
    size: int

    def __str__(self) -> str:
        return f"{self.fault}-{self.operation}-{self.place}-{self.way}-{self.size}".replace(" ", "_")


def cells(places: tuple[str, ...] = ("memory", "gloo")) -> Iterator[Cell]:
    """Every fault in every operation in every way of waiting, on each of ``places``; sizes take turns."""
    sizes = itertools.cycle((2, 3))
    for place, (name, fault) in itertools.product(places, FAULTS.items()):
        for operation, (_, words) in OPERATIONS.items():
            if (fault.word and fault.word not in words.split()) or fault.only not in ("", place):
                continue
            for way in WAYS:
                yield Cell(name, operation, place, way, next(sizes))


def some(of: list[Cell], most: int) -> list[Cell]:
    """So many: of each fault in turn, each time in another operation and way."""
    by_fault: dict[str, list[Cell]] = {}
    for one in of:
        by_fault.setdefault(one.fault, []).append(one)
    turns = itertools.count()
    picked = [
        mine[(turn * 7 + number) % len(mine)]
        for turn in itertools.islice(turns, -(-most // max(1, len(by_fault))))
        for number, mine in enumerate(by_fault.values())
    ]
    return picked[:most]


async def cell(me: Rank, name: str, operation: str) -> Any:
    """The cell, on one rank: what it has heard."""
    pids = await me.get(ac.all_gather_object(os.getpid()))
    await me.get(call(me, operation))  # its lane is open on all ranks
    fault = FAULTS[name]
    if me.rank == CULPRIT:
        heard = await fault.does(me, operation)
        _await_others(me, "has heard")
        return heard

    def begun() -> Any:
        work = call(me, operation)
        me.show(f"{me.rank} calls")
        return work

    heard = await hear(me, begun)
    me.show(f"{me.rank} has heard")
    for rank in _others(me):
        me.see(f"{rank} has heard")
    if name == "SIGSTOP" and me.rank == 0:
        os.kill(pids[CULPRIT], signal.SIGKILL)
    return heard


def table() -> str:
    """The table of docs/faults.md."""
    made = list(cells())
    lines = [
        "| rank 1 | where | the others hear | within | rank 1 hears | operations |",
        "|---|---|---|---|---|---|",
    ]
    for name, fault in FAULTS.items():
        operations = sorted({one.operation for one in made if one.fault == name}, key=list(OPERATIONS).index)
        shown = "all" if len(operations) == len(OPERATIONS) else ", ".join(operations)
        late = fault.error == "CollectiveTimeoutError"
        within = f"timeout + {TOLD_S:g} s" if late else f"{fault.seconds:g} s"
        own = f"`{fault.own}`" if fault.own else "-"
        where = fault.only or "everywhere"
        lines.append(f"| {name} | {where} | `{fault.error}` | {within} | {own} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
