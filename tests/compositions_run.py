"""Runs a `compositions.Program` on one rank, and reports what was wrong.

Faults are recorded rather than raised, so that the other ranks do not lose a peer. Results are compared right
after the wait, and again at the end of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import anyio
import torch
from anyio.lowlevel import checkpoint

import asynccoll as ac
import compositions_expected as expected
import oracle
from asynccoll import host
from asynccoll.ops.scopes import current_lane
from asynccoll.testing.report import leaves
from compositions import MODES, Call, Program, Task, from_json
from compositions_called import issue
from compositions_compared import Record, backward, compare, raised, unchanged
from compositions_modes import ENTER, Modes, modes_now
from compositions_waited import Looped, Threaded, Waiter, Ways, driven
from patience import patient
from ranks import Place, Rank
from worlds import THREADED

#: What a rank raises for a call that was not made: its own, or a peer's.
REFUSALS = (*expected.REFUSED, ac.PeerRefusedError)
#: The exceptions that cancel a task.
CANCELLED: tuple[type[BaseException], ...] = (asyncio.CancelledError,)
with contextlib.suppress(ImportError):
    import trio

    CANCELLED = (*CANCELLED, trio.Cancelled)
#: A program takes milliseconds, but peers' refusals are checked for only once a second.
HANG_SECONDS = 10.0
REFUSAL_SECONDS = 3.0
#: The ways of waiting in which a task issues further calls before it waits.
_LATER = ("later", "dropped", "gathered", "threaded")


@dataclass
class State:
    """A task, and the modes and the lane that it must be in."""

    name: str
    ways: Ways
    modes: Modes = field(default_factory=Modes)
    lanes: list[str] = field(default_factory=lambda: ["default"])
    #: The works issued in each open scope.
    scopes: list[list[Any]] = field(default_factory=list)
    later: list[tuple[Call, Record]] = field(default_factory=list)

    def child(self, name: str) -> State:
        """Return the state of a child task, on its own lane."""
        return replace(self, name=f"{self.name}/{name}", lanes=[f"{self.lanes[-1]}/{name}"])


class Run:
    """One program on one rank."""

    def __init__(self, me: Rank, program: Program, hurt: tuple[type[Exception], ...] = ()) -> None:
        """``hurt``: what calls may raise because a rank dies or is cancelled; any results must be right."""
        self.hurt = hurt
        self.ways: Ways = Threaded() if program.loop == "none" else Looped(program.loop)
        #: The exceptions that calls have raised here.
        self.told: list[Exception] = []
        self.me = me
        self.program = program
        self.complaints: list[str] = []
        self.records: dict[tuple[int, int], Record] = {}
        self.shared = ac.lane("shared")
        self.shared_scope = ac.scope()
        #: For two tasks on one lane: the second waits until the first has begun, the first until it has
        #: ended.
        self.begun, self.ended = anyio.Event(), anyio.Event()
        #: The lanes on which this rank has made calls, with their groups.
        self.used: set[tuple[tuple[int, ...], str]] = {((), "default")}
        for task_index, task in enumerate(program.tasks):
            for coalesced, calls in groupby(enumerate(task.calls), lambda pair: pair[1].coalesced):
                block = list(calls)
                taken_along = coalesced and any(call.refusable for _, call in block)
                for index, call in block:
                    self._prepare(task_index, index, call, taken_along)

    def _prepare(self, task_index: int, index: int, call: Call, taken_along: bool) -> None:
        members = call.group or tuple(range(self.program.ranks))
        if self.me.rank not in members:
            return
        case = expected.case(call, members.index(self.me.rank), len(members))
        if self.program.start == "crossed" and task_index == 1:
            case.must_raise = (ac.LaneOrderError,)
        if self.hurt:
            case.may_raise = (*case.may_raise, *self.hurt)
        if self.program.one_sided or taken_along:
            case.may_raise = (*case.may_raise, ac.PeerRefusedError)
        label = f"task {task_index} call {index}: {call.operation} of {call.payload}"
        self.records[task_index, index] = Record(label, case, oracle.snapshot(case.x), self.me.rank)

    def _raised(self, record: Record, error: Exception) -> None:
        self.told.append(error)
        raised(self.complain, record, error)

    def _is_told(self, error: BaseException) -> bool:
        """Whether the error only says that a rank died or was cancelled."""
        return bool(self.hurt) and all(isinstance(one, (*self.hurt, *CANCELLED)) for one in leaves(error))

    def complain(self, kind: str, text: str) -> None:
        self.complaints.append(f"[{kind}] rank {self.me.rank}: {text}")

    # The tasks

    async def whole(self) -> list[str]:
        """Run the program in a task, compare all results again, and check that the lanes are in step."""
        refusable = sum(call.refusable for call in self.program.calls)
        seconds = patient(HANG_SECONDS + REFUSAL_SECONDS * refusable)
        # If something is lost, a call may be waited for in three places, in each until its deadline of 20 s.
        with anyio.move_on_after(8 * HANG_SECONDS if self.hurt else seconds) as limit:
            await self._whole()
        if limit.cancelled_caught:
            out = [record.label for record in self.records.values() if not record.outcome]
            self.complain("hang", f"not done: {out}")
        return self.complaints

    def blocking(self) -> list[str]:
        """Do the same in a plain thread."""
        driven(self._whole())
        return self.complaints

    async def _whole(self) -> None:
        try:
            await self._tasks()
            await self._afterwards()
        except Exception as error:
            if self._is_told(error):
                raise
            self.complain("crash", traceback.format_exc(limit=-8))
        if modes_now() != Modes():
            self.complain("modes", f"{modes_now()} are left behind")

    async def _tasks(self) -> None:
        program = self.program
        indexed = list(enumerate(program.tasks))
        if program.turned and self.me.rank % 2:
            indexed.reverse()
        state = State("main", self.ways)
        match program.start:
            case "alone":
                await self._task(state, 0, program.tasks[0])
            case "task group":
                async with ac.create_task_group() as tasks:
                    with contextlib.ExitStack() as stack:
                        for name in program.inherited:
                            stack.enter_context(self._mode(state, name))
                        for index, task in indexed:
                            child = State(f"t{index}", self.ways, state.modes, [f"default/t{index}"])
                            tasks.start_soon(self._task, child, index, task, name=f"t{index}")
                    self._check(state, "after starting")
                self._check(state, "after the task group")
            case "lanes":
                async with anyio.create_task_group() as plain:
                    for index, task in indexed:
                        plain.start_soon(self._on_own_lane, index, task)
            case "crossed":
                async with anyio.create_task_group() as plain:
                    plain.start_soon(self._task, State("t0", self.ways), 0, program.tasks[0])
                    await self.begun.wait()
                    plain.start_soon(self._task, State("t1", self.ways), 1, program.tasks[1])
            case "threads":
                errors: list[Exception] = []
                threads = [
                    host.Thread(target=self._begin_thread(), args=(index, task, errors), daemon=True)
                    for index, task in indexed
                ]
                for thread in threads:
                    thread.start()
                await self.ways.until(lambda: not any(thread.is_alive() for thread in threads))
                for error in errors:
                    raise error

    async def _on_own_lane(self, index: int, task: Task, ways: Ways | None = None) -> None:
        with ac.lane(f"own{index}"):
            await self._task(State(f"t{index}", ways or self.ways, lanes=[f"own{index}"]), index, task)

    def _begin_thread(self) -> Callable[..., None]:
        """Return what a plain thread runs. If ranks are threads, only a copied context gives it a rank."""
        if self.me.backend in THREADED:
            return partial(contextvars.copy_context().run, self._in_thread)
        return self._in_thread

    def _in_thread(self, index: int, task: Task, errors: list[Exception]) -> None:
        try:
            driven(self._on_own_lane(index, task, Threaded()))
        except Exception as error:  # raised by the code that waits for the thread
            errors.append(error)

    async def _task(self, state: State, index: int, task: Task) -> None:
        try:
            self._check(state, "at the start")
            await self._task_inside(state, index, task)
        except Exception as error:
            if self._is_told(error):
                raise
            self.complain("crash", f"{state.name}: {traceback.format_exc(limit=-8)}")
        self._check(state, "at the end")
        if self.program.start == "crossed":
            if index == 1:
                self.ended.set()
            self.begun.set()

    async def _task_inside(self, state: State, index: int, task: Task) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name in task.around:
                await self._enter(stack, state, name)
            numbered = list(enumerate(task.calls))
            for coalesced, calls in groupby(numbered, lambda pair: pair[1].coalesced):
                if coalesced:
                    await self._block(state, index, list(calls))
                    continue
                for number, call in calls:
                    await self._call(state, index, number, call)
                    if self.program.start == "crossed" and (index, number) == (0, 0):
                        self.begun.set()
                        await self.ended.wait()
            await self._wait_for_the_rest(state)

    async def _block(self, state: State, index: int, calls: list[tuple[int, Call]]) -> None:
        try:
            with ac.coalescing():
                for number, call in calls:
                    await self._call(state, index, number, call)
        except REFUSALS:
            if not any(call.refusable for _, call in calls):
                raise
        for call, record in state.later:
            if call.coalesced and call.wait not in _LATER and not record.outcome:
                await self._wait(state, call, record)

    async def _wait_for_the_rest(self, state: State) -> None:
        together = [
            (call, record) for call, record in state.later if call.wait == "gathered" and not record.outcome
        ]
        if together:
            await state.ways.results(together[0][0], [record for _, record in together])
        for call, record in state.later:
            if call.wait == "dropped":
                continue
            if call.wait == "gathered" and not record.work.done() and not self.hurt:
                self.complain("not done", f"{record.label} was waited for, with others")
            await self._wait(state, call, record, again=bool(record.outcome))

    # Blocks

    @contextlib.contextmanager
    def _mode(self, state: State, name: str) -> Iterator[None]:
        enter, change = ENTER[name]
        before = state.modes
        with enter():
            state.modes = change(before)
            yield
        state.modes = before

    @contextlib.contextmanager
    def _lane(self, state: State, name: str, block: Any) -> Iterator[None]:
        state.lanes.append(name)
        with block:
            yield
        state.lanes.pop()

    @contextlib.asynccontextmanager
    async def _scope(self, state: State, block: Any) -> AsyncIterator[None]:
        inside: list[Any] = []
        state.scopes.append(inside)
        try:
            async with state.ways.scoped(block):
                yield
        except REFUSALS:  # by a call that only the scope waited for
            if not any(call.refusable for call in self.program.calls):
                raise
        state.scopes.pop()
        for work in inside:
            if work.pending:
                self.complain("scope", f"{state.name} left a scope with {work!r} out")

    async def _enter(self, stack: contextlib.AsyncExitStack, state: State, name: str) -> None:
        if name in MODES:
            stack.enter_context(self._mode(state, name))
        elif name == "scope":
            await stack.enter_async_context(self._scope(state, ac.scope()))
        elif name == "shared scope":
            await stack.enter_async_context(self._scope(state, self.shared_scope))
        elif name == "closed lane":
            own = f"closed {state.name}"
            stack.callback(ac.close_lane, own)
            stack.enter_context(self._lane(state, own, ac.lane(own)))
        elif name == "shared lane":
            stack.enter_context(self._lane(state, "shared", self.shared))
        else:
            own = f"side {state.name}"
            stack.enter_context(self._lane(state, own, ac.lane(own)))

    def _check(self, state: State, where: str) -> None:
        """Complain unless the task is in the modes, and on the lane, that it has entered."""
        now = modes_now()
        if now != state.modes:
            self.complain("modes", f"{state.name} {where}: {now}, not {state.modes}")
        if current_lane() != state.lanes[-1]:
            self.complain("lane", f"{state.name} {where}: on {current_lane()!r}, not {state.lanes[-1]!r}")

    # A call

    async def _pause(self, state: State, call: Call, where: str) -> None:
        for _ in range(call.pauses):
            await state.ways.checkpoint()
            self._check(state, where)

    async def _call(self, state: State, index: int, number: int, call: Call) -> None:
        record = self.records.get((index, number))
        # Without isolation between tasks, modes are entered around the call only.
        ours = self.program.start not in ("lanes", "crossed")
        brief = [name for name in call.around if name in MODES and not ours]

        async def body(state: State) -> None:
            await self._pause(state, call, "before the call")
            if call.rests:
                await state.ways.rest(call.rest_seconds(self.me.rank))
            if record is not None:
                await self._make(state, call, record, brief)
                self._wait_by_thread(call, record, self.program.tasks[index].calls[number + 1 :])
            await self._pause(state, call, "after the call")

        await self._inside(state, [name for name in call.around if name not in brief], body)

    async def _inside(
        self, state: State, around: list[str], body: Callable[[State], Awaitable[None]]
    ) -> None:
        """Run ``body`` in these blocks; what is inside a child block runs in a separate task."""
        async with contextlib.AsyncExitStack() as stack:
            for place, name in enumerate(around):
                inner = around[place + 1 :]
                if name == "child":
                    child = state.child(f"child of {state.name.replace('/', ' ')}")
                    async with ac.create_task_group() as tasks:
                        tasks.start_soon(self._inside, child, inner, body, name=child.name.rpartition("/")[2])
                elif name == "isolated":
                    await ac.isolated(self._inside(replace(state), inner, body))
                else:
                    await self._enter(stack, state, name)
                    continue
                self._check(state, f"after {name}")
                return
            await body(state)

    async def _make(self, state: State, call: Call, record: Record, brief: list[str]) -> None:
        await self._wait_for_the_cancelled(call, record)
        await self._wait_to_be_told(state, call)
        with contextlib.ExitStack() as stack:
            for name in brief:
                stack.enter_context(self._mode(state, name))
            self._check(state, "at the call")
            record.recorded = state.modes.grad and bool(record.case.inputs)
            try:
                if call.wait == "scope cancelled" and self._is_root(call) and state.modes == Modes():
                    await self._scope_cancelled(state, call, record)
                else:
                    record.work = self._issue(state, call, record)
            except Exception as error:
                self._raised(record, error)
                return
            if f"lane {self._lane_of(state)!r}" not in (told := repr(record.work)) and "lane" in told:
                self.complain("lane", f"{record.label} went to {told}, not to {self._lane_of(state)!r}")
        for inside in state.scopes:
            inside.append(record.work)
        if call.wait == "dropped":
            record.work.detach()
        if call.wait in _LATER or (call.coalesced and call.wait != "now"):
            state.later.append((call, record))
            return
        await self._wait(state, call, record)
        if call.wait == "twice":
            state.later.append((call, record))

    def _lane_of(self, state: State) -> str:
        return next(name for name in reversed(state.lanes) if name != "shared")

    def _issue(self, state: State, call: Call, record: Record) -> Any:
        self.used.add((call.group, self._lane_of(state)))
        # Other tasks enter the shared lane, too, so no task may issue on it.
        lane = self._lane_of(state) if state.lanes[-1] == "shared" else None
        return issue(call, record, self.program.ranks, lane)

    # Waiting

    def _sign(self, record: Record) -> str:
        return record.label.partition(":")[0]

    def _is_root(self, call: Call) -> bool:
        members = call.group or tuple(range(self.program.ranks))
        return members[call.root % len(members)] == self.me.rank

    async def _wait_for_the_cancelled(self, call: Call, record: Record) -> None:
        """If a waiter is cancelled, let its peers call only afterwards, so the work cannot complete early."""
        if not call.wait.endswith("cancelled") or call.coalesced:
            return
        if not self._is_root(call):
            await self.ways.until(lambda: self.me.shown(self._sign(record)))

    def _wait_by_thread(self, call: Call, record: Record, following: Sequence[Call]) -> None:
        """Have a thread wait for the work, unless this rank must not wait before a ``told`` call."""
        elsewhere = any(one.told and self._is_root(one) for one in following)
        if call.wait == "threaded" and not record.outcome and not elsewhere:
            sign = f"{self._sign(record)} got by {self.me.rank}"
            works = [record.work] if record.sent is None else [record.work, record.sent]
            record.waiter = Waiter(works, lambda: self.me.show(sign))

    async def _wait_to_be_told(self, state: State, call: Call) -> None:
        """Before a ``told`` call of the root, wait until the threads of all other ranks have their results.

        They must get these although nothing waits here.
        """
        if not call.told or not self._is_root(call):
            return
        before = [self._sign(record) for one, record in state.later if one.wait == "threaded"]
        others = [rank for rank in range(self.me.size) if rank != self.me.rank]
        signs = [f"{sign} got by {rank}" for sign in before for rank in others]
        await state.ways.until(lambda: all(map(self.me.shown, signs)))

    async def _cancelled(self, call: Call, record: Record) -> None:
        if call.coalesced or not self._is_root(call):
            return
        waiting = anyio.Event()

        async def waiter() -> None:
            waiting.set()
            await record.work

        if self.program.loop == "asyncio" and call.seed % 2:
            task = asyncio.create_task(waiter())
            await waiting.wait()
            await checkpoint()
            task.cancel()
            await asyncio.wait([task])
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(waiter)
                await waiting.wait()
                await checkpoint()
                tasks.cancel_scope.cancel()
        self.me.show(self._sign(record))

    async def _scope_cancelled(self, state: State, call: Call, record: Record) -> None:
        """Cancel a task in a scope, and again while it leaves the scope; only then do the peers call."""
        issued = anyio.Event()
        refusals: list[Exception] = []

        async def inside() -> None:
            async with ac.scope():
                try:
                    record.work = self._issue(state, call, record)
                except Exception as error:
                    refusals.append(error)
                issued.set()
                await anyio.sleep_forever()

        async def cancelled_twice(cancel: Callable[[], object]) -> None:
            await issued.wait()
            for _ in range(2):
                await checkpoint()
                cancel()
                await checkpoint()
            self.me.show(self._sign(record))

        if self.program.loop == "asyncio":
            task = asyncio.create_task(inside())
            await cancelled_twice(task.cancel)
            await asyncio.wait([task])
        else:
            scope = anyio.CancelScope()

            async def inside_scope() -> None:
                with scope:
                    await inside()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(inside_scope)
                await cancelled_twice(scope.cancel)
        if refusals:
            raise refusals[0]
        if not record.work.done():
            self.complain("scope", f"{record.label}: a scope that was cancelled was left with it out")

    async def _wait(self, state: State, call: Call, record: Record, again: bool = False) -> None:
        if record.outcome == "raised":
            return
        with contextlib.ExitStack() as stack:
            if call.waited_in:
                stack.enter_context(self._mode(state, call.waited_in))
            try:
                result = await self._result(state, call, record)
                if record.sent is not None:
                    await state.ways.got(record.sent)
            except Exception as error:
                self._raised(record, error)
                return
            self._check(state, "after waiting")
        if again and result is not record.result:
            self.complain("twice", f"{record.label}: another object the second time")
        record.result, record.outcome = result, "value"
        compare(self.complain, record, "at once")

    async def _result(self, state: State, call: Call, record: Record) -> Any:
        match call.wait:
            case "cancelled":
                await self._cancelled(call, record)
            case "scope cancelled":
                self.me.show(self._sign(record))
        return await state.ways.result(call, record, self.complain)

    # After the tasks

    async def _afterwards(self) -> None:
        for record in self.records.values():
            if record.outcome == "value":
                compare(self.complain, record, "when all was over")
            unchanged(self.complain, record)
        if self.hurt:
            return
        if await self._all_well() and not self.program.one_sided:
            for record in self.records.values():
                backward(self.complain, record)
        await self._in_step()

    async def _all_well(self) -> bool:
        """Whether no rank has complained: backward communicates, and would hang if a rank did not run it."""
        self.me.show(f"{'bad' if self.complaints else 'well'} {self.me.rank}")
        everybody = range(self.me.size)
        await self.ways.until(
            lambda: all(self.me.shown(f"well {rank}") or self.me.shown(f"bad {rank}") for rank in everybody)
        )
        return all(self.me.shown(f"well {rank}") for rank in everybody)

    async def _in_step(self) -> None:
        """Complain unless each lane that was used reduces correctly, once all refusals are settled there."""
        refusable = sum(call.refusable for call in self.program.calls)
        for group, name in sorted(self.used):
            for attempt in range(refusable + 1):
                if await self._agreed(group, name, attempt):
                    break
            else:
                self.complain("out of step", f"{name} of {group or 'all'}: refused after all refusals")

    async def _agreed(self, group: tuple[int, ...], name: str, attempt: int) -> bool:
        """Whether all ranks got a result, which is also compared."""
        members = group or tuple(range(self.me.size))
        sign = f"{name} {group} {attempt}".replace("/", " of ")
        try:
            got = await self.ways.got(
                ac.all_reduce(torch.tensor([self.me.rank + attempt]), lane=name, group=list(group) or None)
            )
        except ac.PeerRefusedError:
            self.me.show(f"{sign} refused {self.me.rank}")
        else:
            self.me.show(f"{sign} there {self.me.rank}")
            if got.tolist() != [want := sum(members) + attempt * len(members)]:
                self.complain("out of step", f"{name} of {members}: {got.tolist()}, not {[want]}")
        said = [f"{sign} {what}" for what in ("refused", "there")]
        await self.ways.until(
            lambda: all(any(self.me.shown(f"{one} {rank}") for one in said) for rank in members)
        )
        return all(self.me.shown(f"{said[1]} {rank}") for rank in members)


def run(me: Rank, text: str) -> list[str]:
    """Run the program. Returns what was wrong on this rank.

    It runs on a separate thread, whose end discards any modes that tasks have left behind.
    """
    program = from_json(text)
    for group in sorted({call.group for call in program.calls if call.group}):
        me.prepare(group)
    one = Run(me, program)
    whole: Callable[[], list[str]] = partial(anyio.run, one.whole, backend=program.loop)
    if program.loop == "none":
        whole = one.blocking
    complaints: list[str] = []
    inside = contextvars.copy_context()
    thread = threading.Thread(target=lambda: complaints.extend(inside.run(whole)), daemon=True)
    thread.start()
    thread.join()
    return complaints


def main(text: str) -> None:
    """Run the program as a script, started by ``asynccoll run``."""
    program = from_json(text)
    ac.initialize(timeout=20)
    place = Place(ac.backend(), ac.get_rank(), ac.get_world_size())
    signs = Path(ac.broadcast_object(tempfile.mkdtemp()).wait())
    me = Rank(place, program.loop, signs, partial(print, file=sys.stderr))
    complaints = run(me, text)
    print("\n".join(complaints) or f"rank {place.rank}: as it must be")
    ac.finalize()
