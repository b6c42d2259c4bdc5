"""Calls that some rank refuses, among others: right or a typed error everywhere, never wrong, never a hang.

Every call sends numbers that encode its place and its rank, so that a result mixed from two calls shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import random
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asynccoll as ac
import asynccoll.payload.messages
import oracle
import worlds
from asynccoll import host
from asynccoll.backends.serial.backend import SerialBackend
from asynccoll.host.helpers import Helpers
from asynccoll.host.store import enlist, values_of_listed
from asynccoll.order.cut import Refusal, Verdict
from asynccoll.order.lane import Lane
from asynccoll.order.operation import Estimate, Operation
from asynccoll.runtime import process as runtime
from asynccoll.testing import explore, simulate
from asynccoll.testing.transport import _Communicator
from asynccoll.transport.completion import READY, Completion, Promise, Ready, Transfer
from asynccoll.waiting.work import Work
from asynccoll.world.context import Context, Identity
from patience import patient
from ranks import Rank, raising
from worlds import World

#: The latency of a store on another continent.
REQUEST_SECONDS = 0.0005
#: How many programs one run of the property test draws; by hand, many more.
DRAWS = int(os.environ.get("ASYNCCOLL_TEST_REFUSAL_DRAWS", "2"))
SEED = int(os.environ.get("ASYNCCOLL_TEST_SEED", "0"))

_labels = iter(range(1_000_000))


class Slow:
    """A store each of whose requests takes a while."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._store, name)

        def slowly(*args: Any) -> Any:
            time.sleep(REQUEST_SECONDS)  # simulated latency, not a way to wait
            return request(*args)

        return slowly


@contextlib.contextmanager
def slow_store() -> Iterator[None]:
    """This rank's requests to the store take half a millisecond each."""
    clients = runtime.current().clients
    assert clients is not None
    real = clients.borrow

    @contextlib.contextmanager
    def borrow() -> Iterator[Any]:
        with real() as store:
            yield Slow(store)

    clients.borrow = borrow  # type: ignore[method-assign]
    try:
        yield
    finally:
        del clients.borrow


# ---------------------------------------------------------------- the calls and their results


def said(place: int, rank: int) -> int:
    """Return the number that ``rank`` sends in its call at ``place``."""
    return 1000 * place + rank + 1


def total(place: int, size: int) -> int:
    return sum(said(place, rank) for rank in range(size))


@dataclass(frozen=True)
class Kind:
    """A collective: how to call it, and its result."""

    call: Callable[..., Any]
    want: Callable[[int, int], Any]


def of_tensor(place: int, me: Rank, **how: Any) -> Any:
    return ac.all_reduce(torch.tensor([said(place, me.rank)]), **how)


def of_tree(place: int, me: Rank, **how: Any) -> Any:
    mine = said(place, me.rank)
    return ac.all_reduce({"a": torch.tensor([mine]), "b": [mine, torch.tensor([2.0 * mine])]}, **how)


def of_objects(place: int, me: Rank, **how: Any) -> Any:
    return ac.all_gather_object((place, me.rank, "x" * (600 * (place % 2))), **how)


KINDS = {
    "tensor": Kind(of_tensor, lambda place, size: torch.tensor([total(place, size)])),
    "number": Kind(
        lambda place, me, **how: ac.all_reduce(said(place, me.rank), **how),
        total,
    ),
    "gather": Kind(
        lambda place, me, **how: ac.all_gather(torch.tensor([said(place, me.rank)]), **how),
        lambda place, size: torch.tensor([said(place, rank) for rank in range(size)]),
    ),
    "first": Kind(
        lambda place, me, **how: ac.broadcast(torch.tensor([said(place, me.rank)]), src=0, **how),
        lambda place, size: torch.tensor([said(place, 0)]),
    ),
    "last": Kind(
        lambda place, me, **how: ac.broadcast(torch.tensor([said(place, me.rank)]), src=me.size - 1, **how),
        lambda place, size: torch.tensor([said(place, size - 1)]),
    ),
    "tree": Kind(
        of_tree,
        lambda place, size: {
            "a": torch.tensor([total(place, size)]),
            "b": [total(place, size), torch.tensor([2.0 * total(place, size)])],
        },
    ),
    "objects": Kind(
        of_objects,
        lambda place, size: [(place, rank, "x" * (600 * (place % 2))) for rank in range(size)],
    ),
}


