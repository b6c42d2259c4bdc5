"""The mpi backend beyond what every backend must do: the library underneath, its limits, its shutdown.

Needs mpi4py with an MPI library; the environments `mpich` and `openmpi` have them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, product
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import asynccoll as ac
import needs
import oracle
import worlds
from asynccoll.backends.mpi.opening import Opener
from asynccoll.plan.spec import ReduceOp
from asynccoll.runtime.process import current
from asynccoll.transport import progress
from patience import patient
from ranks import Rank, raising
from struck import Strike

needs.need_package("mpi4py", "mpi", "`make mpi` has environments with mpi4py")


@pytest.fixture(scope="session")
def pair() -> worlds.World:
    """Two ranks."""
    return worlds.world("mpi", 2)


@pytest.fixture(scope="session")
def four() -> worlds.World:
    """Four ranks."""
    return worlds.world("mpi", 4)


def communicator(lane: str = "default") -> Any:
    """Return the MPI communicator behind a lane of the world."""
    from asynccoll.runtime.process import current

    return current().world.lane(lane).communicator


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Keep new operations from the progress thread, as if it had no time yet, and wait for them at the end.

    Until an operation is over MPI writes to its memory, which nobody but the thread and the test keeps.
    """
    from asynccoll.backends.mpi import completion

    kept: list[completion.MpiCompletion] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "watch", kept.append)
        yield
    for work in kept:
        assert work.wait(patient(30))


# ---------------------------------------------------------------- alongside the user's own MPI


async def beside(me: Rank) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.Get_size() == me.size
    handler = world.Get_errhandler()
    mine, theirs = [], []
    for turn in range(30):
        mine.append(ac.all_reduce(turn * 10**me.rank))
        theirs.append(world.Ibarrier())
        assert world.allreduce(1) == me.size
    total = sum(10**rank for rank in range(me.size))
    for turn, work in reversed(list(enumerate(mine))):
        assert await me.get(work) == turn * total
    MPI.Request.Waitall(theirs)
    assert world.Get_errhandler() == handler
    native = ac.new_group(range(me.size)).lane().communicator.native
    assert MPI.Comm.Compare(native, world) == MPI.CONGRUENT, "ours is a communicator of its own"


def test_a_job_that_uses_mpi4py_keeps_working(four: worlds.World) -> None:
    """The user's messages on COMM_WORLD never meet ours, and COMM_WORLD is left unchanged."""
    four.run(beside)


def lives(me: Rank) -> None:
    from mpi4py import MPI

    from asynccoll.backends.mpi import backend

    for turn in range(3):
        if me.rank:
            next(backend._worlds)  # as if a world had been made that this rank could not join
        ac.initialize("mpi", timeout=patient(60), torch_group=turn == 0)
        assert ac.all_reduce(1).wait() == me.size
        assert ac.all_reduce(1, lane=f"of life {turn}").wait() == me.size
        assert torch.distributed.is_initialized() == (turn == 0)
        ac.finalize()
        assert not MPI.Is_finalized()
    assert MPI.COMM_WORLD.allreduce(1) == me.size


def test_it_can_be_initialized_again_and_mpi_lives_on() -> None:
    """finalize leaves MPI itself alone; torch's default group goes with the world that made it."""
    with worlds.fresh("mpi", 2, bare=True) as world:
        world.run(lives, timeout=40)


def stays_away(me: Rank) -> None:
    importlib.import_module("mpi4py.MPI")  # starts MPI, which waits for all ranks
    if me.rank == 0:
        seconds = patient(1)
        with raising(ac.CollectiveTimeoutError, f"within {seconds:g} s"):
            ac.initialize("mpi", timeout=seconds, torch_group=False)
        me.show("heard")
    me.see("heard")
    ac.initialize("mpi", timeout=patient(60), torch_group=False)
    assert ac.all_reduce(1).wait() == me.size
    ac.finalize()


def test_a_rank_that_does_not_join_is_waited_for_until_the_timeout() -> None:
    """The others can try again, and then meet it."""
    with worlds.fresh("mpi", 2, bare=True) as world:
        world.run(stays_away, timeout=40)


