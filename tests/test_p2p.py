"""send, recv and permute: from one rank to another."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
from asynccoll.backends.c10d import channels
from patience import patient
from ranks import Rank, raising
from worlds import World

called: Any = ac  # untyped, for wrong calls that a type checker would report


async def dtypes(me: Rank) -> None:
    for name, dtype in oracle.DTYPES.items():
        for shape in ((), (0,), (3, 2), (1025,)):
            x = oracle.moving(0, shape, dtype)
            label = f"{name} {shape}"
            if me.rank == 0:
                await me.check(label, ac.send, x, dst=me.size - 1, expect=None)
            elif me.rank == me.size - 1:
                like = torch.zeros(shape, dtype=dtype)
                await me.check(label, ac.recv, like, src=0, expect=x)


def test_send_and_recv_every_dtype(several: World, runner: str) -> None:
    """recv returns the tensor that send took, shaped as `like`, which is unchanged."""
    several.run(dtypes, runner=runner)


async def in_inference_mode(me: Rank) -> None:
    for size in (5, 400_000):
        x = torch.arange(float(size))
        if me.rank == 0:
            with torch.inference_mode():
                sent = [ac.send(x + 1, dst=1), ac.send_object({"of": size}, dst=1)]
                for work in sent:
                    await me.get(work)
            await me.get(ac.send(x, dst=1))
        else:
            with torch.inference_mode():
                first, second = ac.recv(torch.zeros(size), src=0), ac.recv_object(src=0)
                assert torch.equal(await me.get(first), x + 1)
                assert await me.get(second) == {"of": size}
                third = ac.recv(torch.zeros(size), src=0)
            assert torch.equal(await me.get(third), x)


@pytest.mark.processes
def test_messages_in_inference_mode(pair: World, runner: str) -> None:
    """Any thread may carry them, in any mode."""
    pair.run(in_inference_mode, runner=runner)


async def to_oneself(me: Rank) -> None:
    x = torch.ones(2)
    says = (f"={me.rank}", "itself")
    await me.refuses("send", ValueError, ac.send, x, dst=me.rank, says=says)
    await me.refuses("recv", ValueError, ac.recv, x, src=me.rank, says=says)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_a_message_to_oneself_is_refused(world: World) -> None:
    """Messages must go to another rank; the error says so, and the lane keeps working."""
    world.run(to_oneself)


async def ring(me: Rank) -> None:
    following, previous = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    for turn in range(20):
        x = torch.full((100,), float(me.rank * 1000 + turn))
        sending = ac.send(x, dst=following)
        receiving = ac.recv(torch.empty(100), src=previous)
        with me.case(f"turn {turn}"):
            oracle.same(await me.get(receiving), torch.full((100,), float(previous * 1000 + turn)))
            assert await me.get(sending) is None, "send gives something"


@pytest.mark.processes
def test_a_ring_of_sends(four: World, runner: str) -> None:
    """All ranks send to the next and receive from the previous one at the same time."""
    four.run(ring, runner=runner)


async def tags(me: Rank) -> None:
    if me.rank == 0:
        works = [ac.send(torch.tensor([tag]), dst=1, tag=tag) for tag in range(5)]
    else:
        works = [ac.recv(torch.zeros(1, dtype=torch.int64), src=0, tag=tag) for tag in range(5)]
        works.reverse()
    for turn, work in enumerate(works):
        with me.case(f"number {turn}"):
            got = await me.get(work)
            if me.rank == 1:
                oracle.same(got, torch.tensor([4 - turn]))


@pytest.mark.processes
def test_tags_tell_messages_apart(pair: World, runner: str) -> None:
    """A message goes to the recv with its tag."""
    pair.run(tags, runner=runner)


async def any_order(me: Rank) -> None:
    peer = 1 - me.rank
    received = {ac.recv(torch.tensor(0), src=peer, tag=tag): tag for tag in range(8)}
    summed = ac.all_reduce(1)
    sent = [ac.send(torch.tensor(tag), dst=peer, tag=tag) for tag in reversed(range(8))]
    seen = [work async for work in ac.as_completed([*received, summed])]
    assert len(seen) == 9
    assert set(seen) == {*received, summed}, "each comes once"
    assert {tag: work.result().item() for work, tag in received.items()} == {tag: tag for tag in range(8)}
    await ac.wait_all(sent)


@pytest.mark.processes
def test_messages_are_taken_as_they_come(pair: World, loop: str) -> None:
    """as_completed yields each message once, in whatever order they were sent."""
    pair.run(any_order, runner=loop)


async def in_falling_order(me: Rank) -> None:
    """The ranks send to the first one in descending order, each once the previous message has arrived."""
    if me.rank:
        await me.get(ac.recv(torch.empty(1), src=0, tag=1))
        await me.get(ac.send(torch.tensor([float(me.rank)]), dst=0))
        return
    senders = [*range(me.size - 1, 0, -1)]
    arriving = ac.recv_any(torch.empty(1))
    await me.get(ac.send(torch.ones(1), dst=senders[0], tag=1))
    came = []
    async for source, x in by_turns(me, arriving):
        came.append((source, x.item()))
        if len(came) < len(senders):
            assert arriving.sources == tuple(sorted(senders[len(came) :]))
            await me.get(ac.send(torch.ones(1), dst=senders[len(came)], tag=1))
    with me.case("came"):
        assert came == [(rank, float(rank)) for rank in senders]
        assert arriving.sources == ()


async def by_turns(me: Rank, arriving: ac.AnySource[Any]) -> AsyncIterator[tuple[int, Any]]:
    """Iterate in the way of the runner."""
    if me.runner == "blocking":
        for taken in arriving:
            yield taken
    else:
        async for taken in arriving:
            yield taken


@pytest.mark.processes
def test_from_any_source_in_order_of_arrival(four: World, runner: str) -> None:
    """Messages come in order of arrival, whatever the order of the posted receives, each with its source."""
    four.run(in_falling_order, runner=runner)


async def farm(me: Rank) -> None:
    """The first rank hands a job to each rank that asks, and dismisses those that ask when none is left."""
    if me.rank:
        done: object = None
        while True:
            await me.get(ac.send_object(done, dst=0, tag=3))
            job = await me.get(ac.recv_object(src=0, tag=3))
            if job is None:
                return
            done = job * job
    jobs, found = [*range(20)], []
    arriving = ac.recv_any_object(sources=range(1, me.size), tag=3)
    async for source, done in by_turns(me, arriving):
        if done is not None:
            found.append(done)
        job = jobs.pop() if jobs else None
        await me.get(ac.send_object(job, dst=source, tag=3))
        if job is not None:
            arriving.again(source)
    with me.case("all jobs"):
        assert sorted(found) == [job * job for job in range(20)]


@pytest.mark.processes
def test_a_server_asks_again_whom_it_has_answered(four: World, runner: str) -> None:
    """Each worker is asked as often as it sends, which is not known beforehand."""
    four.run(farm, runner=runner)


async def late_source(me: Rank) -> None:
    if me.rank:
        if me.rank == 2:
            me.see(f"late {me.runner}")
        await me.get(ac.send(torch.tensor([me.rank]), dst=0))
        return
    arriving = ac.recv_any(torch.tensor([0]), timeout=0.3)
    came: list[int] = []
    with raising(ac.CollectiveTimeoutError, "rank 2") as caught:
        async for source, _ in by_turns(me, arriving):
            came.append(source)
    assert isinstance(caught.error, ac.CollectiveTimeoutError)
    assert (sorted(came), caught.error.ranks) == ([1, 3], (2,))
    assert "without await" not in str(caught.error)
    me.show(f"late {me.runner}")
    with me.case("goes on"):
        assert [(source, x.item()) async for source, x in by_turns(me, arriving)] == [(2, 2)]


@pytest.mark.processes
def test_a_source_that_is_late_is_named(four: World, runner: str) -> None:
    """Messages that have arrived are kept, and the iteration can continue."""
    four.run(late_source, runner=runner)


async def any_source_refused(me: Rank) -> None:
    like = torch.ones(2)
    peer = 1 - me.rank
    for sources, error in (
        ([me.rank], ac.InvalidArgumentError),
        ([peer, peer], ac.InvalidArgumentError),
        ([peer, 7], ac.InvalidArgumentError),
        (peer, ac.PayloadTypeError),
    ):
        for call, args in ((ac.recv_any, (like,)), (ac.recv_any_object, ())):
            with me.case(f"{call.__name__} {sources}"), raising(error, "sources"):
                call(*args, sources=sources)
    if me.lacks("recv"):
        with me.case("lacking"), raising(ac.UnsupportedOpError):
            ac.recv_any(like)
        return
    with me.case("no source"), raising(ac.InvalidArgumentError, "ac.recv_any"):
        ac.recv(like)
    arriving = ac.recv_any(like)
    with me.case("asked for"), raising(ac.InvalidArgumentError, f"rank {peer}"):
        arriving.again(peer)
    sent = ac.send(like * me.rank, dst=peer)
    taken = [one async for one in by_turns(me, arriving)]
    await me.get(sent)
    with me.case("taken"):
        oracle.same(taken, [(peer, like * peer)])


def test_sources_that_are_refused(pair: World, runner: str) -> None:
    """They are refused before any receive is posted."""
    pair.run(any_source_refused, runner=runner)


async def several_take(me: Rank) -> None:
    arriving = ac.recv_any(torch.ones(2))
    peer = 1 - me.rank
    with me.case("two tasks"):
        first = asyncio.ensure_future(anext(arriving))
        await asyncio.sleep(0)
        with raising(ac.InvalidArgumentError, "another task"):
            await anext(arriving)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
    await ac.barrier()  # no rank sends before this
    sent = ac.send(torch.ones(2) * me.rank, dst=peer)
    with me.case("after a cancelled one"):
        source, x = await anext(arriving)
        oracle.same((source, x), (peer, torch.ones(2) * peer))
    await sent


@pytest.mark.processes
def test_one_task_takes_what_arrives(pair: World) -> None:
    """A second task at the same time is refused; if a task is cancelled, no message is lost."""
    pair.run(several_take, runner="asyncio")


async def into_out(me: Rank) -> None:
    x = oracle.moving(0, (4, 2), torch.int16)
    if me.rank == 0:
        await me.check("send strided", ac.send, x.t(), dst=1, expect=None)
        await me.check("send", ac.send, x, dst=1, expect=None)
    else:
        like = torch.zeros(2, 4, dtype=torch.int16)
        await me.check("recv strided", ac.recv, like, src=0, expect=x.t().contiguous())
        with me.case("out"):
            out = torch.zeros(4, 2, dtype=torch.int16)
            got = await me.get(ac.recv(out, src=0, out=out))
            assert got is out, "the result is not out"
            oracle.same(out, x)


@pytest.mark.processes
def test_layouts_and_out(pair: World, runner: str) -> None:
    """A transposed tensor is sent by value; recv fills `out`, which may be `like`."""
    pair.run(into_out, runner=runner)


async def of_one_column(me: Rank) -> None:
    if me.lacks("send"):
        return
    for rows in 1, 0, 3:
        column = torch.arange(rows * 2.0).view(rows, 2)[
            :, 1
        ]  # contiguous for torch if it has one row or none
        if me.rank == 0:
            await me.get(ac.send(column, dst=1, timeout=patient(20.0)))
            await me.get(ac.send(column + 1, dst=1))
        else:
            got = await me.get(ac.recv(torch.zeros(rows), src=0, timeout=patient(20.0)))
            oracle.same(got, column)
            out = torch.zeros(rows, 2)[:, 1]
            assert await me.get(ac.recv(got, src=0, out=out)) is out
            oracle.same(out, column + 1)


@pytest.mark.processes
def test_a_column_of_one_row(pair: World, runner: str) -> None:
    """Its stride is not 1, but has no meaning."""
    pair.run(of_one_column, runner=runner)


async def batch(me: Rank, sends: Any, receives: Any) -> None:
    following, previous = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    x, y = torch.full((3,), float(me.rank)), torch.zeros(3)
    tagged, behind = torch.tensor([me.rank]), torch.tensor([-1])
    works = ac.batch_isend_irecv(
        [
            ac.P2POp(receives, y, previous),
            ac.P2POp(sends, x, following),
            ac.P2POp(sends, tagged, group_peer=following, tag=1),
            ac.P2POp(receives, behind, group_peer=previous, tag=1),
        ]
    )
    assert [await me.get(work) for work in works] == [y, None, None, behind]
    again = (ac.P2POp(*one) for one in ((receives, y.zero_(), previous), (sends, x, following)))
    assert [await me.get(work) for work in ac.batch_isend_irecv(again)] == [y, None]
    oracle.same(y, torch.full((3,), float(previous)))
    oracle.same(behind, torch.tensor([previous]))
    with me.case("refused"):
        for wrong, error in (
            (x, ac.PayloadTypeError),
            (ac.P2POp(sends, x, me.size), ac.InvalidArgumentError),
        ):
            with raising(error):
                ac.batch_isend_irecv([wrong])
        with raising(ac.InvalidArgumentError, "all_reduce"):
            ac.P2POp(ac.all_reduce, x, following)
    # A refused message takes those behind it in the list along.
    sent = [ac.P2POp(sends, x, following, tag=2), ac.P2POp(sends, x, me.size), ac.P2POp(sends, x, following)]
    with raising(ac.InvalidArgumentError):
        ac.batch_isend_irecv([*sent, ac.P2POp(receives, y, previous), ac.P2POp(sends, x, following, tag=1)])
    oracle.same(await me.get(ac.recv(y, src=previous, tag=2)), torch.full((3,), float(previous)))
    for tag in (0, 1):
        with raising(ac.PeerRefusedError, f"rank {previous} refused its side"):
            await me.get(ac.recv(y, src=previous, tag=tag))


def test_messages_of_a_batch_as_torch_makes_them_are_answered_with_what_to_write() -> None:
    theirs = object.__new__(dist.P2POp)  # its constructor refuses our functions, and may ask for a group
    with raising(ac.PayloadTypeError, "a torch.distributed.P2POp in it: write ac.P2POp(ac.send, x, 1)"):
        ac.batch_isend_irecv([theirs])
    for name, ours in (("isend", "ac.P2POp(ac.send, x, 1)"), ("irecv", "ac.P2POp(ac.recv, x, 0)")):
        with raising(AttributeError, f"{ours} for a batch"):
            getattr(ac, name)


@pytest.mark.processes
@pytest.mark.parametrize("spelled", ["ours", "torch"])
def test_a_batch_of_messages(several: World, runner: str, spelled: str) -> None:
    """As in torch programs, buffers are filled, and works are returned in the order of the list."""
    calls = (ac.send, ac.recv) if spelled == "ours" else (dist.isend, dist.irecv)
    several.run(batch, *calls, runner=runner)


OBJECTS = [None, 7, "é" * 3, {"lr": 0.1, "steps": [1, 2]}, "x" * 5000, torch.arange(1000.0), b"", [1] * 400]


async def objects(me: Rank) -> None:
    last = me.size - 1
    for turn, obj in enumerate(OBJECTS):
        if me.rank == 0:
            await me.check(f"send {turn}", ac.send_object, obj, dst=last, expect=None)
        elif me.rank == last:
            await me.check(f"recv {turn}", ac.recv_object, src=0, expect=obj)


def test_objects_one_by_one(several: World, runner: str) -> None:
    """The received object equals the sent one, whatever its size, which only the sender knows."""
    several.run(objects, runner=runner)


async def objects_at_once(me: Rank) -> None:
    peer = 1 - me.rank
    receiving = [ac.recv_object(src=peer, tag=turn % 2) for turn in range(len(OBJECTS))]
    tensor = ac.recv(torch.zeros(3), src=peer, tag=1)
    behind = ac.recv_object(src=peer, tag=1)
    sending: list[Any] = [ac.send_object(obj, dst=peer, tag=turn % 2) for turn, obj in enumerate(OBJECTS)]
    sending += [ac.send(torch.arange(3.0), dst=peer, tag=1), ac.send_object("last", dst=peer, tag=1)]
    gathered = ac.all_gather_object("y" * 3000)
    for turn in reversed(range(len(OBJECTS))):
        with me.case(f"number {turn}"):
            oracle.same(await me.get(receiving[turn]), OBJECTS[turn])
    with me.case("a tensor between"):
        oracle.same(await me.get(tensor), torch.arange(3.0))
        assert await me.get(behind) == "last"
    with me.case("beside"):
        assert await me.get(gathered) == ["y" * 3000] * 2
    for work in sending:
        assert await me.get(work) is None


@pytest.mark.processes
def test_objects_and_tensors_of_a_tag_keep_their_order(pair: World, runner: str) -> None:
    """Many are in flight with two tags, long ones before short ones, with tensors in between."""
    pair.run(objects_at_once, runner=runner)


async def object_before_a_collective(me: Rank) -> None:
    if me.rank == 0:
        await me.check("send", ac.send_object, "x" * 5000, dst=1, expect=None)
        await me.check("gather", ac.all_gather_object, "z" * 5000, expect=["z" * 5000] * 2)
    else:
        receiving = ac.recv_object(src=0)
        await me.check("gather", ac.all_gather_object, "z" * 5000, expect=["z" * 5000] * 2)
        with me.case("recv"):
            assert await me.get(receiving) == "x" * 5000


@pytest.mark.processes
def test_a_long_object_is_taken_while_a_collective_is_waited_for(pair: World, runner: str) -> None:
    """Its second part does not wait for a collective that its sender has yet to call."""
    pair.run(object_before_a_collective, runner=runner)


async def refused_objects(me: Rank) -> None:
    if me.rank == 0:
        await me.refuses("send", TypeError, ac.send_object, object(), dst=1, says=("object",))
        await me.check("the next one", ac.send_object, "x" * 900, dst=1, expect=None)
        await me.check("pickled", ac.send_object, {1, 2}, dst=1, codec="pickle", expect=None)
    else:
        with me.case("recv"), raising(ac.CollectiveError, "refused"):
            await me.get(ac.recv_object(src=0))
        await me.check("the next one", ac.recv_object, src=0, expect="x" * 900)
        await me.refuses("codec", ac.CollectiveError, ac.recv_object, src=0, says=("'pickle'", "codec="))
    await me.refuses("oneself", ac.InvalidArgumentError, ac.recv_object, src=me.rank, says=("itself",))
    await me.refuses("tag", ac.InvalidArgumentError, ac.send_object, 1, dst=1 - me.rank, tag=-1)
    await me.check("afterwards", ac.all_reduce, 1, expect=2)


@pytest.mark.processes
def test_an_object_that_is_refused(pair: World, runner: str) -> None:
    """Its receiver is told, and the next object is right; an error names a different codec."""
    pair.run(refused_objects, runner=runner)


async def beside_collectives(me: Rank) -> None:
    with me.case("recv posted before, sent after a collective"):
        if me.rank == 1:
            receiving = ac.recv(torch.zeros(3), src=0)
        oracle.same(await me.get(ac.all_reduce(me.rank)), 1)
        if me.rank == 0:
            await me.get(ac.send(torch.ones(3), dst=1))
        else:
            oracle.same(await me.get(receiving), torch.ones(3))


@pytest.mark.processes
def test_a_waiting_recv_does_not_hold_up_collectives(pair: World, runner: str) -> None:
    """Messages have their own order: a collective passes a recv that is still waiting."""
    pair.run(beside_collectives, runner=runner)


class Memory(bytearray):
    """A tensor's memory, whose lifetime can be observed."""


