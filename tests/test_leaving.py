"""A rank that leaves, or dies while others wait for it: errors tell the two apart, and soon name the rank."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import asynccoll as ac
import scripts
import threads
import worlds
from asynccoll.backends.serial.backend import SerialBackend
from asynccoll.health.liveness import Liveness
from asynccoll.host.store import Clients
from asynccoll.runtime import process as runtime
from asynccoll.world.context import Context, Identity
from asynccoll.world.farewells import Farewells
from patience import patient
from ranks import Rank, raising


def _asked_of(me: Rank, gone: int, sign: str) -> None:
    """Show ``sign`` once this rank's watch has found rank ``gone`` gone, and has kept watching afterwards."""
    real = Liveness.lost
    seen = 0

    def lost(self: Liveness, ranks: tuple[int, ...], **how: object) -> tuple[int, ...]:
        nonlocal seen
        if seen == 2:
            me.show(sign)
        found: tuple[int, ...] = real(self, ranks, **how)  # type: ignore[arg-type]  # passed on
        seen += gone in found
        return found

    Liveness.lost = lost  # type: ignore[method-assign,assignment]  # a spy on the real one


async def leaves_after_its_part(me: Rank) -> str:
    """The last rank does its part of a gather to rank 1 and leaves; rank 0 does its own part much later."""
    await me.get(ac.all_reduce(1))
    last = me.size - 1
    if me.rank == last:
        await me.get(ac.gather(torch.tensor([last]), dst=1))
        ac.finalize()
        me.show("left")
        return "left"
    if me.rank == 1:
        _asked_of(me, last, "asked")
        rows = await me.get(ac.gather(torch.tensor([1]), dst=1))
        assert rows.flatten().tolist() == list(range(me.size))
        with raising(ac.PeerLostError, f"rank {last}", "finalize"):
            await me.get(ac.all_reduce(1))  # which the rank that has left will never make
        return "right"
    me.see("left")
    me.see("asked")
    await me.get(ac.gather(torch.tensor([me.rank]), dst=1))
    return "late"


@pytest.mark.processes
@pytest.mark.parametrize("size", [3, 5])
def test_who_has_left_is_not_lost_in_what_it_did(size: int) -> None:
    """A peer still in an earlier call gets its result; in a later call it is told which rank has left."""
    with worlds.fresh("gloo", size) as world:
        results = world.run(leaves_after_its_part, runner="blocking", timeout=patient(40))
        world.kill()
    assert results == ["late", "right", *["late"] * (size - 3), "left"]


def test_a_thread_that_has_left_is_not_lost_in_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds between threads of one process."""
    monkeypatch.setattr(Liveness, "lost", Liveness.lost)  # so that the spy is removed afterwards
    results = threads.run(3, leaves_after_its_part, runner="blocking", timeout=patient(10))
    assert results == ["late", "right", "left"]


async def goes_on_without_rank_0(me: Rank) -> None:
    group = ac.new_group([1, 2])
    await me.get(ac.all_reduce(1))
    if me.rank == 0:
        ac.finalize()
        me.show("left")
        return
    await me.get(ac.all_reduce(1, group=group))  # its lane is open
    me.see("left")
    if me.rank == 1:
        with raising(ac.PeerRefusedError, "rank 2 refused"):
            await me.get(ac.all_reduce(1, group=group, timeout=patient(5)))
    else:
        with raising(ac.PayloadTypeError, "object"):
            ac.all_reduce(object(), group=group)  # type: ignore[arg-type]
    assert await me.get(ac.all_reduce(me.rank, group=group, timeout=patient(5))) == 3


def test_threads_hear_of_a_refusal_after_rank_0_has_left() -> None:
    """The store is in the threads' process, whichever rank has left."""
    threads.run(3, goes_on_without_rank_0, timeout=patient(20))


async def dies_instead_of_opening(me: Rank, victim: int) -> float:
    await me.get(ac.all_reduce(1))
    if me.rank == victim:
        me.is_killed_once_all_wait()
    work = ac.all_reduce(1, lane="new")
    me.show(f"{me.rank} waits")
    start = time.monotonic()
    with raising(ac.PeerLostError, f"rank {victim}"):
        await me.get(work)
    return time.monotonic() - start


@pytest.mark.processes
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 2), (5, 3)])
def test_a_death_while_a_lane_is_opened(size: int, victim: int) -> None:
    """The survivors, which wait for the dead rank to join, name it soon."""
    with worlds.fresh("gloo", size, timeout=300.0) as world:
        results = world.run(
            dies_instead_of_opening, victim, runner="blocking", dies=[victim], timeout=patient(30)
        )
        world.kill()
    for rank, seconds in enumerate(results):
        assert rank == victim or seconds < patient(4), f"rank {rank} heard of it after {seconds} s"


