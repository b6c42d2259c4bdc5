"""Every timeout names the rank that keeps an operation from completing, whatever that rank is doing."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
import worlds
from asynccoll import host
from asynccoll.flight import Call, Flight, Progress
from asynccoll.flight.layout import REFUSED
from asynccoll.flight.messages import refused_send
from asynccoll.health import stalls
from asynccoll.health.accounts import Account
from asynccoll.health.blame import Awaited, blame
from asynccoll.health.stalls import stall_seconds
from asynccoll.testing import Kill, Link, Stop, simulate
from patience import patient
from ranks import Rank

SEED = 20


# Texts


def call(sequence: int, operation: str = "all_reduce", lane: str = "default", **more: Any) -> Call:
    at = {"called": 90.0, "begun": 90.0, "ended": 0.0, "waited": 0.0, "failure": "", **more}
    return Call(
        sequence, "world", lane, lane, operation, "float32[4]", "train.py:88", sequence, 1, -1, 16, **at
    )


def flight(*calls: Call, **more: Any) -> Flight:
    lanes: dict[str, int] = {}
    for one in calls:
        lanes[one.lane] = max(lanes.get(one.lane, 0), one.sequence)
    progress = tuple(Progress("world", lane, place) for lane, place in lanes.items())
    made = Flight(1, 2, 71, 0.0, 0.0, "running", 0.0, calls, progress)
    return replace(made, **more)


def near(recorded: Flight | None, **more: Any) -> Account:
    return replace(Account(1, recorded, 102.3, "S", near=True, answers=True), **more)


AWAITED = Awaited("all_reduce", "world", "gradients", "gradients", 41)


def said(account: Account) -> tuple[tuple[int, ...], str]:
    found = blame(AWAITED, {1: account}, (), lambda rank: f"rank {rank} (host n1, pid 71)")
    return found.ranks, str(found)


WHO = "rank 1 (host n1, pid 71)"
LAST = "its last call was broadcast #40 on lane 'eval' at train.py:88, 12.3 s ago, finished"
LATE = f"{WHO} has not called all_reduce #41 on lane 'gradients'; "
DMESG = "dmesg says so"
STOPPED = "its process is stopped (SIGSTOP, or a debugger); continue it with kill -CONT"


def behind(**more: Any) -> Flight:
    return flight(call(40, "broadcast", "eval", ended=91.0), **more)


#: What is known of rank 1, and what is reported about it.
SAID = {
    "computes": (
        near(behind(), stands="DataLoader.__next__ (data.py:17)"),
        f"{LATE}{LAST}; it is now in DataLoader.__next__ (data.py:17)",
    ),
    "waits in an earlier call": (
        near(
            flight(
                call(7, lane="metrics", waited=91.0),
                call(40, "broadcast", "eval", ended=91.0),
            )
        ),
        f"{LATE}{LAST}; waiting in all_reduce #7 on lane 'metrics' at train.py:88",
    ),
    "is stopped": (near(behind(), state="T", answers=False), f"{LATE}{LAST}; {STOPPED}"),
    "swaps": (
        near(behind(), state="D", answers=False),
        f"{LATE}{LAST}; its process is blocked in the kernel (disk I/O, or swapping)",
    ),
    "answers, and is in the kernel for a moment": (
        near(behind(), state="D", stands="load (data.py:17)"),
        f"{LATE}{LAST}; it is now in load (data.py:17)",
    ),
    "is in native code": (
        near(behind(), answers=False),
        f"{LATE}{LAST}; it does not answer: native code may be holding its interpreter",
    ),
    "has ended": (
        near(behind(ending="ended", ended=99.3)),
        f"{LATE}{LAST}; its program ended, 3.0 s ago",
    ),
    "has ended with a code": (
        near(behind(ending="exited", ended=99.3, code=0)),
        f"{LATE}{LAST}; it ended with exit code 0, 3.0 s ago",
    ),
    "was killed": (
        near(behind(ending="exited", ended=99.3, code=-9), state=""),
        f"{LATE}{LAST}; its process was killed by SIGKILL, 3.0 s ago (if it ran out of memory, {DMESG})",
    ),
    "died of an error": (
        near(behind(ending="died", ended=99.3, code=1, said={"why": "LookupError: x"})),
        f"{LATE}{LAST}; it ended with LookupError: x (exit code 1), 3.0 s ago",
    ),
    "is gone": (
        near(behind(), state=""),
        f"{WHO} is gone without having called it; {LAST}; its process is gone",
    ),
    "has called nothing": (near(flight()), f"{LATE}it has made no calls"),
    "is stopped in it": (
        near(flight(call(41, lane="gradients")), state="T"),
        f"{WHO} has called it; {STOPPED}",
    ),
    "died of an error in it": (
        near(
            flight(
                call(41, lane="gradients", ended=99.0, failure="LookupError: x"),
                ending="died",
                ended=99.3,
                code=1,
                said={"why": "LookupError: x"},
            )
        ),
        f"{WHO} has called it; it ended with LookupError: x (exit code 1), 3.0 s ago",
    ),
    "has called something else": (
        near(flight(call(41, "broadcast", "gradients"))),
        f"{WHO} has called broadcast float32[4] instead, at train.py:88",
    ),
    "has refused it": (
        near(flight(call(41, lane="gradients", ended=90.0, waited=REFUSED, failure="PayloadTypeError: x"))),
        f"{WHO} called it at train.py:88, and it was refused there: PayloadTypeError: x",
    ),
    "has refused another": (
        near(flight(call(41, "barrier", "gradients", ended=90.0, waited=REFUSED, failure="ValueError: x"))),
        f"{WHO} called barrier instead at train.py:88, and it was refused there: ValueError: x",
    ),
    "has refused what it called before": (
        near(flight(call(40, "broadcast", "eval", ended=90.0, waited=REFUSED, failure="ValueError: x"))),
        f"{LATE}{LAST.replace('finished', 'refused: ValueError: x')}",
    ),
    "cannot be asked": (Account(1), f"{WHO} does not answer, though its host does"),
    "cannot be reached": (
        Account(1, reached=False),
        f"{WHO} cannot be reached: the network in between is slow or down",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_what_is_said(case: str) -> None:
    account, expected = SAID[case]
    assert said(account) == ((1,), expected)


def test_who_has_made_fewer_parts_of_a_call_is_blamed() -> None:
    """This holds whether or not it has started the next call."""
    parts = [call(41, lane="gradients")._replace(part=part) for part in (1, 2)]
    for calls in (parts, [*parts, call(42, lane="gradients")]):
        for part, ranks in ((2, ()), (3, (1,))):
            assert blame(replace(AWAITED, part=part), {1: near(flight(*calls))}, (), str).ranks == ranks


def test_nobody_is_blamed_who_has_called() -> None:
    assert said(near(flight(call(41, lane="gradients", ended=95.0)))) == (
        (),
        "every rank has called it, and it has completed on rank 1",
    )
    for account in (
        near(flight(call(41, lane="gradients"))),
        near(flight(call(41, lane="gradients"), ending="finalized", ended=99.0)),
    ):
        slow = "every rank has called it: the operation is slow, or stuck in the network"
        assert said(account) == ((), slow)


def test_of_many_ranks_some_are_told() -> None:
    accounts = {rank: replace(near(behind()), rank=rank) for rank in range(20)}
    found = blame(AWAITED, accounts, (), str)
    assert found.ranks == tuple(range(20))
    assert len(found.sentences) == 9
    assert found.sentences[-1] == "and likewise for 12 more ranks"


def test_an_error_keeps_what_it_says_where_it_goes() -> None:
    error = ac.CollectiveTimeoutError("late", (1, 3), operation="all_reduce", lane="gradients")
    for copied in (pickle.loads(pickle.dumps(error)), error):
        assert (str(copied), copied.ranks) == ("late", (1, 3))
        assert (copied.operation, copied.lane) == ("all_reduce", "gradients")
    assert not pickle.loads(pickle.dumps(error)).pending
    assert pickle.loads(pickle.dumps(ac.CollectiveTimeoutError("late", pending=True))).pending
    lost = pickle.loads(pickle.dumps(ac.PeerLostError("gone", (2,))))
    assert (str(lost), lost.ranks) == ("gone", (2,))


# In simulated worlds


@pytest.mark.parametrize("loop", ["asyncio", "none"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_in_a_simulated_world_who_began_a_circle_of_waits_is_named(loop: str, nodes: int) -> None:
    """Rank 1 skips a call in which the others wait; it waits for them in its next one, and learns why."""
    heard: dict[int, str] = {}

    def begun(rank: int) -> ac.Work[torch.Tensor]:
        lane, seconds = ("gradients", 5.0) if rank == 1 else ("metrics", 8.0)
        return ac.all_reduce(torch.ones(2), lane=lane, timeout=seconds)

    def waiting(rank: int) -> None:
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            begun(rank).wait()
        heard[rank] = str(caught.value)

    async def awaiting(rank: int) -> None:
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await begun(rank)
        heard[rank] = str(caught.value)

    main = waiting if loop == "none" else awaiting
    simulate(main, world_size=3, seed=SEED, loop=loop, nodes=nodes, transport="gloo")
    culprit = "rank 1 has not called all_reduce #1 on lane 'metrics', in which ranks 0, 2 have waited"
    assert "rank 0 (host simulated" in heard[1]
    assert f"this may follow from another wait: {culprit}" in heard[1]
    for rank in (0, 2):
        assert "has not called all_reduce #1 on lane 'metrics'" in heard[rank]
        assert "follow" not in heard[rank]


@pytest.mark.parametrize("nodes", [1, 2])
def test_in_a_simulated_world_lanes_in_opposite_order_are_told_from_both_sides(nodes: int) -> None:
    """On both ranks each call is attributed to the rank that made it."""
    heard: dict[int, str] = {}

    async def main(rank: int) -> None:
        mine = "a" if rank == 0 else "b"
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await ac.all_reduce(torch.ones(2), lane=mine, timeout=5.0 + 5.0 * rank)
        heard[rank] = str(caught.value)

    simulate(main, world_size=2, seed=SEED, nodes=nodes, transport="gloo")
    for rank in range(2):
        assert re.search(r" is not ready after \S+ s: ranks wait in a circle: rank ", heard[rank])
        for lane, other in (("a", 1), ("b", 0)):
            told = rf" in all_reduce #1 on lane '{lane}' \(\S+\) for rank {other}\b"
            assert re.search(told, heard[rank]), heard[rank]
        assert "follow" not in heard[rank]


@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_in_a_simulated_world_ranks_that_all_receive_first_are_told_so(transport: str) -> None:
    """Every rank is told of the circle, and how to avoid it."""
    heard: dict[int, str] = {}

    async def main(rank: int) -> None:
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await ac.recv(torch.empty(2), src=(rank - 1) % 3, timeout=5.0)
        heard[rank] = str(caught.value)

    simulate(main, world_size=3, seed=SEED, transport=transport)
    told = "ranks 0, 1, 2 each wait for a message from another, and none has sent one: rank "
    for rank in range(3):
        assert told in heard[rank], heard[rank]
        assert "start all sends and receives before you await any of them" in heard[rank]


@pytest.mark.parametrize("then", ["waits", "computes", "ends"])
def test_in_a_simulated_world_a_whole_state_that_one_rank_gathers_alone(then: str) -> None:
    """torch's users write `if rank == 0`: the error says which calls are for every rank and which for one."""
    heard: dict[int, str] = {}

    async def main(rank: int) -> None:
        layers = ac.overlap.shard_layers([torch.nn.Linear(2, 2)])
        try:
            if rank == 0:
                await layers.full_state_dict()
            elif then == "waits":
                await ac.all_reduce(torch.ones(1), timeout=5.0)
            elif then == "computes":
                await anyio.sleep(20.0)
        except ac.CollectiveError as error:
            heard[rank] = f"{type(error).__name__}: {error}"
            await anyio.sleep(20.0)

    simulate(main, world_size=2, seed=SEED, transport="gloo", operation_timeout=5.0)
    assert heard.keys() == ({0, 1} if then == "waits" else {0})
    kind = "PeerLostError" if then == "ends" else "CollectiveTimeoutError"
    for text in heard.values():
        assert text.startswith(kind), text
        assert (
            text.count("call full_state_dict() (or full_optimizer_state()) on every rank, and only save") == 1
        )
        assert "await lanes in the same order" not in text
        assert "Fewer batches" not in text


