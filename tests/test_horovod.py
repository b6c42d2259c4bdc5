"""The horovod backend beyond what every backend must do: names, process sets, errors, users of Horovod.

The tests need Horovod; the environment `horovod` has it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from anyio.lowlevel import checkpoint

import asynccoll as ac
import needs
import oracle
import worlds
from asynccoll.host.store import Clients
from asynccoll.runtime.process import current
from patience import patient
from ranks import Rank, raising

needs.need_package("horovod", "horovod", "the environment horovod has it: make horovod")


@pytest.fixture(scope="session")
def pair() -> worlds.World:
    """Return a world of two ranks."""
    return worlds.world("horovod", 2)


@pytest.fixture(scope="session")
def three() -> worlds.World:
    """Return a world of three ranks."""
    return worlds.world("horovod", 3)


# ---------------------------------------------------------------- names


async def crossed(me: Rank) -> None:
    order = ["a", "b"] if me.rank == 0 else ["b", "a"]
    for turn in range(20):
        works = {name: ac.all_reduce(turn + (name == "b"), lane=name) for name in order}
        for name in reversed(order):
            assert await me.get(works[name]) == me.size * (turn + (name == "b"))


def test_lanes_in_opposite_order_just_work(pair: worlds.World, runner: str) -> None:
    """Horovod matches by name: a lane is part of the name, and needs nothing else."""
    pair.run(crossed, runner=runner)


async def many_in_flight(me: Rank) -> None:
    works = [ac.all_reduce(torch.full((4,), float(turn))) for turn in range(500)]
    for turn, work in reversed(list(enumerate(works))):
        oracle.same(await me.get(work), torch.full((4,), float(me.size * turn)))


def test_hundreds_in_flight(pair: worlds.World, runner: str) -> None:
    """No two of them share a name."""
    pair.run(many_in_flight, runner=runner)


async def of_all_sizes(me: Rank) -> None:
    """Use more works than names, so that each name is reused for tensors of other shapes and dtypes."""
    from asynccoll.backends.horovod.communicator import RING

    for step in range(3):
        xs = [torch.full((1 + (index + step) % 7,), float(index)) for index in range(RING + 10)]
        xs[5] = xs[5].double()
        works = [ac.all_reduce(x, op="max" if index % 11 == step else "sum") for index, x in enumerate(xs)]
        for index, (x, work) in enumerate(zip(xs, works, strict=True)):
            oracle.same(await me.get(work), x if index % 11 == step else x * me.size)


def test_names_are_used_again_for_other_tensors(pair: worlds.World, runner: str) -> None:
    """What Horovod caches for a name is not applied to what is sent under it later."""
    pair.run(of_all_sizes, runner=runner)


def twice(me: Rank) -> None:
    """Let rank 1 call only after rank 0 has its error, so that the first operation is still in flight."""
    one, other = (_communicator("twice") for _ in range(2))
    if me.rank == 1:
        me.see("told")
    first = one.all_reduce(torch.ones(2), ac.ReduceOp.SUM)
    if me.rank == 0:
        second = other.all_reduce(torch.ones(2), ac.ReduceOp.SUM)
        while not second.wait(1.0):
            pass
        error = second.error()
        assert isinstance(error, ac.CollectiveMismatchError), repr(error)
        assert "same name" in str(error)
        me.show("told")
    while not first.wait(1.0):
        pass
    assert first.error() is None


def _communicator(prefix: str) -> Any:
    from asynccoll.backends.horovod.backend import _in_world

    backend: Any = current().backend
    return _in_world(backend.hvd, prefix, backend._rounds)


def test_a_name_that_is_in_flight_is_refused(pair: worlds.World) -> None:
    """If two operations ever had the same name, Horovod's error becomes ours, and the first one completes."""
    pair.run(twice)


async def waits(me: Rank) -> None:
    if me.rank == 1:
        me.see("ticked")
    work = ac.all_reduce(1)
    if me.rank == 0:
        task = asyncio.ensure_future(_result(work))
        for _ in range(20):
            await asyncio.sleep(0)
        me.show("ticked")
        assert await task == me.size
    else:
        assert await work == me.size


async def _result(work: Any) -> Any:
    return await work


