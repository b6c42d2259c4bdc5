"""What is specific to XLA: device and lazy tensors, late and differing replicas, other device users."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import asynccoll as ac
import needs
import oracle
import worlds
from asynccoll.runtime.process import current
from patience import patient
from ranks import Rank, raising
from worlds import World

pytestmark = pytest.mark.skipif(
    not needs.has_package("torch_xla", "xla-tpu"),
    reason="torch_xla is not here; `make xla` runs this file in an environment that has it",
)

DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def replicas(size: int) -> World:
    """The world of this size, shared by the tests of this file."""
    return worlds.world("xla-tpu", size)


@pytest.fixture(params=[1, 2, 4])
def world(request: pytest.FixtureRequest) -> World:
    return replicas(request.param)


def on_device(value: Any) -> Any:
    """Move tensors, including those in lists, to this replica's device."""
    if isinstance(value, torch.Tensor):
        return value.to(ac.device())
    return [on_device(one) for one in value] if isinstance(value, list) else value


def moved(call: Any) -> Any:
    """Run `call` on device tensors; its results are on the device, and are moved back for comparison."""

    def on_xla(*args: Any, **kwargs: Any) -> Any:
        def back(got: Any) -> Any:
            if isinstance(got, torch.Tensor):
                assert got.device == ac.device(), f"the result is on {got.device}"
                return got.cpu()
            return [back(one) for one in got] if isinstance(got, list) else got

        return call(*map(on_device, args), **kwargs).map(back)

    on_xla.__name__ = call.__name__
    return on_xla


async def every_collective(me: Rank) -> None:
    n = me.size
    for dtype in DTYPES:
        xs = oracle.by_rank(oracle.counting, n, (2 * n, 3), dtype)
        x, last = xs[me.rank], n - 1

        async def check(name: str, call: Any, *args: Any, expect: Any, dtype: Any = dtype, **kw: Any) -> None:
            await me.check(f"{name} {dtype}", moved(call), *args, expect=expect, value=True, **kw)

        for op in oracle.reductions(dtype):
            rtol = oracle.epsilon(dtype) if op == "avg" else 0.0
            total = oracle.reduced(xs, op)
            await check(op, ac.all_reduce, x, op=op, expect=total, rtol=rtol)
        total = oracle.reduced(xs, "sum")
        await check("reduce", ac.reduce, x, dst=last, expect=total if me.rank == last else None)
        share = oracle.reduce_scatter(xs, "sum")[me.rank]
        await check("reduce_scatter", ac.reduce_scatter, x, expect=share)
        await check("broadcast", ac.broadcast, x, src=last, expect=xs[last])
        await check("all_gather", ac.all_gather, x, dim=1, expect=oracle.concatenated(xs, 1))
        both = oracle.concatenated(xs)
        await check("gather", ac.gather, x, dst=last, expect=both if me.rank == last else None)
        await check("scatter", ac.scatter, both if me.rank == 0 else None, expect=x)
        await check("all_to_all", ac.all_to_all, x, expect=oracle.all_to_all(xs)[me.rank])
        ring = [(r, (r + 1) % n) for r in range(n)]
        await check("permute", ac.permute, x, ring, expect=oracle.permute(xs, ring)[me.rank])
    with me.case("barrier"):
        await me.get(ac.barrier())


def test_every_collective_on_device_tensors(world: World, runner: str) -> None:
    """Results are the same as on any backend and on the replica's device; inputs keep their values."""
    if world.size == 4 and runner != "asyncio":
        runner = "blocking"
    world.run(every_collective, runner=runner, timeout=100)


async def inferring(me: Rank) -> None:
    n = me.size
    xs = oracle.by_rank(oracle.counting, n, (2 * n, 3), torch.float32)
    x, ring = xs[me.rank], [(r, (r + 1) % n) for r in range(n)]
    total, out = oracle.reduced(xs, "sum"), torch.zeros(2 * n, 3)
    with torch.inference_mode():
        await me.check("all_reduce", moved(ac.all_reduce), x, expect=total)
        await me.check("reduce_scatter", moved(ac.reduce_scatter), x, expect=oracle.parts(total, n)[me.rank])
        await me.check("all_gather", moved(ac.all_gather), x, expect=oracle.concatenated(xs))
        await me.check("all_to_all", moved(ac.all_to_all), x, expect=oracle.all_to_all(xs)[me.rank])
        await me.check("permute", moved(ac.permute), x, ring, expect=oracle.permute(xs, ring)[me.rank])
        await me.check("from the host", ac.permute, x, ring, expect=oracle.permute(xs, ring)[me.rank])
        with me.case("out="):
            oracle.same(await me.get(ac.all_reduce(x, out=out)), total)


