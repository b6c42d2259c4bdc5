"""A process forked from a rank, like a DataLoader worker: it knows its rank, and disturbs no process."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import asynccoll as ac
import asynccoll.sync as idist
import scripts
import worlds
from asynccoll.backends import choosing
from asynccoll.backends.c10d import backend as c10d
from asynccoll.order import operation
from asynccoll.runtime import process as runtime
from asynccoll.transport import completion
from asynccoll.waiting import work
from patience import patient
from ranks import Rank

pytestmark = pytest.mark.processes
SIZES = [size for size in worlds.WORLD_SIZES if size in (2, 3)]


def error_of(call: Any) -> str:
    """Return the name of the exception type that the call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def who() -> tuple[Any, ...]:
    """Return everything that can be asked without communication."""
    mine = DistributedShare()
    return (
        (ac.get_rank(), ac.get_world_size(), ac.get_local_rank(), ac.get_nproc_per_node()),
        (ac.get_rank([0, 1]), ac.get_world_size([0, 1])) if ac.backend() != "horovod" else (),
        (ac.backend(), str(ac.device()), ac.is_initialized()),
        (idist.get_rank(), idist.get_world_size(), idist.get_local_rank(), idist.backend()),
        (idist.model_name(), str(idist.device()), idist.get_nnodes(), idist.get_node_rank()),
        mine.of(ac.auto_dataloader),
        mine.of(idist.auto_dataloader),
    )


class DistributedShare:
    """The first share of 12 samples that a loader created here draws, and its batch size."""

    def of(self, auto_dataloader: Any) -> tuple[list[int], int]:
        loader = auto_dataloader(list(range(12)), batch_size=6, shuffle=False)
        return list(loader.sampler), loader.batch_size


class Told(Dataset[Any]):
    """What a worker finds out, once per sample."""

    def __init__(self, prepared: Any, pending: Any) -> None:
        self.prepared = prepared
        self.pending = pending

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        calls = (
            lambda: ac.all_reduce(1),
            ac.barrier,
            lambda: ac.all_reduce(1, lane="of the worker"),
            lambda: ac.new_group([0]),
            lambda: idist.all_reduce(1),
            idist.barrier,
            self.prepared.start,
            self.pending.wait,
        )
        idist.finalize()
        ac.finalize()
        return who(), [error_of(call) for call in calls], torch.tensor([index])


