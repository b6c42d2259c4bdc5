"""Collectives inside `torch.compile`, and DDP, on process groups of ours."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import asynccoll as ac
import asynccoll.sync as idist
import oracle
import scripts
import worlds
from asynccoll.ops import compiled
from patience import patient
from ranks import Rank, raising
from worlds import World

Step = Callable[[torch.Tensor], torch.Tensor]

STEPS: dict[str, Step] = {
    "all_reduce": lambda x: ac.all_reduce(x).wait() * x,
    "average": lambda x: ac.all_reduce(x, op="AVG").wait() * x,
    "broadcast": lambda x: ac.broadcast(x * 2, src=1).wait() * x,
    "all_gather": lambda x: ac.all_gather(x * x).wait(),
    "all_gather of columns": lambda x: ac.all_gather(x * x, dim=-1).wait(),
    "reduce_scatter": lambda x: ac.reduce_scatter(x * x).wait(),
    "reduce_scatter of columns": lambda x: ac.reduce_scatter(x * x, dim=1, op="avg").wait(),
    "all_to_all": lambda x: ac.all_to_all(x * x).wait(),
    "two at once": lambda x: torch.cat(ac.wait_all((ac.all_reduce(x), ac.all_gather(x * x))).wait(60)),
}


@pytest.fixture(scope="module")
def gloo_pair() -> World:
    return worlds.world("gloo", 2)


def _value_and_gradient(step: Step, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = (torch.arange(8.0).reshape(2, 4) + rank).requires_grad_()
    result = step(x)
    weight = torch.arange(float(result.numel())).reshape(result.shape) * (rank + 1)
    (result * weight).sum().backward()
    assert x.grad is not None
    return result.detach(), x.grad


def _same_in_a_graph(step: Step, twin: Step, rank: int, compiler: str) -> None:
    """Check that compiled ``step`` gives the value and the gradient that ``twin`` gives outside a graph."""
    torch._dynamo.reset()
    expected = _value_and_gradient(twin, rank)
    in_a_graph = torch.compile(step, fullgraph=True, backend=compiler)
    if compiled.have_gradients():
        oracle.same(list(_value_and_gradient(in_a_graph, rank)), list(expected))
        return
    with torch.no_grad():
        oracle.same(in_a_graph(torch.arange(8.0).reshape(2, 4) + rank), expected[0])
    with pytest.raises(ac.UnsupportedOpError, match="use a newer torch"):
        _value_and_gradient(in_a_graph, rank)


async def same_in_a_graph(me: Rank, compiler: str) -> None:
    for name, step in STEPS.items():
        with me.case(f"{name} by {compiler}"):
            _same_in_a_graph(step, step, me.rank, compiler)


def test_a_graph_gives_what_eager_gives(gloo_pair: World) -> None:
    """There is one graph without breaks; values and gradients equal those of the eager call bit for bit.

    If torch has no gradients in graphs, they are refused at compile time.
    """
    gloo_pair.run(same_in_a_graph, "aot_eager", runner="blocking", timeout=120.0)


@pytest.mark.slow
def test_inductor_gives_what_eager_gives(gloo_pair: World, tmp_path: Path) -> None:
    """The same holds for the compiler that users use."""
    gloo_pair.run(same_in_a_graph, "inductor", runner="blocking", timeout=400.0)


#: A step with a blocking call, and the same with the call whose gradient it has in a graph.
BLOCKING: dict[str, tuple[Step, Step]] = {
    "all_reduce": (lambda x: idist.all_reduce(x * x) * x, lambda x: ac.all_reduce(x * x).wait() * x),
    "broadcast": (
        lambda x: idist.broadcast(x * 2, src=1) * x,
        lambda x: ac.broadcast(x * 2, src=1).wait() * x,
    ),
    "all_gather": (lambda x: idist.all_gather(x * x), lambda x: ac.all_gather(x * x).wait()),
}


async def blocking_in_a_graph(me: Rank, compiler: str) -> None:
    for name, (step, twin) in BLOCKING.items():
        with me.case(f"{name} by {compiler}"):
            _same_in_a_graph(step, twin, me.rank, compiler)
    for name, call in {
        "all_reduce": idist.all_reduce,
        "MAX": lambda x: idist.all_reduce(x, "MAX"),
        "broadcast": lambda x: idist.broadcast(x, src=1),
    }.items():
        with me.case(f"{name} overwrites its tensor as outside of a graph"):
            torch._dynamo.reset()
            eager, given = (torch.arange(3.0) + me.rank for _ in range(2))
            result = torch.compile(call, fullgraph=True, backend=compiler)(given)
            oracle.same([given, result], [call(eager), eager])


def test_blocking_calls_in_a_graph(gloo_pair: World) -> None:
    """`asynccoll.sync` traces without a break, too, and its results have gradients in a graph."""
    gloo_pair.run(blocking_in_a_graph, "aot_eager", runner="blocking", timeout=120.0)


@pytest.mark.slow
def test_blocking_calls_by_inductor(gloo_pair: World) -> None:
    gloo_pair.run(blocking_in_a_graph, "inductor", runner="blocking", timeout=400.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown reduction": ({"op": "nope"}, "unknown reduction 'nope'"),
    "a logical reduction": ({"op": "and"}, "not supported inside torch.compile"),
    "a group": ({"group": [0, 1]}, "leave out group="),
}
#: Refused with the text of the eager call, for a tensor of this shape.
AS_EAGER: dict[str, tuple[Step, tuple[int, ...]]] = {
    "all_gather along no dim": (lambda x: ac.all_gather(x, dim=3).wait(), (2, 1)),
    "all_gather of 0-d along no dim": (lambda x: ac.all_gather(x, dim=1).wait(), ()),
    "reduce_scatter along no dim": (lambda x: ac.reduce_scatter(x, dim=2).wait(), (4, 2)),
    "reduce_scatter of columns, uneven": (lambda x: ac.reduce_scatter(x, dim=1).wait(), (4, 1)),
    "reduce_scatter, uneven": (lambda x: ac.reduce_scatter(x).wait(), (3,)),
    "all_to_all, uneven": (lambda x: ac.all_to_all(x).wait(), (3,)),
    "all_to_all of 0-d": (lambda x: ac.all_to_all(x).wait(), ()),
    "bits of floats": (lambda x: ac.all_reduce(x, op="bor").wait(), (2,)),
    "too few rows": (
        lambda x: ac.all_to_all(x, input_split_sizes=[1, 1], output_split_sizes=[1, 1]).wait(),
        (3,),
    ),
    "too many ranks": (
        lambda x: ac.all_to_all(x, input_split_sizes=[1, 2], output_split_sizes=[1, 1, 1]).wait(),
        (3,),
    ),
}


async def refused_in_a_graph(me: Rank) -> None:
    for name, (arguments, says) in REFUSED.items():
        with me.case(name):
            torch._dynamo.reset()
            step = torch.compile(
                lambda x, given=arguments: ac.all_reduce(x, **given).wait(),
                fullgraph=True,
                backend="aot_eager",
            )
            with pytest.raises(ac.AsyncCollError, match=says):
                step(torch.ones(2))
    mesh = init_device_mesh("cpu", (me.size,))
    for group in (mesh, mesh.get_group(), ac.new_group(range(me.size))):
        with me.case(f"a {type(group).__name__}"):
            torch._dynamo.reset()
            step = torch.compile(
                lambda x, group=group: ac.all_reduce(x, group=group).wait(),
                fullgraph=True,
                backend="aot_eager",
            )
            with pytest.raises(ac.UnsupportedOpError, match="leave out group="):
                step(torch.ones(2))
    for name, (call, shape) in AS_EAGER.items():
        with me.case(name):
            torch._dynamo.reset()
            with raising(ac.AsyncCollError) as eager:
                call(torch.ones(shape))
            with pytest.raises(type(eager.error), match=re.escape(str(eager.error))):
                torch.compile(call, fullgraph=True, backend="aot_eager")(torch.ones(shape))
    with me.case("rows of which nobody says how many come"):
        torch._dynamo.reset()
        splits = [[1, 2], [2, 1]][me.rank]
        counted = torch.compile(lambda x: ac.all_to_all(x, input_split_sizes=splits).wait(), fullgraph=True)
        with pytest.raises(ac.UnsupportedOpError, match="output_split_sizes is needed") as caught:
            counted(torch.ones(3))
        assert type(pickle.loads(pickle.dumps(caught.value))) is ac.UnsupportedOpError


async def bools_in_a_graph(me: Rank) -> None:
    x = torch.tensor([True, me.rank == 0, False, False])
    for op in ("sum", "product", "max", "band", "bxor"):
        for name, call in {"all_reduce": ac.all_reduce, "reduce_scatter": ac.reduce_scatter}.items():
            with me.case(f"{name} {op}"):
                torch._dynamo.reset()
                step = torch.compile(
                    lambda x, call=call, op=op: call(x, op=op).wait(), fullgraph=True, backend="aot_eager"
                )
                oracle.same(step(x).view(torch.uint8), call(x, op=op).wait().view(torch.uint8))


def test_bools_are_reduced_in_a_graph_as_outside(gloo_pair: World) -> None:
    """The results are bytes of 0 and 1."""
    gloo_pair.run(bools_in_a_graph, runner="blocking", timeout=60.0)


NARROW: dict[str, Step] = {
    "all_reduce": lambda x: ac.all_reduce(x).wait(),
    "average": lambda x: ac.all_reduce(x, op="avg").wait(),
    "reduce_scatter": lambda x: ac.reduce_scatter(x).wait(),
    "broadcast": lambda x: ac.broadcast(x, src=1).wait(),
    "all_gather": lambda x: ac.all_gather(x).wait(),
    "all_to_all": lambda x: ac.all_to_all(x).wait(),
}


async def narrow_in_a_graph(me: Rank) -> None:
    for dtype in (torch.int16, torch.float8_e5m2):
        x = (torch.arange(4) + me.rank).to(dtype)
        for name, step in NARROW.items():
            if name == "average" and not dtype.is_floating_point:
                continue
            with me.case(f"{name} of {dtype}"):
                torch._dynamo.reset()
                oracle.same(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))


def test_dtypes_that_gloo_does_not_know(gloo_pair: World) -> None:
    """They are sent in wider dtypes, as outside a graph."""
    gloo_pair.run(narrow_in_a_graph, runner="blocking", timeout=60.0)


async def sizes_of_the_graph(me: Rank) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch._dynamo.reset()
        step = torch.compile(
            lambda x, sent, received: ac.all_to_all(
                x, input_split_sizes=sent.tolist(), output_split_sizes=received.tolist()
            ).wait(),
            fullgraph=True,
            backend="aot_eager",
        )
        counts = torch.tensor([[1, 2], [2, 1]][me.rank])
        got = step(torch.arange(3), counts, counts)
        oracle.same(got, torch.tensor([[0, 0, 1], [1, 2, 2]][me.rank]))
    torch._dynamo.reset()
    scattered = torch.compile(lambda x: ac.reduce_scatter(x).wait(), dynamic=True, backend="aot_eager")
    for rows in (4, 6):
        oracle.same(scattered(torch.ones(rows)), torch.full((rows // 2,), 2.0))


def test_sizes_that_the_graph_computes(gloo_pair: World) -> None:
    """Such sizes are not compared at compile time."""
    gloo_pair.run(sizes_of_the_graph, runner="blocking", timeout=60.0)


def test_what_a_graph_cannot_do_is_refused_while_it_is_made(gloo_pair: World) -> None:
    """Nothing is sent, and the error says why."""
    gloo_pair.run(refused_in_a_graph, runner="blocking", timeout=60.0)


async def ddp_beside_ours(me: Rank) -> None:
    torch.manual_seed(0)
    group = ac.new_group(range(me.size)).process_group()
    plain = torch.nn.Linear(64, 64)
    model = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group, bucket_cap_mb=1)
    model.module.load_state_dict(plain.state_dict())
    inputs = [torch.randn(8, 64) for _ in range(me.size)]
    for turn in range(3):
        ours = ac.all_reduce(torch.full((1000,), me.rank + turn))
        model.zero_grad()
        model(inputs[me.rank]).square().sum().backward()
        with me.case(f"ours beside DDP, turn {turn}"):
            oracle.same(await me.get(ours), torch.full((1000,), sum(range(me.size)) + me.size * turn))
    for rank_input in inputs:
        (plain(rank_input).square().sum() / me.size).backward()
    with me.case("gradients are the average over ranks"):
        assert plain.weight.grad is not None
        torch.testing.assert_close(model.module.weight.grad, plain.weight.grad)


def test_ddp_runs_on_our_group_beside_our_collectives(gloo_pair: World, runner: str) -> None:
    """DDP has its own connections: neither side changes the other's numbers."""
    gloo_pair.run(ddp_beside_ours, runner=runner)