@dataclass
class Program:
    """The same calls on every rank; some ranks refuse some of them."""

    kinds: list[str]
    refused: dict[int, set[int]] = field(default_factory=dict)  # rank -> places
    window: dict[int, int] = field(default_factory=dict)  # rank -> its calls in flight before it awaits
    timeouts: set[int] = field(default_factory=set)  # places whose waiters time out at first
    slow: bool = True


async def run_program(me: Rank, given: dict[str, Any], name: str) -> list[str]:
    """Return the outcome of each call on this rank: right, lost or refused."""
    program = Program(**given)
    with slow_store() if program.slow else contextlib.nullcontext():
        outcomes = await _run_program(me, program, name)
    ac.close_lane(name)
    return outcomes


async def _run_program(me: Rank, program: Program, name: str) -> list[str]:
    outcomes: dict[int, str] = {}
    out: list[tuple[int, Any]] = []
    mine = program.refused.get(me.rank, set())
    for place, kind in enumerate(program.kinds, 1):
        if place in mine:
            with raising(ac.InvalidArgumentError, "timeout"):
                KINDS[kind].call(place, me, lane=name, timeout=-1)
            outcomes[place] = "refused"
        else:
            timeout = 0.002 if place in program.timeouts else None
            out.append((place, KINDS[kind].call(place, me, lane=name, timeout=timeout)))
        while len(out) > program.window.get(me.rank, 1) - 1:
            await _outcome(me, program, *out.pop(0), outcomes)
    for place, work in out:
        await _outcome(me, program, place, work, outcomes)
    for turn in range(len(program.kinds) + 1, len(program.kinds) + 3):
        work = of_tensor(turn, me, lane=name)
        with contextlib.suppress(ac.PeerRefusedError):  # if it was lost with a refused call
            oracle.same(await me.get(work), torch.tensor([total(turn, me.size)]))
    if not any(len(program.kinds) in places for places in program.refused.values()):
        oracle.same(await me.get(of_tensor(0, me, lane=name)), torch.tensor([total(0, me.size)]))
    return [outcomes[place] for place in sorted(outcomes)]


async def _outcome(me: Rank, program: Program, place: int, work: Any, outcomes: dict[int, str]) -> None:
    ends = time.monotonic() + patient(30)
    while place not in outcomes:
        try:
            got = await me.get(work)
        except ac.PeerRefusedError:
            outcomes[place] = "lost"
        except ac.CollectiveTimeoutError:
            assert place in program.timeouts, f"#{place} timed out"
            assert time.monotonic() < ends, f"#{place} never ended"
        else:
            with me.case(f"#{place} {program.kinds[place - 1]}"):
                oracle.same(got, KINDS[program.kinds[place - 1]].want(place, me.size))
            outcomes[place] = "right"


def check(world: World, program: Program, runner: str = "asyncio", seconds: float = 40) -> list[list[str]]:
    """Run it; calls are right, lost, or refused on the rank; those before the first refusal are right."""
    results: list[list[str]] = world.run(
        run_program, vars(program), f"refusals {next(_labels)}", runner=runner, timeout=patient(seconds)
    )
    first = min((place for places in program.refused.values() for place in places), default=10**9)
    for rank, outcomes in enumerate(results):
        for place, outcome in enumerate(outcomes, 1):
            refused = place in program.refused.get(rank, set())
            assert (outcome == "refused") == refused, f"rank {rank}, #{place}: {outcome}"
            if place < first:
                assert outcome == "right", f"rank {rank}, #{place}: {outcome}, before anything was refused"
    return results


def test_a_refusal_behind_which_calls_are_in_flight(several: World, runner: str) -> None:
    """Other ranks have the refused call and the next in flight; no result mixes two calls."""
    size = several.size
    for place in (1, 2):
        program = Program(["gather"] * 6, {0: {place}}, dict.fromkeys(range(1, size), 3))
        results = check(several, program, runner)
        for outcomes in results[1:]:
            assert outcomes[place - 1] == "lost"


def test_several_refuse_in_a_row(several: World) -> None:
    """One rank refuses, each in turn, two in the same place, or a second while the first is settled."""
    size = several.size
    last = size - 1
    for refused in (
        {0: {2, 3, 4}},
        {rank: {rank + 1, rank + 1 + size} for rank in range(size)},
        {0: {3}, last: {3}},
        {0: {2, 5}, last: {3, 5}},
        {0: {5}, last: {2}},
        {rank: {3} for rank in range(size)},
    ):
        for windows in (1, 4):
            check(several, Program(["gather"] * 8, refused, dict.fromkeys(range(size), windows)))