@pytest.mark.parametrize("loop", ["asyncio", "trio", "none"])
@pytest.mark.parametrize("transport", ["gloo", "mpi", "nccl"])
def test_in_a_simulated_world_the_one_that_skips_a_call_is_named(loop: str, transport: str) -> None:
    """Every waiting rank learns who has not called, whatever the order of threads; each run says the same."""

    heard: dict[int, ac.CollectiveTimeoutError] = {}

    def blocking(rank: int) -> None:
        ac.all_reduce(torch.ones(2)).wait()
        if rank == 1:
            ac.broadcast(torch.ones(1), lane="eval").detach()
        else:
            with pytest.raises(ac.CollectiveTimeoutError) as caught:
                ac.all_reduce(torch.ones(3), lane="gradients", timeout=3.0).wait()
            heard[rank] = caught.value

    async def awaiting(rank: int) -> None:
        await ac.all_reduce(torch.ones(2))
        if rank == 1:
            ac.broadcast(torch.ones(1), lane="eval").detach()
            await anyio.sleep(30)
        else:
            with pytest.raises(ac.CollectiveTimeoutError) as caught:
                await ac.all_reduce(torch.ones(3), lane="gradients", timeout=3.0)
            heard[rank] = caught.value

    for seed in range(SEED, SEED + 5):
        main = blocking if loop == "none" else awaiting
        digests = []
        for _ in range(2):
            heard.clear()
            report = simulate(main, world_size=3, seed=seed, loop=loop, transport=transport)
            digests.append(report.digest)
            for rank in (0, 2):
                text = str(heard[rank])
                assert heard[rank].ranks == (1,), text
                assert "has not called all_reduce #1 on lane 'gradients'" in text
                assert "its last call was broadcast #1 on lane 'eval'" in text
        assert digests[0] == digests[1]