async def known_to_torch(me: Rank) -> None:
    with me.case("the same group every time, with torch's own functions working on it"):
        group = ac.new_group(range(me.size)).process_group()
        assert ac.new_group(range(me.size)).process_group() is group
        assert dist.get_process_group_ranks(group) == list(range(me.size))
        x = torch.tensor([me.rank + 1])
        dist.broadcast(x, src=1, group=group)
        oracle.same(x, torch.tensor([2]))
    with me.case("and taken by ours"):
        oracle.same(ac.all_reduce(1, group=group).wait(), me.size)


def test_torch_knows_the_group(gloo_pair: World) -> None:
    gloo_pair.run(known_to_torch, runner="blocking")


def by_two_threads(me: Rank) -> None:
    group, both = ac.new_group([me.rank]), threading.Barrier(2)

    def made(_: int) -> dist.ProcessGroup:
        both.wait(patient(10))
        return group.process_group()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(made, range(2))
    assert first is second


def test_two_threads_make_one_group(gloo_pair: World) -> None:
    """Each made one, under a name that torch knows once."""
    gloo_pair.run(by_two_threads)


async def outside(me: Rank) -> None:
    group = ac.new_group([1])
    if me.rank == 0:
        await me.refuses(
            "process_group", ac.InvalidArgumentError, group.process_group, says=("rank 0", "[1]")
        )