def test_device_tensors_in_inference_mode(world: World) -> None:
    """In this mode XLA makes no views of tensors that were launched outside of it."""
    world.run(inferring, timeout=60)


async def bits(me: Rank) -> None:
    x = torch.tensor([0x7FA00001, -0x80000000, 0x7FC00000 + me.rank], dtype=torch.int32).view(torch.float32)
    for place in (x, x.to(ac.device())):
        got = await me.get(ac.all_gather(place))
        assert got.cpu().view(torch.int32)[:2].tolist() == x.view(torch.int32)[:2].tolist()
        got = await me.get(ac.broadcast(place, src=me.size - 1))
        assert got.cpu().view(torch.int32)[:2].tolist() == x.view(torch.int32)[:2].tolist()


def test_movement_keeps_every_bit() -> None:
    """The sign of zero and the payload of a NaN survive: XLA's own all_gather loses both."""
    replicas(2).run(bits)


async def groups(me: Rank) -> None:
    for ranks in ([1, 3], [0, 2, 3], [2]):
        group = ac.new_group(ranks)
        if me.rank not in ranks:
            continue
        for dtype in (torch.float32, torch.int16):
            xs = [oracle.counting(rank, (len(ranks) * 2,), dtype) for rank in ranks]
            mine = ranks.index(me.rank)
            x = xs[mine]
            await me.check(
                "all_reduce", moved(ac.all_reduce), x, group=group, expect=oracle.reduced(xs, "sum")
            )
            await me.check("all_gather", moved(ac.all_gather), x, group=group, expect=oracle.concatenated(xs))
            await me.check(
                "reduce_scatter",
                moved(ac.reduce_scatter),
                x,
                group=group,
                expect=oracle.reduce_scatter(xs, "sum")[mine],
            )
            swapped = oracle.all_to_all(xs)[mine]
            await me.check("all_to_all", moved(ac.all_to_all), x, group=group, expect=swapped)
            pairs = [(ranks[0], ranks[-1])]
            local = [(0, len(ranks) - 1)]
            want = oracle.permute(xs, local)[mine]
            await me.check("permute", moved(ac.permute), x, pairs, group=group, expect=want)


def test_groups_that_do_and_do_not_divide_the_world() -> None:
    """XLA wants equal groups for all but all_reduce; for unequal groups the rest is built on it."""
    replicas(4).run(groups, timeout=60)


async def late_peer(me: Rank) -> None:
    x = torch.arange(4.0, device=ac.device())
    if me.rank == 0:
        start = time.monotonic()
        work = ac.all_reduce(x + 1)
        y = x
        for _ in range(100):
            y = y * 1.5 + 1
        value = float(y.cpu()[0])
        took = time.monotonic() - start
        assert not work.done(), "done without its peer"
        assert value > 1.0
        me.show("rank 0 has computed")
        assert took < 10.0
    else:
        me.see("rank 0 has computed")
        work = ac.all_reduce(x + 1)
    got = await me.get(work)
    oracle.same(got.cpu(), 2 * (torch.arange(4.0) + 1))


def test_a_late_peer_blocks_neither_tracing_nor_the_device(runner: str) -> None:
    """While one replica is missing, the other can trace, run and read what it likes."""
    replicas(2).run(late_peer, runner=runner)


async def written_in_place(me: Rank) -> None:
    import torch_xla

    base = torch.arange(4.0) + 1
    calls = {
        "sum": (ac.all_reduce, 2 * base),
        "avg": (lambda x: ac.all_reduce(x, op="avg"), base),
        "lazy": (lambda x: ac.all_reduce(x * 3), 6 * base),
        "view": (lambda x: ac.all_reduce(x.view(2, 2)).map(lambda total: total.view(4)), 2 * base),
        "all_gather": (ac.all_gather, base.repeat(2)),
        "broadcast": (lambda x: ac.broadcast(x, src=0), base),
    }
    for name, (call, want) in calls.items():
        with me.case(name):
            x = torch.arange(4.0, device=ac.device()) + 1
            torch_xla.sync()
            if me.rank == 0:
                work = call(x)
                x.add_(10)
                torch_xla.sync()
                x.mul_(2)
                assert x.cpu().tolist() == (2 * (base + 10)).tolist()
                me.show(name)
            else:
                me.see(name)
                work = call(x)
            got = await me.get(work)
            oracle.same(got.cpu(), want)
            twice = got * 2  # computed later, from the result as it is now
            got.add_(1)
            oracle.same((await me.get(ac.all_reduce(got, op="max"))).cpu(), want + 1)
            oracle.same(twice.cpu(), 2 * want)
            got.mul_(3)
            torch_xla.sync()
            oracle.same((await me.get(ac.all_reduce(got, op="min"))).cpu(), 3 * (want + 1))


