"""Prepared operations: each start gives the ordinary call's result for the input's current values."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import asynccoll as ac
import oracle
import worlds
from patience import patient
from ranks import Rank, raising
from worlds import World


@pytest.fixture(scope="session", params=worlds.BACKENDS)
def checked(request: pytest.FixtureRequest) -> World:
    """Two ranks with check="full"."""
    return worlds.world(request.param, 2, check="full")


DTYPES = ("float32", "float16", "int16", "bool", "complex64", "uint64", "float64")
SIZES = ((), (0,), (3, 2))


async def reductions(me: Rank) -> None:
    for name in DTYPES:
        dtype = oracle.DTYPES[name]
        for shape in SIZES:
            for op in ("sum", "max", "avg", "and"):
                if op in oracle.reductions(dtype):
                    with me.case(f"{op} of {name}{shape}"):
                        await _reduced_thrice(me, shape, dtype, op)


async def _reduced_thrice(me: Rank, shape: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
    x = torch.empty(shape, dtype=dtype)
    prepared = ac.prepare("all_reduce", x, op=op)
    results = []
    for step in range(3):
        inputs = oracle.by_rank(oracle.counting, me.size, shape, dtype, seed=step)
        x.copy_(inputs[me.rank])
        results.append(await me.get(prepared.start()))
        oracle.same(results[-1], oracle.reduced(inputs, op), value=True, rtol=1e-3)
        oracle.same(x, inputs[me.rank], where="the input")
    assert results[0] is results[1] is results[2]


def test_all_reduce_of_every_plan(world: World) -> None:
    """Plans are native, exchanged, gathered, cast and viewed, depending on dtype and size."""
    world.run(reductions)


async def in_place(me: Rank) -> None:
    for shape in ((3,), (3000,), (600_000,)):
        x = torch.empty(shape)
        prepared = ac.prepare("all_reduce", like=x, out=x)
        for step in range(3):
            x.fill_(me.rank + step)
            assert await me.get(prepared.start()) is x
            oracle.same(x, torch.full(shape, float(sum(rank + step for rank in range(me.size)))))
        out = torch.empty(shape)
        for dtype in (torch.int16, torch.float16):  # sent wider, and too large to be exchanged
            y = torch.full(shape, me.rank + 1, dtype=dtype)
            wider = ac.prepare("all_reduce", y)
            for scale in (1, 2):
                y.fill_(scale)
                oracle.same(await me.get(wider.start()), torch.full(shape, scale * me.size, dtype=dtype))
        into = ac.prepare("all_reduce", like=x, out=out)
        x.fill_(1.0)
        assert await me.get(into.start()) is out
        oracle.same(out, torch.full(shape, float(me.size)))


def test_into_memory_of_the_caller(world: World, runner: str) -> None:
    """``out`` may be the input; with an event loop, a thread makes large copies."""
    world.run(in_place, runner=runner)


async def movements(me: Rank) -> None:
    n = me.size
    for name in ("float32", "int16", "float8_e5m2"):
        dtype = oracle.DTYPES[name]
        x = torch.empty((2 * n, 3), dtype=dtype)
        gathered, scalar = ac.prepare("all_gather", x), ac.prepare("all_gather", torch.tensor(me.rank))
        sent, exchanged = ac.prepare("broadcast", x, src=n - 1), ac.prepare("all_to_all", x)
        scattered = ac.prepare("reduce_scatter", y := torch.empty(2 * n, 3))
        for step in range(2):
            inputs = oracle.by_rank(oracle.moving, n, (2 * n, 3), dtype, seed=step)
            x.copy_(inputs[me.rank])
            y.fill_(me.rank + step)
            oracle.same(
                await me.get(gathered.start()),
                torch.cat([one.view(torch.uint8) for one in inputs]).view(dtype),
            )
            oracle.same(await me.get(sent.start()), inputs[-1])
            rows = [one.view(torch.uint8).chunk(n)[me.rank] for one in inputs]
            oracle.same(await me.get(exchanged.start()), torch.cat(rows).view(dtype))
            oracle.same(
                await me.get(scattered.start()), torch.full((2, 3), float(sum(r + step for r in range(n))))
            )
            oracle.same(await me.get(scalar.start()), torch.arange(n))
    splits = [rank + 1 for rank in range(n)]
    rows = torch.full((sum(splits),), me.rank)
    uneven = ac.prepare("all_to_all", rows, input_split_sizes=splits, output_split_sizes=[me.rank + 1] * n)
    want = torch.cat([torch.full((me.rank + 1,), rank) for rank in range(n)])
    oracle.same(await me.get(uneven.start()), want)


def test_what_only_moves(world: World, runner: str) -> None:
    """all_gather, broadcast, all_to_all and reduce_scatter get new contents at each start."""
    world.run(movements, runner=runner)


async def trees(me: Rank) -> None:
    tree = {"w": torch.empty(4, 3), "b": [torch.empty(3), torch.empty(2, dtype=torch.float64)]}
    for out in (None, tree, {"w": torch.empty(4, 3), "b": [torch.empty(3), torch.empty(2).double()]}):
        prepared = ac.prepare("all_reduce", tree, op="sum", out=out)
        for step in range(2):
            for scale, x in enumerate((tree["w"], *tree["b"])):
                x.fill_(me.rank + step + scale)
            got = await me.get(prepared.start())
            assert out is None or got is out
            for scale, y in enumerate((got["w"], *got["b"])):
                want = float(sum(rank + step + scale for rank in range(me.size)))
                oracle.same(y, torch.full_like(y, want), value=True)


def test_trees_travel_packed(world: World, runner: str) -> None:
    world.run(trees, runner=runner)


async def misused(me: Rank) -> None:
    x = torch.ones(3)
    prepared = ac.prepare("all_reduce", x)
    first = prepared.start()
    with raising(ac.InvalidArgumentError, "awaited", "prepare a second"):
        prepared.start()  # on every rank: nothing was sent, and the lane keeps working
    oracle.same(await me.get(first), torch.full((3,), float(me.size)))
    oracle.same(await me.get(prepared.start()), torch.full((3,), float(me.size)))
    for says, error, name, like, call in (
        ("all_to_all can", ValueError, "gather", x, {}),
        ("unknown operation", ValueError, "sum", x, {}),
        ("unexpected keyword argument 'src'", ValueError, "all_reduce", x, {"src": 0}),
        ("x.contiguous()", ValueError, "all_reduce", torch.ones(2, 3).t(), {}),
        ("x.detach()", ValueError, "all_reduce", torch.ones(2, requires_grad=True), {}),
        ("float64", ValueError, "all_reduce", x, {"out": torch.ones(3).double()}),
        ("int32", TypeError, "all_reduce", torch.ones(3, dtype=torch.int32), {"op": "avg"}),
        ("number", TypeError, "all_reduce", 1.5, {}),
        ("got a str", TypeError, "broadcast", [x, "a"], {}),
        ("timeout", ValueError, "all_reduce", x, {"timeout": -1}),
    ):
        with me.case(f"{name} {says}"), raising(error, says.replace("number", "float")):
            ac.prepare(name, like, **call)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_misuse_is_refused(pair: World, runner: str) -> None:
    """It is refused before anything is sent, and the error says what to do instead."""
    pair.run(misused, runner=runner)


#: Ways to give other memory to a tensor that an operation was prepared with.
MOVED: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda x: setattr(x, "data", torch.full((2,), 7.0)),
    "set_": lambda x: x.set_(torch.full((2,), 7.0)),  # type: ignore[call-overload]  # torch's stub lacks it
    "resize_": lambda x: x.resize_(3),
    "strides": lambda x: x.as_strided_((2,), (0,)),
}


async def moved(me: Rank) -> None:
    for name, move in MOVED.items():
        for call in ("all_reduce", "broadcast", "all_gather", "a tree", "out"):
            x, out = torch.full((2,), me.rank + 1.0), torch.empty(2)
            like = {"a": x, "b": torch.ones(3)} if call == "a tree" else x
            into = {"out": out} if call == "out" else {}
            with me.case(f"{call} {name}"):
                op = ac.prepare(call if not into and like is x else "all_reduce", like, **into)
                await me.get(op.start())
                move(out if into else x)
                with raising(
                    ac.InvalidArgumentError, "memory or shape of one has changed", "prepare it again"
                ):
                    op.start()
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_a_tensor_that_has_other_memory_now_is_refused(pair: World, runner: str) -> None:
    """Otherwise the prepared memory, which the tensor no longer has, would be sent or filled."""
    pair.run(moved, runner=runner, timeout=patient(30))


async def started_again(me: Rank) -> None:
    op = ac.prepare("all_gather", x := torch.ones(2))
    await op.start()  # opens the lane, so that the next start is waited for directly
    if me.rank == 0:
        first = op.start()
        lost: list[str] = []

        async def wait() -> None:
            with raising(ac.CollectiveError, "started again"):
                await first
            lost.append("told")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            with raising(ac.CollectiveTimeoutError):
                first.wait(0.01)
            second = op.start()
            me.show("started again")
        assert lost
    else:
        me.see("started again")
        await op.start()
        x.fill_(2)
        second = op.start()
    oracle.same(await second, torch.tensor([1.0, 1.0, 2.0, 2.0]))


def test_a_task_that_still_waits_where_another_gave_up(pair: World) -> None:
    """It loses its result to the next start. Regression: it got that start's numbers."""
    pair.run(started_again, runner="asyncio")