def test_waiting_leaves_the_loop_alone(pair: worlds.World) -> None:
    """While one rank is late, the other's tasks run: its call comes only after them."""
    pair.run(waits)


def added_while_asked(me: Rank) -> None:
    from asynccoll.backends.horovod import completion

    told, watched = threading.Event(), []
    poll, clear, ours = completion.poll, completion.clear, -1  # the thread polls other handles meanwhile

    def ends(handle: int) -> bool:
        if handle != ours:
            return poll(handle)
        other = threading.Thread(target=work.add_callback, args=(told.set,))
        other.start()
        other.join()
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "poll", ends)
        patch.setattr(completion, "clear", lambda handle: handle == ours or clear(handle))
        patch.setattr(completion.progress, "watch", watched.append)  # the thread has not started to poll it
        work = completion.HorovodCompletion(lambda: ours, (), completion.Common())
        work.enter()
        assert work.done()
    for one in watched:
        completion.progress.watch(one)
    assert told.wait(patient(10))


def added_once_it_is_over(me: Rank) -> None:
    from asynccoll.backends.horovod import completion

    told, watched = [], []
    poll, clear, ours = completion.poll, completion.clear, -1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "poll", lambda handle: handle == ours or poll(handle))
        patch.setattr(completion, "clear", lambda handle: handle == ours or clear(handle))
        patch.setattr(completion.progress, "watch", watched.append)  # the thread has not polled it yet
        work = completion.HorovodCompletion(lambda: ours, (), completion.Common())
        work.add_callback(lambda: told.append("first"))
        work.enter()
        assert work._look()
        work.add_callback(lambda: told.append("second"))
        assert told == ["second"]
    assert watched == [work]
    assert work.poll()
    assert told == ["second", "first"]


def test_who_adds_a_callback_to_what_is_over_calls_no_other_callback(pair: worlds.World) -> None:
    """A lane adds one with its lock held, if a name is still in use; another one may take that lock."""
    pair.run(added_once_it_is_over)


def writes(me: Rank) -> None:
    from asynccoll.backends.horovod.communicator import RING

    under = _communicator("writes")
    if me.rank == 1:
        me.see("looked")
    calls = [under.all_reduce(torch.ones(2), ac.ReduceOp.SUM) for _ in range(RING + 1)]
    if me.rank == 0:
        assert all(call.writing() for call in calls)
        me.show("looked")
    for call in calls:
        while not call.wait(1.0):
            pass
        assert call.error() is None
        assert not call.writing()
    last = under.all_reduce(torch.ones(2), ac.ReduceOp.SUM)
    under.abort()
    assert last.wait(patient(30))
    me.look_until(lambda: not last.writing(), "Horovod never wrote what both ranks have called")


def test_memory_is_in_use_until_horovod_has_written_to_it(pair: worlds.World) -> None:
    """It is so even after a waiter has timed out: until then `out` of that call is refused."""
    pair.run(writes)


def ends(me: Rank) -> None:
    import horovod.torch as hvd

    ac.initialize("horovod", timeout=patient(60), torch_group=False)
    if me.rank == 0:
        under, never = _communicator("ends"), _communicator("never")
        call = under.all_reduce(torch.ones(2), ac.ReduceOp.SUM)  # which rank 1 does not make
        me.look_until(lambda: call._handle is not None, "it has not entered Horovod")
        never.abort()
        unmade = never.all_reduce(torch.ones(2), ac.ReduceOp.SUM)
        under.abort()
        assert call.poll()
        assert call.writing()
        me.look_until(unmade.poll, "nobody told it that it was given up")
        assert not unmade.writing()
        me.show("asked")
    me.see("asked")
    ac.finalize(abort=True)
    hvd.shutdown()
    if me.rank == 0:
        assert not call.writing()


def test_memory_that_was_given_up_is_free_once_horovod_has_ended() -> None:
    """A worker of an elastic job continues with the same tensors in the next world."""
    with worlds.fresh("horovod", 2, bare=True) as world:
        world.run(ends, timeout=30)