def test_what_is_written_in_place_changes_no_call_and_no_other_tensor(runner: str) -> None:
    """It changes neither the input of a call in flight nor what was derived from a result before."""
    replicas(2).run(written_in_place, runner=runner, timeout=60)


def spoilt() -> torch.Tensor:
    """A lazy tensor that cannot be computed, as torch_xla has given away the memory it reads."""
    import torch_xla

    x = torch.arange(4.0, device=ac.device()) + 1
    torch_xla.sync()
    y = x * 2
    x.add_(10)
    torch_xla._XLAC._xla_sync_multi([x], [], wait=True, sync_xla_data=True)
    return y


async def cannot_be_computed(me: Rank) -> None:
    x = spoilt() if me.rank == 1 else torch.ones(4, device=ac.device())
    with raising(ac.CollectiveError, "could not be computed"):
        await me.get(ac.all_reduce(x))
    await me.check("afterwards", ac.all_reduce, torch.ones(2), expect=torch.full((2,), 2.0))


def test_an_input_that_cannot_be_computed_fails_on_every_replica() -> None:
    """No wait is endless. After this tensor, `sync` no longer works in this world."""
    with worlds.fresh("xla-tpu", 2) as world:
        world.run(cannot_be_computed)


def much_later(me: Rank) -> None:
    if me.rank == 1:
        time.sleep(20.0)
    oracle.same(ac.all_reduce(torch.ones(3)).wait().cpu(), torch.full((3,), 2.0))


@pytest.mark.slow
def test_a_peer_may_be_later_than_the_runtime_has_patience() -> None:
    """The runtime ends the process if a collective waits for 15 s; ours wait off the device."""
    replicas(2).run(much_later, timeout=60)


async def different(me: Rank) -> None:
    calls = {
        "shape": lambda: ac.all_reduce(torch.ones(2 + me.rank)),
        "dtype": lambda: ac.all_reduce(torch.ones(2, dtype=(torch.float32, torch.int32)[me.rank])),
        "op": lambda: ac.all_reduce(torch.ones(2), op=("sum", "max")[me.rank]),
        "root": lambda: ac.broadcast(torch.ones(2), src=me.rank),
        "collective": lambda: (ac.all_reduce, ac.all_gather)[me.rank](torch.ones(2)),
    }
    for name, call in calls.items():
        with me.case(name):
            with raising(ac.CollectiveMismatchError, "nothing was sent") as caught:
                await me.get(call())
            assert "rank 0:" in str(caught.error)
            assert "rank 1:" in str(caught.error)
            await me.check("afterwards", ac.all_reduce, torch.ones(2), expect=torch.full((2,), 2.0))
    with me.case("splits"), raising(ac.CollectiveMismatchError, "2 rows expected from rank 1"):
        expected = [1, 1 + me.rank]
        await me.get(ac.all_to_all(torch.ones(2), input_split_sizes=[1, 1], output_split_sizes=expected))
    await me.check("after splits", ac.all_reduce, torch.ones(2), expect=torch.full((2,), 2.0))


def test_different_calls_are_an_error_on_every_replica(runner: str) -> None:
    """Even without checks, both sides are shown, nothing is launched, and the lane remains usable."""
    replicas(2).run(different, runner=runner)


async def on_anothers_device(me: Rank) -> None:
    x = torch.ones(2, device=torch.device("xla", 0))
    for call in (ac.all_reduce, ac.all_gather, ac.broadcast):
        if me.rank == 0:
            with raising(ac.PeerRefusedError, "another rank's device"):
                await me.get(call(x))
        else:
            with raising(ac.InvalidArgumentError, "on xla:0, another rank's device", "is xla:1"):
                await me.get(call(x))
    await me.check("afterwards", ac.all_reduce, torch.ones(2), expect=torch.full((2,), 2.0))