async def mapped_and_started_again(me: Rank) -> None:
    """Rank 0 gives up its wait for what it derived from the first start."""
    op = ac.prepare("all_gather", torch.ones(2) * me.rank)
    if me.rank == 0:
        with raising(ac.CollectiveTimeoutError):
            op.start().map(torch.clone).wait(0.01)
        second = op.start()
        me.show("mapped")
    else:
        me.see("mapped")
        await op.start()
        second = op.start()
    oracle.same(await second, torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_a_wait_that_is_cut_short_for_a_derived_work_counts_for_the_start(pair: World) -> None:
    """The next start was refused, on both ranks."""
    pair.run(mapped_and_started_again, runner="asyncio")


async def written_in_flight(me: Rank) -> None:
    for name, into in (("all_gather", None), ("all_reduce", torch.empty(2))):
        op = ac.prepare(name, x := torch.ones(2), **({} if into is None or me.rank else {"out": into}))
        with me.case(name):
            if me.rank == 0:
                first = op.start()
                with raising(ac.CollectiveTimeoutError):
                    first.wait(0.01)
                x.fill_(2)  # rank 1 may get this value
                with raising(ac.InvalidArgumentError, "written to in place before", "Await it first"):
                    op.start()
                me.show(name)
                with raising(ac.InvalidArgumentError, "written to"):
                    await first
            else:
                me.see(name)
                await op.start()
                with raising(ac.PeerRefusedError, "written to"):
                    await op.start()
            x.fill_(3)
            want = [3.0, 3.0] * 2 if name == "all_gather" else [6.0, 6.0]
            oracle.same(await op.start(), torch.tensor(want))


def test_an_input_that_was_written_to_while_a_start_was_in_flight_is_not_sent_again(pair: World) -> None:
    """After a wait that timed out, the other rank may have got the new values for the first start's."""
    pair.run(written_in_flight, runner="asyncio")


async def written_and_dropped(me: Rank) -> None:
    op = ac.prepare("all_gather", x := torch.ones(2))
    if me.rank == 0:
        with raising(ac.CollectiveTimeoutError):
            op.start().wait(0.01)
        x.fill_(2)
        with raising(ac.InvalidArgumentError, "written to in place before"):
            op.start()
        second = op.start()  # fills the memory that the first start, still in flight, fills before it
        me.show("refused once")
    else:
        me.see("refused once")
        oracle.same((await op.start())[2:], torch.ones(2))
        with raising(ac.PeerRefusedError, "written to"):
            await op.start()
        second = op.start()
    oracle.same(await second, torch.tensor([2.0, 2.0, 1.0, 1.0]))


def test_a_start_after_a_dropped_one_whose_input_was_written_to_is_refused_once(pair: World) -> None:
    """Regression: the dropped start can no longer be awaited, and every later start was refused."""
    pair.run(written_and_dropped, runner="asyncio")


async def overwritten(me: Rank) -> None:
    for like in (torch.ones(2), [torch.ones(2), torch.ones(3), torch.ones(2).double()]):
        op = ac.prepare("all_reduce", like)
        result = await me.get(op.start())
        results = result if isinstance(result, list) else [result]
        weights = [torch.ones_like(x, requires_grad=True) for x in results]
        losses = [(weight * x).sum() for weight, x in zip(weights, results, strict=True)]
        works = [ac.all_reduce(x) for x in results]
        last = op.start()
        for work in works:
            with raising(ac.InvalidArgumentError, "written to in place"):
                await me.get(work)
        await me.get(last)
        for loss in losses:
            with raising(RuntimeError, "modified by an inplace operation"):
                loss.backward()


def test_a_result_that_is_still_needed_and_overwritten_is_an_error(pair: World, runner: str) -> None:
    """A call that is still to be waited for, or a backward, may need it."""
    pair.run(overwritten, runner=runner)


async def refused(me: Rank) -> None:
    x = torch.full((2,), me.rank + 1.0)
    op = ac.prepare("all_reduce", x)
    result = await op.start()
    if me.rank == 0:
        with raising(ac.PeerRefusedError, "nonsense"):
            await op.start()
    else:
        with raising(ac.InvalidArgumentError, "nonsense"):
            ac.all_reduce(x, op="nonsense")
    again = await op.start()
    oracle.same(again, torch.full((2,), 3.0))
    if me.backend in ("mpi", "horovod"):  # these cannot withdraw what was issued
        assert (again is result) == (me.rank != 0)


def test_a_start_after_one_that_may_still_write_fills_other_memory(pair: World) -> None:
    pair.run(refused, runner="asyncio")


async def ordered(me: Rank) -> None:
    """Prepared and ordinary operations share the lane's order; another lane has another order."""
    x, y = torch.ones(2), torch.full((2,), 2.0)
    one, two = ac.prepare("all_reduce", x), ac.prepare("all_reduce", y, lane="side")
    works = [one.start(), two.start(), ac.all_reduce(torch.full((2,), 3.0))]
    for scale, work in enumerate(works, start=1):
        oracle.same(await me.get(work), torch.full((2,), float(scale * me.size)))
    assert "side" in repr(two)


def test_the_order_is_the_lane_s(pair: World, runner: str) -> None:
    pair.run(ordered, runner=runner)


AFTER_FINALIZE = """
import torch, asynccoll as ac
ac.initialize("serial")
prepared = ac.prepare("all_reduce", torch.ones(2))
print(prepared.start().wait().tolist())
ac.finalize()
try:
    prepared.start()
except ac.NotInitializedError as error:
    print(error)
"""


def test_after_finalize_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_FINALIZE],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.stdout.startswith("[1.0, 1.0]"), done.stderr
    assert "prepare it again" in done.stdout