def test_refusals_of_every_kind_of_call(several: World) -> None:
    """Trees, programs and one-sided calls are refused among such calls; some waiters time out first."""
    kinds = list(KINDS) * 2
    for culprit in (0, several.size - 1):
        refused = {culprit: {2, 6, 7, 13}}
        check(several, Program(kinds, refused, {0: 3, several.size - 1: 2}, {3, 6, 9}))


def test_what_nobody_made_needs_no_other_communicator(several: World) -> None:
    """If all ranks refuse it, the lane is unchanged, and later calls are right."""
    program = Program(["number"] * 4, {rank: {2} for rank in range(several.size)}, slow=False)
    for outcomes in check(several, program):
        assert outcomes == ["right", "refused", "right", "right"]


def test_refusals_on_five_ranks() -> None:
    """The same holds if most ranks only hear of it."""
    for backend in worlds.BACKENDS:
        if backend == "gloo":
            world = worlds.world(backend, 5)
            check(world, Program(["gather", "tree"] * 4, {0: {2}, 3: {4, 5}}, {1: 3, 2: 2, 4: 8}))


def drawn(rng: random.Random, size: int) -> Program:
    """Draw a program of random calls with random refusals."""
    kinds = rng.choices(list(KINDS), k=rng.randint(3, 14))
    refused = {
        rank: set(rng.sample(range(1, len(kinds) + 1), rng.randint(0, 2)))
        for rank in range(size)
        if rng.random() < 0.6
    }
    windows = {rank: rng.randint(1, 5) for rank in range(size)}
    return Program(
        kinds, refused, windows, {p for p in range(len(kinds)) if rng.random() < 0.1}, rng.random() < 0.8
    )


def test_random_refusals(several: World) -> None:
    """Whatever is refused at whatever time, calls are right or raise a typed error."""
    for turn in range(DRAWS):
        seed = SEED * 1_000_000 + turn
        program = drawn(random.Random(f"{several.size} {seed}"), several.size)
        try:
            check(several, program)
        except BaseException as error:
            error.add_note(f"seed {seed}, {several.size} ranks: {program}")
            raise


# ---------------------------------------------------------------- in the middle of a call


async def breaks_off(me: Rank, name: str, kind: type[Exception], own: type[Exception]) -> None:
    """On rank 0 ``kind`` is raised between the two rounds of a program, which raises ``own``."""
    await me.get(ac.all_reduce(1, lane=name))
    real = asynccoll.payload.messages._padded
    text = f"of rank {me.rank}: " + "x" * 2000

    def padded(message: Any, *rest: Any) -> Any:
        if b"of rank 0" in message.body_bytes():
            raise kind("no room for the second round")
        return real(message, *rest)

    if me.rank == 0:  # rank 0 only: if ranks are threads, they share the module
        asynccoll.payload.messages._padded = padded
    try:
        work = ac.all_gather_object(text, lane=name)
        with raising(own if me.rank == 0 else ac.PeerRefusedError, "no room") as caught:
            await me.get(work)
        assert isinstance(caught.error, ac.PeerRefusedError) is (me.rank > 0), "a rank is not its own peer"
        with raising(type(caught.error), "no room"):
            work.result()
        pickle.loads(pickle.dumps(caught.error))
    finally:
        if me.rank == 0:
            asynccoll.payload.messages._padded = real
    await me.check("afterwards", ac.all_gather_object, me.rank, lane=name, expect=list(range(me.size)))
    texts = [text.replace(str(me.rank), str(rank), 1) for rank in range(me.size)]
    await me.check("as long", ac.all_gather_object, text, lane=name, expect=texts)
    ac.close_lane(name)


@pytest.mark.parametrize(
    ("kind", "own"),
    [(MemoryError, ac.CollectiveError), (ac.UnsupportedOpError, ac.UnsupportedOpError)],
    ids=["foreign", "typed"],
)
def test_a_program_that_breaks_off(
    several: World, runner: str, kind: type[Exception], own: type[Exception]
) -> None:
    """A failure on one rank between two native calls is a refusal: peers do not wait for the rest.

    That rank gets the same error as from a call refused at once: our own errors are raised as they are.
    """
    label = f"breaks off {next(_labels)}"
    several.run(breaks_off, label, kind, own, runner=runner, timeout=patient(30))