def recorded_since() -> ac.Prepared[torch.Tensor]:
    x = torch.ones(2)
    prepared = ac.prepare("all_reduce", x)
    x.requires_grad_()
    return prepared


def in_a_block() -> None:
    with ac.coalescing():
        ac.all_reduce(torch.ones(2)).detach()
        ac.all_reduce(torch.ones(2), op="nonsense")


#: What a rank calls that is refused, how it is recorded, and why, in one word.
REFUSING: dict[str, tuple[Callable[[], object], str, str]] = {
    "value": (
        lambda: ac.all_reduce(torch.ones(2), timeout=-1),
        "all_reduce",
        "InvalidArgumentError: timeout",
    ),
    "call": (lambda: ac.all_reduce(torch.ones(2), "sum"), "all_reduce", "InvalidCallError: all_reduce()"),
    "leaf": (lambda: ac.all_reduce({"a": torch.ones(2), "b": object()}), "all_reduce", "PayloadTypeError"),
    "barrier": (lambda: ac.barrier(timeout=-1), "barrier", "InvalidArgumentError: timeout"),
    "factor": (lambda: ac.all_reduce(1, prescale=2.0), "all_reduce", "Error"),
    "prepared": (lambda: recorded_since().start(), "all_reduce", "InvalidArgumentError: prepare"),
    "block": (in_a_block, "all_reduce", "InvalidArgumentError: unknown reduction"),
}


@pytest.mark.parametrize("how", REFUSING)
def test_in_a_simulated_world_who_has_refused_it_is_told_from_who_has_not_called(how: str) -> None:
    refused, name, why = REFUSING[how]
    heard: list[str] = []

    def main(rank: int) -> None:
        ac.all_reduce(torch.ones(2)).wait()
        if rank == 1:
            with pytest.raises(ac.AsyncCollError):
                refused()
            host.sleep(3.0)
        else:
            with pytest.raises(ac.CollectiveTimeoutError) as caught:  # before it looks for refusals
                ac.all_reduce(torch.ones(2), timeout=0.5).wait()
            heard.append(str(caught.value))
            assert caught.value.ranks == (1,)

    assert not simulate(main, world_size=2, seed=SEED, loop="none").errors
    (text,) = heard
    what = "it" if name == "all_reduce" else f"{name} instead"
    assert re.search(
        rf"rank 1 .* called {what} at \S*test_blame.py:\d+, and it was refused there: .*{re.escape(why)}",
        text,
    ), text