def test_a_tensor_on_the_device_of_another_replica_is_refused() -> None:
    """That device would get two launches, which wait for each other until the process ends."""
    replicas(2).run(on_anothers_device)


async def crossing(me: Rank) -> None:
    names = [f"lane {k}" for k in range(6)]
    shuffled = random.Random(me.rank).sample(names, len(names))
    x = torch.ones(8, device=ac.device())
    works = {}
    for turn in range(10):
        for name in shuffled:
            factor = turn + names.index(name)
            works[turn, name] = factor, ac.all_reduce(x * factor, lane=name)
    for factor, work in works.values():
        got = await me.get(work)
        assert got.cpu().tolist() == [factor * me.size] * 8


def test_lanes_in_any_order() -> None:
    """Sixty operations on six lanes are issued in a different order on each of four replicas."""
    replicas(4).run(crossing, timeout=60)


def beside_sync(me: Rank) -> None:
    import torch_xla

    device = ac.device()
    y = torch.ones(16, device=device)
    for turn in range(200):
        x = torch.full((4,), float(turn), device=device)
        works = [ac.all_reduce(x), ac.all_gather(x.cpu()), ac.all_reduce(x + 1, op="avg")]
        # Calls behind that of a number, which is two calls, are started by the thread that completes it.
        number, behind = ac.all_gather(turn), [ac.broadcast(x), ac.all_to_all(x)]
        for _ in range(3):
            y = y * 0.5 + 1
            torch_xla.sync()
        total, gathered, mean = [work.wait().cpu() for work in works]
        assert number.wait() == [turn] * me.size
        assert [work.wait().cpu().tolist() for work in behind] == [x.cpu().tolist()] * 2
        assert total.tolist() == [turn * me.size] * 4
        assert gathered.tolist() == [turn] * 4 * me.size
        assert mean.tolist() == [turn + 1] * 4
    assert y.cpu().tolist() == [2.0] * 16


def test_a_users_sync_takes_no_collective_along() -> None:
    """`torch_xla.sync()` launches whatever is pending on the device, but never half of a collective."""
    replicas(2).run(beside_sync, timeout=60)


async def read_on_host(me: Rank) -> None:
    x = torch.arange(6.0, device=ac.device())
    got = await ac.all_reduce(x, op="avg").on_host()
    oracle.same(got.cpu(), torch.arange(6.0))
    tree = await ac.all_gather({"a": x, "n": me.rank}).on_host()
    assert tree["n"] == list(range(me.size))
    oracle.same(tree["a"].cpu(), torch.arange(6.0).repeat(me.size))


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_on_host_has_computed_what_is_left_to_do(loop: str) -> None:
    """Trees too, without blocking the event loop."""
    replicas(2).run(read_on_host, runner=loop)


async def read_after_leaving(me: Rank) -> None:
    work = ac.all_reduce(torch.arange(6.0, device=ac.device()), op="avg")
    await work
    ac.finalize()
    oracle.same((await asyncio.wait_for(work.on_host(), patient(5))).cpu(), torch.arange(6.0))


def test_on_host_after_the_world_was_left() -> None:
    """The progress thread of the world has ended."""
    with worlds.fresh("xla-tpu", 2) as world:
        world.run(read_after_leaving)


async def not_for_the_host(me: Rank) -> None:
    spoils = ac.all_reduce(torch.ones(4, device=ac.device())).map(lambda total: total + spoilt())
    with raising(ac.CollectiveError, "computing the result"):
        await spoils.on_host()
    await me.check("afterwards", ac.all_reduce, torch.ones(2), expect=torch.full((2,), 2.0))


def test_what_cannot_be_computed_for_the_host_is_an_error_there() -> None:
    """The replica's thread continues to serve other calls."""
    with worlds.fresh("xla-tpu", 2) as world:
        world.run(not_for_the_host)


def executions(me: Rank) -> int:
    from torch_xla.debug import metrics

    x = torch.ones(3, device=ac.device())
    ac.all_reduce(x).wait()  # compiles it
    before = metrics.metric_data("ExecuteTime")[0]
    work = ac.all_reduce(x)
    got = work.wait()
    ran = metrics.metric_data("ExecuteTime")[0] - before
    assert got.cpu().tolist() == [1.0] * 3
    return int(ran)


