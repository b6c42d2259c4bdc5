"""The fault matrix, as data: faults, calls, backends and ways of waiting, with the errors that peers get.

Each cell is tried in fresh processes (`test_faults_matrix.py`): the other ranks must raise the error given
here, which names rank 1, within the given time. A backend is a row of `PLACES`, a fault a row of `FAULTS`.
Run as a program, it prints the table of docs/faults.md.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

import asynccoll as ac
from ranks import Rank
from worlds import THREADED

#: The timeout of a call that never completes, and how long after it the waiter must have its error, at most.
TIMEOUT_S = 1.5
TOLD_S = 1.0
#: The timeout where an error is expected earlier: ample, since the machine may be busy.
AMPLE_S = 20.0
#: How soon the loss of a rank must be noticed: its connections close, or it is checked after a second.
LOST_S = 3.0
CULPRIT = 1

#: The default arguments: elements, dtype, reduction, root, a key of a tree, rows per rank, characters.
USUAL = {"n": 4, "dtype": torch.float32, "op": "sum", "root": 0, "key": "b", "rows": 2, "text": 1}
#: A text that does not fit into the bytes left to a rank that is short of memory.
LONG, SHORT_OF_BYTES = {"text": 96 << 20}, 64 << 20


def _ones(said: dict[str, Any], times: int = 1) -> torch.Tensor:
    return torch.ones(said["n"] * times, dtype=said["dtype"])


#: By name: the call, with the arguments in ``USUAL``, and the names of those that it uses.
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
            {"a": _ones(said), said["key"]: torch.ones(2)}, op=said["op"], **more
        ),
        "n op key",
    ),
    "an object": (
        lambda size, said, **more: ac.all_gather_object({"text": "x" * said["text"]}, **more),
        "text",
    ),
    "uneven all_to_all": (
        lambda size, said, **more: ac.all_to_all(
            torch.ones(said["rows"] * size),
            input_split_sizes=[said["rows"]] * size,
            output_split_sizes=[said["rows"]] * size,
            **more,
        ),
        "rows",
    ),
}
WAYS = ("asyncio", "trio", "blocking")

#: The places to try it: the backend's name, the options of `initialize`, and whether each rank is told
#: that it is on a separate host.
PLACES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "memory": ("gloo", {"memory": True}, False),
    "gloo": ("gloo", {"memory": False}, False),
    "mpi": ("mpi", {}, False),
    "horovod": ("horovod", {}, False),
    "gloo, hosts": ("gloo", {}, True),
    "mpi, hosts": ("mpi", {}, True),
    "xla": ("xla-tpu", {}, False),
}

Heard = tuple[str, tuple[int, ...], float, str]


def call(me: Rank, operation: str, *, lane: str = "tried", timeout: float = TIMEOUT_S, **other: Any) -> Any:
    """Start the call of a cell; ``other``: arguments that differ from the usual ones."""
    made, _ = OPERATIONS[operation]
    return made(me.size, {**USUAL, **other}, lane=lane, timeout=timeout)


async def hear(me: Rank, work: Callable[[], Any]) -> Heard:
    """Make the call and wait for it. Returns the error, its ranks, the seconds, and its text."""
    start = time.monotonic()
    try:
        begun = work()
        if isinstance(begun, ac.Work):
            await me.get(begun)
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
        ctypes.PyDLL(None).usleep(200_000)  # holds the GIL most of the time


async def _calls_another_lane(me: Rank, operation: str) -> Heard:
    return await hear(me, lambda: call(me, operation, lane="another"))


async def _refuses(me: Rank, _operation: str) -> Heard:
    return await hear(me, lambda: ac.all_reduce(object(), lane="tried"))  # type: ignore[arg-type]


async def _exits_with_1(me: Rank, _operation: str) -> None:
    _await_others(me, "calls")
    os._exit(1)


async def _is_interrupted(me: Rank, _operation: str) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:  # as if it left the program: `finalize` sees the exception
        ac.finalize(abort=True)
    finally:
        signal.signal(signal.SIGINT, before)
    _await_others(me, "has heard")


async def _calls_once_more(me: Rank, operation: str) -> Heard:
    await me.get(call(me, operation))
    _await_others(me, "has heard")
    return await hear(me, lambda: call(me, operation))


async def _forks(me: Rank, operation: str) -> Heard:
    """Fork: the child that inherits the world must not use it, and does not harm it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call(me, operation)
        except ac.AsyncCollError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the child was not refused"
    return await hear(me, lambda: call(me, operation, timeout=AMPLE_S))


async def _has_a_deadline(me: Rank, operation: str) -> Heard:
    """Time out before the others call; neither they nor the call itself are affected."""
    work = call(me, operation, timeout=0.3)
    heard = await hear(me, lambda: work)
    me.show("1 gave up")
    await me.get(work)
    return heard