def test_a_non_member_has_no_process_group(gloo_pair: World) -> None:
    gloo_pair.run(outside, runner="blocking")


ALONE: dict[str, Step] = {
    "all_reduce": lambda x: ac.all_reduce(x).wait() * x,
    "average": lambda x: ac.all_reduce(x, op="AVG").wait() * x,
    "broadcast": lambda x: ac.broadcast(x * 2, src=0).wait() * x,
    "all_gather": lambda x: ac.all_gather(x * x, dim=1).wait(),
    "all_gather of a scalar": lambda x: ac.all_gather(x.sum()).wait(),
    "reduce_scatter": lambda x: ac.reduce_scatter(x * x, dim=1, op="avg").wait(),
    "all_to_all": lambda x: ac.all_to_all(x * x, input_split_sizes=[2], output_split_sizes=[2]).wait(),
    "two at once": lambda x: torch.cat(ac.wait_all([ac.all_reduce(x), ac.all_gather(x * x)]).wait(60)),
    "with a time limit": lambda x: ac.all_reduce(x).wait(60) * x,
}


@pytest.mark.parametrize("step", ALONE.values(), ids=ALONE)
def test_a_graph_in_a_world_of_one(step: Step) -> None:
    """Under `python train.py` a graph gives one rank's result, which never shares the input's memory."""
    _same_in_a_graph(step, step, 0, "aot_eager")


