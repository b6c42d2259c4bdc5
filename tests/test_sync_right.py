"""``asynccoll.sync`` is right where ``ignite.distributed`` is wrong: each line of the migration page."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch

import asynccoll as ac
import asynccoll.sync as idist
import worlds
from asynccoll.sync import collectives, layout
from patience import patient
from ports import free_port
from ranks import raising

SIZES = [2, 4]


@pytest.fixture(params=SIZES, ids=lambda size: f"gloo-{size}", scope="module")
def world(request):
    return worlds.world("gloo", request.param)


def same(got, expected):
    assert type(got) is type(expected), f"{got!r} != {expected!r}"
    assert got == expected, f"{got!r} != {expected!r}"


def parameters(me):
    for src in range(me.size):
        parameter = torch.nn.Parameter(torch.full((3,), float(me.rank)))
        at = parameter.data_ptr()
        with me.case(f"from {src}"):
            assert idist.broadcast(parameter, src=src) is parameter
            assert parameter.tolist() == [float(src)] * 3
            assert parameter.data_ptr() == at
            assert parameter.is_leaf
            assert parameter.requires_grad


def inferred(me):
    """Inference tensors are filled even outside the mode, as by torch."""
    with torch.inference_mode():
        x, y = torch.full((3,), float(me.rank)), torch.full((3,), float(me.rank))
    assert idist.all_reduce(x) is x
    assert x.tolist() == [float(sum(range(me.size)))] * 3
    assert idist.broadcast(y, src=1) is y
    assert y.tolist() == [1.0] * 3


def sparse(me):
    """As by torch; the sum has more values than each rank's tensor."""
    for wanted, inferring in ((False, False), (True, False), (False, True)):
        with torch.inference_mode(inferring):
            x = torch.sparse_coo_tensor([[me.rank, 9]], [1.0, 2.0], (10,), requires_grad=wanted)
        with me.case(f"gradient wanted: {wanted}, made in inference mode: {inferring}"):
            assert idist.all_reduce(x) is x
            assert x.detach().to_dense().tolist() == [1.0] * me.size + [0.0] * (9 - me.size) + [2.0 * me.size]
            assert (x.is_leaf, x.requires_grad) == (True, wanted)
    with me.case("another reduction"), raising(NotImplementedError, "sparse"):
        idist.all_reduce(x, "MAX")


@pytest.mark.parametrize("case", [parameters, inferred, sparse], ids=lambda case: case.__name__)
def test_tensors_are_filled_in_place(world, case):
    world.run(case)


def numbers(me):
    for src in range(me.size):
        for value in (16777217, 0.1, 2**53 + 1, -5, True, 1 + 2j, 1e300, float("inf")):
            with me.case(f"broadcast {value!r} from {src}"):
                same(idist.broadcast(value if me.rank == src else 0.0, src=src), value)
                same(idist.broadcast(value if me.rank == src else None, src=src, safe_mode=True), value)
    with me.case("ints and floats"):
        mixed = [1, 2.5] * me.size
        same(idist.all_gather(mixed[me.rank]), mixed[: me.size])
        same(idist.all_reduce(mixed[me.rank]), sum(mixed[: me.size]))
    with me.case("past 64 bits"):
        same(idist.all_reduce(2**62, "PRODUCT"), 2 ** (62 * me.size))
    with me.case("complex"):
        same(idist.all_reduce(0.1 + 0.1j), sum([0.1 + 0.1j] * me.size))


def strings(me):
    texts = ["héllo", "日本語", "🎉" * 300, "\ud800", "", "plain", "é" * 90_000, "a\0b"]
    for shift in range(len(texts)):
        mine = [texts[(rank + shift) % len(texts)] for rank in range(me.size)]
        with me.case(f"all_gather, shifted by {shift}"):
            same(idist.all_gather(mine[me.rank]), mine)
        with me.case(f"broadcast, shifted by {shift}"):
            same(idist.broadcast(mine[me.rank], src=1), mine[1])