async def hears_of_a_death_late(me: Rank) -> tuple[int, ...]:
    """The last rank is killed; rank 0 hears of it, and ends; rank 1 looks when both are gone."""
    last = me.size - 1
    pids = await me.get(ac.all_gather(os.getpid()))
    if me.rank == last:
        for rank in range(last):
            me.see(f"{rank} looks at it")
        os.kill(os.getpid(), signal.SIGKILL)
    watched = {rank: os.pidfd_open(pids[rank]) for rank in (0, last)}
    me.show(f"{me.rank} looks at it")
    if me.rank == 0:
        with raising(ac.PeerLostError, f"rank {last}"):
            await me.get(ac.all_reduce(1))
        ac.finalize(abort=True)
        os._exit(0)
    for process in watched.values():
        assert select.select([process], [], [], patient(20))[0], "it has not ended"
    with pytest.raises(ac.PeerLostError) as caught:
        await me.get(ac.all_reduce(1))
    return caught.value.ranks


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "memory"])
def test_who_ends_because_another_was_killed_is_not_blamed(backend: str) -> None:
    """However late a peer looks, it blames the killed rank: the other one ended only as a consequence."""
    with worlds.fresh(backend, 3) as world:
        results = world.run(hears_of_a_death_late, runner="blocking", dies=[0, 2], timeout=patient(40))
        world.kill()
    assert results[1] == (2,)


async def leaves_before_others_are_done(me: Rank, leaver: int) -> list[tuple[str, tuple[int, ...], float]]:
    """Return the others' errors on an open lane, and on one that they open after a rank has left."""
    await me.get(ac.all_reduce(1, lane="open"))
    if me.rank == leaver:
        ac.finalize()
        return []
    told = []
    for lane in ("open", "new"):
        start = time.monotonic()
        with pytest.raises(ac.PeerLostError) as caught:
            await me.get(ac.all_reduce(torch.ones(3), lane=lane))
        told.append((str(caught.value), caught.value.ranks, time.monotonic() - start))
    ac.finalize()
    return told


@pytest.mark.processes
@pytest.mark.parametrize(("size", "leaver"), [(2, 0), (2, 1), (5, 0)])
def test_who_has_left_is_named(size: int, leaver: int) -> None:
    """Each error names it once, also rank 0, whose process stays for the store, and also on a new lane."""
    with worlds.fresh("gloo", size, timeout=300.0) as world:
        results = world.run(leaves_before_others_are_done, leaver, runner="blocking", timeout=patient(40))
        world.kill()
    for rank, told in enumerate(results):
        assert rank == leaver or len(told) == 2
        for text, ranks, seconds in told:
            assert ranks == (leaver,), text
            assert text.count("has left its world") == 1, text
            assert seconds < patient(4), f"rank {rank} heard of it after {seconds} s"


DIES_IN_INITIALIZE = """
    import os, pathlib, signal, time
    import asynccoll as ac
    from asynccoll.order.lane import Lane
    from asynccoll.world.context import Context

    rank, close = int(os.environ["RANK"]), Context.close
    heard = [pathlib.Path(__file__).with_name(f"{n} heard") for n in range(int(os.environ["WORLD_SIZE"]))]

    def close_last(self, **how):
        heard[rank].touch()
        while not all(path.exists() for path in heard[:1] + heard[2:]):
            time.sleep(0.01)
        close(self, **how)

    Context.close = close_last  # who looks after a rank has closed finds that one gone as well
    if rank == 1:
        Lane.open = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        ac.initialize("gloo", timeout=300.0)
    except ac.PeerLostError as error:
        print("lost", error.ranks)
    seconds = time.monotonic() - start
    assert seconds < 60, f"heard of it after {seconds} s"
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_death_during_initialize(tmp_path: Path, ranks: int) -> None:
    """If a rank joins and dies before all lanes are open, the others do not wait their whole timeout."""
    ended = scripts.run(tmp_path, DIES_IN_INITIALIZE, ranks=ranks)
    for rank, one in enumerate(ended):
        if rank != 1:
            assert one.code == 0, one.err
            assert one.out.split() == ["lost", "(1,)"], one.out


async def refuses_and_dies(me: Rank, victim: int) -> float:
    """The victim is the only rank that does not report what it did at a refused place."""
    await me.get(ac.all_reduce(1))
    if me.rank == victim:
        me.see("refused")
        os.kill(os.getpid(), signal.SIGKILL)
    with raising(ac.InvalidArgumentError):
        ac.all_reduce(1, timeout=-1)
    work = ac.all_reduce(2)
    if me.rank == 0:
        me.show("refused")
    start = time.monotonic()
    with raising(ac.PeerLostError, f"rank {victim}"):
        await me.get(work)
    assert runtime.current().world.lane().broken is not None
    return time.monotonic() - start


@pytest.mark.processes
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 1)])
def test_a_death_while_a_refusal_is_settled(size: int, victim: int) -> None:
    """Ranks that wait for the dead rank's report are told that it is lost."""
    with worlds.fresh("gloo", size, timeout=300.0) as world:
        results = world.run(refuses_and_dies, victim, runner="blocking", dies=[victim], timeout=patient(30))
        world.kill()
    for rank, seconds in enumerate(results):
        assert rank == victim or seconds < patient(4), f"rank {rank} heard of it after {seconds} s"