def test_in_a_simulated_world_a_call_refused_on_no_lane_is_told_as_the_last_one() -> None:
    heard: list[str] = []

    def main(rank: int) -> None:
        if rank == 1:
            with pytest.raises(ac.InvalidArgumentError):
                ac.all_reduce(torch.ones(2), lane="")
            host.sleep(1.0)
            ac.all_reduce(torch.ones(2)).wait()
        else:
            work = ac.all_reduce(torch.ones(2), timeout=0.9)
            with pytest.raises(ac.CollectiveTimeoutError) as caught:
                work.wait()
            heard.append(str(caught.value))
            work.wait()

    assert not simulate(main, world_size=2, seed=SEED, loop="none").errors
    last = (
        r"has not called all_reduce #1 .*; its last call was all_reduce at \S+:\d+, 0.9 s ago, refused: Inv"
    )
    assert re.search(last, heard[0])


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi"])
def test_who_sends_before_it_receives_is_told_which_call_is_missing(transport: str) -> None:
    heard: dict[int, ac.CollectiveTimeoutError] = {}

    async def first_send(rank: int) -> None:
        size = ac.get_world_size()
        work = ac.send(torch.ones(2), dst=(rank + 1) % size, tag=3)
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await work
        heard[rank] = caught.value
        await anyio.sleep(2)  # the others learn of it while this rank is still here

    simulate(first_send, world_size=3, transport=transport, operation_timeout=1.0)
    assert sorted(heard) == [0, 1, 2]
    for rank, error in heard.items():
        then, after, text = (rank + 1) % 3, (rank + 2) % 3, str(error)
        assert error.ranks == (then,)
        assert f"send to rank {then} (tag 3) on lane 'default' of the world" in text
        assert f"pid {1000 + then}) has not called recv from rank {rank} (tag 3)" in text
        assert f"its last call was send to rank {after} (tag 3) on lane 'default'" in text
        assert f"This rank's send to rank {then} (tag 3) is still pending" in text


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi"])
def test_a_message_on_a_lane_that_a_third_rank_does_not_use_says_so(transport: str) -> None:
    """Both sides had called it, so the network was blamed; but a lane opens with all ranks of its group."""

    def main(rank: int) -> None:
        if rank == 0:
            ac.send(torch.ones(2), dst=1, lane="apart").wait(5)
        elif rank == 1:
            ac.recv(torch.ones(2), src=0, lane="apart").wait(5)
        else:
            host.sleep(10)

    report = simulate(main, world_size=3, seed=SEED, loop="none", transport=transport)
    for rank in (0, 1):
        error = report.errors[rank]
        assert isinstance(error, ac.CollectiveTimeoutError)
        assert error.ranks == (2,)
        assert (
            "rank 2 (host simulated, pid 1002) has made no call on lane 'apart', which opens once every rank "
            "of the group has used it: use the default lane, or a group of just the sender and the receiver"
        ) in str(error)


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi"])
def test_who_has_refused_to_receive_is_told_from_who_has_not_called(transport: str) -> None:
    """A refused recv has taken no message: the sender waits, and a repeated recv receives it."""
    heard: list[str] = []

    async def main(rank: int) -> None:
        x = torch.ones(2)
        if rank == 1:
            with pytest.raises(ac.InvalidArgumentError):
                ac.recv(x, src=0, tag=3, out=torch.ones(3))
            await ac.recv_object(src=0)
            assert (await ac.recv(x, src=0, tag=3)).tolist() == [7.0, 7.0]
            return
        work = ac.send(7 * x, dst=1, tag=3, timeout=2.0)
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await work
        heard.append(str(caught.value))
        await ac.send_object("go on", dst=1)
        await work

    report = simulate(main, world_size=2, transport=transport)
    assert not report.errors
    called = (
        r"pid 1001\) called recv from rank 0 \(tag 3\) at \S*test_blame.py:\d+, and it was refused there: Inv"
    )
    assert re.search(called, heard[0]), heard


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi"])
@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_recv_that_nobody_waits_for_any_more_is_named_by_the_one_after_it(transport: str, how: str) -> None:
    """It takes the message; both ranks were told less: the sender even that its next one had been called."""
    heard: dict[int, str] = {}

    async def main(rank: int) -> None:
        group, x = [0, 2], torch.ones(2)
        if rank == 0:
            with anyio.move_on_after(1.0) if how == "cancelled" else pytest.raises(ac.CollectiveTimeoutError):
                await ac.recv(x, src=2, tag=3, group=group, timeout=2.0)
            await ac.recv_object(src=2, group=group)
            work = ac.recv(x, src=2, tag=3, group=group, timeout=2.0)
        elif rank == 2:
            await anyio.sleep(3.0)
            await ac.send(x, dst=0, tag=3, group=group)
            await ac.send_object("go on", dst=0, group=group)
            await anyio.sleep(10.0)
            work = ac.send(2 * x, dst=0, tag=3, group=group)
            await work
            await ac.send_object("go on", dst=0, group=group)
            work = ac.send(3 * x, dst=0, tag=3, group=group, timeout=4.0)
        else:
            return
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await work
        assert caught.value.ranks == (2 - rank,)
        heard[rank] = str(caught.value)
        if rank == 0:
            await ac.recv_object(src=2, group=group)
            await anyio.sleep(5.0)
            await work
            work = ac.recv(x, src=2, tag=3, group=group)
        await work

    simulate(main, world_size=3, transport=transport, operation_timeout=30.0).check()
    assert re.search(
        r"pid 1002\) has not called send to rank 0 \(tag 3\) .*; this rank's recv at \S*test_blame.py:\d+, "
        r"which nobody waits for any more, has taken the last message",
        heard[0],
    ), heard
    assert "pid 1000) has not called recv from rank 2 (tag 3)" in heard[2]


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi"])
@pytest.mark.parametrize("how", ["stopped", "taken", "cancelled and taken"])
@pytest.mark.filterwarnings("ignore::asynccoll.UnawaitedWorkWarning")
def test_a_recv_of_recv_any_is_named_by_a_later_one_only_if_nobody_waits_for_it(
    transport: str, how: str
) -> None:
    """It was named neither way: its done-callback counted as a wait that went on."""
    heard: list[str] = []

    async def main(rank: int) -> None:
        x = torch.ones(2)
        if rank:
            await anyio.sleep(rank)
            await ac.send(x, dst=0, tag=3)
            await ac.barrier()
            await anyio.sleep(1.5)
            if rank == 2:
                await ac.send(x, dst=0, tag=3)
            await ac.barrier()
            return
        arriving = ac.recv_any(x, tag=3)
        if how == "cancelled and taken":
            with anyio.move_on_after(0.5):
                await arriving.__anext__()
        async for _ in arriving:
            if how == "stopped":
                break
        await ac.barrier()
        work = ac.recv(x, src=2, tag=3, timeout=1.0)
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await work
        heard.append(str(caught.value))
        await work
        await ac.barrier()

    simulate(main, world_size=3, transport=transport, operation_timeout=30.0, seed=SEED).check()
    (told,) = heard
    assert "pid 1002) has not called send to rank 0 (tag 3)" in told
    abandoned = r"; this rank's recv at \S*test_blame.py:\d+, which nobody waits for any more, has taken the "
    assert bool(re.search(abandoned, told)) == (how == "stopped"), told


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_call_is_told_as_a_wait_only_as_long_as_it_is_polled(goes_on: bool) -> None:
    """One look, even by ``repr``, was told as a wait from then on."""
    heard: list[str] = []

    async def main(rank: int) -> None:
        if rank == 0:
            work = ac.all_reduce(1.0, timeout=5.0)
            with pytest.raises(ac.CollectiveTimeoutError) as caught:
                await work
            heard.append(str(caught.value))
            await work
            await ac.wait_all([ac.all_reduce(1.0, lane=name) for name in ("side", "other")])
            return
        side, other = (ac.all_reduce(1.0, lane=name) for name in ("side", "other"))
        assert "in flight" in repr(side)
        for _ in range(80):
            assert not (goes_on and side.done())
            await anyio.sleep(0.1)
        await ac.wait_all([ac.all_reduce(1.0), side, other])

    simulate(main, world_size=2, seed=SEED).check()
    (told,) = heard
    assert "its last call was all_reduce #1 on lane 'other'" in told
    assert ("; waiting in all_reduce #1 on lane 'side' at " in told) == goes_on, told


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi"])
def test_a_message_with_another_tag_is_told_although_other_calls_came_after_it(transport: str) -> None:
    heard: dict[int, str] = {}

    async def main(rank: int) -> None:
        x = torch.ones(2)
        work = ac.send(x, dst=1, tag=3) if rank == 0 else ac.recv(x, src=0, tag=4)
        await ac.barrier()
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await work
        heard[rank] = str(caught.value)
        await ac.barrier(timeout=9.0)  # both still answer
        other = ac.recv(x, src=0, tag=3) if rank else ac.send(x, dst=1, tag=4)
        await ac.wait_all([work, other])

    simulate(main, world_size=2, transport=transport, operation_timeout=2.0).check()
    for rank, mine, its in (
        (0, "send to rank 1", "recv from rank 0"),
        (1, "recv from rank 0", "send to rank 1"),
    ):
        assert re.search(
            rf"; rank {1 - rank} called {its} \(tag {4 - rank}\) on lane 'default' at \S*test_blame.py:\d+, "
            rf"for which this rank has not called {mine} \(tag {4 - rank}\); tags, lanes and order have to",
            heard[rank],
        ), heard