def contradictions(me: Rank) -> None:
    for options, said in (
        ({"rank": 1 - me.rank, "world_size": 2}, "MPI says"),
        ({"rank": me.rank, "world_size": 3}, "MPI says"),
    ):
        with pytest.raises(ac.LaunchEnvironmentError, match=said):
            ac.initialize("mpi", **options)
    with pytest.raises(ac.InvalidArgumentError, match="mpiexec"):
        ac.initialize("mpi", init_method="tcp://127.0.0.1:1", rank=me.rank, world_size=2)
    with pytest.raises(ac.InvalidArgumentError, match="torch_group"):
        ac.initialize("mpi", interface="lo")
    assert not ac.is_initialized()


def test_what_contradicts_mpi_is_refused() -> None:
    """A different rank, size or way to meet, or an unknown option: typed errors say what MPI says."""
    with worlds.fresh("mpi", 2, bare=True) as world:
        world.run(contradictions)


# ---------------------------------------------------------------- memory and counts


async def in_pieces(me: Rank, limit: int) -> None:
    under = communicator()
    usual, under._limit = under._limit, limit
    try:
        for dtype in (torch.int64, torch.float32):
            inputs = oracle.by_rank(oracle.counting, me.size, (me.size * 3, 2), dtype)
            x, name = inputs[me.rank], str(dtype)
            check = me.check
            await check(
                f"all_reduce {name}", ac.all_reduce, x, expect=oracle.reduced(inputs, "sum"), value=True
            )
            largest = oracle.reduced(inputs, "max")
            await check(f"max {name}", ac.all_reduce, x, op="max", expect=largest)
            wanted = oracle.reduce(inputs, "sum", 1)[me.rank]
            await check(f"reduce {name}", ac.reduce, x, dst=1, expect=wanted, value=True)
            await check(f"broadcast {name}", ac.broadcast, x, src=1, expect=inputs[1])
            await check(f"all_gather {name}", ac.all_gather, x, expect=oracle.concatenated(inputs))
            await check(f"gather {name}", ac.gather, x, dst=1, expect=oracle.gather(inputs, 1)[me.rank])
            part = oracle.reduce_scatter(inputs, "sum")[me.rank]
            await check(f"reduce_scatter {name}", ac.reduce_scatter, x, expect=part, value=True)
            swapped = oracle.all_to_all(inputs)[me.rank]
            await check(f"all_to_all {name}", ac.all_to_all, x, expect=swapped)
            sent = inputs if me.rank == 1 else None
            await check(f"scatter {name}", ac.scatter, sent, src=1, expect=x)
            await _message(me, inputs)
        await check(
            "object", ac.all_gather_object, [me.rank] * 500, expect=[[r] * 500 for r in range(me.size)]
        )
    finally:
        under._limit = usual


async def _message(me: Rank, inputs: list[torch.Tensor]) -> None:
    if me.rank == 0:
        await me.check("send", ac.send, inputs[0], dst=1, expect=None)
    if me.rank == 1:
        await me.check("recv", ac.recv, inputs[1], src=0, expect=inputs[0])


@pytest.mark.parametrize("limit", [1, 5, 16, 100])
def test_counts_above_the_limit_are_reached_in_pieces(four: worlds.World, limit: int) -> None:
    """Counts above 2^31 on a 32-bit library go the same way: by datatypes of many bytes, or several calls."""
    four.run(in_pieces, limit)


async def huge(me: Rank) -> None:
    count = 2**31 + 3
    x = torch.zeros(count, dtype=torch.uint8)
    if me.rank == 1:
        x[0], x[2**31 - 1], x[-1] = 7, 8, 9
    got = await me.get(ac.all_reduce(x, op="max", out=x))
    assert got is x
    assert [int(got[i]) for i in (0, 1, 2**31 - 1, count - 1)] == [7, 0, 8, 9]
    if me.rank == 0:
        x[2**31] = 5
    await me.get(ac.broadcast(x, src=0, out=x))
    assert [int(x[i]) for i in (0, 2**31 - 1, 2**31, count - 1)] == [7, 8, 5, 9]


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    """With real large counts nothing is cut off or wraps around at 2^31. Its ranks take 3 GB each."""
    with worlds.fresh("mpi", 2) as world:
        world.run(huge, timeout=120)
        world.kill()