def interrupted(me: Rank) -> None:
    """Strike at each call and return in the module, and right after each call of a native function."""
    from asynccoll.backends.horovod import completion

    under, struck = _communicator("interrupted"), 0
    for event, moment in itertools.product(("call", "c_call", "c_return", "return"), range(8)):
        x, parts = torch.full((2,), me.rank + 1.0), [torch.zeros(2) for _ in range(me.size)]
        calls = [
            under.gather(parts if me.rank == 0 else None, x, 0),
            under.all_reduce(x.clone(), ac.ReduceOp.SUM),
        ]
        wrong = under.all_to_all(torch.ones(4), torch.ones(2), [2, 2], [1, 1])
        for call in (*calls, wrong):
            me.look_until(
                lambda call=call: call._handle is not None and completion.poll(call._handle), "not over"
            )
            sys.setprofile(partial(_strike, completion.__file__, event, itertools.count(moment, -1)))
            try:
                call.poll()
            except KeyboardInterrupt:
                struck += 1
            finally:
                sys.setprofile(None)
            assert call.wait(patient(30))
        assert [call.error() for call in calls] == [None, None], (event, moment)
        assert isinstance(wrong.error(), ac.CollectiveMismatchError), (event, moment)
        if me.rank == 0:
            assert torch.cat(parts).tolist() == [1.0, 1.0, 2.0, 2.0], (event, moment)
    assert struck > 20


def _strike(file: str, wanted: str, left: Iterator[int], frame: FrameType, event: str, _what: object) -> None:
    if frame.f_code.co_filename == file and event == wanted and next(left) == 0:
        raise KeyboardInterrupt


def test_a_call_whose_end_is_interrupted_has_the_same_end(pair: worlds.World) -> None:
    """Horovod tells it once: whoever asked again took a call that was over for one that was cut off."""
    pair.run(interrupted)


def test_a_callback_that_is_added_while_another_thread_finds_the_end_is_called(pair: worlds.World) -> None:
    pair.run(added_while_asked)


# ---------------------------------------------------------------- mismatches


async def mismatches(me: Rank) -> None:
    odd = me.rank
    cases: dict[str, Any] = {
        "shape": lambda: ac.all_reduce(torch.ones(2 + odd)),
        "dtype": lambda: ac.all_reduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
        "reduction": lambda: ac.all_reduce(torch.ones(2), op="max" if odd else "sum"),
        "root": lambda: ac.broadcast(torch.ones(2), src=odd),
        "size of a broadcast": lambda: ac.broadcast(torch.ones(2 + odd), src=0),
        "part of a gathering": lambda: ac.all_gather(torch.ones(2 + odd)),
        "rows of an exchange": lambda: ac.all_to_all(torch.ones(2, 2 + odd)),
    }
    called = {"root": "broadcast", "size of a broadcast": "broadcast", "part of a gathering": "all_gather"}
    called["rows of an exchange"] = "all_to_all"
    for label, call in cases.items():
        with me.case(label):
            try:
                got = await me.get(call())
            except ac.CollectiveMismatchError as error:
                assert "nothing was sent" in str(error)
                for rank in range(me.size):
                    assert f"rank {rank}: {called.get(label, 'all_reduce')} " in str(error), error
            else:
                raise AssertionError(f"not noticed: {got!r}")
        await me.check(f"after {label}", ac.all_reduce, 1, expect=me.size)


def test_mismatches_raise_on_every_rank_and_the_job_goes_on(pair: worlds.World, runner: str) -> None:
    """The error shows both sides on each rank, and nothing is sent."""
    pair.run(mismatches, runner=runner)


def around_the_result(me: Rank) -> None:
    under, memory, x = _communicator("around"), torch.zeros(4), torch.full((2,), 1.0 + me.rank)
    others = [
        under.all_to_all(memory[:2], torch.ones(2 + 2 * me.rank), [1, 1], [1 + me.rank] * 2),
        under.gather(None, x, 1 - me.rank),
    ]
    fits = under.all_to_all(memory[1:3], x, [1, 1], [1, 1])
    for call in (*others, fits):
        while not call.wait(1.0):
            pass
        assert isinstance(call.error(), ac.CollectiveMismatchError) is (call is not fits)
    oracle.same(memory, torch.tensor([0.0, 1.0, 2.0, 0.0]))
    oracle.same(x, torch.full((2,), 1.0 + me.rank))