async def _is_cancelled(me: Rank, operation: str) -> None:
    """Stop waiting; the call stays in flight, and the others get its result."""
    work = call(me, operation)
    with contextlib.suppress(ac.CollectiveTimeoutError):
        work.wait(0.05)
    del work
    me.show("1 gave up")


async def _calls_in_other_order(me: Rank, operation: str) -> Heard:
    other = "barrier" if operation != "barrier" else "all_reduce"
    first = await hear(me, lambda: call(me, other, timeout=AMPLE_S))
    await hear(me, lambda: call(me, operation))
    return first


def _with(**other: Any) -> Callable[[Rank, str], Awaitable[Heard]]:
    async def calls(me: Rank, operation: str) -> Heard:
        return await hear(me, lambda: call(me, operation, timeout=AMPLE_S, **other))

    return calls


async def _calls_another_operation(me: Rank, operation: str) -> Heard:
    other = "barrier" if operation != "barrier" else "all_reduce"
    return await hear(me, lambda: call(me, other, timeout=AMPLE_S))


async def _has_no_memory(me: Rank, operation: str) -> Heard:
    """Send a short text, but have too little memory for those of the others."""
    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[5]) * resource.getpagesize()
    # Not RLIMIT_AS, because threads reserve much address space.
    with _limited(resource.RLIMIT_DATA, used + SHORT_OF_BYTES):
        return await hear(me, lambda: call(me, operation, timeout=AMPLE_S))


# Further conditions on the other ranks