async def no_copy(me: Rank) -> None:
    before = _resident()
    x = torch.zeros(64 << 18)  # 64 MiB
    for _ in range(3):
        await me.get(ac.all_reduce(x, out=x))
    assert _resident() - before < (64 + 48) << 20, "a copy of the tensor was made"
    total = await me.get(ac.all_reduce(x))
    assert total is not x
    assert _resident() - before < (2 * 64 + 48) << 20, "more than the result was made"


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_mpi_works_on_the_tensors_own_memory(pair: worlds.World) -> None:
    """We allocate no second buffer of the tensor's size for an all_reduce in place."""
    pair.run(no_copy, timeout=60)


# ---------------------------------------------------------------- progress


async def unattended(me: Rank, count: int) -> None:
    x = torch.ones(count)
    for _ in range(3):
        await me.get(ac.all_reduce(x))  # waited for immediately, as is then expected of the next one
    if me.rank == 0:
        work = ac.all_reduce(x)
        me.see("done elsewhere")  # blocks this thread: only the progress thread can move it
        assert float((await me.get(work))[0]) == me.size
        return
    assert float((await me.get(ac.all_reduce(x)))[-1]) == me.size
    me.show("done elsewhere")


@pytest.mark.parametrize("count", [1, 10_000, 4 << 20])
@pytest.mark.parametrize("runner", ["asyncio", "blocking"])
def test_operations_move_while_nobody_waits_for_them(pair: worlds.World, runner: str, count: int) -> None:
    """A rank that computes after its call does not delay its peers."""
    pair.run(unattended, count, runner=runner, timeout=20)


async def one_after_the_other(me: Rank) -> None:
    large = [torch.full((2 << 20,), float(me.rank + turn)) for turn in range(4)]
    later = torch.full((2 << 20,), float(me.rank))
    for turn, x in enumerate(large):
        first = ac.all_reduce(x)
        moved = ac.broadcast(later, src=turn % me.size)
        small = ac.all_reduce(torch.tensor([turn]))
        time.sleep(0.002)  # as a program does that computes before it waits
        assert (await me.get(small)).tolist() == [turn * me.size]
        assert float((await me.get(moved))[-1]) == turn % me.size
        total = await me.get(first)
        assert float(total[0]) == float(total[-1]) == sum(range(me.size)) + turn * me.size
        assert float(x[0]) == me.rank + turn


def test_what_is_left_to_the_thread_keeps_its_place(four: worlds.World) -> None:
    """A large call that is left to the progress thread precedes every call made after it."""
    four.run(one_after_the_other)


def behind_a_large_message(me: Rank) -> None:
    from asynccoll.backends.mpi import completion

    under = communicator()
    large, small = torch.full((2 << 20,), me.rank * 7.0), torch.full((1,), me.rank * 3.0)
    if me.rank == 0:
        works = [under.recv(x, 1, 0) for x in (large, small, large, small)]
        assert all(work.wait(patient(30)) for work in works)
        assert [type(work.error()) for work in works] == [type(None), ac.PeerRefusedError] + 2 * [type(None)]
        assert (large.unique().tolist(), small.tolist()) == ([7.0], [3.0])
        return
    with unwatched():
        under._common.overlapped = True
        first = under.send(large, 0, 0)
        under.refuse(0, 0, "not this one")
        second = under.send(large, 0, 0)
        assert isinstance(first, completion.LeftToThread)
        assert isinstance(second, completion.LeftToThread)
        later = type(under)(under.native, under._library, me.rank, me.size, 1)
        later.inherit(under)
        assert all(work.wait(patient(30)) for work in (later.send(small, 0, 0), first, second))


def test_a_large_message_that_is_left_to_the_thread_keeps_its_place(pair: worlds.World) -> None:
    """Also ahead of a refused message, and of one that is sent after a refused call."""
    pair.run(behind_a_large_message)


def refused_often(me: Rank) -> None:
    under, x, times, length = communicator(), torch.ones(1), 100, 900
    if me.rank == 0:
        for _ in range(times):
            message = under.recv(x, 1, 0)
            assert message.wait(patient(30))
            assert isinstance(message.error(), ac.PeerRefusedError)
        return
    tracemalloc.start()
    with unwatched():
        for _ in range(times):
            under.refuse(0, 0, "n" * length)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < times * length // 2, f"{grown} bytes more after {times} refused messages"