def test_rows_that_nobody_expects_overwrite_nothing(pair: worlds.World) -> None:
    """Horovod resizes the result to what arrives, which could overwrite the memory behind it."""
    pair.run(around_the_result)


async def fits_not(me: Rank) -> None:
    context = current()
    context.checks_order, before = False, context.checks_order
    try:
        sent = [1, 1 + me.rank]
        work = ac.all_to_all(torch.ones(sum(sent)), input_split_sizes=sent, output_split_sizes=[1, 1])
        if me.rank == 0:
            oracle.same(await me.get(work), torch.ones(2))
        else:
            with pytest.raises(ac.CollectiveMismatchError, match=r"all_to_all #\d+ on .* got \[1, 2\]"):
                await me.get(work)
    finally:
        context.checks_order = before


def test_a_mismatch_that_horovod_reports_says_of_which_call(pair: worlds.World, runner: str) -> None:
    """This is so if the calls are not compared beforehand."""
    pair.run(fits_not, runner=runner)


async def natively(me: Rank) -> None:
    communicator: Any = current().world.lane().communicator
    for op, divisor in ((ac.ReduceOp.SUM, 1), (ac.ReduceOp.AVG, me.size)):
        out = torch.empty(2)
        completion = communicator.reduce_scatter(out, torch.arange(4.0) * (me.rank + 1), op)
        while not completion.wait(1.0):
            pass
        assert completion.error() is None
        scale = me.size * (me.size + 1) / 2 / divisor
        oracle.same(out, torch.tensor([2.0 * me.rank, 2.0 * me.rank + 1]) * scale)


def test_horovods_own_reduce_scatter(pair: worlds.World) -> None:
    """The dispatcher does not use it, but it gives what the composition gives."""
    pair.run(natively)


# ---------------------------------------------------------------- alongside the user's own Horovod


async def beside(me: Rank) -> None:
    import horovod.torch as hvd

    assert (hvd.rank(), hvd.size()) == (me.rank, me.size)
    mine = [ac.all_reduce(torch.full((3,), float(turn))) for turn in range(20)]
    theirs = [
        hvd.allreduce_async(torch.full((3,), float(turn)), op=hvd.Sum, name=f"turn {turn}")
        for turn in range(20)
    ]
    named = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="default")
    for turn in reversed(range(20)):
        want = torch.full((3,), float(me.size * turn))
        oracle.same(await me.get(mine[turn]), want)
        oracle.same(hvd.synchronize(theirs[turn]), want)
    oracle.same(hvd.synchronize(named), torch.full((2,), float(me.size)))
    model = torch.nn.Linear(2, 1)
    await me.get(ac.broadcast([parameter.detach() for parameter in model.parameters()]))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    model(torch.full((1, 2), float(me.rank))).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None
    oracle.same(model.weight.grad, torch.full((1, 2), (me.size - 1) / 2))


def test_the_users_own_horovod_goes_on_beside_it(three: worlds.World) -> None:
    """The user's operations, names and optimizer never collide with ours."""
    three.run(beside)


async def sets(me: Rank) -> None:
    import horovod.torch as hvd

    theirs = hvd.add_process_set([0, 2])
    group = ac.new_group([2, 0])
    if me.rank in (0, 2):
        await me.check("ours", ac.all_reduce, 10**me.rank, group=group, expect=101)
        context = current()
        made = context.add_group((0, 2))
        opening = made.opening("default", 0, lambda: False)
        native = context.backend.native_group(opening, made.lane().communicator)
        got = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="theirs", process_set=native)
        oracle.same(got, torch.full((1,), 2.0))
        assert native.process_set_id == theirs.process_set_id
    await me.check("the world", ac.all_reduce, 1, expect=me.size)
    await me.refuses("not made", ac.UnsupportedOpError, ac.all_reduce, 1, group=[0, 1], says=("new_group",))
    await made_late(me)


