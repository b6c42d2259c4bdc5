"""initialize and finalize: all ways to meet, who owns the world, and how it ends."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pytest
import torch
import torch.distributed as dist

import asynccoll as ac
import oracle
import scripts
import worlds
from asynccoll.backends.memory import sharing
from asynccoll.flight import registry
from asynccoll.host import actors
from asynccoll.host.store import Exchange
from asynccoll.runtime.process import _renewed, current, existing, refresh, when_joined
from patience import until
from ports import free_port
from ranks import Rank, raising
from worlds import World


@pytest.fixture(scope="session")
def bare() -> World:
    """Two processes that have not called initialize."""
    return worlds.world("gloo", 2, bare=True)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set these variables for the block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def launched(me: Rank, port: int) -> dict[str, str]:
    """Return what torchrun would set."""
    return {
        "RANK": str(me.rank),
        "LOCAL_RANK": str(me.rank),
        "WORLD_SIZE": str(me.size),
        "LOCAL_WORLD_SIZE": str(me.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def works(me: Rank) -> None:
    """Check that the new world is the right one, and can be left."""
    try:
        assert ac.is_initialized()
        assert ac.get_rank() == me.rank
        assert ac.get_world_size() == me.size
        assert ac.backend().removeprefix("cpu:") == "gloo"
        assert ac.device() == torch.device("cpu")
        assert ac.all_reduce(10**me.rank).wait() == 11
        oracle.same(ac.all_gather(torch.tensor([me.rank])).wait(), torch.tensor([0, 1]))
        assert ac.all_reduce(1, lane="another").wait() == 2
    finally:
        ac.finalize()
    assert not ac.is_initialized()
    assert not dist.is_initialized(), "finalize leaves torch's default group"


# ---------------------------------------------------------------- ways to meet


def by_env(me: Rank, port: int) -> None:
    with environment(**launched(me, port)):
        ac.initialize("gloo")
        works(me)
        ac.initialize("gloo", init_method="env://")
        works(me)


def by_tcp(me: Rank, port: int) -> None:
    method = f"tcp://127.0.0.1:{port}"
    ac.initialize("gloo", init_method=method, rank=me.rank, world_size=me.size)
    works(me)


def by_file(me: Rank, path: str) -> None:
    ac.initialize("gloo", init_method=f"file://{path}", rank=me.rank, world_size=me.size)
    works(me)


def by_tcp_store(me: Rank, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, me.size, is_master=me.rank == 0)
    ac.initialize("gloo", store=store, rank=me.rank, world_size=me.size)
    works(me)
    prefixed = dist.PrefixStore("second", store)
    ac.initialize("gloo", store=prefixed, rank=me.rank, world_size=me.size)
    works(me)


def by_file_store(me: Rank, path: str) -> None:
    store = dist.FileStore(path, me.size)
    ac.initialize("gloo", store=store, rank=me.rank, world_size=me.size)
    works(me)


def test_meets_by_environment(bare: World) -> None:
    """env:// works with a launcher's variables, explicitly and by default; twice in one process."""
    bare.run(by_env, free_port())


def test_meets_by_tcp(bare: World) -> None:
    """tcp://host:port works with rank and world_size."""
    bare.run(by_tcp, free_port())


def test_meets_by_file(bare: World, tmp_path: Path) -> None:
    """file:// works with rank and world_size."""
    bare.run(by_file, str(tmp_path / "meet"))


def test_meets_by_tcp_store(bare: World) -> None:
    """A TCPStore of the user's works, and a PrefixStore on it."""
    bare.run(by_tcp_store, free_port())


def test_meets_by_file_store(bare: World, tmp_path: Path) -> None:
    """A FileStore of the user's works."""
    bare.run(by_file_store, str(tmp_path / "store"))


def spelled(me: Rank, port: int) -> None:
    for turn, name in enumerate(["GLOO", "Gloo", "cpu:gloo"]):
        method = f"tcp://127.0.0.1:{port + turn}"
        ac.initialize(name, init_method=method, rank=me.rank, world_size=me.size)
        works(me)