def test_refused_messages_leave_nothing_behind(pair: worlds.World) -> None:
    """What was said instead of a message is kept until it is sent, and no longer."""
    pair.run(refused_often, runner="blocking")


async def refused_and_reopened(me: Rank) -> None:
    for turn in range(6):
        await me.get(ac.all_reduce(1, lane="short"))
        if me.rank == 0:
            work = ac.broadcast(torch.full((3,), 7.0), src=0, lane="short")
            with contextlib.suppress(ac.PeerRefusedError):  # it may have heard of the refusal, or not
                await me.get(work)
            me.show(f"sent {turn}")
        else:
            me.see(f"sent {turn}")
            with raising(ac.InvalidArgumentError, "timeout"):
                ac.broadcast(torch.zeros(3), src=0, lane="short", timeout=-1)
        ac.close_lane("short")
        await me.get(ac.all_reduce(1, lane="short"))  # so that MPI gives the next call the same number
        own = torch.full((3,), 1.0 + me.rank)
        oracle.same(await me.get(ac.broadcast(own, src=1, lane="short")), torch.full((3,), 2.0))
        ac.close_lane("short")


def test_what_nobody_has_received_reaches_no_other_lane(pair: worlds.World) -> None:
    """Regression: a lane got the context of a closed one, and with it the data of a call that was refused."""
    pair.run(refused_and_reopened, runner="blocking")


async def relayed(me: Rank) -> None:
    x = torch.full((1 << 18,), float(me.rank))
    await me.get(ac.barrier())
    work = ac.broadcast(x, src=0)
    if me.rank in (1, 2):
        me.see("the last has it")
    assert float((await me.get(work))[-1]) == 0.0
    if me.rank == 3:
        me.show("the last has it")


def test_a_relay_passes_on_while_it_computes(four: worlds.World) -> None:
    """In a tree of ranks, data passes through ranks whose own thread is busy."""
    four.run(relayed)


def counted() -> Callable[[], int]:
    """Count the turns that the progress thread takes from now on."""
    turns = 0
    nap = progress._Pace.nap

    def counts(*args: Any) -> float:
        nonlocal turns
        turns += 1
        return nap(*args)

    progress._Pace.nap = counts  # type: ignore[method-assign]  # this process is the rank's own

    def so_far() -> int:
        return turns

    return so_far


async def idle(me: Rank) -> tuple[int, int]:
    await me.get(ac.all_reduce(torch.ones(1000)))
    turns = counted()
    before = -1
    while turns() != before:  # until the thread rests
        before = turns()
        time.sleep(0.2)
    time.sleep(0.5)  # the time in which turns are counted, here and below
    nothing = turns() - before
    if me.rank == 1:
        me.see("measured")
        await me.get(ac.all_reduce(torch.ones(1000)))
        return nothing, 0
    work = ac.all_reduce(torch.ones(1000))
    time.sleep(progress.LONG_SECONDS + 0.2)
    before = turns()
    time.sleep(0.5)
    one = turns() - before
    me.show("measured")
    await me.get(work)
    return nothing, one


def test_an_idle_process_burns_no_core() -> None:
    """With nothing in flight the thread rests; it looks at a delayed call every 10 ms, in two naps."""
    with worlds.fresh("mpi", 2) as unused:  # in the shared worlds an operation may stay in flight forever
        found = unused.run(idle)
        for nothing, one in found:
            assert nothing == 0
            assert one <= 150
    assert any(one for _, one in found)


# ---------------------------------------------------------------- opening


def gives_up(me: Rank) -> None:
    from asynccoll.runtime.process import current

    backend: Any = current().backend
    for early, how in ((0, "not wanted"), (1, "late"), (0, "late")):
        name = f"{how} on rank {early}"
        asked = current().world.opening(name, 0, lambda: False)
        if me.rank == early:
            if how == "late":
                with pytest.raises(ac.CollectiveTimeoutError, match=f"rank {1 - early} had not joined"):
                    backend.open(replace(asked, meeting=0.0))
            else:
                with pytest.raises(ac.AbortedError):
                    backend.open(replace(asked, given_up=lambda: True))
            me.show(name)
        else:
            me.see(name)
            with pytest.raises(ac.PeerLostError, match=f"rank {early} had given up"):
                backend.open(replace(asked, meeting=patient(600)))
    assert ac.all_reduce(1, lane="another").wait() == me.size