def roots(me):
    """As torch takes them: ``np.argmin`` gives a number of NumPy."""
    for src in (np.int64(1), np.argmin([1, 0]), True):
        for make in (int, str, torch.tensor):
            with me.case(f"{make.__name__} from {src!r}"):
                same(idist.broadcast(make(me.rank), src=src), make(1))
                mine = make(1) if me.rank == 1 else None
                same(idist.broadcast(mine, src=src, safe_mode=True), make(1))


def scattered(me):
    """ignite's placeholder is contiguous, and gets the bytes in the order in which they lie in memory."""
    x = torch.arange(6.0).view(2, 3).t()
    for src in range(me.size):
        got = idist.broadcast(x if me.rank == src else None, src=src, safe_mode=True)
        assert got.tolist() == [[0, 3], [1, 4], [2, 5]]


def shapes(me):
    """ignite cuts or pads a tensor whose shape is not the one given, or leaves the peers waiting."""
    right = [[rank + 1, 2] for rank in range(me.size)]
    mine = torch.ones(me.rank + 1, 2)
    wrong = {
        "another shape": (torch.ones(7, 7), right),
        "too few": (mine, right[:-1]),
        "too many dimensions": (mine, [[*shape, 1] for shape in right]),
        "none": (mine, []),
        "no shapes": (mine, None),
        "sizes": (mine, [1, 2]),
        "texts": (mine, ["a", "b"]),
        "no tensor": ([1.0], right),
    }
    for name, (tensor, said) in wrong.items():
        with me.case(name):
            if me.rank == 0:
                with raising((ValueError, TypeError), "shapes"):
                    idist.all_gather_tensors_with_shapes(tensor, said)
            else:
                with raising(ac.PeerRefusedError, "rank 0 refused"):
                    idist.all_gather_tensors_with_shapes(mine, right)
    found = idist.all_gather_tensors_with_shapes(mine, right)
    assert [list(one.shape) for one in found] == right


def refused_in_a_group(me):
    """The members of the group are told; the other ranks are not affected."""
    members = [0, 1]
    if me.rank == 0:
        with raising(TypeError, "Unhandled input type"):
            idist.all_reduce("abc", group=members)
        with raising(ValueError, "Unsupported reduction operation"):
            idist.all_reduce(1, "mean", group=members)
        with raising(ValueError, "Unsupported reduction operation"):
            idist.all_reduce(1, ["SUM"], group=members)
    elif me.rank == 1:
        for _ in range(3):
            with raising(ac.PeerRefusedError, "rank 0 refused"):
                idist.all_reduce(1, group=members)
    elif me.rank > 1:
        with raising(TypeError, "Unhandled input type"):
            idist.all_reduce("abc", group=members)
    same(idist.all_reduce(1), me.size)