def test_backend_names_in_any_spelling(bare: World) -> None:
    """Names work in any case, and so does torch's own "cpu:gloo"."""
    bare.run(spelled, free_port(3))


def connecting_late(me: Rank, port: int, marks: Path) -> None:
    """One rank learns the other's address only when the other is about to leave, or has left."""
    told = Exchange.get
    for turn in range(6):
        late = me.rank == turn % 2
        leaving, left = marks / f"leaving {turn}", marks / f"left {turn}"
        with pytest.MonkeyPatch.context() as patch, environment(**launched(me, port + turn)):
            if late:

                def get(exchange: Exchange, key: str, leaving: Path = leaving, left: Path = left) -> bytes:
                    if until(leaving.exists, 0.5):  # or gloo has this rank connect to the other
                        until(left.exists, 0.5)
                    return told(exchange, key)

                patch.setattr(Exchange, "get", get)
            ac.initialize("gloo")
        if not late:
            leaving.touch()
        ac.finalize()
        if not late:
            left.touch()


def test_who_leaves_at_once_waits_for_those_that_are_still_connecting(bare: World, tmp_path: Path) -> None:
    """They would take the rank for a lost peer: gloo finishes on one side before the other."""
    bare.run(connecting_late, free_port(6), tmp_path)


def places(me: Rank, port: int, other: int) -> None:
    one_node = launched(me, port)
    with environment(**one_node):
        ac.initialize("gloo")
        got = (ac.get_local_rank(), ac.get_nproc_per_node(), ac.get_nnodes(), ac.get_node_rank())
        assert got == (me.rank, 2, 1, 0), got
        assert ac.hostname() == socket.gethostname()
        ac.finalize()
    two_nodes = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(me.rank)}
    with environment(**{**one_node, **two_nodes, "MASTER_PORT": str(other)}):
        ac.initialize("gloo")
        got = (ac.get_local_rank(), ac.get_nproc_per_node(), ac.get_nnodes(), ac.get_node_rank())
        assert got == (0, 1, 2, me.rank), got
        ac.finalize()


def test_local_rank_and_its_siblings(bare: World) -> None:
    """They come from the launcher: two ranks on one node, or one on each of two."""
    bare.run(places, free_port(), free_port())


# ---------------------------------------------------------------- who owns the world


def adopting(me: Rank, port: int) -> None:
    method, joined = f"tcp://127.0.0.1:{port}", list[object]()
    dist.init_process_group("gloo", init_method=method, rank=me.rank, world_size=me.size)
    when_joined(joined.append)
    try:
        assert ac.is_initialized()
        assert ac.get_rank() == me.rank
        assert ac.all_reduce(10**me.rank).wait() == 11
        ours = [ac.all_reduce(torch.full((3,), float(k))) for k in range(5)]
        x = torch.full((3,), 100.0)
        dist.all_reduce(x)
        oracle.same(x, torch.full((3,), 200.0))
        for k, work in enumerate(ours):
            oracle.same(work.wait(), torch.full((3,), 2.0 * k))
        ac.finalize()
        assert dist.is_initialized(), "finalize destroys the user's group"
        x = torch.ones(1)
        dist.all_reduce(x)
        oracle.same(x, torch.full((1,), 2.0))
        assert ac.all_reduce(1).wait() == 2, "cannot be adopted again"
        assert joined[1:] == [current()], "recordings and graphs learn of no adopted world"
        ac.finalize()
    finally:
        _renewed.remove(joined.append)
        dist.destroy_process_group()


def test_adopts_a_group_that_the_user_made(bare: World) -> None:
    """It works without initialize, does not interfere with dist.*, and still belongs to the user."""
    bare.run(adopting, free_port())


def destroying(me: Rank, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=me.rank, world_size=me.size)
    assert ac.all_reduce(1).wait() == me.size
    adopted = existing()
    dist.barrier()  # the other rank has its result, too
    dist.destroy_process_group()
    assert refresh() == "none"
    assert adopted is not None
    assert adopted.closed
    nothing_is_left()