async def let_go_meanwhile(me: Rank) -> None:
    receiving = ac.recv(torch.zeros(3), src=0, tag=5) if me.rank == 1 else None
    memories = [Memory(4000) for _ in range(8)]
    known = [weakref.ref(memory) for memory in memories]
    while memories:
        x = torch.frombuffer(memories.pop(), dtype=torch.float32)
        await me.get(ac.all_reduce(x, out=x))
    del x
    held = len(known)
    deadline = time.monotonic() + patient(5)
    while held > 1 and time.monotonic() < deadline:  # the backend's thread may hold one a moment longer
        gc.collect()
        held = sum(memory() is not None for memory in known)
    with me.case("memory of collectives"):
        assert held <= 1, f"that of {held} of 8 is still held"
    if receiving is None:
        await me.get(ac.send(torch.ones(3), dst=1, tag=5))
    else:
        oracle.same(await me.get(receiving), torch.ones(3))


@pytest.mark.processes
def test_a_waiting_recv_keeps_nothing_else(pair: World, runner: str) -> None:
    """However long it waits, collectives that run meanwhile release their memory."""
    pair.run(let_go_meanwhile, runner=runner)


def test_what_a_given_up_receive_may_still_fill_is_claimed() -> None:
    """gloo cannot cancel a receive, and its sender, which may not know of a loss yet, may still send."""
    arrived = threading.Event()

    class Pair:
        def recv(self, xs: list[torch.Tensor], *_: int) -> Any:
            xs[0].copy_(torch.tensor([2, channels._DTYPES.index(torch.float32)]))
            return SimpleNamespace(wait=lambda _: arrived.wait(patient(30)))

    received = channels.Channels(lambda _: Pair(), 0, print).recv(torch.zeros(2), 1, 0)
    assert received.writing()
    arrived.set()
    assert received.wait(patient(30))
    assert received.error() is None and not received.writing()