def test_a_refused_send_is_no_reason_once_one_after_it_has_arrived() -> None:
    refused = call(0, "send")._replace(peer=1, part=0, waited=REFUSED, failure="TypeError: ...")
    arrived, waits = (call(0, "send", ended=ended)._replace(peer=1, part=0) for ended in (95.0, 0.0))
    about = ("world", "default", "send", 1, 0)
    assert refused_send(flight(refused, waits), *about) == refused
    assert refused_send(flight(refused, waits, waits), *about) == refused
    assert refused_send(flight(refused, arrived, waits), *about) is None
    assert refused_send(flight(arrived, waits), *about) is None


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi"])
@pytest.mark.parametrize("takes", ["first", "never"])
def test_who_sends_again_is_told_that_the_refusal_was_received(transport: str, takes: str) -> None:
    """A refused send counts as a message: the recv meant for the next one has failed with it."""
    heard: list[str] = []

    async def main(rank: int) -> None:
        x = torch.ones(2)
        if rank == 1:
            work = ac.recv(x, src=0)
            if takes == "first":
                with pytest.raises(ac.PeerRefusedError):
                    await work
            await ac.recv_object(src=0, tag=1)
            if takes == "never":
                with pytest.raises(ac.PeerRefusedError):
                    await work
            await ac.recv(x, src=0)
            return
        with pytest.raises(TypeError):
            ac.send(x, 1)  # type: ignore[call-arg, misc]  # as in torch
        sent = ac.send(x, dst=1, timeout=2.0)
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await sent
        heard.append(str(caught.value))
        await ac.send_object("go on", dst=1, tag=1)
        await sent

    report = simulate(main, world_size=2, transport=transport)
    assert not report.errors, report.errors
    if takes == "first":
        failed = (
            r"pid 1001\) has not called recv from rank 0 \(tag 0\) on lane 'default' again, after its recv "
            r"at \S*test_blame.py:\d+ failed: .*: rank 0 refused its side .* counts as a message"
        )
        assert re.search(failed, heard[0]), heard
        return
    taken = (
        r"both ranks have called it\n  this rank's send at \S*test_blame.py:\d+ was refused, which counts as "
        r"a message: a recv of rank 1 may have failed with that refusal; rank 1 then has to call it again"
    )
    assert re.search(taken, heard[0]), heard


def test_a_wait_that_follows_from_the_callers_own_is_not_told_as_its_cause() -> None:
    """Rank 2 waits for both others; one of them waits in a message that the other has refused."""
    heard: list[str] = []

    async def main(rank: int) -> None:
        x = torch.ones(2)
        if rank == 0:
            with pytest.raises(ac.InvalidArgumentError):
                ac.recv(x, src=1, out=torch.ones(3))
            await anyio.sleep(3)
            await ac.recv(x, src=1)
        elif rank == 1:
            work = ac.send(x, dst=0, timeout=2.0)
            with pytest.raises(ac.CollectiveTimeoutError) as caught:
                await work
            heard.append(str(caught.value))
            await work
        await ac.barrier()

    assert not simulate(main, world_size=3).errors
    assert "and it was refused there" in heard[0]
    assert "another wait" not in heard[0], heard


def test_what_was_refused_before_the_program_went_on_is_not_told_as_a_cause() -> None:
    heard: dict[int, str] = {}

    async def main(rank: int) -> None:
        refused = ac.InvalidArgumentError if rank == 1 else ac.PeerRefusedError
        with pytest.raises(refused):
            await ac.all_reduce(1.0, lane="before", timeout=-1.0 if rank == 1 else 9.0)
        await ac.barrier()
        if rank == 0:
            await anyio.sleep(3)
        work = ac.all_reduce(1.0, lane="now", timeout=2.0)
        if rank > 0:
            with pytest.raises(ac.CollectiveTimeoutError) as caught:
                await work
            heard[rank] = str(caught.value)
        await work

    assert not simulate(main, world_size=3).errors
    for text in heard.values():
        assert "has not called all_reduce #1 on lane 'now'" in text
        assert "'before'" not in text, text
    assert sorted(heard) == [1, 2]


def test_who_receives_in_a_group_is_known_by_its_rank_in_the_world() -> None:
    heard: dict[int, str] = {}

    async def main(rank: int) -> None:
        group = ac.new_group([0, 2])
        if rank == 1:
            return
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await ac.recv_object(src=2 - rank, group=group, timeout=1.0)
        heard[rank] = str(caught.value)
        await anyio.sleep(2)

    simulate(main, world_size=3)
    for rank in (0, 2):
        other, where = 2 - rank, "on lane 'default' of ranks [0, 2]"
        assert f"has not called send_object to rank {rank} (tag 0) {where};" in heard[rank]
        assert f"its last call was recv_object from rank {rank} (tag 0) {where} at" in heard[rank]
        assert f"recv_object from rank {other} (tag 0) on lane" in heard[rank]


def test_in_a_simulated_world_crossed_locks_are_told_by_where_the_tasks_are() -> None:
    heard: dict[int, list[str]] = {}

    async def crossed(rank: int) -> None:
        lock = anyio.Lock()

        async def one(lane: str) -> None:
            async with lock:
                try:
                    await ac.all_reduce(1.0, lane=lane, timeout=1.0)
                except ac.CollectiveTimeoutError as error:
                    heard[rank] = [*heard.get(rank, []), str(error)]
                    await anyio.sleep(3)  # so that the other rank sees it in this state

        async with anyio.create_task_group() as tasks:
            for lane in ("a", "b")[:: 1 if rank == 0 else -1]:
                tasks.start_soon(one, lane)

    for seed in range(SEED, SEED + 5):
        heard.clear()
        report = simulate(crossed, world_size=2, seed=seed)
        assert sorted(heard) == [0, 1], report.errors
        for rank, lane in enumerate("ab"):
            text = heard[rank][0]
            assert f"pid {1001 - rank}) has not called all_reduce #1 on lane '{lane}'" in text
            assert "native code" not in text


def test_who_calls_only_when_its_own_wait_has_ended_is_told_from_who_is_slow() -> None:
    made = near(flight(call(41, lane="gradients", called=102.2)))
    assert said(made)[1] == (
        "every rank has called it, rank 1 0.1 s ago: the operation is slow, or stuck in the network"
    )


def test_who_calls_only_after_a_timeout_is_not_taken_for_the_network() -> None:
    before = call(7, "barrier", "eval", waited=-102.1)
    for waited, called, after in ((-102.1, 102.2, True), (-102.1, 103.0, False), (90.0, 102.2, False)):
        recorded = flight(before._replace(waited=waited), call(41, lane="gradients", called=called))
        text = said(near(recorded, now=called + 0.1))[1]
        assert text == "every rank has called it, rank 1 0.1 s ago" + (
            ", after its wait for barrier #7 on lane 'eval' at train.py:88 had timed out"
            if after
            else ": the operation is slow, or stuck in the network"
        )
    assert call(1, waited=REFUSED, failure="no").timed_out == 0.0