async def of_other_keys(me: Rank, *names: str) -> None:
    last = me.rank == me.size - 1
    for name in names:
        for here, there in (({"a": 2, "b": 2}, {"a": 2, "c": 2}), ({"a": [2, 2]}, {"a": [2], "b": 2})):
            like = shaped(there if last else here)
            with me.case(f"{name} {here}"), raising(ac.CollectiveMismatchError, "'a'", "'b'"):
                await me.get(ac.prepare(name, like=like).start())
            await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def shaped(tree: object) -> Any:
    """Make a tree of tensors of ones with the lengths that ``tree`` gives."""
    if isinstance(tree, int):
        return torch.ones(tree)
    return {k: shaped(v) for k, v in tree.items()} if isinstance(tree, dict) else list(map(shaped, tree))  # type: ignore[call-overload]


def test_trees_of_other_keys_are_refused(pair: World) -> None:
    """The ordinary call refuses, too: leaves of one tree would be summed with other leaves of the other."""
    pair.run(of_other_keys, "all_reduce")  # the root of a broadcast may complete before it hears of it


def test_trees_of_other_keys_are_refused_ahead(checked: World) -> None:
    checked.run(of_other_keys, "all_reduce", "broadcast")


async def compared(me: Rank) -> None:
    x = torch.ones(3 + me.rank)
    prepared = ac.prepare("all_reduce", x)
    with raising(ac.CollectiveMismatchError, "float32 [3]", "float32 [4]"):
        await me.get(prepared.start())
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_starts_are_compared_too(checked: World) -> None:
    """They are compared with ``check="full"``."""
    checked.run(compared)