@contextlib.contextmanager
def _limited(what: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    yield
    resource.setrlimit(what, before)


def _without_disk() -> AbstractContextManager[None]:
    return _limited(resource.RLIMIT_FSIZE, 0)


@contextlib.contextmanager
def _without_descriptors() -> Iterator[None]:
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    yield
    for descriptor in taken:
        os.close(descriptor)


@dataclass(frozen=True)
class Fault:
    """``does``: what rank 1 does instead of the call. ``error``: what the others get, within ``seconds``.

    ``own``: what rank 1 itself gets, None if nothing. ``word``: an argument that calls must use to be tried.
    ``names``: whether the error's ``ranks`` name rank 1. ``after``: a sign that the others wait for before
    they call.
    """

    does: Callable[[Rank, str], Awaitable[Any]]
    error: str
    seconds: float
    own: str | None = None
    dies: bool = False
    word: str = ""
    names: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    called: dict[str, Any] = field(default_factory=dict)
    """What the others call that is not as usual."""
    besides: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    after: str = ""
    not_on: str = ""
    """A backend whose launcher ends the job then."""
    of_process: bool = False
    """It befalls all of a process, so no single rank where ranks are its threads."""


FULL = {"check": "full"}
_LATE = TIMEOUT_S + TOLD_S
_LOST, _TIMEOUT, _MISMATCH = "PeerLostError", "CollectiveTimeoutError", "CollectiveMismatchError"
FAULTS: dict[str, Fault] = {
    "kill -9": Fault(_is_killed, _LOST, LOST_S, dies=True, of_process=True),
    "exit 0": Fault(_exits, _LOST, LOST_S, dies=True, not_on="mpi", of_process=True),
    "exit 1": Fault(_exits_with_1, _LOST, LOST_S, dies=True, of_process=True),
    "finalize": Fault(_leaves, _LOST, LOST_S),
    "exception between calls": Fault(_fails, _LOST, LOST_S),
    "Ctrl-C": Fault(_is_interrupted, _LOST, LOST_S, of_process=True),
    "SIGSTOP": Fault(_is_stopped, _TIMEOUT, _LATE, dies=True, of_process=True),
    "skipped call": Fault(_is_late, _TIMEOUT, _LATE),
    "skipped call, disk full": Fault(_is_late, _TIMEOUT, _LATE, besides=_without_disk, of_process=True),
    "skipped call, no descriptors left": Fault(
        _is_late, _TIMEOUT, _LATE, besides=_without_descriptors, of_process=True
    ),
    "stuck in native code": Fault(_is_in_native_code, _TIMEOUT, _LATE, of_process=True),
    "other lane": Fault(_calls_another_lane, _TIMEOUT, _LATE, own=_TIMEOUT),
    "extra call": Fault(_calls_once_more, "", LOST_S, own=_TIMEOUT),
    "deadline": Fault(_has_a_deadline, "", LOST_S, own=_TIMEOUT, after="1 gave up"),
    "cancelled": Fault(_is_cancelled, "", LOST_S, after="1 gave up"),
    "fork": Fault(_forks, "", LOST_S, own="", of_process=True),
    "refused call": Fault(_refuses, "PeerRefusedError", LOST_S, own="PayloadTypeError"),
    "out of memory": Fault(
        _has_no_memory,
        "PeerRefusedError",
        LOST_S,
        own="CollectiveError",
        word="text",
        called=LONG,
        of_process=True,
    ),
}
#: Differing calls, by what differs.
DIFFERENT = {
    "operation": (_calls_another_operation, ""),
    "order": (_calls_in_other_order, ""),
    "shape": (_with(n=5), "n"),
    "dtype": (_with(dtype=torch.int64), "dtype"),
    "reduction": (_with(op="max"), "op"),
    "root": (_with(root=1), "root"),
    "tree": (_with(key="c"), "key"),
    "split": (_with(rows=3), "rows"),
}
for _what, (_does, _word) in DIFFERENT.items():
    for _name, _options in (("", {}), (", check=full", FULL)):
        FAULTS[f"other {_what}{_name}"] = Fault(
            _does, _MISMATCH, LOST_S, own=_MISMATCH, word=_word, names=False, options=_options
        )


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    fault: str
    operation: str
    place: str
    way: str
    size: int

    def __str__(self) -> str:
        return f"{self.fault}-{self.operation}-{self.place}-{self.way}-{self.size}".replace(" ", "_")


def cells(places: tuple[str, ...] = tuple(PLACES)) -> Iterator[Cell]:
    """Yield every fault on each of ``places``, with operations, ways of waiting and sizes in pairs.

    In one place a fault is tried in every other operation, in the next place in the remaining ones.
    """
    for (at, place), (number, (name, fault)) in itertools.product(
        enumerate(PLACES), enumerate(FAULTS.items())
    ):
        backend = PLACES[place][0]
        fitting = [
            one for one, (_, words) in OPERATIONS.items() if not fault.word or fault.word in words.split()
        ]
        if place not in places or fault.not_on == backend or (fault.of_process and backend in THREADED):
            continue
        for turn, operation in enumerate(fitting):
            if turn % 2 == at % 2 or len(fitting) == 1:
                yield Cell(
                    name, operation, place, WAYS[(number + turn // 2) % 3], 2 + (number + turn // 2 + at) % 2
                )


def some(of: list[Cell], most: int) -> list[Cell]:
    """Return at most ``most`` cells: each fault in turn, each time with another operation and way."""
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


def may_have_sent(one: Cell) -> bool:
    """Whether rank 1 may complete before the others call, as a root on MPI does once it has sent."""
    fault = FAULTS[one.fault]
    return (one.operation, fault.word) == ("broadcast", "root") and not fault.options and "mpi" in one.place


async def cell(me: Rank, name: str, operation: str) -> Any:
    """Run the cell on one rank. Returns what the rank got."""
    pids = await me.get(ac.all_gather_object(os.getpid()))
    await me.get(call(me, operation))  # its lane is open on all ranks
    fault = FAULTS[name]
    if me.rank == CULPRIT:
        heard = await fault.does(me, operation)
        _await_others(me, "has heard")
        return heard

    if fault.after:
        me.see(fault.after)
    work = call(me, operation, timeout=TIMEOUT_S if fault.error == _TIMEOUT else AMPLE_S, **fault.called)
    me.show(f"{me.rank} calls")
    with fault.besides():
        heard = await hear(me, lambda: work)
    me.show(f"{me.rank} has heard")
    for rank in _others(me):
        me.see(f"{rank} has heard")
    if name == "SIGSTOP" and me.rank == 0:
        os.kill(pids[CULPRIT], signal.SIGKILL)
    return heard


def told(error: str) -> str:
    """Format an error for the table."""
    return f"`{error}`" if error else "nothing"


def table() -> str:
    """Return the table of docs/faults.md."""
    made = list(cells())
    lines = [
        f"| rank 1 | the others get | within | rank 1 gets | operations | {' | '.join(PLACES)} |",
        "|---|---|---|---|---|" + "---|" * len(PLACES),
    ]
    for name, fault in FAULTS.items():
        mine = [one for one in made if one.fault == name]
        operations = sorted({one.operation for one in mine}, key=list(OPERATIONS).index)
        shown = "all" if len(operations) == len(OPERATIONS) else ", ".join(operations)
        late = fault.error == _TIMEOUT
        within = "" if not fault.error else f"timeout + {TOLD_S:g} s" if late else f"{fault.seconds:g} s"
        own = "-" if fault.own is None else told(fault.own)
        counts = [str(sum(one.place == place for one in mine) or "-") for place in PLACES]
        lines.append(f"| {name} | {told(fault.error)} | {within} | {own} | {shown} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