def test_blocking_calls_in_a_graph_in_a_world_of_one() -> None:
    def three(x: torch.Tensor) -> tuple[object, ...]:
        return idist.all_reduce(x * 2), idist.all_gather(x), idist.broadcast(x * 3, src=0)

    expected = [torch.full((2,), factor) for factor in (2.0, 1.0, 3.0)]
    oracle.same(list(torch.compile(three, fullgraph=True, backend="eager")(torch.ones(2))), expected)


def test_what_a_graph_cannot_do_is_refused_in_a_world_of_one_as_well() -> None:
    with pytest.raises(ac.UnsupportedOpError, match="leave out group="):
        torch.compile(lambda x: ac.all_reduce(x, out=x).wait(), fullgraph=True, backend="eager")(
            torch.ones(2)
        )
    x = torch.ones(2)
    total = torch.compile(lambda x: ac.all_reduce(x).wait(), fullgraph=True, backend="eager")(x)
    total.add_(1)
    oracle.same(x, torch.ones(2))


FIRST_ALONE = """
    import os, torch, asynccoll as ac

    rank, port = (int(os.environ[name]) for name in ("RANK", "MASTER_PORT"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]

    @torch.compile(fullgraph=True, backend="eager")
    def three(x):
        return ac.all_reduce(x).wait(), ac.broadcast(x, src=0).wait(), ac.all_gather(x).wait()

    def show():
        print(*(one.tolist() for one in three(torch.full((1,), 1.0 + rank))), sep="; ")

    show()
    ac.initialize("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    show()
    ac.finalize()
"""