class Loaded:
    """The result of a future, which raises the same exception each time it is sent."""

    def __init__(self, batch: Future[str]) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return str, (self._batch.result(),)


@dataclass(frozen=True)
class LoadError(Exception):
    """An exception on which no attribute can be set."""

    why: str

    def __str__(self) -> str:
        return self.why


_NO_DISK = {"plain": OSError("no disk"), "frozen": LoadError("no disk")}


async def raises_the_same_again(me: Rank, name: str, kind: str) -> None:
    batch: Future[str] = Future()
    batch.set_exception(_NO_DISK[kind])
    for turn in range(3):
        if me.rank == 0:
            with pytest.raises(type(_NO_DISK[kind]), match="no disk"):
                ac.all_gather_object(Loaded(batch), codec="pickle", lane=name)
        else:
            with raising(ac.PeerRefusedError, "no disk"):
                await me.get(ac.all_gather_object(f"{turn}", codec="pickle", lane=name))
    mine = [f"of rank {rank}" for rank in range(me.size)]
    await me.check("after", ac.all_gather_object, mine[me.rank], codec="pickle", lane=name, expect=mine)
    ac.close_lane(name)


@pytest.mark.parametrize("kind", sorted(_NO_DISK))
def test_a_call_refused_for_the_same_exception_as_one_before(several: World, runner: str, kind: str) -> None:
    """Its peers are told of each call once; otherwise their call would meet another one of this rank."""
    several.run(raises_the_same_again, f"same {runner} {kind}", kind, runner=runner, timeout=patient(30))


# ---------------------------------------------------------------- resources


async def many_refusals(me: Rank, name: str) -> tuple[int, int]:
    """Return how many threads and descriptors twelve refusals have added after the first three."""
    before = (0, 0)
    for turn in range(15):
        if turn % me.size == me.rank:
            with raising(ac.InvalidArgumentError):
                ac.all_reduce(1, lane=name, timeout=-1)
        else:
            with raising(ac.PeerRefusedError):
                await me.get(ac.all_reduce(1, lane=name))
        await me.check(f"after {turn}", ac.all_reduce, turn, lane=name, expect=turn * me.size)
        if turn == 2:
            before = _resources()
    after = _resources()
    return after[0] - before[0], after[1] - before[1]


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_refusals_leave_nothing_behind() -> None:
    """An ended epoch's communicator is closed: threads and descriptors do not accumulate."""
    with worlds.fresh("gloo", 2) as world:
        for threads, descriptors in world.run(many_refusals, "many", runner="asyncio", timeout=patient(60)):
            assert threads <= 4, f"{threads} more threads after twelve refusals"
            assert descriptors <= 4, f"{descriptors} more descriptors after twelve refusals"


# ---------------------------------------------------------------- messages


async def waits_elsewhere(me: Rank, name: str) -> None:
    """Rank 0 has calls in flight on the refused call's lane, but waits for its peers elsewhere."""
    if me.rank == 0:
        unseen = [ac.broadcast(float(place), src=0, lane=name) for place in range(3)]
    else:
        with raising(ac.InvalidArgumentError, "timeout"):
            ac.broadcast(0.0, src=0, lane=name, timeout=-1)
        unseen = [ac.broadcast(0.0, src=0, lane=name) for _ in range(2)]
        for work in unseen:
            with contextlib.suppress(ac.PeerRefusedError):  # if lost with it, as rank 0 was ahead
                assert await me.get(work) == 1.0 + unseen.index(work)
    assert await me.get(ac.all_reduce(1, lane=f"{name} elsewhere")) == me.size
    for work in unseen:
        with contextlib.suppress(ac.PeerRefusedError):
            await me.get(work)


def test_who_refused_is_found_by_a_rank_that_waits_elsewhere(several: World, runner: str) -> None:
    """Its peers need its report to continue, and it needs them; otherwise all would wait for the timeout."""
    several.run(waits_elsewhere, f"waits elsewhere {runner}", runner=runner, timeout=patient(20))