async def refused(me: Rank) -> None:
    x = torch.ones(2)
    await me.refuses("dst", ValueError, ac.send, x, dst=me.size, says=(str(me.size),))
    await me.refuses("src", ValueError, ac.recv, x, src=-1, says=("-1",))
    await me.refuses("tag", ValueError, ac.send, x, dst=1 - me.rank, tag=-1, says=("tag", "-1"))
    await me.refuses("type", TypeError, ac.send, object(), dst=1 - me.rank, tag=9, says=("object",))
    expected = ac.UnsupportedOpError if me.lacks("recv") else ac.CollectiveError
    await me.refuses("told", expected, ac.recv, x, src=1 - me.rank, tag=9)
    await me.check("afterwards", ac.all_reduce, 1, expect=2)


def test_bad_messages_are_refused(pair: World) -> None:
    """Missing ranks, invalid tags and payloads are refused; the lane keeps working."""
    pair.run(refused)


async def refused_by_one(me: Rank) -> None:
    x = torch.arange(3.0)
    if me.rank == 0:
        await me.refuses("send", TypeError, ac.send, object(), dst=1, says=("object",))
        await me.check("the next one", ac.send, x, dst=1, expect=None)
        await me.check("of a refused recv", ac.send, x, dst=1, tag=1, expect=None)
        await me.check("of a refused call", ac.send_object, "y" * 900, dst=1, tag=1, expect=None)
    else:
        says = (
            "recv from rank 0 (tag 0) on lane",
            "test_p2p.py:",
            "rank 0 refused its side (",
            "ranks.py:",
            "): PayloadTypeError",
        )
        with me.case("recv"), raising(ac.PeerRefusedError, *says) as caught:
            await me.get(ac.recv(torch.empty(3), src=0))
        assert isinstance(caught.error, ac.PeerRefusedError) and caught.error.ranks == (0,)
        await me.check("the next one", ac.recv, torch.empty(3), src=0, expect=x)
        bad = torch.empty(2)
        await me.refuses("out", ValueError, ac.recv, x, src=0, tag=1, out=bad, says=("out", "float32[2]"))
        await me.check("repeated", ac.recv, x, src=0, tag=1, expect=x)
        await me.refuses("codec", ValueError, ac.recv_object, src=0, tag=1, codec="none", says=("codec",))
        await me.refuses("call", TypeError, ac.recv_object, 0, src=0, tag=1, says=("positional",))
        await me.check("called again", ac.recv_object, src=0, tag=1, expect="y" * 900)
    await me.check("afterwards", ac.all_reduce, 1, expect=2)