def test_a_context_is_closed_with_the_group_that_the_user_destroys(bare: World, tmp_path: Path) -> None:
    bare.run(destroying, str(tmp_path / "meet"))


def adopting_apart(me: Rank, port: int) -> None:
    method = f"tcp://127.0.0.1:{port}"
    with environment(ASYNCCOLL_NODE=f"node {me.rank % 2}"):
        dist.init_process_group("gloo", init_method=method, rank=me.rank, world_size=me.size)
        try:
            part = dist.new_group([0, 1])
            for group in (None, part) if me.rank < 2 else (None,):
                size = me.size if group is None else 2
                for _ in range(8):
                    oracle.same(
                        ac.all_reduce(torch.ones(3), group=group).wait(), torch.full((3,), float(size))
                    )
                x = torch.ones(3, dtype=torch.int32 if me.rank == 1 else torch.float32)
                with raising(ac.CollectiveMismatchError, "int32", "float32", "test_runtime.py"):
                    ac.all_reduce(x, group=group).wait()
                assert ac.all_reduce(1, group=group).wait() == size
            ac.finalize()
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_a_group_of_torchs_compare_their_calls_between_hosts(size: int) -> None:
    """torch has not said which hosts the ranks of such a group are on."""
    with worlds.fresh("gloo", size, bare=True) as world:
        world.run(adopting_apart, free_port())


def never_joined(me: Rank, path: str) -> None:
    ac.initialize("gloo", init_method=f"file://{path}", rank=me.rank, world_size=2)
    if me.rank == 0:
        current().timeout = 0.5
        with raising(ac.CollectiveTimeoutError, "member 1 of 2 had not joined"):
            ac.new_group([0, 1]).process_group()
        me.show("timed out")
    me.see("timed out")
    ac.finalize()


def test_a_group_of_torchs_that_a_member_never_makes(bare: World, tmp_path: Path) -> None:
    bare.run(never_joined, str(tmp_path / "meet"), timeout=30.0)


def for_torch(me: Rank, port: int) -> None:
    method = f"tcp://127.0.0.1:{port}"
    ac.initialize("gloo", init_method=method, rank=me.rank, world_size=me.size)
    assert dist.is_initialized(), "initialize sets no default group for torch"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    out = ac.all_reduce(torch.ones(4))
    model(torch.full((1, 3), float(me.rank))).sum().backward()
    oracle.same(model.module.weight.grad, torch.full((1, 3), 0.5))
    oracle.same(out.wait(), torch.full((4,), 2.0))
    works(me)


def test_torch_code_works_beside_ours(bare: World) -> None:
    """initialize sets torch's default group: DDP trains on it while our calls are in flight."""
    bare.run(for_torch, free_port())


def forgotten(me: Rank, port: int) -> None:
    oracle.same(ac.all_reduce(5).wait(), 5)  # alone, as nothing says otherwise yet
    with environment(**launched(me, port)):
        with raising(ac.NotInitializedError, "initialize", str(me.size)):
            ac.all_reduce(1)
        with raising(ac.NotInitializedError):
            ac.get_rank()
        assert not ac.is_initialized()
        ac.initialize("gloo")
        works(me)
        with raising(ac.NotInitializedError, "initialize"):
            ac.all_reduce(1)
    with raising(ac.NotInitializedError, "finalized"):
        ac.all_reduce(1)
    assert ac.is_main() is (me.rank == 0), "the last line of a program, which prints on one rank"


def test_a_forgotten_initialize_is_an_error() -> None:
    """It is an error under a launcher and after finalize: never silently a world of one."""
    with worlds.fresh("gloo", 2, bare=True) as world:
        world.run(forgotten, free_port())