async def in_a_group(rank: int, x: object) -> object:
    return await ac.all_reduce(x, group=ac.new_group([0, 2]), lane="mine", timeout=3.0)


async def of_a_tree(rank: int, x: object) -> object:
    return await ac.all_reduce({"a": [x, 1]}, timeout=3.0)


async def in_a_thread(rank: int, x: object) -> object:
    return await anyio.to_thread.run_sync(lambda: ac.all_reduce(x, timeout=3.0).wait())


async def of_several(rank: int, x: object) -> object:
    works = [ac.all_reduce(x, timeout=3.0), ac.all_reduce(1, timeout=3.0)]
    return [work.result() async for work in ac.as_completed(works)]


@pytest.mark.parametrize("wrong", ["refused", "late", "killed"])
@pytest.mark.parametrize("call", [in_a_group, of_a_tree, in_a_thread, of_several])
@pytest.mark.parametrize("size", [3, 5])
def test_each_error_names_the_rank_the_call_and_the_line(call: Any, wrong: str, size: int) -> None:
    """This holds for a group, a lane, a tree, a thread, and several calls at a time."""
    heard: dict[int, ac.CollectiveError] = {}

    async def main(rank: int) -> None:
        await ac.barrier()
        if call is in_a_group and rank not in (0, 2):
            return
        if wrong == "late" and rank == 2:
            await anyio.sleep(7.0)
        try:
            await call(rank, object() if wrong == "refused" and rank == 2 else torch.ones(2))
        except ac.CollectiveError as error:
            heard[rank] = error
            await anyio.sleep(8.0)
        except ac.PayloadTypeError:
            await anyio.sleep(8.0)

    faults = [Kill(2, after_call=2)] if wrong == "killed" else []
    simulate(main, world_size=size, seed=SEED, faults=faults)
    line = call.__code__.co_firstlineno + 1
    number = 1 if call is in_a_group else 2  # after the barrier
    assert heard
    for error in heard.values():
        text = str(error)
        assert error.ranks == (2,), text
        assert (error.operation, error.lane) == ("all_reduce", "mine" if call is in_a_group else "default")
        assert f"all_reduce #{number}" in text
        assert f"test_blame.py:{line}" in text
        assert "rank 2" in text


async def timed_out(work: ac.Work[int]) -> None:
    with contextlib.suppress(ac.CollectiveTimeoutError):
        work.wait(2.0)


async def cancelled(work: ac.Work[int]) -> None:
    with anyio.move_on_after(2.0):
        await work


async def never_waited_for(work: ac.Work[int]) -> None:
    work.detach()


async def completed(work: ac.Work[int]) -> None:
    with contextlib.suppress(ac.CollectiveTimeoutError):
        async for _ in ac.as_completed([work], timeout=2.0):
            pass


async def polled(work: ac.Work[int]) -> None:
    assert not work.done()
    work.detach()


async def polled_and_cancelled(work: ac.Work[int]) -> None:
    assert not work.done()
    await cancelled(work)


@pytest.mark.parametrize(
    "give_up", [timed_out, cancelled, never_waited_for, completed, polled, polled_and_cancelled]
)
def test_a_call_that_nobody_waits_for_any_more_is_told_as_no_other_wait(give_up: Any, loop: str) -> None:
    """A child task has abandoned it, so it is part of no circle and no chain of waits: the rank computes."""
    heard: dict[int, str] = {}

    async def main(rank: int) -> None:
        side = None
        if rank == 1:
            side = ac.all_reduce(rank, lane="side", timeout=100.0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(give_up, side)
            await anyio.sleep(9.0)
        work = ac.all_reduce(1.0, lane="main", timeout=6.0)
        try:
            await work
        except ac.CollectiveTimeoutError as error:
            heard[rank] = str(error)
            await work
        await (ac.all_reduce(rank, lane="side") if side is None else side)

    for size in (2, 3):
        heard.clear()
        simulate(main, world_size=size, seed=SEED, loop=loop).check()
        assert sorted(heard) == [0, 2][: size - 1]
        for text in heard.values():
            assert (
                "s: rank 1 (host simulated, pid 1001) has not called all_reduce #1 on lane 'main'; " in text
            )
            assert "circle" not in text
            assert "another wait" not in text


def test_who_waits_beside_one_that_was_cancelled_hears_of_a_lost_rank(loop: str) -> None:
    """The watchdog checks on the operation as long as any task waits for it."""

    async def main(rank: int) -> str:
        if rank == 1:
            await anyio.sleep(100.0)
        work = ac.all_reduce(1.0, timeout=60.0)

        async def beside() -> None:
            with anyio.move_on_after(1.0):
                await work

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beside)
            try:
                await work
            except ac.CollectiveError as error:
                return type(error).__name__
        return ""

    report = simulate(main, world_size=2, seed=SEED, loop=loop, faults=[Kill(1, at=5.0)])
    assert report.results[0] == "PeerLostError"
    assert report.virtual_seconds < 20


def test_in_a_simulated_world_the_wait_that_is_the_cause_is_told_first() -> None:
    """Rank 1 makes rank 0's call only once its own wait, for a call that rank 0 skips, has timed out."""

    async def crossed(rank: int) -> None:
        await ac.barrier()
        if rank == 0:
            await ac.all_reduce(1.0, lane="a", timeout=1.2)
        try:
            await ac.all_reduce(1.0, lane="b", timeout=1.0)
        finally:
            await ac.all_reduce(1.0, lane="a", timeout=4.0)
            await anyio.sleep(2)  # so that rank 0 sees it in this state

    far = Link((0.1, 0.1), 1e9)  # so that it is still in flight when rank 0 asks
    for seed in range(SEED, SEED + 5):
        report = simulate(crossed, world_size=2, seed=seed, link=far)
        with pytest.raises(AssertionError) as caught:
            report.check()
        cause, follows = str(caught.value).split("\nrank 0 raised CollectiveTimeoutError: ")
        assert cause.startswith(f"seed {seed}: rank 1 raised CollectiveTimeoutError: ")
        assert "has not called all_reduce #1 on lane 'b'" in cause
        assert "after its wait for all_reduce #1 on lane 'b' at" in follows
        assert "this may follow from another wait: rank 0 has not called all_reduce #1 on lane 'b'" in follows