async def loads(me: Rank) -> None:
    mine, total = who(), [float(sum(range(me.size)))]
    for turn in range(2):
        x = torch.tensor([float(me.rank)])
        prepared = ac.prepare("all_reduce", x, lane=f"{turn} of {me.rank}")
        early = prepared.start()  # the others make this call later
        told = list(
            DataLoader(
                Told(prepared, early),
                num_workers=2,
                multiprocessing_context="fork",
                batch_size=None,
                collate_fn=tuple,
                timeout=patient(60),
            )
        )
        late = [ac.all_reduce(x, lane=f"{turn} of {rank}") for rank in range(me.size) if rank != me.rank]
        assert [(await me.get(one)).tolist() for one in (early, *late)] == [total] * me.size
        for place, errors, _ in told:
            assert place == mine, (place, mine)
            assert set(errors) == {"ForkedProcessError"}, errors
    assert await me.get(ac.all_gather_object(me.rank)) == list(range(me.size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", worlds.BACKENDS)
def test_the_workers_of_a_data_loader(backend: str, size: int) -> None:
    """Calls are in flight, garbage is collected: each knows its rank, none communicates, the rank runs on."""
    worlds.world(backend, size).run(loads, timeout=90)


async def with_locks_held(me: Rank) -> None:
    context = runtime.current()
    locks = [work._claim, completion._settling, operation._wakers_lock, context._lock, context.world._lock]
    locks += [lane._lock for lane in context.lanes()]
    held, fork_is_done = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        fork_is_done.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(int(patient(20)))
        everything_is_right = (
            ac.get_rank([0, 1]) == me.rank
            and error_of(lambda: ac.all_reduce(1)) == "ForkedProcessError"
            and not completion.Promise().wait(0.001)
            and ac.Work((), lambda: 5).wait() == 5
        )
        os._exit(0 if everything_is_right else 9)
    fork_is_done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert await me.get(ac.all_reduce(1)) == me.size


def test_locks_that_were_held_by_other_threads() -> None:
    """Such locks are free in the child."""
    worlds.world("gloo", 2).run(with_locks_held, timeout=40)


async def while_a_lane_closes(me: Rank) -> None:
    if me.rank == 0:
        mine = ac.all_reduce(1, lane="closing")
        ac.close_lane("closing")
        child = os.fork()
        if child == 0:
            signal.alarm(int(patient(20)))
            os._exit(0 if error_of(lambda: mine.wait(patient(5))) == "ForkedProcessError" else 9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    await me.get(ac.all_reduce(1, lane="afterwards"))
    if me.rank > 0:
        mine = ac.all_reduce(1, lane="closing")
        ac.close_lane("closing")
    assert await me.get(mine) == me.size


def test_what_is_in_flight_on_a_lane_that_is_being_closed() -> None:
    """A child does not wait for it, nor ask the peers on behalf of its parent."""
    worlds.world("gloo", 2).run(while_a_lane_closes, timeout=patient(60))


async def while_a_future_waits(me: Rank) -> None:
    if me.rank == 0:
        future = ac.all_reduce(1, lane="waited for").as_concurrent_future()
        called: list[object] = []
        future.add_done_callback(called.append)
        child = os.fork()
        if child == 0:
            signal.alarm(int(patient(20)))
            failed = error_of(lambda: future.result(patient(5))) == "ForkedProcessError"
            os._exit(0 if failed and not called else 9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    await me.get(ac.all_reduce(1, lane="afterwards"))
    if me.rank > 0:
        future = ac.all_reduce(1, lane="waited for").as_concurrent_future()
    assert future.result(patient(20)) == me.size


def test_a_future_that_a_thread_of_the_parent_settles() -> None:
    """It has failed in the child, which has no such thread. Regression: the child waited for it forever."""
    worlds.world("gloo", 2).run(while_a_future_waits, timeout=patient(60))


ENDS = """
    import gc, os, signal, sys, torch, asynccoll as ac
    import torch.distributed as dist
    MADE
    in_flight = ac.all_reduce(1, lane="in flight") if ac.get_rank() == 0 else None
    mine = ac.get_rank()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        gc.collect()
        assert ac.get_rank() == mine
        sys.exit(3)  # through all exit hooks, and the end of the interpreter
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if in_flight is None:
        in_flight = ac.all_reduce(1, lane="in flight")
    print(code, in_flight.wait(), ac.all_reduce(1).wait())
    x = torch.ones(1)
    dist.all_reduce(x)
    print(int(x))
"""


@pytest.mark.slow
@pytest.mark.parametrize("made", ['ac.initialize("gloo")', 'dist.init_process_group("gloo")'])
def test_a_child_that_ends_like_a_program(tmp_path: Path, made: str) -> None:
    """None of our exit hooks run in the child, nothing is destroyed, and the parent's world stays intact."""
    for ended in scripts.run(tmp_path, ENDS.replace("MADE", made), ranks=2, timeout=40):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["3", "2", "2", "2"], ended.err


LET_GO = """
    import gc, os, signal
    import torch.distributed as dist
    import asynccoll as ac

    gc.disable()

    def let_go(thing):
        cycle = [thing]
        cycle.append(cycle)

    let_go(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    let_go(dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        let_go([])
        os._exit(3 if gc.collect() else 9)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(gc.collect() > 0)
"""


def test_what_the_parent_let_go_of_is_not_destroyed_in_a_child(tmp_path: Path) -> None:
    """torch's store and groups join threads when destroyed, and abort or hang without them."""
    (ended,) = scripts.run(tmp_path, LET_GO, ranks=1, timeout=40)
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["3", "True"], ended.err


AFTERWARDS = """
    import os, signal, asynccoll as ac
    ac.initialize("gloo")
    mine = ac.get_rank()
    ac.finalize()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        right = ac.is_main() is (mine == 0)
        try:
            ac.all_reduce(1)
        except ac.NotInitializedError as error:
            right = right and "finalized" in str(error)
        os._exit(3 if right else 9)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_child_of_a_rank_that_has_left_its_world_knows_who_that_was(tmp_path: Path) -> None:
    """It knows its former rank like the rank itself, so that what is printed once still is."""
    for ended in scripts.run(tmp_path, AFTERWARDS, ranks=2):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["3"], ended.err


OWN_WORLD = """
    import os, signal, torch.distributed as dist
    import asynccoll as ac

    MADE
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        del os.environ["MASTER_ADDR"]
        ac.initialize("gloo", rank=0, world_size=1)
        print(ac.all_reduce(1).wait(), dist.get_world_size(), flush=True)
        ac.finalize()
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ac.all_reduce(1).wait())
"""


@pytest.mark.slow
@pytest.mark.parametrize("made", ['ac.initialize("gloo")', 'dist.init_process_group("gloo"); ac.get_rank()'])
def test_a_child_makes_a_world_of_its_own(tmp_path: Path, made: str) -> None:
    """It is not made on torch's group of the parent, whose connections the parent still uses."""
    for ended in scripts.run(tmp_path, OWN_WORLD.replace("MADE", made), ranks=2):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["1", "1", "3", "2"], ended.err


TORCH_ALONE = """
    import os, torch.distributed as dist
    dist.init_process_group("gloo")
    LOADED
    child = os.fork()
    if child == 0:
        import asynccoll.sync as idist
        right = ac.get_rank() == idist.get_rank() == dist.get_rank() and idist.get_world_size() == 2
        try:
            ac.all_reduce(1)
        except ac.ForkedProcessError as error:
            right = right and f"rank {dist.get_rank()} of 2" in str(error)
        os._exit(3 if right else 9)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ac.all_reduce(1).wait())
"""


@pytest.mark.slow
@pytest.mark.parametrize("loaded", ["import asynccoll as ac, asynccoll.sync", "import asynccoll as ac"])
def test_a_group_of_torchs_that_nobody_had_looked_at(tmp_path: Path, loaded: str) -> None:
    """The child still knows its rank in the group, without communication.

    Most of the library is loaded when the first name is used, which may be in the child.
    """
    for ended in scripts.run(tmp_path, TORCH_ALONE.replace("LOADED", loaded), ranks=2):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["3", "2"], ended.err


async def dies_with_a_child(me: Rank) -> tuple[int, ...]:
    await me.get(ac.all_reduce(1))
    if me.rank == 1:
        me.see("0 waits")
        if os.fork() == 0:
            signal.alarm(int(patient(30)))
            me.see("0 has heard")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    work = ac.all_reduce(torch.ones(1000))
    me.show("0 waits")
    try:
        await me.get(work)
    except ac.PeerLostError as error:
        return error.ranks
    finally:
        me.show("0 has heard")
    raise AssertionError("gave a result without the dead rank")


def test_a_child_does_not_stand_in_for_a_dead_rank() -> None:
    """The child has copies of the rank's sockets, but the rank still counts as lost."""
    with worlds.fresh("gloo", 2) as world:
        heard, _ = world.run(dies_with_a_child, dies=[1], timeout=30)
        world.kill()
    assert heard == (1,)


def test_a_child_that_asks_for_its_place_leaves_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot use CUDA if its parent has; else it would take memory of the GPU for nothing."""
    used: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(c10d, "_default_group_ref", lambda: None)
    context = choosing.adopt("nccl", None, 1, 2, 1800.0, "off")
    try:
        assert (context.rank, context.world_size, context.device.type) == (1, 2, "cpu")
    finally:
        context.close(abort=True, patience=0.0)
    assert not used