def test_the_world_of_one_runs_collectives_too() -> None:
    """torch_xla's own functions would return a copy instead."""
    (ran,) = replicas(1).run(executions)
    assert ran >= 1


async def hooks(me: Rank) -> None:
    w = torch.full((3,), float(me.rank + 1), device=ac.device()).requires_grad_()
    seen: list[tuple[Any, ...]] = []

    def summed(grad: torch.Tensor) -> torch.Tensor:
        total = ac.all_reduce(grad, lane="hook").wait()
        seen.append((ac.get_rank(), threading.current_thread() is not here))
        return total

    here = threading.current_thread()
    w.register_hook(summed)
    y = await me.get(ac.all_reduce(w * w))
    (y * (me.rank + 1)).sum().backward()
    both = sum(range(1, me.size + 1))
    want = sum(2.0 * (rank + 1) * both for rank in range(me.size))
    assert w.grad is not None
    assert w.grad.cpu().tolist() == [want] * 3
    assert seen == [(me.rank, True)], "the hook did not run in a thread of autograd, as this rank"


def test_hooks_of_backward_run_as_the_rank_of_their_device(runner: str) -> None:
    """Autograd runs hooks in threads of its own, one for each device."""
    replicas(2).run(hooks, runner=runner)


def gives_up(me: Rank) -> str:
    ac.all_reduce(1).wait()
    if me.rank == 1:
        me.see("0 waits")
        ac.finalize(abort=True)
        return "gone"
    work = ac.all_reduce(torch.ones(4))
    me.show("0 waits")
    try:
        work.wait()
    except ac.PeerLostError as error:
        ac.finalize(abort=True)
        return str(error)
    return "nothing heard"


def test_a_replica_that_gives_up_is_named() -> None:
    """Replicas that wait for it are told immediately, and the process continues."""
    with worlds.fresh("xla-tpu", 2) as world:
        heard = world.run(gives_up, timeout=30)
        world.kill()
    assert heard[1] == "gone"
    assert "1" in heard[0]
    assert "aborted" in heard[0] or "gone" in heard[0]


class OwnCall:
    """A call of a rank that is its own process; it records that it was launched."""

    def __init__(self, launched: list[OwnCall]) -> None:
        self.error = self.splits = None
        self.launched = launched
        self.replica = SimpleNamespace(
            progress=SimpleNamespace(submit=lambda job: job()), xla=SimpleNamespace(wait=lambda: None)
        )

    def prepare(self) -> None:
        pass

    def launch(self) -> None:
        self.launched.append(self)

    def end(self) -> None:
        pass


@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
def test_ranks_that_are_processes_launch_in_the_order_of_the_lane(order: tuple[int, ...]) -> None:
    """Inputs may reach the device in another order: a ready one was once launched before an earlier one."""
    from asynccoll.backends.xla.launching import ProcessLauncher  # importing it imports torch_xla

    launcher = ProcessLauncher("lane")
    launched: list[OwnCall] = []
    calls: Any = [OwnCall(launched) for _ in order]
    arrive = [launcher.enter(call) for call in calls]
    there = set()
    for place in order:
        arrive[place]()
        there.add(place)
        assert launched == calls[: next((n for n in range(3) if n not in there), 3)]


def rows_of_a_process(me: Rank) -> None:
    from asynccoll.backends.xla.collectives import Members
    from asynccoll.backends.xla.communicator import XlaCommunicator
    from asynccoll.backends.xla.launching import ProcessLauncher

    backend: Any = current().backend
    under = XlaCommunicator(backend, Members((0,), 0, 1), ProcessLauncher("lane"))
    for expected, sent in ((2, 2), (2, 3), (3, 3)):
        out = torch.zeros(expected, 2)
        call = under.all_to_all(out, torch.ones(sent, 2), [expected], [sent])
        assert call.wait(patient(30))
        if expected == sent:
            assert call.error() is None
            assert out.tolist() == [[1.0, 1.0]] * sent
        else:
            assert isinstance(call.error(), ac.CollectiveMismatchError), repr(call.error())
            assert "rank 0 expects [2] rows from ranks [0], which send it [3]" in str(call.error())


def test_ranks_that_are_processes_compare_the_rows_that_they_expect_and_send() -> None:
    """If only the sums agreed, rows of one rank passed for another's."""
    replicas(1).run(rows_of_a_process)