def _held():
    """Count descriptors and threads, except the thread that a process starts at its first slow call."""
    gc.collect()
    shared = any(thread.name == "asynccoll-progress" for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")) - shared


def groups(me):
    members = [0, 1]
    inside = me.rank in members
    if inside:  # the others need not call
        same(idist.all_gather(me.rank, group=members), members)
        same(idist.all_gather("é", group=members), ["é", "é"])
    before = _held()
    for _ in range(50):
        idist.all_reduce(torch.ones(2), group=members)
    held = _held()
    assert all(now <= then for now, then in zip(held, before, strict=True)), f"{before} became {held}"


class UnsaidError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def first_fails(me, local):
    ran = []

    def body():
        with idist.one_rank_first(local=local):
            ran.append(me.rank)
            if me.rank == 0:
                raise LookupError("no such file")

    if me.rank == 0:
        with raising(LookupError, "no such file"):
            body()
    else:
        with raising(ac.CollectiveError, "rank 0: LookupError: no such file"):
            body()
    assert ran == ([0] if me.rank == 0 else [])
    with raising(UnsaidError if me.rank == 0 else ac.CollectiveError), idist.one_rank_first(local=local):
        ran.append(me.rank)
        raise UnsaidError
    assert ran == ([0, 0] if me.rank == 0 else [])

    @idist.one_rank_only(with_barrier=True)
    def alone():
        raise LookupError("alone")

    if me.rank == 0:
        with raising(LookupError, "alone"):
            alone()
    else:
        assert alone() is None
    same(idist.all_reduce(1), me.size)


def no_such_rank_on_one(me):
    """As on nodes of different sizes: what is a rank on the others is none on the last."""
    ran = []

    def body():
        with idist.one_rank_first(rank=me.size if me.rank == me.size - 1 else 0):
            ran.append(me.rank)

    if me.rank == me.size - 1:
        with raising(ValueError, f"between 0 and {me.size - 1}, but given {me.size}"):
            body()
    elif me.rank == 0:
        body()
    else:
        with raising(ac.CollectiveError, f"rank {me.size - 1}: InvalidArgumentError"):
            body()
    assert ran == ([0] if me.rank == 0 else [])
    same(idist.all_reduce(1), me.size)


def refused_by_one(me):
    wrong = {
        "all_reduce": lambda: idist.all_reduce("abc"),
        "op": lambda: idist.all_reduce(1, "mean"),
        "broadcast": lambda: idist.broadcast(None),
        "safe broadcast": lambda: idist.broadcast([], safe_mode=True),
        "not to be pickled": lambda: idist.all_gather(lambda: None),
        "not yet a parameter": lambda: idist.broadcast(torch.nn.UninitializedParameter()),
        "not yet one to gather": lambda: idist.all_gather(torch.nn.UninitializedParameter()),
    }
    right = {
        "all_reduce": lambda: idist.all_reduce(1),
        "op": lambda: idist.all_reduce(1),
        "broadcast": lambda: idist.broadcast(1),
        "safe broadcast": lambda: idist.broadcast(None, safe_mode=True),
        "not to be pickled": lambda: idist.all_gather({}),
        "not yet a parameter": lambda: idist.broadcast(torch.ones(2)),
        "not yet one to gather": lambda: idist.all_gather(torch.ones(2)),
    }
    for name, call in wrong.items():
        with me.case(name):
            if me.rank == 0:
                with raising((TypeError, ValueError)):
                    call()
            else:
                with raising(ac.PeerRefusedError, "rank 0 refused"):
                    right[name]()
        with me.case(f"after {name}"):
            same(idist.all_reduce(1), me.size)


@pytest.mark.parametrize(
    "case",
    [numbers, strings, roots, scattered, shapes, groups, refused_by_one, refused_in_a_group],
    ids=lambda c: c.__name__,
)
def test_right(world, case):
    world.run(case, timeout=60.0)


@pytest.mark.parametrize("local", [False, True])
def test_one_rank_first_lets_nobody_hang(world, local):
    world.run(first_fails, local)


def test_one_rank_first_of_a_rank_that_one_node_lacks(world):
    world.run(no_such_rank_on_one)


# Contexts that are created and destroyed


def _make(me, port):
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=me.rank, world_size=me.size
    )


def _serial():
    assert (idist.model_name(), idist.backend(), idist.get_world_size()) == ("serial", None, 1)
    x = torch.ones(2)
    assert idist.all_reduce(x) is x
    assert idist.all_gather(5) == [5]


def _native(me):
    assert (idist.model_name(), idist.backend(), idist.get_world_size()) == ("native-dist", "gloo", me.size)
    assert idist.get_rank() == me.rank
    same(idist.all_gather(me.rank), list(range(me.size)))


def behind_our_back(me, ports):
    idist.set_local_rank(me.rank)
    threads = []
    for port in ports[:3]:
        _serial()
        _make(me, port)
        if port == ports[1]:
            idist.sync()
        _native(me)
        idist.sync()  # in a live context; in ignite the next context would then read as serial
        _native(me)
        assert (idist.get_local_rank(), idist.get_nproc_per_node()) == (me.rank, me.size)
        torch.distributed.destroy_process_group()
        if port == ports[1]:
            idist.sync()
        _serial()
        threads.append(_held())
    deadline = time.monotonic() + patient(5)
    while threads[-1] > threads[0] and time.monotonic() < deadline:  # the last thread may still be ending
        time.sleep(0.01)
        threads.append(_held())
    assert threads[-1] <= threads[0], f"kept: {threads}"
    _make(me, ports[3])
    _native(me)
    torch.distributed.destroy_process_group()
    _make(me, ports[4])  # another one, with no call in between
    _native(me)
    idist.finalize()  # destroys it, as ignite's does
    assert not torch.distributed.is_initialized()
    _serial()