async def refuses_twice_and_leaves(me: Rank) -> None:
    """Of two calls the last rank refuses the first, all but rank 0 the second; rank 0 joins late."""
    bad = {"op": "nonsense"}
    await me.get(ac.barrier())
    if me.rank == 0:
        for rank in range(1, me.size):
            me.see(f"{rank} has refused")
    for number, refuses in enumerate((me.rank == me.size - 1, 0 < me.rank < me.size - 1)):
        if number and refuses:
            me.show(f"{me.rank} has refused")
        # Ranks that leave close their connections, which a late rank may notice first.
        expected = ac.InvalidArgumentError if refuses else (ac.PeerRefusedError, ac.PeerLostError)
        if me.rank == me.size - 1 and number == 0:
            me.show(f"{me.rank} has refused")
        with pytest.raises(expected):
            await me.get(ac.all_reduce(torch.ones(3), **(bad if refuses else {})))
    ac.finalize()


@pytest.mark.processes
@pytest.mark.parametrize("size", [3, 5])
def test_nobody_leaves_before_its_refusals_are_known(size: int) -> None:
    """Once, the late rank did not hear of the second refusal, and waited the whole timeout for the others."""
    with worlds.fresh("gloo", size, timeout=300.0) as world:
        world.run(refuses_twice_and_leaves, runner="blocking", timeout=patient(40))
        world.kill()


async def leaves_with_a_refusal_open(me: Rank) -> float:
    """Rank 0 refuses the call after one that the others have not made yet, and never will."""
    await me.get(ac.all_reduce(1, lane="x"))
    if me.rank == 0:
        ahead = ac.all_reduce(2, lane="x")
        with raising(ac.InvalidArgumentError):
            ac.all_reduce(3, lane="x", op="nonsense")
        me.show("refused")
    else:
        me.see("refused")
        context = runtime.current()
        context.refusals.look(context.lanes())  # as every waiter does
        me.show(f"{me.rank} has heard")
    for rank in range(1, me.size):
        me.see(f"{rank} has heard")
    start = time.monotonic()
    ac.finalize()
    if me.rank == 0:
        with raising((ac.PeerRefusedError, ac.PeerLostError)):
            await me.get(ahead)
    return time.monotonic() - start


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", worlds.BACKENDS)
def test_all_leave_although_a_refusal_cannot_be_settled(backend: str, size: int) -> None:
    """Ranks that know of it and owe earlier calls leave; once, they waited for each other's reports."""
    with worlds.fresh(backend, size, timeout=300.0) as world:
        results = world.run(leaves_with_a_refusal_open, runner="blocking", timeout=patient(60))
        world.kill()
    for rank, seconds in enumerate(results):
        assert seconds < patient(8), f"rank {rank} took {seconds} s to leave"


def test_a_world_is_left_once() -> None:
    """At the end of a program, a thread that waited in ``finalize`` was told that ``_store`` is missing."""
    context = Context(SerialBackend(), Identity(), store=dist.HashStore())
    context.close(abort=True)
    context.close(abort=False)


class _Counted(dist.HashStore):
    """Counts how often it is asked whether keys are set."""

    asked = 0

    def clone(self) -> _Counted:
        return self

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return super().check(keys)


class _Mortal:
    """Knows which ranks are dead."""

    def __init__(self, *dead: int) -> None:
        self.dead = dead

    def lost(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in self.dead)


def _last(dead: Sequence[int] = (), left: Sequence[int] = ()) -> tuple[Farewells, _Counted]:
    """Return what rank 0 of a large world asks when it leaves last, and the store that it asks."""
    store = _Counted()
    for rank in left:
        store.set(f"left/{rank}", "")
    return Farewells(0, 100, Clients(store), _Mortal(*dead), list), store  # type: ignore[arg-type]


def test_one_rank_that_stays_is_asked_for_alone() -> None:
    """With a request for each rank, each look would keep a large world's store from serving others."""
    farewells, store = _last()
    assert not farewells._only_dead_stay()
    assert store.asked == 1


def test_who_has_left_is_not_asked_for_again() -> None:
    farewells, store = _last(left=range(1, 99))
    assert not farewells._only_dead_stay()
    before = store.asked
    assert not farewells._only_dead_stay()
    assert store.asked == before + 1


@pytest.mark.parametrize("alive", [True, False])
def test_the_dead_are_not_waited_for(alive: bool) -> None:
    dead = [1, 50, *([] if alive else [99])]
    farewells, _ = _last(dead, left=[rank for rank in range(1, 99) if rank not in (1, 50)])
    assert farewells._only_dead_stay() is not alive