def test_who_comes_when_another_rank_has_given_up_is_told(pair: worlds.World) -> None:
    """Otherwise it would wait for that rank: in the store, or inside MPI forever."""
    pair.run(gives_up)


class Dying:
    """The store of a rank that dies once its first decision has reached it."""

    def __init__(self, store: dist.HashStore) -> None:
        self._store = store
        self._died = False

    def __getattr__(self, name: str) -> Any:
        if self._died:
            raise KeyboardInterrupt
        self._died = name == "compare_set"
        return getattr(self._store, name)


def opener(rank: int) -> Opener:
    """Make an opener whose library only records what it is called for."""
    library: Any = SimpleNamespace(call=lambda make, name, members: f"{name} of {members}")
    base = SimpleNamespace(Get_rank=lambda: rank, Get_group=lambda: None)
    return Opener(library, base, "")


def test_a_rank_that_dies_when_it_has_decided_leaves_the_decision_in_the_journal() -> None:
    """There was a moment at which the others would have waited forever, for this name and all later ones."""
    store = dist.HashStore()
    with contextlib.suppress(KeyboardInterrupt):
        opener(0)._decide(Dying(store), "lane", (0, 1), "given up")  # type: ignore[arg-type]
    other = opener(1)
    assert not other._decide(store, "lane", (0, 1), "complete")
    assert other._decide(store, "next", (1, 2), "complete")
    assert not other._decide(store, "next", (1, 2), "given up")
    other._follow(store)
    assert str(other._made.pop("lane")) == "rank 0 had given up opening lane"
    assert other._made == {"next": "next of [1, 2]"}
    assert not other._decide(store, "next", (1, 2), "given up"), "it is decided, though read already"


# ---------------------------------------------------------------- requests


class Answering:
    """A request that gives the prepared answers one after the other; it raises an answer that is an error."""

    def __init__(self, *answers: bool | Exception) -> None:
        self._answers = list(answers)

    def Test(self) -> bool:  # noqa: N802  # spelled as mpi4py's
        answer = self._answers.pop(0) if self._answers else True  # MPI's answer once a request has completed
        if isinstance(answer, Exception):
            raise answer
        return answer


def added_while_asked(me: Rank) -> None:
    from asynccoll.backends.mpi import completion

    told = threading.Event()

    class Ending:
        def Test(self) -> bool:  # noqa: N802  # spelled as mpi4py's
            other = threading.Thread(target=work.add_callback, args=(told.set,))
            other.start()
            other.join()
            return True

    usual, completion.watch = completion.watch, [].append  # as if the thread had not seen it yet
    try:
        work = completion.MpiCompletion(Ending(), None, 8, completion.Common(1))
    finally:
        completion.watch = usual
    assert work.done()
    usual(work)
    assert told.wait(patient(10))


def test_a_callback_that_is_added_while_another_thread_finds_the_end_is_called(pair: worlds.World) -> None:
    pair.run(added_while_asked)