async def across_epochs(me: Rank, name: str) -> None:
    """A recv is posted before a call is refused, and its message is sent after."""
    await me.get(ac.all_reduce(1, lane=name))
    last = me.size - 1
    early = ac.recv(torch.zeros(3), src=0, lane=name) if me.rank == last else None
    if me.rank == 0:
        with raising(ac.InvalidArgumentError):
            ac.all_reduce(1, lane=name, timeout=-1)
    else:
        with raising(ac.PeerRefusedError):
            await me.get(ac.all_reduce(1, lane=name))
    await me.check("between", ac.all_reduce, 2, lane=name, expect=2 * me.size)
    if me.rank == 0:
        await me.check("sent", ac.send, torch.tensor([1.0, 2.0, 3.0]), dst=last, lane=name, expect=None)
    if early is not None:
        with me.case("received"):
            oracle.same(await me.get(early), torch.tensor([1.0, 2.0, 3.0]))
    ac.close_lane(name)


def test_messages_meet_across_a_refusal(several: World, runner: str) -> None:
    """A recv posted before a refused call takes the message sent after it."""
    if several.backend not in ("horovod", "xla-tpu"):  # these have no messages
        several.run(across_epochs, f"messages {next(_labels)}", runner=runner, timeout=patient(30))


async def sends_while_halted(me: Rank, name: str) -> None:
    """Rank 1 makes the call before the refused one only once it has a message that is sent after both."""
    await me.get(ac.all_reduce(1, lane=name))
    if me.rank == 0:
        before = ac.all_reduce(1, lane=name)
        with raising(ac.InvalidArgumentError):
            ac.all_reduce(1, lane=name, timeout=-1)
        await me.check("sent", ac.send, torch.ones(2), dst=1, lane=name, expect=None)
    else:
        if me.rank == 1:
            await me.check("received", ac.recv, torch.zeros(2), src=0, lane=name, expect=torch.ones(2))
        before = ac.all_reduce(1, lane=name)
        with raising(ac.PeerRefusedError):
            await me.get(ac.all_reduce(1, lane=name))
    with me.case("before"):
        assert await me.get(before) == me.size
    await me.check("afterwards", ac.all_reduce, 2, lane=name, expect=2 * me.size)
    ac.close_lane(name)


def test_a_message_does_not_wait_for_a_refusal_to_be_settled(several: World, runner: str) -> None:
    """Otherwise the peer that needs the message to get there would never arrive."""
    if several.backend not in ("horovod", "xla-tpu"):
        several.run(sends_while_halted, f"halted {next(_labels)}", runner=runner, timeout=patient(30))


# ---------------------------------------------------------------- one rank's part, by itself


def test_what_is_held_goes_on_in_order() -> None:
    """A rank refuses #7, hears of #4, and its program breaks off at #2: #3, #5 and #6 still run."""
    lane = Context(SerialBackend(), Identity(), check="off").world.lane("held")
    gate = Promise()

    def first(_: Any) -> Generator[Completion, None, Completion]:
        yield gate
        return READY

    lane.run("first", first)
    others = [lane.issue(Estimate("other"), lambda _: READY) for _ in range(2, 7)]
    cut = lane.halting.refuse("the seventh", None)
    assert cut is not None
    lane.halting.hear(0, Refusal(1, 4, "a peer's"))
    lane.halting.refuse("broke off", 2)
    gate.settle()
    assert lane.halting.conclude(cut)
    following = lane.halting.resume(cut, Verdict(Refusal(0, 2, "broke off"), 3, in_step=True))
    assert following is not None
    assert following.place == 7
    went_on = [one.sequence for one in others if one.done() and one.error() is None]
    assert went_on == [3, 5, 6]


def test_a_program_that_is_over_at_once_fails_with_what_its_last_call_does() -> None:
    lane = Context(SerialBackend(), Identity(), check="off").world.lane("at once")
    lane.issue(Estimate("first"), lambda _: READY)  # opens the lane

    def program(_: Any) -> Generator[Completion, None, Completion]:
        yield from ()
        return Ready(RuntimeError("no room"))

    operation = lane.run("program", program, awaited_soon=True)
    assert operation.done()
    assert "no room" in str(operation.error())


def halted(*completions: Completion) -> tuple[Lane, list[Operation]]:
    """Return a lane on which a peer has refused a call, and its lost operations, with these completions."""
    lane = Context(SerialBackend(), Identity(), check="off").world.lane("halted")
    lost = [lane.issue(Estimate("fills"), lambda _, one=one: one) for one in completions]  # type: ignore[misc]
    lane.halting.hear(0, Refusal(1, 1, "a peer's"))
    return lane, lost