async def made_late(me: Rank) -> None:
    """Create two groups, which rank 2 creates in the other order, and only after a timeout names it."""
    lists = [[0, 1], [1, 2]]
    if me.rank == 2:
        me.see("told")
        lists.reverse()
    made = [ac.new_group(one) for one in lists]
    works = [ac.all_reduce(1, group=group, timeout=1) for group in reversed(made) if me.rank in group.ranks]
    if me.rank == 0:
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await me.get(works[0])
        assert caught.value.ranks == (2,)
        assert "rank 2" in str(caught.value)
        assert "has not called new_group([0, 1]), as every rank has to" in str(caught.value)
        me.show("told")
    for work in works:
        assert await me.until_ready(work) == 2


def test_groups_are_process_sets() -> None:
    """A process set of the user's is used; a list without one is refused with the fix."""
    with worlds.fresh("horovod", 3) as world:  # where no other case has created groups
        world.run(sets)


async def messages(me: Rank) -> None:
    x = torch.ones(2)
    peer = (me.rank + 1) % me.size
    says = ("gloo", "permute or broadcast can replace it if all ranks of a group call them")
    await me.refuses("send", ac.UnsupportedOpError, ac.send, x, dst=peer, says=says)
    await me.refuses("recv", ac.UnsupportedOpError, ac.recv, x, src=peer, says=says)
    two, one = ac.new_group([0, 1]), ac.new_group([0])
    if me.rank < 2:
        mine, received = x * me.rank, torch.zeros(2) if me.rank == 0 else x * 2
        await me.check("permute", ac.permute, mine + 2, [(0, 1)], group=two, expect=received)
        await me.check("broadcast", ac.broadcast, mine, src=1, group=two, expect=x)
    if me.rank == 0:
        await me.check("a group of one", ac.all_gather, x, group=one, expect=x)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_messages_are_refused_before_anything_is_sent(three: worlds.World) -> None:
    """The error names backends with messages, and a replacement here that the third rank need not call."""
    three.run(messages)


# ---------------------------------------------------------------- a rank that dies in a world with groups


async def dies_beside_groups(me: Rank, victim: int) -> tuple[str, tuple[int, ...], float]:
    two, _ = ac.new_group([0, 1]), ac.new_group([1, 2])
    await me.get(ac.all_reduce(1))
    if me.rank < 2:
        await me.get(ac.all_reduce(1, group=two))
    if me.rank == victim:
        me.is_killed_once_all_wait()
    work = ac.all_reduce(torch.ones(2), group=two if (me.rank, victim) == (0, 1) else None)
    me.show(f"{me.rank} waits")
    start = time.monotonic()
    with pytest.raises(ac.PeerLostError) as caught:
        await me.get(work)
    return str(caught.value), caught.value.ranks, time.monotonic() - start


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_named_where_there_are_groups(victim: int) -> None:
    """Unpatched Horovod ends the survivors: removing the process sets involves the lost rank again."""
    with worlds.fresh("horovod", 3) as world:
        results = world.run(dies_beside_groups, victim, dies=[victim], timeout=30)
        world.kill()
    assert results.pop(victim) == worlds.Died(-signal.SIGKILL)
    for text, lost, seconds in results:
        assert lost == (victim,), text
        assert f"rank {victim}" in text
        assert seconds < 10, text


@pytest.mark.parametrize(
    "said",
    [
        "Allreduce: Process set provided does not exist, or has not been registered.",
        "Horovod is shutting down.",
        "Horovod has not been initialized properly; use hvd.init().",
    ],
)
def test_what_horovod_says_once_its_thread_has_ended_is_no_mystery(said: str) -> None:
    """The thread has taken its process sets along: that they do not exist is not the cause."""
    from asynccoll.backends.horovod.failures import typed

    assert isinstance(typed(ValueError(said), "making the process set [0, 1]"), ac.PeerLostError)


async def dies_outside(me: Rank) -> tuple[str, tuple[int, ...]]:
    two = ac.new_group([0, 1])
    await me.get(ac.all_reduce(1))
    if me.rank == 2:
        me.is_killed_once_all_wait()
    await me.get(ac.all_reduce(1, group=two))
    work = ac.all_reduce(1, group=two if me.rank == 0 else None)  # which the other ranks do not call
    me.show(f"{me.rank} waits")
    with pytest.raises(ac.PeerLostError) as caught:
        await me.get(work)
    return str(caught.value), caught.value.ranks