def parts_that_fail(me: Rank) -> None:
    from mpi4py import MPI

    from asynccoll.backends.mpi import completion
    from asynccoll.backends.mpi.completion import Common, Many, MpiCompletion
    from asynccoll.backends.mpi.messages import Received, room

    truncated = MPI.Exception(MPI.ERR_TRUNCATE)

    def fails() -> Answering:
        raise truncated

    def begun(request: Many, *parts: Callable[[], Answering]) -> MpiCompletion:
        return MpiCompletion(request.make([partial(part) for part in parts]), None, 8 << 20, Common(1))

    first, second = (lambda: Answering(truncated)), (lambda: Answering(False, False, True))
    for order in ((first, second), (second, first), (second, fails)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(completion, "watch", [].append)  # the progress thread would find the end first
            work = begun(Many(), *order)
        assert not work.done()
        assert work.writing(), "MPI still uses the memory of the other part"
        assert work.wait(patient(10))
        assert isinstance(work.error(), ac.CollectiveMismatchError)
    nothing_came = begun(Received(room(), torch.ones(1)), first, second)
    assert nothing_came.wait(patient(10))
    assert "truncate" in str(nothing_came.error()).lower()


def test_a_call_in_parts_fails_when_none_of_them_is_in_flight(pair: worlds.World) -> None:
    """That one part has failed does not mean that MPI is done with the memory of the others."""
    pair.run(parts_that_fail)


def interrupted(me: Rank) -> None:
    from asynccoll.backends.mpi import completion

    under, struck = communicator(), 0
    with unwatched():
        for event, moment in product(("c_call", "c_return", "return"), range(4)):
            x = torch.full((2 << 20,), float(me.rank))
            under._common.overlapped = True
            work = under.all_reduce(x, ac.ReduceOp.SUM)
            assert isinstance(work, completion.LeftToThread)
            sys.setprofile(partial(_strike, "make", event, count(moment, -1)))
            try:
                work.make()
            except KeyboardInterrupt:
                struck += 1
            finally:
                sys.setprofile(None)
            after = under.all_reduce(torch.ones(1), ac.ReduceOp.SUM)
            assert work.wait(patient(30))
            assert after.wait(patient(30))
            assert x.unique().tolist() == [float(sum(range(me.size)))]
    assert struck > 3


def interrupted_before(me: Rank) -> None:
    from asynccoll.backends.mpi import completion

    under, struck = communicator(), 0
    with unwatched():
        for where, event, moment in product(
            ("__init__", "_watch_large"), ("call", "c_call", "c_return", "return"), range(4)
        ):
            x = torch.full((2 << 20,), float(me.rank))
            under._common.overlapped = True
            sys.setprofile(partial(_strike, where, event, count(moment, -1)))
            try:
                under.all_reduce(x, ac.ReduceOp.SUM)
            except KeyboardInterrupt:
                struck += 1
                assert completion.never_ending[-1][0] is x, "MPI may use it"  # type: ignore[index]
            finally:
                sys.setprofile(None)
            for _ in range(2):
                after = under.all_reduce(torch.ones(1), ac.ReduceOp.SUM)
                assert after.wait(patient(30))
                assert after.error() is None
    assert struck > 7


def _strike(
    where: str, wanted: str, left: Iterator[int], frame: FrameType, event: str, _what: object
) -> None:
    if frame.f_code.co_name == where and event == wanted and next(left) == 0:
        raise KeyboardInterrupt


def test_a_call_whose_making_is_interrupted_is_made_once(pair: worlds.World) -> None:
    """A second one would meet a later call on the other ranks."""
    pair.run(interrupted)


def test_calls_go_on_after_a_large_one_was_interrupted(pair: worlds.World) -> None:
    """Whether or not it will be made. All ranks are interrupted at the same moment here."""
    pair.run(interrupted_before)


# ---------------------------------------------------------------- errors


async def too_long(me: Rank) -> str:
    if me.rank == 1:
        ac.send(torch.ones(4), dst=0).detach()
        return ""
    try:
        await me.get(ac.recv(torch.empty(2), src=1))
    except ac.CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return "a result"


def test_a_truncated_message_is_a_typed_error() -> None:
    """MPI's error code becomes our error and the job continues; MPI does not abort it."""
    with worlds.fresh("mpi", 2) as world:
        told, _ = world.run(too_long)
        world.kill()
    assert told.startswith("CollectiveMismatchError"), told
    assert "4 elements of float32, but the receiver expects 2 of float32" in told


async def big_tag(me: Rank) -> None:
    from mpi4py import MPI

    tag, peer = 2**31 - 2, 1 - me.rank
    if MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) < tag:
        await me.refuses("tag", ac.InvalidArgumentError, ac.send, torch.ones(1), dst=peer, tag=tag)
        for _ in range(2):  # the second one does not wait for the first
            await me.refuses("tag", ac.InvalidArgumentError, ac.recv_object, src=peer, tag=tag)
    else:
        sent = ac.send(torch.full((2,), float(me.rank)), dst=peer, tag=tag)
        await me.check(
            "tag", ac.recv, torch.empty(2), src=peer, tag=tag, expect=torch.full((2,), float(peer))
        )
        await me.get(sent)
    await me.check("afterwards", ac.all_reduce, 1, expect=2)


def test_a_tag_that_the_library_lacks_is_refused(pair: worlds.World) -> None:
    """MPICH's largest tag is lower than ours, and the error says so; Open MPI has all tags."""
    pair.run(big_tag)