def called_wrongly(me: Rank, port: int) -> None:
    place: dict[str, Any] = {"rank": me.rank, "world_size": me.size}
    method = f"tcp://127.0.0.1:{port}"
    with raising(ac.BackendNotFoundError, "carrier-pigeon", "gloo", "serial") as caught:
        ac.initialize("carrier-pigeon", init_method=method, **place)
    assert isinstance(caught.error, ImportError)
    with raising(ac.InvalidArgumentError, "check", "'some'", "full"):
        ac.initialize("gloo", init_method=method, check="some", **place)
    with raising(ac.InvalidArgumentError, "timeout", "-1"):
        ac.initialize("gloo", init_method=method, timeout=-1, **place)
    with raising(ac.InvalidArgumentError, "rank", "7"):
        ac.initialize("gloo", init_method=method, rank=7, world_size=2)
    with raising(ac.InvalidArgumentError, "world_size"):
        ac.initialize("gloo", init_method=method, rank=me.rank)
    with raising(ac.InvalidArgumentError, "store"):
        ac.initialize("gloo", store=dist.HashStore())
    with raising(ac.InvalidArgumentError, "speed", "gloo"):
        ac.initialize("gloo", init_method=method, speed=11, **place)
    for elsewhere, says in {
        "nowhere://x": "No rendezvous handler",
        "tcp://localhost": "names no port",
        "tcp://localhost:0": "names no port",
        "tcp://localhost:any": "does not work: Port",
        "file:///nowhere/x": "a directory that does not exist",
    }.items():
        with raising(ac.InvalidArgumentError, f"init_method {elsewhere!r}", says):
            ac.initialize("gloo", init_method=elsewhere, timeout=0.2, **place)
    with (
        environment(RANK="0"),
        raising(ac.LaunchEnvironmentError, "RANK", "WORLD_SIZE"),
    ):
        ac.initialize()
    ac.initialize("gloo", init_method=method, **place)
    with raising(ac.InvalidArgumentError, "already"):
        ac.initialize("gloo", init_method=method, **place)
    works(me)
    ac.finalize()  # must do nothing


def test_wrong_arguments(bare: World) -> None:
    """Each raises a typed error that names it, and initialize works afterwards."""
    bare.run(called_wrongly, free_port())


def without_end(me: Rank, path: str, timeout: float) -> None:
    """The timeout covers every wait in `initialize`, of a call and in `finalize`; rank 1 joins later."""
    if me.rank == 1:
        me.see("initializing")
    me.show("initializing")
    ac.initialize("gloo", init_method=f"file://{path}", rank=me.rank, world_size=2, timeout=timeout)
    if me.rank == 1:
        me.see("waiting")
    work = ac.all_reduce(1, lane="without end")
    if me.rank == 0:
        with raising(ac.CollectiveTimeoutError, "not ready"):
            work.wait(timeout=0.2)
        me.show("waiting")
    assert work.wait(timeout=timeout) == 2
    assert ac.wait_all([ac.all_reduce(1, timeout=timeout)]).wait(timeout) == (2,)
    assert anyio.run(ends, timeout) == 2
    assert anyio.run(ends, timeout, backend="trio") == 2
    ac.finalize()


async def ends(timeout: float) -> int:
    async for work in ac.as_completed([ac.all_reduce(1, timeout=timeout)], timeout=timeout):
        return work.result()
    return 0


@pytest.mark.parametrize("timeout", [math.inf, sys.float_info.max])
def test_a_timeout_may_be_infinite(bare: World, tmp_path: Path, timeout: float) -> None:
    bare.run(without_end, str(tmp_path / "meet"), timeout, timeout=60.0)


# ---------------------------------------------------------------- alone


def alone(me: Rank) -> None:
    assert not ac.is_initialized()
    assert ac.backend() == "serial"
    assert (ac.get_rank(), ac.get_world_size()) == (0, 1)
    assert (ac.get_local_rank(), ac.get_nproc_per_node()) == (0, 1)
    assert (ac.get_node_rank(), ac.get_nnodes()) == (0, 1)
    x = torch.arange(3)
    oracle.same(ac.all_reduce(x).wait(), torch.arange(3))
    assert ac.all_reduce(x).wait() is not x
    oracle.same(ac.all_gather(torch.tensor(5)).wait(), torch.tensor([5]))
    assert ac.all_gather("é").wait() == ["é"]
    assert ac.all_reduce(1, group=[0]).wait() == 1
    with raising(ac.InvalidArgumentError, "1"):
        ac.all_reduce(1, group=[0, 1])
    assert not dist.is_initialized(), "a world of one made a process group"
    assert {"gloo", "serial"} <= set(ac.available_backends())