def test_a_killed_rank_is_named_in_calls_of_a_group_that_it_is_no_member_of() -> None:
    """Horovod ends with that rank, for all groups."""
    with worlds.fresh("horovod", 3) as world:
        results = world.run(dies_outside, dies=[2], timeout=30)
        world.kill()
    for text, lost in results[:2]:
        assert lost == (2,), text
        assert "made no call" not in text


def process_sets(rank: int, made: list[list[int]]) -> Any:
    """Return those of a rank of two; a fake Horovod notes in ``made`` the sets it is asked to create."""
    from asynccoll.backends.horovod.process_sets import ProcessSets

    hvd: Any = types.SimpleNamespace(rank=lambda: rank, size=lambda: 2, add_process_set=made.append)
    sets = ProcessSets(hvd)
    sets._known = lambda ranks: None  # type: ignore[method-assign]
    return sets


def wanted(ranks: tuple[int, ...], clients: Clients, given_up: Callable[[], bool]) -> Any:
    key = "-".join(map(str, ranks))
    return types.SimpleNamespace(ranks=ranks, group=key, clients=clients, given_up=given_up)


def never() -> bool:
    return False


def test_process_sets_are_made_in_one_order_once_all_ranks_have_asked_for_them() -> None:
    clients = Clients(dist.HashStore())
    made: list[list[list[int]]] = [[], []]
    one, other = map(process_sets, range(2), made)
    one.register(wanted((0,), clients, never))
    one.register(wanted((1,), clients, never))
    with pytest.raises(ac.CollectiveError, match=r"\[0\] was given up"):
        one.wait((0,), iter([False, True]).__next__)
    assert one.absent((0,)) == (1,)
    assert made == [[], []]
    for ranks in ((1,), (0,)):
        other.register(wanted(ranks, clients, never))
    for sets in (one, other):
        for ranks in ((0,), (1,)):
            sets.wait(ranks, never)
            assert sets.absent(ranks) == ()
        sets.close()
    assert made[0] == made[1]
    assert sorted(made[0]) == [[0], [1]]


def test_a_group_whose_thread_could_not_start_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second ``new_group`` once did nothing, and neither did that of any later group."""
    clients = Clients(dist.HashStore())
    made: list[list[list[int]]] = [[], []]
    one, other = map(process_sets, range(2), made)

    def too_many(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", too_many)
        with pytest.raises(RuntimeError):
            one.register(wanted((0,), clients, never))
    until = time.monotonic() + patient(10)
    for sets in (one, other):
        sets.register(wanted((0,), clients, never))
    for sets in (one, other):
        sets.wait((0,), lambda: time.monotonic() > until)
        sets.close()
    assert made == [[[0]], [[0]]]


def test_a_world_that_is_left_makes_no_more_process_sets() -> None:
    left = threading.Event()
    sets = process_sets(0, made := [])
    sets.register(wanted((0,), Clients(dist.HashStore()), left.is_set))
    left.set()
    with pytest.raises(ac.AbortedError, match="its world was left"):
        sets.wait((0,), never)
    sets.close()
    assert made == []


# ---------------------------------------------------------------- a rank that is stopped


async def stands_still(me: Rank, pids: list[int]) -> tuple[str, float]:
    await me.get(ac.all_reduce(1))
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 kills it
    start = time.monotonic()
    try:
        await me.get(ac.all_reduce(torch.ones(2)))
    except ac.PeerLostError as error:
        return str(error), time.monotonic() - start
    finally:
        os.kill(pids[1], signal.SIGKILL)
    raise AssertionError("gave a result without rank 1")


def test_a_stopped_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive but silent: after Horovod's own timeout the others get an error."""
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "3")
    with worlds.fresh("horovod", 2) as world:
        (text, seconds), _ = world.run(stands_still, world.pids, dies=[1], timeout=40)
        world.kill()
    assert seconds < 15, f"heard of it after {seconds} s"
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" in text


async def calls_beside_a_stopped_one(me: Rank, pids: list[int]) -> tuple[str, tuple[int, ...]]:
    await me.get(ac.all_reduce(1))
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 kills it
    stopped = Path(f"/proc/{pids[1]}/stat")
    while stopped.read_text().rpartition(")")[2].split()[0] != "T":
        await checkpoint()
    try:
        # Horovod's thread now holds its lock: a call that took the lock here would block this process, too.
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await me.get(ac.broadcast(torch.ones(2), src=0, timeout=1.0))
        return str(caught.value), caught.value.ranks
    finally:
        os.kill(pids[1], signal.SIGKILL)