@pytest.mark.processes
def test_a_message_that_one_side_refuses(pair: World, runner: str) -> None:
    """The receiver of a send is told; a refused recv has taken nothing, and can be repeated."""
    pair.run(refused_by_one, runner=runner)


def _unpicklable(_: object) -> bytes:
    raise KeyError("the codec's own")


#: What rank 0 calls instead of a send or recv that the other side waits for.
WRONGLY: dict[str, tuple[type[Exception], bool, Callable[[Any], object]]] = {
    "by position": (ac.InvalidCallError, True, lambda x: called.send(x, 1)),
    "with async_op": (ac.InvalidCallError, True, lambda x: called.send(x, dst=1, async_op=True)),
    "with its tag": (ac.InvalidCallError, True, lambda x: called.send(x, 1, None, 0)),
    "without a payload": (ac.InvalidCallError, True, lambda x: called.send(group_dst=1)),
    "in a group": (ac.InvalidCallError, True, lambda x: called.send(x, 1, ac.new_group([0, 1]))),
    "timeout": (ac.InvalidArgumentError, True, lambda x: ac.send(x, dst=1, timeout=-1)),
    "recv": (ac.InvalidCallError, False, lambda x: called.recv(x, 1)),
    "recv with a timeout": (ac.InvalidArgumentError, False, lambda x: ac.recv(x, src=1, timeout=0)),
}