@pytest.fixture(scope="session")
def one_bare() -> World:
    """One process that has not called initialize."""
    return worlds.world("gloo", 1, bare=True)


def test_a_script_runs_unlaunched(one_bare: World) -> None:
    """Without a launcher it is a world of one without a process group; other groups are errors."""
    one_bare.run(alone)


def initialized_alone(me: Rank) -> None:
    ac.initialize()
    assert ac.is_initialized()
    assert (ac.backend(), ac.get_world_size()) == ("serial", 1)
    assert ac.all_reduce(3).wait() == 3
    ac.finalize()


def test_initialize_without_a_launcher(one_bare: World) -> None:
    """initialize() alone makes a world of one."""
    one_bare.run(initialized_alone)


# ---------------------------------------------------------------- the end


def drained(me: Rank, port: int) -> None:
    method = f"tcp://127.0.0.1:{port}"
    ac.initialize("gloo", init_method=method, rank=me.rank, world_size=me.size)
    works = [ac.all_reduce(torch.full((100_000,), float(k))) for k in range(10)]
    ac.finalize()
    for k, work in enumerate(works):
        assert work.done(), "finalize did not wait"
        oracle.same(work.wait()[:2], torch.full((2,), 2.0 * k))


def test_finalize_waits_for_what_is_outstanding(bare: World) -> None:
    """After finalize every work is done and has its result."""
    bare.run(drained, free_port())


def aborted(me: Rank, port: int) -> None:
    method = f"tcp://127.0.0.1:{port}"
    ac.initialize("gloo", init_method=method, rank=me.rank, world_size=me.size)
    assert ac.all_reduce(1).wait() == 2
    if me.rank == 0:
        stuck = ac.all_reduce(torch.ones(10))
        assert not stuck.done()
        ac.finalize(abort=True)
        with raising(ac.CollectiveError):
            stuck.wait(timeout=10)
        me.show("aborted")
    else:
        me.see("aborted")
        ac.finalize(abort=True)
    assert not ac.is_initialized()


def test_finalize_aborts_when_told_to(bare: World) -> None:
    """A stuck operation fails with a typed error and finalize(abort=True) does not wait."""
    bare.run(aborted, free_port())


def too_late(me: Rank, port: int) -> None:
    if me.rank == 0:
        with raising(ac.CollectiveTimeoutError):
            method = f"tcp://127.0.0.1:{port}"
            ac.initialize("gloo", init_method=method, rank=0, world_size=2, timeout=1.0)
            ac.all_reduce(1).wait()
        if ac.is_initialized():
            ac.finalize(abort=True)


def test_a_rank_that_nobody_joins_times_out(bare: World) -> None:
    """initialize, or at the latest the first operation, raises after its timeout."""
    bare.run(too_late, free_port())


ALONE = """
    import time
    import asynccoll as ac
    started = time.monotonic()
    try:
        ac.initialize("gloo", timeout=1.5)
    except ac.CollectiveTimeoutError as error:
        print(time.monotonic() - started < 60, error)  # not the usual half an hour
"""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_launched_rank_whose_peer_does_not_come_says_which(tmp_path: Path, rank: int) -> None:
    """Rank 0 serves the store and names its peer; rank 1 finds no store; both within the timeout."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    (ended,) = scripts.run(tmp_path, ALONE, launched=False, env={**place, **meeting})
    wanted = (
        "rank 0 timed out waiting for rank 1 of 2",
        f"rank 1 of 2 found no store at 127.0.0.1:{meeting['MASTER_PORT']}",
    )
    assert ended.out.startswith(f"True {wanted[rank]}"), ended.err


def test_a_port_that_another_program_has_is_told_by_rank_0(tmp_path: Path) -> None:
    """Rank 0 fails at once and says what to change, instead of reporting a timeout."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        meeting = {"MASTER_PORT": str(taken.getsockname()[1])}
        (ended,) = scripts.run(tmp_path, ALONE, launched=False, env={**place, **meeting})
    assert "LaunchEnvironmentError: rank 0 of 2 cannot listen for the other ranks" in ended.err
    assert "choose another MASTER_PORT" in ended.err