def test_a_call_beside_a_stopped_rank_ends_in_an_error_that_names_it() -> None:
    with worlds.fresh("horovod", 2) as world:
        (text, ranks), _ = world.run(calls_beside_a_stopped_one, world.pids, dies=[1], timeout=patient(20))
        world.kill()
    assert ranks == (1,)
    assert "its process is stopped" in text


# ---------------------------------------------------------------- repeated initialization


def lives(me: Rank) -> None:
    import horovod.torch as hvd

    for turn in range(3):
        ac.initialize("horovod", timeout=patient(60), torch_group=turn == 0)
        assert ac.all_reduce(1).wait() == me.size
        assert ac.all_reduce(1, lane=f"of life {turn}").wait() == me.size
        assert torch.distributed.is_initialized() == (turn == 0)
        if turn == 1:
            given_up = ac.all_reduce(torch.ones(2)) if me.rank == 0 else None  # rank 1 never makes this call
            ac.finalize(abort=True)
            with pytest.raises(ac.AbortedError):
                given_up.wait() if given_up is not None else _aborted()
        else:
            ac.finalize()
        assert hvd.is_initialized()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="of the user").item() == me.size


def _aborted() -> None:
    raise ac.AbortedError("nothing was given up here")


def test_it_can_be_initialized_again_and_horovod_lives_on() -> None:
    """This works after a normal end, and after an abort with a call that only one rank has made."""
    worlds.world("horovod", 2, bare=True).run(lives, timeout=60)


def stays_away(me: Rank, where: str) -> None:
    import horovod.torch as hvd

    from asynccoll.backends.horovod import backend

    hvd.init()
    if me.rank == 0:
        seconds = patient(2)
        with raising(ac.CollectiveTimeoutError, f"within {seconds:g} s"):
            ac.initialize("horovod", timeout=seconds, torch_group=False)
        me.show("heard")
    elif where == "Context":
        with pytest.MonkeyPatch.context() as patch, raising(LookupError, "here only"):
            patch.setattr(backend, where, _raises_here_only)
            ac.initialize("horovod", timeout=patient(20), torch_group=False)
    me.see("heard")


def _raises_here_only(*_: object, **__: object) -> None:
    raise LookupError("here only")


@pytest.mark.parametrize("where", ["ac.initialize", "Context"])
def test_a_rank_that_joins_horovod_but_not_the_world_is_waited_for_until_the_timeout(where: str) -> None:
    """Horovod waits for it forever, wherever it stops on its way into the world."""
    with worlds.fresh("horovod", 2, bare=True) as world:
        world.run(stays_away, where, timeout=30)


def takes_over(me: Rank) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if me.rank == 0:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    mine = [model.weight.tolist(), optimizer.state_dict()["state"]]
    state = ac.elastic.state(model=model, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    groups = [*optimizer.param_groups]
    state.sync()
    state.commit()
    state.restore()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05, (
        "the scheduler writes to the groups that the optimizer reads"
    )
    assert all(one is ours for one, ours in zip(optimizer.param_groups, groups, strict=True))
    wanted = ac.broadcast_object(mine).wait()
    torch.testing.assert_close([model.weight.tolist(), optimizer.state_dict()["state"]], wanted)


def test_a_new_worker_takes_over_the_first_ones_optimizer(pair: worlds.World) -> None:
    """Horovod's function makes a step on a worker without state: it decayed that worker's weights."""
    pair.run(takes_over)


def takes_over_more(me: Rank) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    sampler = ac.auto_dataloader(range(12), batch_size=2, shuffle=False).sampler
    if me.rank == 0:
        drawn = iter(sampler)
        assert [next(drawn), next(drawn)] == [0, 2]
        optimizer.step()
        schedule.step()
    state = ac.elastic.state(optimizer=optimizer, schedule=schedule, sampler=sampler)
    state.sync()
    state.commit()
    schedule.step()
    state.restore()
    assert state.schedule is schedule, "another one would step a copy of the optimizer"
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.1)
    schedule.step()
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 0.05)
    sampler.num_replicas, sampler.rank = 4, 3  # as in a larger world, of which these workers are left
    state.on_reset()
    state.sync()
    assert [*sampler] == [*range(4, 12)][me.rank :: 2]