async def called_wrongly(me: Rank) -> None:
    x = torch.ones(2)
    for name, (error, sends, call) in WRONGLY.items():
        if me.rank == 0:
            with me.case(name), raising(error):
                call(x)
            if not sends:  # a refused recv has taken nothing
                await me.check(name, ac.recv, x, src=1, timeout=patient(20), expect=x)
        elif sends:  # a library may only say that the message is missing
            with me.case(name), raising(ac.CollectiveError) as caught:
                await me.get(ac.recv(x, src=0, timeout=patient(20)))
            assert not isinstance(caught.error, ac.CollectiveTimeoutError), name
        else:
            await me.check(name, ac.send, x, dst=0, timeout=patient(20), expect=None)
    if me.rank == 0:
        with me.case("an object"), raising(KeyError, "the codec's own"):
            ac.send_object(1, dst=1, codec=ac.Codec("own", _unpicklable, pickle.loads))
        await me.check("the next one", ac.send, x, dst=1, expect=None)
    else:
        with me.case("an object"), raising(ac.CollectiveError) as caught:
            await me.get(ac.recv_object(src=0, codec="pickle", timeout=patient(20)))
        assert not isinstance(caught.error, ac.CollectiveTimeoutError)
        await me.check("the next one", ac.recv, torch.empty(2), src=0, expect=x)