def test_waiters_of_a_lost_call_hear_of_it_once_nothing_writes_to_its_memory() -> None:
    """A retry that refilled the memory was refused, as the call might still write to it."""
    over, writing = Transfer(), Transfer()
    lane, (queued, first, second) = halted(Promise(), over, writing)
    woken: list[Operation] = []
    for one in (queued, first, second):
        one.add_waker(partial(woken.append, one))
    assert woken == [queued]
    over.settle(RuntimeError("connection closed"))
    assert woken == [queued, first]
    assert not second.done()
    lane.halting.tell(late=True)  # the second may write forever
    assert woken == [queued, first, second]
    assert all(one.done() and isinstance(one.error(), ac.PeerRefusedError) for one in (queued, first, second))
    assert "a peer's" in str(first.error())


def test_a_lost_call_that_is_over_after_all_has_no_result() -> None:
    writing = Transfer()
    _, (lost,) = halted(writing)
    work = Work((lost,), None)
    writing.settle()
    with pytest.raises(ac.PeerRefusedError):
        work.wait()
    assert not work.claims


def test_what_was_derived_from_a_lost_call_ends_it_too() -> None:
    """Else the call would claim its memory, and a prepared one could not be started again."""
    native = Transfer()
    _, (lost,) = halted(native)
    work = Work((lost,), None)
    work.fills(torch.zeros(1))
    derived = work.map(torch.neg).map(torch.neg)
    native.settle(RuntimeError("connection closed"))
    with raising(ac.PeerRefusedError, "a peer's"):
        derived.wait()
    assert not work.pending
    assert not work.claims


def test_a_lost_call_is_kept_only_while_native_code_may_use_its_memory() -> None:
    """Regression: queued ones, which never end, were kept with their buckets until the lane was closed."""
    lane, lost = halted(Promise(), Transfer())
    queued, writing = map(weakref.ref, lost)
    lane.halting.tell(late=True)
    lost.clear()
    for _ in range(3):
        lane.issue(Estimate("later"), lambda _: READY)  # held, as the refusal is not settled here
    gc.collect()
    assert queued() is None
    assert writing() is not None


def behind_a_late_one(work: Work[Any]) -> Any:
    """Wait for a call that is late, and for ``work``, which is then not waited for."""
    lane = Context(SerialBackend(), Identity(), check="off").world.lane("late")
    with pytest.raises(ac.CollectiveTimeoutError):
        ac.wait_all([Work((lane.issue(Estimate("late"), lambda _: Promise()),), None), work]).wait(0.01)
    return work.result()


async def awaited(work: Work[Any]) -> Any:
    return await work


async def completed(work: Work[Any]) -> Any:
    return [one.result() async for one in ac.as_completed([work], timeout=0.01)]


