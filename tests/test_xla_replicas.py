"""Where replica threads meet: plain Python, which needs no torch_xla."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import asynccoll as ac
from asynccoll.backends.xla import replicas as xla_replicas
from asynccoll.backends.xla.backend import ON_CPU, ON_TPU
from asynccoll.backends.xla.progress import Progress
from asynccoll.backends.xla.replicas import Replicas, Room, join
from asynccoll.plan.dispatch import plan
from asynccoll.plan.spec import Op, ReduceOp, TensorSpec, Topology, Wire


class Call:
    """A call that remembers how it failed."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error


def taken(room: Room) -> list[Any]:
    """Return all calls that can be taken, in order."""
    return list(iter(room.take, None))


def test_who_comes_last_can_take_all_calls_by_rank() -> None:
    """Each place of the order is a separate meeting; a complete one waits for earlier ones."""
    room = Room(3)
    calls = {(place, rank): Call() for place in (1, 2, 3) for rank in range(3)}
    arrivals = [(1, 2), (2, 0), (1, 0), (2, 2), (2, 1), (1, 1), (3, 1), (3, 0), (3, 2)]
    got = []
    for where in arrivals:
        complete = room.arrive(*where, calls[where])
        got.append((complete, taken(room)))
    first, second, third = ([calls[place, rank] for rank in range(3)] for place in (1, 2, 3))
    nothing = (False, [])
    assert got[:4] == [nothing] * 4
    assert got[4:] == [(True, []), (True, [first, second]), nothing, nothing, (True, [third])]


def test_who_gives_up_fails_those_that_wait_and_those_that_come() -> None:
    """They fail with the error of the first rank that gave up."""
    room = Room(2)
    waiting, late = Call(), Call()
    room.arrive(1, 0, waiting)
    first = ac.PeerLostError("rank 1 is gone", (1,))
    room.give_up(first)
    room.give_up(ac.PeerLostError("again", (0,)))
    assert not room.arrive(2, 0, late)
    assert taken(room) == []
    assert (waiting.error, late.error) == (first, first)


def test_a_communicator_that_all_have_left_is_forgotten() -> None:
    """It is not forgotten earlier, as a late rank must hear that another gave up."""
    world = Replicas(2)
    room = world.room("lane", 2)
    world.leave("lane", 0)
    world.leave("lane", 0)
    assert world.room("lane", 2) is room
    world.leave("lane", 1)
    world.leave("lane", 1)
    assert world.room("lane", 2) is not room


def _joined(size: int, absent: int = 0, timeout: float = 30.0) -> list[Any]:
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = join(rank, size, timeout)
        except ac.AsyncCollError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size - absent)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_replicas_join_one_world_and_then_another() -> None:
    """All of them get the same world; the next time they get a new one."""
    first, second = _joined(4), _joined(4)
    assert len(set(map(id, first))) == len(set(map(id, second))) == 1
    assert first[0] is not second[0]


def test_a_replica_that_does_not_come_is_named() -> None:
    """The error of the others names it, and they may try again."""
    *here, none = _joined(3, absent=1, timeout=0.05)
    assert none is None
    for error in here:
        assert isinstance(error, ac.CollectiveTimeoutError)
        assert "replicas [2] of 3" in str(error) or "of 3 did not" in str(error)
    assert len(set(map(id, _joined(3)))) == 1


def test_a_rank_joins_once() -> None:
    """Two threads that claim to be the same replica cause an error, not a world of the wrong ranks."""
    started = threading.Thread(target=join, args=(0, 2, 10.0))
    started.start()
    try:
        with xla_replicas._changed:
            waits = xla_replicas._changed.wait_for
            assert waits(lambda: xla_replicas._gathering and 0 in xla_replicas._gathering[0].joined, 10.0)
        with pytest.raises(ac.InvalidArgumentError, match="another thread"):
            join(0, 2, 10.0)
    finally:
        assert join(1, 2, 10.0).size == 2
        started.join()


def test_jobs_run_in_order_in_one_thread_which_ends() -> None:
    """``begin`` runs before all jobs, and makes the thread the replica's."""
    seen: list[Any] = []
    progress = Progress("test-progress", lambda: seen.append("begin"))
    for index in range(100):
        progress.submit(lambda index=index: seen.append((index, threading.current_thread().name)))
    progress.close()
    assert seen == ["begin", *((index, "test-progress") for index in range(100))]
    assert all(thread.name != "test-progress" for thread in threading.enumerate())


def test_a_job_for_a_thread_that_has_ended_runs_in_the_callers() -> None:
    """Otherwise its waiter would never return: another replica may launch for one that leaves."""
    progress = Progress("test-progress", lambda: None)
    progress.close()
    ran: list[threading.Thread] = []
    progress.submit(lambda: ran.append(threading.current_thread()))
    assert ran == [threading.current_thread()]


@pytest.mark.parametrize(
    ("name", "native", "why"),
    [
        ("gather", "all_gather", "no gather of its own"),
        ("scatter", "reduce_scatter", "no scatter of its own"),
        ("reduce", "all_reduce", "no reduce of its own"),
        ("permute", "collective_permute", "no permute of its own"),
        ("all_gather", "all_gather", "it is sent as int32"),
    ],
)
def test_plans_say_what_is_built_of_what(name: str, native: str, why: str) -> None:
    """Planning needs nothing but the table of capabilities."""
    planned = plan(Op(name), TensorSpec(torch.float32, device="xla"), Topology(ON_CPU, 4))
    assert planned.native == native
    assert why in str(planned)


def test_bfloat16_is_reduced_in_float32_on_the_cpu() -> None:
    """The CPU cannot reduce bfloat16; a TPU can."""
    spec = TensorSpec(torch.bfloat16, device="xla")
    on_cpu = plan(Op.ALL_REDUCE, spec, Topology(ON_CPU, 2), reduce=ReduceOp.AVG)
    assert (on_cpu.wire, on_cpu.wire_dtype, on_cpu.divide) == (Wire.CAST, torch.float32, True)
    on_tpu = plan(Op.ALL_REDUCE, spec, Topology(ON_TPU, 2), reduce=ReduceOp.SUM)
    assert on_tpu.wire is Wire.SAME


@pytest.mark.parametrize("name", ["send", "recv"])
def test_messages_are_refused_with_advice(name: str) -> None:
    """XLA has no messages between two ranks: a permute does the same."""
    with pytest.raises(ac.UnsupportedOpError, match="permute"):
        plan(Op(name), TensorSpec(torch.float32), Topology(ON_CPU, 2))