def test_a_graph_of_another_world_is_made_anew(tmp_path: Path) -> None:
    """The world has one rank, then two: its size is a constant in the graph."""
    for rank, ended in enumerate(scripts.run(tmp_path, FIRST_ALONE, ranks=2)):
        assert ended.code == 0, ended.err
        mine = float(rank + 1)
        assert ended.out.splitlines() == [f"[{mine}]; [{mine}]; [{mine}]", "[3.0]; [1.0]; [1.0, 2.0]"]


TWO_LIVES = """
    import torch, asynccoll as ac
    from torch.distributed.distributed_c10d import _resolve_process_group

    @torch.compile(fullgraph=True, backend="aot_eager")
    def total(x):
        return ac.all_reduce(x).wait()

    for life in range(2):
        ac.initialize("gloo")
        print(total(torch.ones(1)).item())
        name = ac.new_group([0, 1]).process_group().group_name
        ac.finalize()
        try:
            _resolve_process_group(name)
        except Exception:
            print("forgotten")
"""


def test_a_graph_outlives_its_world(tmp_path: Path) -> None:
    """finalize takes the group from torch; after the next initialize the same graph runs on the new group."""
    for ended in scripts.run(tmp_path, TWO_LIVES, ranks=2):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["2.0", "forgotten"] * 2


def test_ranks_that_are_threads_do_not_discard_the_graphs_of_each_other(monkeypatch) -> None:
    """Graphs of such ranks have no collectives, which are refused, so no rank is a constant in them."""
    discarded: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: discarded.append(1))
    monkeypatch.setattr(compiled._graphs, "place", None)
    ranks: list[Any] = [SimpleNamespace(rank=rank, world_size=2, thread_rank=True) for rank in range(2)]
    for rank in ranks:
        monkeypatch.setattr(compiled, "current", lambda rank=rank: rank)
        compiled._renew(rank)
        assert compiled._size() == 2
    assert not discarded
    alone: Any = SimpleNamespace(rank=0, world_size=1, thread_rank=True)
    monkeypatch.setattr(compiled, "current", lambda: alone)
    assert compiled._size() == 1
    compiled._renew(ranks[0])
    assert discarded == [1], "a graph of a world of one is wrong in one of two"