def test_in_a_simulated_world_a_stopped_rank_is_told_from_one_that_is_late() -> None:
    def main(rank: int) -> tuple[tuple[int, ...], str]:
        ac.all_reduce(torch.ones(2)).wait()
        work = ac.all_reduce(torch.ones(2), timeout=2.0)
        try:
            work.wait()
        except ac.CollectiveTimeoutError as error:
            work.wait()
            return error.ranks, str(error)
        return (), ""

    report = simulate(main, world_size=3, seed=SEED, loop="none", faults=[Stop(2, 3.0, after_call=1)])
    for rank in (0, 1):
        ranks, text = report.results[rank]
        assert ranks == (2,), text
        assert "its process is stopped" in text


def test_in_a_simulated_world_the_last_call_of_a_killed_rank_is_told() -> None:
    async def main(rank: int) -> None:
        for _ in range(3):
            await ac.all_reduce(torch.ones(2), lane="eval")

    report = simulate(main, world_size=3, seed=SEED, faults=[Kill(1, after_call=2)])
    for rank in (0, 2):
        error = report.errors[rank]
        assert isinstance(error, ac.PeerLostError)
        assert error.ranks == (1,)
        assert "its last call was all_reduce #1 on lane 'eval'" in str(error)
        assert (error.operation, error.lane) == ("all_reduce", "eval")


@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_that_a_rank_has_left_is_said_once(transport: str) -> None:
    def main(rank: int) -> None:
        ac.all_reduce(torch.ones(2)).wait()
        if rank != 1:
            ac.all_reduce(torch.ones(3)).wait()

    report = simulate(main, world_size=3, seed=SEED, loop="none", transport=transport)
    for rank in (0, 2):
        text = str(report.errors[rank])
        assert len(re.findall(r"\bleft\b", text)) == 1, text
        assert re.search(
            r"has left its world \(finalize\) \(\d\.\d s ago; its last call was all_reduce #1", text
        )


def test_a_refusal_that_was_never_told_is_no_skipped_call() -> None:
    heard: list[str] = []

    async def main(rank: int) -> None:
        await ac.barrier()
        for _ in range(2):
            try:
                _ = await ac.all_reduce(torch.ones(2), lane="eval", timeout=-1.0 if rank == 1 else 9.0)
            except ac.AsyncCollError as error:
                heard.extend([str(error)] * (rank == 0))

    simulate(main, world_size=2, seed=SEED, transport="gloo")
    told = (
        r"rank 1 called it at \S+test_blame.py:\d+, and it was refused there: InvalidArgumentError: timeout"
    )
    assert re.search(told, heard[-1]), heard
    assert "skipped" not in heard[-1]


@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_that_a_rank_has_skipped_one_of_equal_calls_is_told_with_its_line(transport: str) -> None:
    """The later calls agree, so nothing looks wrong until the last one, which this rank does not make."""
    lines = {}

    def main(rank: int) -> None:
        code = main.__code__
        lines.update(first=code.co_firstlineno + 5, last=code.co_firstlineno + 6)
        for i in range(4):
            if rank != 1 or i != 2:
                ac.all_reduce(torch.ones(2)).wait()
        ac.all_reduce(torch.ones(2)).wait()

    report = simulate(main, world_size=2, seed=SEED, loop="none", transport=transport)
    text = str(report.errors[0])
    assert re.search(
        r"; rank 1's last call there was #4, and this rank is at #5: rank 1 skipped a call, "
        r"likely at #4, the first that was called from different lines: "
        rf"\S+test_blame.py:{lines['first']} on rank 0, \S+test_blame.py:{lines['last']} on rank 1",
        text,
    ), text


@pytest.mark.parametrize("alike", [True, False])
def test_a_timeout_tells_where_one_of_equal_calls_was_skipped(alike: bool) -> None:
    """Not if the ranks run different code from the start: then their lines say nothing."""
    heard: dict[int, str] = {}
    lines = {}

    def main(rank: int) -> None:
        code = main.__code__
        lines.update(first=code.co_firstlineno + 9, last=code.co_firstlineno + 10)
        if alike or rank == 0:
            ac.all_reduce(torch.ones(2)).wait()
        else:
            ac.all_reduce(torch.ones(2)).wait()
        for i in range(4):
            if rank != 1 or i != 2:
                ac.all_reduce(torch.ones(2)).wait()
        last = ac.all_reduce(torch.ones(2))
        try:
            last.wait()
        except ac.CollectiveTimeoutError as error:
            heard[rank] = str(error)
        host.sleep(20.0)

    simulate(main, world_size=2, seed=SEED, loop="none", operation_timeout=5.0)
    assert heard.keys() == {0}
    hint = (
        r"\n  a rank may have skipped an earlier call: likely at #5, the first that was called from "
        r"different lines: "
        rf"\S+test_blame.py:{lines['first']} on rank 0, \S+test_blame.py:{lines['last']} on rank 1"
    )
    assert bool(re.search(hint, heard[0])) is alike, heard[0]
    assert ("skipped an earlier call" in heard[0]) is alike


# In processes