@pytest.mark.processes
def test_a_message_that_is_called_wrongly_does_not_keep_its_receiver_waiting(pair: World) -> None:
    """This holds if the call says which rank it is for."""
    pair.run(called_wrongly, runner="asyncio")


async def message_behind_a_refused_call(me: Rank) -> None:
    if me.rank == 1:
        await me.refuses("culprit", TypeError, ac.all_gather, object())
        await me.check("recv", ac.recv, torch.empty(2), src=0, timeout=patient(10), expect=torch.ones(2))
    else:
        texts, sent = ac.all_gather("é"), ac.send(torch.ones(2), dst=1, timeout=patient(10))
        with me.case("refused"), raising(ac.PeerRefusedError):
            await me.get(texts)
        with me.case("send"):
            await me.get(sent)


@pytest.mark.processes
def test_a_message_that_waits_behind_a_refused_call(pair: World, runner: str) -> None:
    """Such a message is not given up with the call."""
    pair.run(message_behind_a_refused_call, runner=runner)


#: What is sent to a receiver that expects three float32, and what the error says of it.
UNFITTING = {
    "short": (torch.ones(2, device="cpu"), "2 elements of float32"),
    "long": (torch.ones(4, device="cpu"), "4 elements of float32"),
    "none": (torch.ones(0, device="cpu"), "0 elements of float32"),
    "as many bytes": (torch.ones(3, dtype=torch.int32, device="cpu"), "3 elements of int32"),
    "as many elements": (torch.ones(3, dtype=torch.float64, device="cpu"), "3 elements of float64"),
}