WAITS: dict[str, Callable[[Work[Any]], Any]] = {
    "wait": lambda work: work.wait(timeout=0.01),
    "await": lambda work: asyncio.run(awaited(work)),
    "all": behind_a_late_one,
    "completed": lambda work: asyncio.run(completed(work)),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_ends_early_has_the_error_of_a_lost_call(wait: str) -> None:
    """Its timeout says less than the refusal, which is known by then."""
    native = Transfer()
    _, (lost,) = halted(native)
    lost.deadline = host.monotonic() + 0.01
    work = Work((lost,), None)
    work.fills(torch.zeros(1))
    with pytest.raises(ac.PeerRefusedError, match="a peer's"):
        WAITS[wait](work)
    assert work.claims, "native code may still write"
    native.settle()
    assert not work.claims


def in_a_block(x: torch.Tensor) -> list[Work[torch.Tensor]]:
    y = x.clone()
    with ac.coalescing():
        return [ac.all_reduce(x, out=x), ac.all_reduce(y, out=y)]


#: Ways to start an all_reduce in place, given the tensor, and the same operation prepared. Only the first of
#: the works is waited for.
STARTS: dict[str, Callable[[torch.Tensor, ac.Prepared[torch.Tensor]], list[Work[torch.Tensor]]]] = {
    "at once": lambda x, _: [ac.all_reduce(x, out=x)],
    "derived": lambda x, _: [ac.all_reduce(x, out=x).map(torch.neg).map(torch.neg)],
    "prepared": lambda _, op: [op.start()],
    "prepared, derived": lambda _, op: [op.start().map(torch.clone)],
    "in a block": lambda x, _: in_a_block(x),
}


async def retries(rank: int, start: str) -> None:
    """Refuse a call on one rank, and make it again with the same memory, filled again."""
    x, size = torch.zeros(64), ac.get_world_size()
    op = ac.prepare("all_reduce", x, out=x)
    held: list[Work[torch.Tensor]] = []  # a work that is over claims no memory, although it is kept
    for refuses in range(3):
        for timeout in (-1 if rank == refuses % size else None, None):
            x.fill_(rank + 1)
            try:
                if timeout is not None:
                    ac.all_reduce(x, timeout=timeout)
                held += (works := STARTS[start](x, op))
                await works[0]
            except (ac.PeerRefusedError, ac.InvalidArgumentError) as error:
                assert "timeout must" in str(error)
        oracle.same(x, torch.full((64,), size * (size + 1) / 2))
    for work in held:
        work.detach()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("transport", ["gloo", "memory", "xla"])
def test_a_refused_call_can_be_made_again_with_the_same_memory(transport: str, start: str) -> None:
    for size in (2, 3):
        main = partial(retries, start=start)
        explore(
            main, seeds=range(12 if start == "at once" else 4), world_size=size, transport=transport
        ).check()


async def given_up(me: Rank, seen: str) -> bool:
    x, gone, refused = torch.full((1000,), 1.0 + me.rank), Path(seen), False
    if me.rank == 1:
        me.see("sent")  # a rank that knows of a refusal sends nothing, and nothing is written to its memory
        with raising(ac.InvalidArgumentError, "timeout"):
            ac.broadcast(x, src=2, out=x, timeout=-1)
    elif me.rank == 0:
        work = ac.broadcast(x, src=2, out=x)
        me.show("sent")
        with raising(ac.PeerRefusedError, "refused its side"):
            await me.get(work)
        try:
            work = ac.all_reduce(x, out=x, lane="other")
        except ac.InvalidArgumentError as error:
            assert "broadcast #" in str(error) and "may still write to it" in str(error)
            refused = True
        finally:
            gone.touch()
        if not refused:
            oracle.same(await me.get(work), torch.full((1000,), 3.0))
    else:
        deadline = time.monotonic() + patient(20)
        while not gone.exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with contextlib.suppress(ac.PeerRefusedError):
            await me.get(ac.broadcast(x, src=2, out=x))
    if me.rank:
        try:
            oracle.same(await me.get(ac.all_reduce(torch.ones(1000), lane="other")), torch.full((1000,), 3.0))
        except ac.PeerRefusedError:
            refused = True
    fresh = torch.full((3,), 1.0 + me.rank)
    oracle.same(await me.get(ac.all_reduce(fresh, out=fresh)), torch.full((3,), 6.0))
    oracle.same(await me.get(ac.all_reduce(x * 0 + 1)), torch.full((1000,), 3.0))
    if me.rank == 0 and not refused:
        oracle.same(x, torch.full((1000,), 3.0))
    return refused


@pytest.mark.processes
# Horovod starts nothing, and so writes nothing, before every rank has called.
@pytest.mark.parametrize("backend", [one for one in worlds.BACKENDS if one != "horovod"] or ["gloo"])
def test_what_a_refused_call_may_still_fill_is_not_sent(backend: str, tmp_path: Path) -> None:
    """Its source calls late, unaware of the refusal. Regression: the tensor was overwritten seconds later."""
    refused = worlds.world(backend, 3).run(given_up, str(tmp_path / "seen"))
    # Shared memory may have been given up by then, also by the source: no rank writes there any more.
    assert refused == [True] * 3 or (backend == "memory" and refused == [False] * 3)


async def large_tree_given_up(me: Rank) -> None:
    last, total = me.size - 1, float(sum(range(1, me.size + 1)))
    x = [torch.full((1 << length,), 1.0 + me.rank) for length in [21, *[17] * 40]]
    if me.rank == last:
        with raising(ac.InvalidArgumentError, "timeout"):
            ac.all_reduce(x, out=x, timeout=-1)
        me.see("given up")
    elif me.rank == 0:
        me.see("given up")
        with contextlib.suppress(ac.PeerRefusedError):
            await me.get(ac.all_reduce(x, out=x))
    else:
        with raising(ac.PeerRefusedError, "refused its side"):
            await me.get(ac.all_reduce(x, out=x))
        me.show("given up")
    for leaf in x:
        leaf.fill_(1.0 + me.rank)
    try:
        await me.get(ac.all_reduce(x, out=x))
    except (ac.InvalidArgumentError, ac.PeerRefusedError):
        return  # a rank may still be writing to it
    for leaf in x:
        oracle.same(leaf, torch.full_like(leaf, total))


@pytest.mark.processes
@pytest.mark.parametrize("backend", [one for one in worlds.BACKENDS if one != "horovod"] or ["gloo"])
def test_a_large_tree_that_was_given_up_is_not_sent_while_its_first_part_is_filled(backend: str) -> None:
    """It is sent in several calls: those before the one it had reached are still in flight."""
    world = worlds.world(backend, 3)
    for _ in range(3):
        world.run(large_tree_given_up)


@pytest.mark.parametrize("kind", ["in memory", "a file"])
def test_who_has_refused_is_read_in_a_few_requests(kind: str, tmp_path: Path) -> None:
    """A store that can list keys needs few requests; for a file, each rank's key is looked up."""
    store = dist.HashStore() if kind == "in memory" else dist.FileStore(str(tmp_path / "store"), 1)
    asked: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(store, name)

    keys = {rank: f"refused/{rank}" for rank in range(1000 if kind == "in memory" else 12)}
    counted: Any = Counted()
    assert values_of_listed(counted, "any", keys) == []
    for rank in (3, 10, 3):
        store.set(keys[rank], f"of {rank}")
        enlist(store, "any", rank)
    asked.clear()
    assert values_of_listed(counted, "any", keys) == [b"of 3", b"of 10"]
    assert len(asked) < 8 or kind == "a file"


def test_a_refusal_that_no_thread_can_settle_ends_the_calls_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks were told nothing, and waited for the timeout; here another error replaced the why."""
    start = Helpers.start

    def refuse_to_start(helpers: Helpers, name: str, action: Callable[[], object]) -> host.Thread | None:
        if name in ("asynccoll-settle", "asynccoll-abort"):
            return None
        return start(helpers, name, action)

    async def main(rank: int) -> list[str]:
        await ac.all_reduce(1)
        if rank == 0:
            monkeypatch.setattr(Helpers, "start", refuse_to_start)
        said = []
        for op in ("no such" if rank == 0 else "sum", "sum"):
            try:
                await ac.all_reduce(torch.ones(1), op=op)
            except ac.AsyncCollError as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    report = simulate(main, world_size=2)
    report.check()
    refused, after = report.results[0]
    assert refused.startswith("InvalidArgumentError")
    assert "settling a refused call" in after
    assert "no thread can be started" in after
    assert len(report.results[1]) == 2
    assert not any("Timeout" in one for one in report.results[1])


def test_a_message_for_which_no_thread_can_start_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank looked for the culprit with the lane locked, on the thread that had locked it."""

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def main(rank: int) -> str:
        await ac.barrier()
        if rank == 1:
            return ""
        monkeypatch.setattr(_Communicator, "send", no_thread)
        monkeypatch.setattr(Helpers, "start", lambda *_: None)
        try:
            await ac.send(torch.ones(1), dst=1)
        except ac.CollectiveError as error:
            return str(error)
        return "sent"

    report = simulate(main, world_size=2)
    assert report.deadlock is None, report.deadlock
    assert "send on lane 'default' of the world failed: can't start new thread" in report.results[0]


def test_a_lane_that_has_not_opened_fails_though_no_thread_can_look_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the rank waited forever for a communicator that it could not open."""

    def nobody_came(*_: object) -> None:
        raise ac.PeerLostError("nobody came")

    async def main(rank: int) -> str:
        await ac.barrier()
        said = ""
        if rank == 0:
            lane = runtime.current().world.lane("another")
            with monkeypatch.context() as patched:
                patched.setattr(type(lane.world.backend), "open", nobody_came)
                patched.setattr(Helpers, "start", lambda *_: None)
                try:
                    lane.open()
                except ac.PeerLostError as error:
                    said = str(error)
        await ac.barrier()
        return said

    report = simulate(main, world_size=2)
    report.check()
    assert "nobody came" in report.results[0]