def destroyed(me, ports):
    """What ``initialize`` made is destroyed through torch, and then made anew."""
    for port in ports[:3]:
        place = {"rank": me.rank, "world_size": me.size}
        idist.initialize("gloo", init_method=f"tcp://127.0.0.1:{port}", **place)
        _native(me)
        torch.distributed.destroy_process_group()
        _serial()
        idist.sync()
        _serial()
        idist.finalize()
        assert "MASTER_ADDR" not in os.environ
    idist.initialize("gloo", init_method=f"tcp://127.0.0.1:{ports[3]}", **place)
    _native(me)
    with raising(ValueError, "already initialized"):
        idist.initialize("gloo")
    idist.finalize()
    _serial()


def twice(me, port):
    _make(me, port)
    with raising(ValueError, "trying to initialize the default process group twice!"):
        idist.initialize("gloo")
    idist.finalize()


def left_in_error(me, port):
    """``finalize`` raises, and yet nothing is left of the world."""
    for join in (partial(idist.initialize, "gloo"), partial(_make, me, port)):
        join()
        with warnings.catch_warnings():
            warnings.simplefilter("error", ac.UnawaitedWorkWarning)
            dropped = ac.all_reduce(torch.ones(2))
            del dropped
            with raising(ac.UnawaitedWorkWarning):
                idist.finalize()
        assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ)
        assert not torch.distributed.is_initialized()
        _serial()


def cut_short(me, port):
    """Ctrl-C strikes as a rank tells the others its place, at the first call in a group of torch's."""
    idist.set_local_rank(me.rank)
    _make(me, port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_store", interrupted)
        with raising(KeyboardInterrupt):
            idist.get_rank()
    assert (idist.get_local_rank(), idist.get_nproc_per_node()) == (me.rank, me.size)
    idist.finalize()


def compiled_before(me, port):
    """What is compiled while there is no world is compiled again in one."""
    function = torch.compile(lambda x: idist.all_reduce(x) + 1, backend="eager", fullgraph=True)
    assert function(torch.ones(2)).tolist() == [2.0, 2.0]
    idist.initialize("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=me.rank, world_size=me.size)
    assert function(torch.ones(2)).tolist() == [me.size + 1.0] * 2
    idist.finalize()


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize("case", [behind_our_back, destroyed])
def test_contexts_come_and_go(case):
    with worlds.fresh("gloo", 2, bare=True) as world:
        world.run(case, [free_port() for _ in range(5)], timeout=60.0)


def test_finalize_that_raises_leaves_nothing_behind():
    with worlds.fresh("gloo", 1, bare=True) as world:
        world.run(left_in_error, free_port())


def test_a_rank_that_was_struck_tells_its_place_later():
    with worlds.fresh("gloo", 2, bare=True) as world:
        world.run(cut_short, free_port(), timeout=60.0)


def test_a_graph_of_no_world_is_none_of_a_world():
    with worlds.fresh("gloo", 2, bare=True) as world:
        world.run(compiled_before, free_port(), timeout=patient(60))


def test_ctrl_c_leaves_no_mark_on_later_calls(monkeypatch):
    """Calls that are awaited later would be driven by their waiter only."""
    struck = Mark()
    monkeypatch.setattr(collectives, "waiting", struck)
    with pytest.raises(KeyboardInterrupt):
        collectives._waited_for(ac.all_reduce, 1)
    assert struck.value is False


class Mark:
    """Stands for the context variable; Ctrl-C strikes right after it was set."""

    value = False

    def set(self, value):
        self.value = value
        if value:
            raise KeyboardInterrupt

    def reset(self, token):
        self.value = token


def test_initialize_beside_a_group_of_the_user():
    with worlds.fresh("gloo", 1, bare=True) as world:
        world.run(twice, free_port())


def test_unknown_keywords_are_refused():
    with pytest.raises(ValueError, match="has no option 'foo'"):
        idist.initialize("gloo", foo=1)
    assert idist.model_name() == "serial"
    assert not {"RANK", "MASTER_ADDR"} & set(os.environ)