async def unfitting(me: Rank) -> None:
    for tag, (name, (x, said)) in enumerate(UNFITTING.items()):
        if me.rank == 0:
            await me.check(name, ac.send, x, dst=1, tag=tag, expect=None)
            await me.check("the next one", ac.send, torch.ones(3), dst=1, tag=tag, expect=None)
            continue
        says = f"recv from rank 0 (tag {tag})", "test_p2p.py:", said, "the receiver expects 3 of float32"
        with me.case(name), raising(ac.CollectiveMismatchError, *says):
            await me.get(ac.recv(torch.empty(3), src=0, tag=tag))
        await me.check("the next one", ac.recv, torch.empty(3), src=0, tag=tag, expect=torch.ones(3))


async def unfitting_objects(me: Rank) -> None:
    if me.rank == 0:
        await me.check("tensor", ac.send, torch.ones(3), dst=1, expect=None)
        await me.check("object", ac.send_object, [1], dst=1, expect=None)
    else:
        for name, receive in (("tensor", ac.recv_object), ("object", partial(ac.recv, torch.empty(3)))):
            says = "a tensor is received by recv", "an object by recv_object"
            with me.case(name), raising(ac.CollectiveMismatchError, *says) as caught:
                await me.get(receive(src=0))
            assert "but `like`" not in str(caught.error)


@pytest.mark.processes
def test_an_object_is_no_tensor(pair: World) -> None:
    """If one is sent and the other expected, the receiver's error names both functions."""
    pair.run(unfitting_objects)


@pytest.mark.processes
def test_a_message_of_another_size_or_dtype_than_expected(pair: World, runner: str) -> None:
    """Half a tensor is an error, not a result; so are bytes of another dtype; the next message is right."""
    pair.run(unfitting, runner=runner)


async def cancelled_callback(me: Rank) -> None:
    if me.rank == 1:
        me.see("go")
        for _ in range(2):
            await ac.send(torch.full((1,), 2.0), dst=0)
        return
    told, work = threading.Event(), ac.recv(torch.zeros(1), src=1)
    work.add_done_callback(_cancelled)
    work.add_done_callback(lambda _: told.set())
    me.show("go")
    assert told.wait(patient(10)), "the callback behind one that was cancelled is never called"
    oracle.same(await me.get(work), torch.full((1,), 2.0))
    oracle.same(await me.get(ac.recv(torch.zeros(1), src=1)), torch.full((1,), 2.0))


def _cancelled(_: Any) -> None:
    raise asyncio.CancelledError  # as the result of a cancelled future does


@pytest.mark.processes
def test_a_callback_that_raises_what_is_no_exception_ends_no_thread(pair: World) -> None:
    """The thread that received the message still receives that rank's next one."""
    pair.run(cancelled_callback)