def test_schedulers_and_samplers_are_kept_too(pair: worlds.World) -> None:
    """Regression: nothing took them back, and a new worker's scheduler stepped a copy of the optimizer."""
    pair.run(takes_over_more)


def keeps_losses(me: Rank) -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum() * (me.rank + 1)
    state = ac.elastic.state(losses=[loss], best={"loss": loss})
    state.sync()
    state.losses.append(weight.sum())
    state.commit()
    state.losses.clear()
    state.restore()
    assert [x.tolist() for x in (*state.losses, state.best["loss"])] == [2.0, 2.0, 2.0]
    assert not any(x.requires_grad for x in (*state.losses, state.best["loss"]))


def test_losses_are_kept_without_their_history(pair: worlds.World) -> None:
    """Regression: torch refuses to deepcopy a tensor that autograd has computed."""
    pair.run(keeps_losses)


class _Average:
    """An average of weights as users write it: it keeps what it loads, and changes it in place."""

    def __init__(self) -> None:
        self.values = {"weight": torch.zeros(2)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = state


def lost_twice(me: Rank) -> None:
    model = torch.nn.Linear(1, 2, dtype=torch.bfloat16)
    model.register_buffer("mask", torch.tensor([True, me.rank == 0]))
    state = ac.elastic.state(model=model, average=_Average(), epoch=me.rank, losses=[float(me.rank)])

    def train() -> None:
        with torch.no_grad():
            model.weight += 1
        model.mask.zero_()
        state.average.values["weight"] += 1
        state.epoch += 1
        state.losses.append(7.0)

    def has() -> list[Any]:
        held = [model.weight, model.mask, state.average.values["weight"]]
        return [*(x.tolist() for x in held), state.epoch, [*state.losses]]

    wanted = ac.broadcast_object(has()).wait()
    state.sync()
    for _ in range(2):
        train()
        state.restore()  # no worker has committed anything in this world
        assert has() == wanted, "the copy is rank 0's, whole, and does not change"
    train()
    wanted = ac.broadcast_object(has()).wait()
    state.sync()  # hosts were added
    assert has() == wanted, "workers continue from the current state, all of it"


def test_every_worker_returns_to_the_same_whole_state(pair: worlds.World) -> None:
    """Regression: lists and averages kept what a loss took back, a new worker its own weights."""
    pair.run(lost_twice)


def alone_afterwards(me: Rank) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ac.initialize("horovod", torch_group=False)
    assert ac.auto_optim(optimizer) is optimizer
    ac.finalize()
    ac.initialize("serial")
    assert ac.auto_optim(optimizer) is optimizer
    torch.nn.init.constant_(model.weight, 5)
    model(torch.tensor([[3.0]])).sum().backward()
    optimizer.step()
    assert model.weight.item() == 2
    ac.finalize()


def test_the_last_worker_trains_on_alone() -> None:
    """Regression: its backward sent gradients to the ranks of the earlier world, and was refused."""
    with worlds.fresh("horovod", 2, bare=True) as world:
        world.run(alone_afterwards, timeout=30)


def contradictions(me: Rank) -> None:
    for options in ({"rank": 1 - me.rank, "world_size": 2}, {"rank": me.rank, "world_size": 3}):
        with pytest.raises(ac.LaunchEnvironmentError, match="Horovod says"):
            ac.initialize("horovod", **options)
    with pytest.raises(ac.InvalidArgumentError, match="horovodrun"):
        ac.initialize("horovod", init_method="tcp://127.0.0.1:1", rank=me.rank, world_size=2)
    with pytest.raises(ac.InvalidArgumentError, match="torch_group"):
        ac.initialize("horovod", interface="lo")
    assert not ac.is_initialized()


def test_what_contradicts_horovod_is_refused() -> None:
    """A wrong rank, size, rendezvous or option gives a typed error, for rank and size with Horovod's."""
    worlds.world("horovod", 2, bare=True).run(contradictions)