def after_its_abort(me: Rank) -> None:
    ac.all_reduce(1, lane="given up").wait()
    communicator: Any = current().world.lane("given up").communicator
    communicator.abort()
    for call in (communicator.send, communicator.recv):
        message = call(torch.ones(2), 1 - me.rank, 0)
        assert message.done()
        assert isinstance(message.error(), ac.AbortedError)
    reduced = communicator.all_reduce(torch.ones(2), ReduceOp.SUM)
    assert reduced.done()
    assert isinstance(reduced.error(), ac.AbortedError)


def test_nothing_is_issued_on_a_communicator_that_was_aborted(pair: worlds.World) -> None:
    """Such an operation would never complete, since nothing polls it."""
    pair.run(after_its_abort, runner="blocking")


def stuck(me: Rank) -> list[str]:
    ac.initialize("mpi", timeout=patient(60))
    ac.all_reduce(1).wait()
    if me.rank == 0:
        work = ac.all_reduce(torch.ones(1000))
        start = time.monotonic()
        ac.finalize(abort=True)
        took = time.monotonic() - start
        assert took < 10, f"finalize(abort=True) took {took} s"
        heard = [type(work.exception()).__name__]
        me.show("aborted")
        me.see("heard")
        return heard
    me.see("aborted")
    try:
        ac.all_reduce(torch.ones(1000), lane="another").wait()
    except ac.AsyncCollError as error:
        me.show("heard")
        ac.finalize(abort=True)
        return [type(error).__name__]
    return ["a result"]


def test_abort_is_quick_and_peers_hear_of_it() -> None:
    """Operations in flight fail with AbortedError here; a peer waiting for this rank gets a typed error."""
    with worlds.fresh("mpi", 2, bare=True) as world:
        first, second = world.run(stuck, timeout=40)
        world.kill()
    assert first == ["AbortedError"]
    assert second[0] in ("PeerLostError", "AbortedError", "CollectiveError")


# ---------------------------------------------------------------- what it reports about itself


def test_explain_tells_what_travels(pair: worlds.World) -> None:
    """A call is native where MPI supports it; other dtypes are widened, and the plan says so."""
    pair.run(explained)


def explained(me: Rank) -> None:
    native = ac.explain("all_reduce", torch.ones(2))
    assert native.backend == "mpi"
    assert native.direct
    cast = str(ac.explain("all_reduce", torch.ones(2, dtype=torch.bfloat16)))
    assert "is sent as float32" in cast
    moved = ac.explain("broadcast", torch.ones(2, dtype=torch.float8_e5m2))
    assert moved.direct, "every dtype is moved as it is"


async def calls_in_a_graph(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (me.size,))
    x = torch.ones(2)
    for group in (mesh, mesh.get_group(), ac.new_group(range(me.size)), None):
        with me.case(f"group={group}"):
            if me.rank == 1:
                torch._dynamo.reset()
                step = torch.compile(
                    lambda x, group=group: ac.all_reduce(x, group=group).wait(),
                    fullgraph=True,
                    backend="eager",
                )
                with raising(ac.UnsupportedOpError, "outside the compiled code"):
                    step(x)
            else:
                with raising(ac.PeerRefusedError, "rank 1"):
                    ac.all_reduce(x, group=group).wait()
            assert ac.all_reduce(1, group=group).wait() == me.size


def test_a_call_in_a_graph_is_refused_and_the_others_are_told(pair: worlds.World) -> None:
    """On the group that the call names, whatever names it."""
    pair.run(calls_in_a_graph, runner="blocking", timeout=60)


def failed_under_ctrl_c(me: Rank) -> None:
    from mpi4py import MPI

    from asynccoll.backends.mpi import completion

    class Fails:
        """A request that has failed: MPI says so once, and has no request then."""

        Test = Mock(side_effect=[MPI.Exception(MPI.ERR_TRUNCATE), True])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "watch", [].append)
        work = completion.MpiCompletion(Fails(), None, 0, completion.Common(1))

        def told() -> object:
            assert work.poll()
            return work.error()

        with pytest.raises(KeyboardInterrupt), Strike(1, completion.typed.__code__):
            told()
        assert isinstance(told(), ac.CollectiveMismatchError)


def test_ctrl_c_does_not_make_a_success_of_a_failure(pair: worlds.World) -> None:
    pair.run(failed_under_ctrl_c)