async def permutations(me: Rank) -> None:
    size = me.size
    tables = {
        "identity": [(r, r) for r in range(size)],
        "shift": [(r, (r + 1) % size) for r in range(size)],
        "reverse": [(r, size - 1 - r) for r in range(size)],
        "none": [],
        "one": [(0, size - 1)],
        "half": [(r, r + 1) for r in range(0, size - 1, 2)],
    }
    for name, pairs in tables.items():
        for dtype_name, dtype in oracle.DTYPES.items():
            for shape in ((), (0,), (2, 3)):
                inputs = oracle.by_rank(oracle.moving, size, shape, dtype)
                await me.check(
                    f"{name} of {dtype_name} {shape}",
                    ac.permute,
                    inputs[me.rank],
                    pairs,
                    expect=oracle.permute(inputs, pairs)[me.rank],
                )


def test_permute_every_dtype(world: World, runner: str) -> None:
    """A destination gets its source's tensor; a rank that receives nothing gets zeros."""
    world.run(permutations, runner=runner)


async def permute_layouts(me: Rank) -> None:
    pairs = [(r, (r + 1) % me.size) for r in range(me.size)]
    for name, layout in oracle.LAYOUTS.items():
        inputs = [layout(oracle.moving(r, (4, 3), torch.float32)) for r in range(me.size)]
        expect = oracle.permute(inputs, pairs)[me.rank]
        await me.check(name, ac.permute, inputs[me.rank], pairs, expect=expect)
    inputs = oracle.by_rank(oracle.moving, me.size, (3,), torch.int16)
    with me.case("out"):
        out = torch.ones(3, dtype=torch.int16)
        got = await me.get(ac.permute(inputs[me.rank], pairs, out=out))
        assert got is out, "the result is not out"
        oracle.same(out, oracle.permute(inputs, pairs)[me.rank])
    with me.case("alias, nobody receives"):
        x = inputs[me.rank].clone()
        await me.get(ac.permute(x, [], out=x))
        oracle.same(x, torch.zeros(3, dtype=torch.int16))


def test_permute_layouts_and_out(world: World, runner: str) -> None:
    """Non-contiguous tensors are sent by value; `out` is the result and may be the input."""
    world.run(permute_layouts, runner=runner)


async def permute_refused(me: Rank) -> None:
    x = torch.ones(2)
    call, size = ac.permute, me.size
    await me.refuses("rank", ValueError, call, x, [(0, size)], says=(str(size),))
    await me.refuses("negative", ValueError, call, x, [(-1, 0)], says=("-1",))
    await me.refuses("source twice", ValueError, call, x, [(0, 0), (0, 1)], says=("0",))
    await me.refuses("destination twice", ValueError, call, x, [(0, 1), (1, 1)], says=("1",))
    await me.refuses("no pairs", (ValueError, TypeError), call, x, [0, 1])
    await me.check("afterwards", call, x, [(0, 1), (1, 0)], expect=x)


def test_permute_refuses_what_is_no_permutation(pair: World) -> None:
    """A rank may send once and receive once; the lane keeps working."""
    pair.run(permute_refused)


async def pairs_that_differ(me: Rank) -> None:
    says = ("permute along [(0, 1)]", "permute along [(1, 0)]")
    with me.case("differ"), raising(ac.CollectiveMismatchError, *says):
        if me.rank == 0:  # on MPI, its part would otherwise complete immediately
            me.see("called")
        work = ac.permute(torch.ones(3), [(1, 0)] if me.rank == 0 else [(0, 1)])
        if me.rank == 1:
            me.show("called")
        await me.get(work)
    pairs = [(1, 0), (0, 1)] if me.rank == 0 else [(0, 1), (1, 0)]
    await me.check(
        "in another order", ac.permute, me.rank * torch.ones(3), pairs, expect=(1 - me.rank) * torch.ones(3)
    )


@pytest.mark.processes
def test_pairs_that_differ_between_ranks(pair: World, runner: str) -> None:
    """Regression: gloo ended the process. The order in which the pairs are listed makes no difference."""
    pair.run(pairs_that_differ, runner=runner)


async def cycle(me: Rank, order: list[int], shape: tuple[int, ...], name: str) -> None:
    pairs = [(order[k], order[(k + 1) % me.size]) for k in range(me.size)]
    x = oracle.moving(me.rank, shape, oracle.DTYPES[name])
    with me.case(f"{name} {shape} {pairs}"):
        moved = x
        for _ in range(me.size):
            moved = await me.get(ac.permute(moved, pairs))
        oracle.same(moved, x)


@given(
    order=st.permutations(range(4)),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    name=st.sampled_from(sorted(oracle.DTYPES)),
)
def test_a_cycle_taken_n_times_is_the_identity(
    world: World, order: list[int], shape: tuple[int, ...], name: str
) -> None:
    """Permuting n times by an n-cycle returns every rank's own tensor."""
    world.run(cycle, [rank for rank in order if rank < world.size], shape, name)
