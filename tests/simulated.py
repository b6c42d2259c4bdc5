"""Runs a `compositions.Program` in a simulated world, with each interleaving determined by a seed."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import asynccoll as ac
import compositions_run
from asynccoll import host
from asynccoll.health import stalls
from asynccoll.testing import Cancel, Fail, Fault, Interrupt, Kill, Report, StoreLost, network, simulate
from asynccoll.testing.report import leaves
from asynccoll.testing.scheduler import running
from compositions import LONG_RESTS, Call, Program


class SimulatedRank:
    """The part of `ranks.Rank` that a program needs; all ranks share `signs`."""

    backend = "simulated"  # the scheduler assigns threads to ranks

    def __init__(self, rank: int, size: int, signs: set[str], runner: str = "asyncio") -> None:
        self.rank = rank
        self.size = size
        self._signs = signs
        self._runner = runner

    async def get(self, work: Any) -> Any:
        return work.wait() if self._runner == "blocking" else await work

    def at(self, what: str) -> None:
        """Do nothing: the report of a simulation says where it is."""

    def show(self, sign: str) -> None:
        self._signs.add(sign)

    def see(self, sign: str) -> None:
        while sign not in self._signs:
            host.sleep(0.005)

    def shown(self, sign: str) -> bool:
        return sign in self._signs

    def prepare(self, *groups: Sequence[int]) -> bool:
        return True


#: Faults after which calls may fail; after others, each call must return its expected result.
_HURT = (Cancel, Fail, Interrupt, Kill, StoreLost)
#: The errors for a rank that has died or left.
_LOST = (ac.PeerLostError, ac.PeerRefusedError, ac.AbortedError, ac.NotInitializedError)


def complaints(
    program: Program, seed: int, faults: Sequence[Fault] = (), **options: Any
) -> tuple[list[str], Report]:
    """Run the simulation. Returns the complaints of all ranks, and the report."""
    signs: tuple[set[str], ...] = (set(), set())  # of each world
    hurt = _hurt_by(faults, program)
    if hurt:
        program = unwaited(program)
    if any(isinstance(fault, StoreLost) for fault in faults):
        program = all_waiting(program)
    told: dict[int, list[Exception]] = {}
    left: list[str] = []

    def lives(rank: int) -> Iterator[compositions_run.Run]:
        """Yield the run of each world, one after the other."""
        for life in range(2 if options.get("again") and not hurt else 1):
            if life:
                ac.finalize()
                left.extend([] if faults else _left_by(rank))
                ac.initialize(timeout=20.0)
            me: Any = SimulatedRank(rank, program.ranks, signs[life])
            one = compositions_run.Run(me, program, hurt)
            told[rank] = one.told
            yield one

    async def main(rank: int) -> list[str]:
        return [found for one in lives(rank) for found in await one.whole()]

    def blocking(rank: int) -> list[str]:
        return [found for one in lives(rank) for found in one.blocking()]

    noticed: list[str] = []
    ours = ("again", "warned")
    given = {name: value for name, value in options.items() if name not in ours} | {"timeout": 200.0}
    with pytest.MonkeyPatch.context() as patched:  # ``patch.dict`` would set the whole environment anew
        patched.setattr(threading, "excepthook", lambda args: noticed.append(_thrown(args)))
        if not options.get("warned", True):
            patched.setenv(stalls.VARIABLE, "0")
        report = simulate(
            blocking if program.loop == "none" else main,
            world_size=program.ranks,
            seed=seed,
            loop=program.loop,
            faults=faults,
            **given,
        )
    found = noticed + left
    found += [one for each in report.results.values() for one in each]
    found += [
        f"[crash] rank {rank}: {error!r}"
        for rank, error in report.errors.items()
        if not (hurt and all(isinstance(one, (*hurt, *_OWN)) for one in leaves(error)))
    ]
    raised = [(rank, error) for rank, errors in told.items() for error in errors]
    found += [one for rank, error in [*report.errors.items(), *raised] for one in untrue(rank, error, report)]
    if [*map(type, faults)] == [Fail] and not _may_part(program):
        found += unheard([*report.errors.items(), *raised])
    if report.deadlock is not None:
        found.append(f"[hang] {report.deadlock}")
    found += [f"[mismatch] {one}" for one in report.mismatches]
    calm = not faults and not any(call.refusable for call in program.calls)
    worlds = 2 if options.get("again") else 1
    found += busy(program, report, worlds, calm=calm)
    if calm and not any(call.rests >= LONG_RESTS for call in program.calls):
        in_memory = options.get("transport") == "memory" and options.get("nodes", 1) == 1
        found += late(program, report, worlds, in_memory=in_memory)
    return found, report


#: The threads that a process keeps for its next world.
_KEPT = ("asynccoll-progress", "asynccoll-future")


def _left_by(rank: int) -> list[str]:
    """Complain about threads and beacons that a rank has not ended although it left the world."""
    scheduler = running()
    assert scheduler is not None
    threads = [one.name for one in scheduler.threads if one.rank == rank]
    left = [name for name in threads if name.startswith("asynccoll-") and not name.startswith(_KEPT)]
    left += ["its beacon"] * network.current.network.is_lit(rank)
    return [f"[left] rank {rank} has left a world, and not ended {', '.join(left)}"] if left else []


#: The longest time of a message between simulated ranks; a request to the store takes less.
_LONGEST_MESSAGE_SECONDS = 2e-3
#: Longer than the library's naps between polls (8 ms) and the deadlines in programs (20 ms), but shorter than
#: the waits that time out only as a safeguard (100 ms and more).
_IN_VAIN_SECONDS = 15 * _LONGEST_MESSAGE_SECONDS
#: The ways of waiting that wait only once the task has issued all of its calls.
_AT_THE_END = ("later", "gathered", "dropped", "threaded")
#: The most switch points per call of a rank, and the most where something goes wrong, which lasts seconds.
#: Most calls have 100; with a switch point before each statement of the progress thread, some had 2,500.
_CALL_STEPS, _WORST_STEPS = 10_000, 50_000
#: The most seconds per call: its messages, one or two lanes to open, and the pauses of those that poll.
_CALL_SECONDS = 25 * _LONGEST_MESSAGE_SECONDS


def busy(program: Program, report: Report, lives: int, *, calm: bool) -> list[str]:
    """Complain about too many steps: something polls without sleeping."""
    steps = _CALL_STEPS if calm else _WORST_STEPS
    most = lives * (len(program.calls) + 1) * program.ranks * steps
    return [f"[busy] it took {report.steps} steps; at most {most} were due"] if report.steps > most else []


def late(program: Program, report: Report, lives: int, *, in_memory: bool) -> list[str]:
    """Complain if a program without faults takes longer than its messages do: a wakeup was lost.

    Every wait should be ended by the event waited for. After a lost wakeup the results are right, only late.
    """
    most = lives * (len(program.calls) + 1) * _CALL_SECONDS
    found = []
    # A thread that issues several calls and waits for the last one first has then waited for all of them. In
    # memory, however, each movement wakes it, if only to check.
    together = max(
        sum(call.wait in _AT_THE_END or call.coalesced for call in task.calls) for task in program.tasks
    )
    longer = 0.0 if in_memory else together * _CALL_SECONDS / 2
    if report.longest_timeout > _IN_VAIN_SECONDS + longer:
        found.append(f"[late] a thread waited for {report.longest_timeout:.4f} s, in vain")
    if report.virtual_seconds > most:
        found.append(f"[late] it took {report.virtual_seconds:.3f} s; at most {most:.3f} s were due")
    return found


def _thrown(args: Any) -> str:
    """Format the exception that ended a thread that nothing waits for."""
    told = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback, limit=-6)
    return f"[thread] {''.join(told)}"


#: The exceptions by which a rank's user ends it.
_OWN: tuple[type[BaseException], ...] = (KeyboardInterrupt, *compositions_run.CANCELLED)


def _hurt_by(faults: Sequence[Fault], program: Program) -> tuple[type[Exception], ...]:
    """Return the errors that calls may raise because of the faults."""
    if not any(isinstance(fault, _HURT) for fault in faults):
        return ()
    if any(isinstance(fault, StoreLost) for fault in faults):
        return (ac.AsyncCollError,)
    if any(isinstance(fault, Fail) for fault in faults):
        return (ac.CollectiveError,)
    return (*_LOST, ac.CollectiveTimeoutError) if _may_part(program) else _LOST


def _may_part(program: Program) -> bool:
    """Whether survivors may make different calls, and wait for each other until they time out.

    A call that fails cancels its siblings in the task group or scope: on one rank before they call, on
    another afterwards, also in groups without the lost rank. In such a group, the loss does not end the wait.
    """
    return len(program.tasks) > 1 or any(call.around for task in program.tasks for call in task.calls)


def unwaited(program: Program) -> Program:
    """Return the same program without waits for signs of other ranks, which may never come."""
    tasks = tuple(
        replace(
            task,
            calls=tuple(
                replace(_later(call) if call.wait.endswith("cancelled") else call, told=False)
                for call in task.calls
            ),
        )
        for task in program.tasks
    )
    return replace(program, tasks=tasks)


def _later(call: Call) -> Call:
    return replace(call, wait="later")


#: The ways that poll or use a callback instead of waiting: they have no deadline.
_NO_WAITS = ("result", "exception", "callback")


def all_waiting(program: Program) -> Program:
    """Return the same program, but with real waits: without a store, only deadlines reveal a lost peer."""
    tasks = tuple(
        replace(task, calls=tuple(_later(call) if call.wait in _NO_WAITS else call for call in task.calls))
        for task in program.tasks
    )
    return replace(program, tasks=tasks)


def untrue(rank: int, error: BaseException, report: Report) -> list[str]:
    """Complain if the error names ranks as lost that were not."""
    gone = {*report.killed, *report.errors, *report.results}
    named = [one for one in leaves(error) if isinstance(one, ac.PeerLostError)]
    return [
        f"[untrue] rank {rank}: {one!r}" for one in named if rank in one.ranks or not set(one.ranks) <= gone
    ]


def unheard(errors: Iterable[tuple[int, BaseException]]) -> list[str]:
    """Complain about timeouts where a call failed on one rank: the others must hear of it at once."""
    return [
        f"[unheard] rank {rank}: {one!r}"
        for rank, error in errors
        for one in leaves(error)
        if isinstance(one, ac.CollectiveTimeoutError)
    ]


def script(program: Program, seed: int) -> str:
    """Return a script that replays the run, with ``tests`` on PYTHONPATH."""
    return (
        "from compositions import from_json\nfrom explore_simulated import wrong\n\n"
        f"print(*wrong(from_json('''{program.to_json()}'''), {seed}), sep='\\n')\n"
    )