async def one_is_late(me: Rank, how: str) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 is held up as `how` says; return what the others were told, and when."""
    await me.get(ac.all_reduce(torch.ones(2), lane="gradients"))
    await me.get(ac.broadcast(1.0, lane="eval"))
    if me.rank == 1:
        await lateness(me, how)
        return "", (), 0.0
    start = time.monotonic()
    work = ac.all_reduce(torch.ones(3), lane="gradients", timeout=1.5)
    heard = ("nothing", (), 0.0)
    try:
        await me.get(work)
    except ac.CollectiveTimeoutError as error:
        assert (error.operation, error.lane) == ("all_reduce", "gradients")
        heard = str(error), error.ranks, time.monotonic() - start
    me.show(f"{me.rank} has heard")
    if how == "stopped" and me.rank == 0:
        for rank in range(2, me.size):
            me.see(f"{rank} has heard")
        found = re.search(r"pid (\d+)", heard[0])
        assert found, heard
        os.kill(int(found[1]), signal.SIGCONT)
    await me.get(work)
    return heard


async def lateness(me: Rank, how: str) -> None:
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 continues it once it has the error
    elif how == "native":
        hold_the_interpreter(2.5)
    else:
        for rank in range(me.size):
            if rank != 1:
                me.see(f"{rank} has heard")
    await me.get(ac.all_reduce(torch.ones(3), lane="gradients"))


def hold_the_interpreter(seconds: float) -> None:
    """Block in native code without releasing the GIL."""
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@pytest.mark.processes
@pytest.mark.parametrize("backend", worlds.BACKENDS)
@pytest.mark.parametrize(("size", "runner"), [(2, "asyncio"), (3, "trio"), (3, "blocking")])
@pytest.mark.parametrize("how", ["computing", "native", "stopped"])
def test_who_is_late_is_named(backend: str, size: int, runner: str, how: str) -> None:
    with worlds.fresh(backend, size) as world:
        results = world.run(one_is_late, how, runner=runner, timeout=patient(20))
    for rank, (text, ranks, seconds) in enumerate(results):
        if rank == 1:
            continue
        assert ranks == (1,), text
        assert re.search(
            r"rank 1 \(host .*, pid \d+\) has not called all_reduce #2 on lane 'gradients'", text
        )
        assert re.search(
            r"its last call was broadcast #1 on lane 'eval' at .*test_blame.py:\d+, \d\.\d s ago", text
        )
        if how == "computing":
            assert re.search(r"it is now in .*\((test_blame|ranks)\.py:\d+\)", text)
        else:
            why = {
                "native": "native code may be holding its interpreter",
                "stopped": "its process is stopped",
            }
            assert why[how] in text
        assert seconds < 1.5 + patient(1.0)


# During the wait


async def asked(me: Rank) -> tuple[tuple[int, ...], str]:
    await me.get(ac.all_reduce(torch.ones(2)))
    if me.rank == 1:
        me.show("recorded")  # this comes after a call's start; its peer may have sent its data by then
        me.see("asked")
        await me.get(ac.barrier())
        return (), ""
    me.see("recorded")
    work = ac.barrier()
    found = ac.who_is_missing(work)
    me.show("asked")
    await me.get(work)
    assert ac.who_is_missing(work).ranks == ()
    return found.ranks, str(found)


@pytest.mark.processes
@pytest.mark.parametrize("backend", worlds.BACKENDS)
def test_who_is_missing(backend: str) -> None:
    with worlds.fresh(backend, 2) as world:
        results = world.run(asked, timeout=patient(20))
    ranks, text = results[0]
    assert ranks == (1,), text
    assert "has not called barrier #2 on lane 'default'; its last call was all_reduce #1" in text


def test_who_waits_for_long_is_warned_once(capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """The warning has the words of the later timeout, long before that."""

    def main(rank: int) -> None:
        ac.all_reduce(torch.ones(2)).wait()
        if rank == 1:
            host.sleep(9.0)
        ac.all_reduce(torch.ones(2)).wait()

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ASYNCCOLL_STALL_WARNING", "4")
        report = simulate(main, world_size=2, seed=SEED, loop="none")
    assert not report.errors
    expected = re.compile(
        r"rank 0 has waited for [45] s for all_reduce #2 on .*: rank 1 \(host simulated, pid 1001\) has not "
        r"called all_reduce #2 on lane 'default'; its last call was all_reduce #1"
    )
    assert len(expected.findall(caplog.text)) == 1
    assert len(expected.findall(capsys.readouterr().err)) == 1


def test_simulated_seconds_are_no_reason_to_warn(capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    """No warning is given unless the program or its environment asks for it."""

    def main(rank: int) -> None:
        host.sleep(50.0 * rank)
        ac.barrier().wait()

    report = simulate(main, world_size=2, seed=SEED, loop="none", operation_timeout=100.0)
    assert not report.errors
    assert report.virtual_seconds > 40
    assert "has waited for" not in caplog.text + capsys.readouterr().err


@pytest.mark.parametrize("nodes", [1, 4])
def test_what_the_whole_job_waits_for_is_warned_of_once(nodes: int, caplog: Any) -> None:
    """Only one rank warns of the circle; every rank warns of its own wait."""

    async def main(rank: int) -> None:
        with pytest.raises(ac.CollectiveError):
            await ac.all_reduce(torch.ones(2), lane="ab"[rank % 2], timeout=9.0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ASYNCCOLL_STALL_WARNING", "4")
        simulate(main, world_size=4, seed=SEED, nodes=nodes, transport="gloo")
    warned = [one for one in caplog.messages if "has waited for" in one]
    assert [one.partition(" has waited")[0] for one in sorted(warned)] == [
        f"rank {rank}" for rank in range(4)
    ]
    assert sum("ranks wait in a circle" in one for one in warned) == 1
    elsewhere = "; another rank's warning says what the whole job waits for"
    assert sum(one.endswith(elsewhere) for one in warned) == 3
    assert all("has not called all_reduce #1 on lane" in one for one in warned)


@pytest.mark.parametrize("said", ["-1", "soon", "nan"])
def test_when_to_warn_is_a_number_of_seconds(said: str) -> None:
    with pytest.raises(ac.InvalidArgumentError, match="ASYNCCOLL_STALL_WARNING must be a number of seconds"):
        stall_seconds(environ={"ASYNCCOLL_STALL_WARNING": said})


def test_when_to_warn_is_thirty_seconds_or_what_is_given() -> None:
    assert stall_seconds(environ={}) == 30.0
    assert stall_seconds(environ={"ASYNCCOLL_STALL_WARNING": "0"}) == 0.0
    assert stall_seconds(2.5, environ={"ASYNCCOLL_STALL_WARNING": "7"}) == 2.5


def test_a_wait_that_holds_the_event_loop_is_told(loop: str) -> None:
    """The task that would make the call the other rank waits for cannot run; if both await, neither waits."""
    heard: list[str] = []

    async def waiting(lane: str) -> None:
        try:
            ac.all_reduce(1, lane=lane, timeout=5.0).wait()
        except ac.CollectiveTimeoutError as error:
            heard.append(str(error))

    async def awaiting(lane: str) -> None:
        assert await ac.all_reduce(1, lane=lane, timeout=5.0) == 2

    async def main(rank: int) -> None:
        for each in (awaiting, waiting):
            async with ac.create_task_group() as tasks:
                for lane in ("a", "b") if rank == 0 else ("b", "a"):
                    tasks.start_soon(each, lane)

    simulate(main, world_size=2, seed=SEED, loop=loop)
    assert heard
    assert all("no other task of its event loop could make a call in the meantime" in text for text in heard)


def test_a_warning_that_cannot_be_printed_is_logged_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader of stderr may have exited (`2>&1 | head`): the watchdog keeps running."""
    reads, writes = os.pipe()
    os.close(reads)
    broken = os.fdopen(writes, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", broken)
    stalls.warn(0, "barrier #1", 30.0, "rank 1 has not called it")
    with contextlib.suppress(OSError):  # what is still buffered
        broken.close()
    assert "rank 0 has waited for 30 s for barrier #1: rank 1 has not called it" in caplog.text