#: Where ``initialize`` fails, on every rank or on one: before it shares memory, when its beacon is already
#: announced, and in a call made once the world exists.
FAILS = {
    "sharing": (sharing, "share"),
    "beacon": (registry, "register"),
    "world": (actors, "current"),
}


def nothing_is_left() -> None:
    assert not ac.is_initialized()
    assert not dist.is_initialized()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"asynccoll-answers", "asynccoll-watch", "asynccoll-memory"}


def fails_midway(me: Rank, path: str, where: str) -> None:
    with pytest.MonkeyPatch.context() as patch, me.case("fails"):
        patch.setattr(*FAILS[where], no_memory)
        # A rank that is behind may find that the other has left.
        with raising((OSError, ac.PeerLostError)) as caught:
            ac.initialize("gloo", init_method=f"file://{path}", rank=me.rank, world_size=2, timeout=10)
        assert "no memory" in str(caught.error) or isinstance(caught.error, ac.PeerLostError)
    with me.case("nothing is left of it"):
        nothing_is_left()
    with ac.session("gloo", init_method=f"file://{path} again", rank=me.rank, world_size=2):
        assert ac.all_reduce(1).wait() == 2


def no_memory(*_: object) -> NoReturn:
    raise OSError("no memory")


@pytest.mark.parametrize("where", FAILS)
def test_initialize_that_fails_midway_leaves_nothing(bare: World, tmp_path: Path, where: str) -> None:
    """Otherwise peers would take this rank for a live one."""
    bare.run(fails_midway, str(tmp_path / "meet"), where, timeout=60.0)


#: Steps of ``finalize``, as attributes of a context.
STEPS = [
    "drain",
    "watch.stop",
    "world.close",
    "backend._inner._opening.wait",
    "backend.close",
    "farewells.leave",
]


def interrupted(me: Rank, path: str, step: str) -> None:
    ac.initialize("gloo", init_method=f"file://{path}", rank=me.rank, world_size=2)
    assert ac.all_reduce(1).wait() == 2
    *owner, name = step.split(".")
    of = attrgetter(".".join(owner))(current()) if owner else current()
    stop = getattr(of, name)

    def struck(*args: object, **how: object) -> NoReturn:
        stop(*args, **how)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, raising(KeyboardInterrupt, ""):
        patch.setattr(of, name, struck)
        ac.finalize()
    nothing_is_left()


@pytest.mark.parametrize("step", STEPS)
def test_finalize_closes_everything_though_ctrl_c_strikes(bare: World, tmp_path: Path, step: str) -> None:
    bare.run(interrupted, str(tmp_path / "meet"), step, timeout=60.0)


def fails_to_connect(me: Rank, path: str) -> None:
    if me.rank == 0:
        with (
            pytest.MonkeyPatch.context() as patch,
            me.case("fails"),
            raising(ac.PeerLostError, "rank 0 of 1 cannot connect to the others: no network"),
        ):
            patch.setattr(dist.distributed_c10d, "ProcessGroupGloo", no_network)
            ac.initialize("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    with ac.session("gloo", init_method=f"file://{path} again", rank=me.rank, world_size=2, timeout=10.0):
        assert ac.all_reduce(1).wait() == 2


def no_network(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("no network")


def test_a_rank_that_could_not_connect_meets_the_others_the_next_time(bare: World, tmp_path: Path) -> None:
    """torch counts the groups that it names, including those that could not be made."""
    bare.run(fails_to_connect, str(tmp_path / "meet"), timeout=40.0)
