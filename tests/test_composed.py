"""Combined forms of a call: trees, prepared operations and blocks, in scopes and under autograd modes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

import asynccoll as ac
import oracle
from asynccoll.errors import InvalidArgumentError, UnsupportedOpError
from ranks import Rank, raising
from worlds import World

LENGTHS = (3, 50_000)  # sent by the exchange, and by the backend's own algorithm


def _total(me: Rank, value: float = 0.0) -> float:
    """Return the sum over all ranks of their rank and ``value``."""
    return sum(range(me.size)) + me.size * value


def _mine(me: Rank, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(me.rank))


@contextlib.asynccontextmanager
async def _scope(me: Rank) -> AsyncIterator[None]:
    """Enter a scope as with an event loop, or as without one."""
    if me.runner == "blocking":
        with ac.scope():
            yield
    else:
        async with ac.scope():
            yield


# One call is one work


async def scoped(me: Rank) -> None:
    for op, factor in (("sum", 1.0), ("avg", 1 / me.size)):
        for length in LENGTHS:
            x = {"w": _mine(me, length), "b": [_mine(me, 2, 2) + 1]}
            wanted = {
                "w": torch.full((length,), _total(me) * factor),
                "b": [torch.full((2, 2), _total(me, 1) * factor)],
            }
            filled = {"w": torch.empty(length), "b": [torch.empty(2, 2)]}
            op_of_tree = ac.prepare("all_reduce", x, op=op)
            results: list[Any] = []
            async with _scope(me):
                results.append(await me.get(ac.all_reduce(x, op=op)))
                await me.get(ac.all_reduce(x, op=op, out=filled))
                results.append(filled)
                with ac.coalescing():
                    works = [ac.all_reduce(leaf, op=op) for leaf in (x["w"], x["b"][0])]
                results.append({"w": await me.get(works[0]), "b": [await me.get(works[1])]})
                results.append(await me.get(op_of_tree.start()))
                late = ac.all_reduce(x, op=op)
            results.append(late.result())
            for result in results:
                oracle.same(result, wanted, rtol=1e-6)


def test_what_a_scope_ends_after_stays_as_it_was_got(world: World, runner: str) -> None:
    """A tree, a tree with out=, a block and a prepared tree are finished once, by the end of the scope."""
    world.run(scoped, runner=runner)


async def counted(me: Rank) -> None:
    from asynccoll.host.blocks import innermost
    from asynccoll.waiting.work import scopes

    async with _scope(me):
        members = innermost(scopes)
        assert members is not None
        tree = [_mine(me, 2) for _ in range(20)] + [me.rank, "name"]  # including numbers and strings
        works = [
            ac.all_reduce(tree[:-1]),
            ac.broadcast(tree),
            ac.all_gather(tree, uneven=True),
            ac.gather(tree),
            ac.prepare("all_reduce", tree[:20]).start(),
            ac.all_reduce(tree[:20], prescale=2.0),
            ac.permute(tree[:3], [(0, me.size - 1)]),
        ]
        kept = members._works
        assert list(map(id, kept)) == list(map(id, works)), kept
        for work in works:
            await me.get(work)


def test_a_scope_knows_the_work_of_each_call_and_no_other(pair: World) -> None:
    pair.run(counted)


# Gradients


def _calls_with_gradient(me: Rank) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return calls on a vector of ``2 n`` whose results are awaited with autograd off."""
    n = me.size
    return {
        "postscale": lambda x: ac.all_reduce(x, postscale=3.0),
        "prescale of a tree": lambda x: ac.all_reduce({"x": x}, prescale=0.5, postscale=6.0).map(
            lambda y: y["x"]
        ),
        "compression": lambda x: ac.all_reduce(x, compression="fp16", postscale=3.0),
        "dim": lambda x: ac.all_gather(x.view(2, n), dim=1).map(lambda y: y * 3),
        "coalesced": lambda x: _coalesced(x).map(lambda y: y * 3),
        "map": lambda x: ac.all_reduce(x).map(lambda y: y * 3),
        "permute": lambda x: ac.permute(x, [(r, r) for r in range(n)]).map(lambda y: y * 3),
    }


def _coalesced(x: torch.Tensor) -> Any:
    with ac.coalescing():
        return ac.all_reduce(x)


async def awaited_without_recording(me: Rank) -> None:
    n = me.size
    for name, call in _calls_with_gradient(me).items():
        if name == "dim" and me.rank >= 0:
            wanted = 3.0 * n  # each rank's loss covers all rows
        else:
            wanted = 3.0 if name == "permute" else 3.0 * n
        with me.case(name):
            x = torch.ones(2 * n, requires_grad=True)
            work = call(x)
            with torch.no_grad():
                y = await me.get(work)
            assert y.requires_grad, f"{name}: the gradient is lost"
            y.sum().backward()
            oracle.same(x.grad, torch.full((2 * n,), wanted), where=name)
    with torch.no_grad():
        work = ac.all_reduce(torch.ones(2, requires_grad=True), postscale=2.0)
    assert not (await me.get(work)).requires_grad


def test_gradients_are_those_of_the_call_s_mode(world: World, runner: str) -> None:
    world.run(awaited_without_recording, runner=runner)


async def none_there(me: Rank) -> None:
    n = me.size
    x = torch.ones(n, requires_grad=True)
    leaf = {"a": [x * 2]}
    works = {
        "safe": ac.broadcast(x, safe_mode=True, src=me.size - 1),
        "safe tree": ac.broadcast(leaf, safe_mode=True),
        "uneven": ac.all_gather(x, uneven=True),
        "uneven tree": ac.all_gather(leaf, uneven=True),
        "gather": ac.gather(x),
        "gather tree": ac.gather(leaf),
        "reduce": ac.reduce(x),
        "reduce tree": ac.reduce(leaf),
        "scatter": ac.scatter(x if me.rank == 0 else None),
        "max": ac.all_reduce(x, op="max"),
    }
    marked_on = {"safe": me.size - 1, "safe tree": 0, "scatter": 0, **dict.fromkeys(("gather", "reduce"), 0)}
    marked_on |= {"gather tree": 0, "reduce tree": 0}
    for name, work in works.items():
        with torch.no_grad():
            y = await me.get(work)
        if marked_on.get(name, me.rank) != me.rank:
            continue
        while isinstance(y, (dict, list)):
            y = y["a"] if isinstance(y, dict) else y[0]
        with me.case(name):
            assert y.requires_grad, f"{name}: lost in silence"
            with raising(UnsupportedOpError, "gradient"):
                y.sum().backward()


def test_what_has_no_gradient_says_so_in_backward(pair: World, runner: str) -> None:
    pair.run(none_there, runner=runner)


async def into_out(me: Rank) -> None:
    n = me.size
    x = torch.ones(n, requires_grad=True)
    out, long = torch.empty(n), torch.empty(n * n)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: ac.all_reduce(x, out=out),
        "all_reduce in place": lambda: ac.all_reduce(x, out=x),
        "scaled": lambda: ac.all_reduce(x, postscale=2.0, out=out),
        "tree": lambda: ac.all_reduce([x], out=[out]),
        "broadcast": lambda: ac.broadcast(x, out=out),
        "broadcast into a parameter": lambda: ac.broadcast(x.detach(), out=x),
        "reduce": lambda: ac.reduce(x, out=out),
        "reduce_scatter": lambda: ac.reduce_scatter(x, out=torch.empty(1)),
        "all_gather": lambda: ac.all_gather(x, out=long),
        "all_gather, dim": lambda: ac.all_gather(x.view(1, n), dim=1, out=long.view(1, -1)),
        "gather": lambda: ac.gather(x, out=long),
        "all_to_all": lambda: ac.all_to_all(x, out=out),
        "permute": lambda: ac.permute(x, [(0, 0)], out=out),
        "scatter": lambda: ac.scatter(x if me.rank == 0 else None, out=x[:1] if me.rank else torch.empty(1)),
    }
    for name, call in calls.items():
        with me.case(name), raising(InvalidArgumentError, "out=", "gradient", "no_grad"):
            await me.get(call())
    with me.case("coalesced"), raising(InvalidArgumentError, "no_grad"), ac.coalescing():
        ac.all_reduce(x, out=out)
    with torch.no_grad():
        prepared = ac.prepare("all_reduce", x)
        oracle.same(await me.get(prepared.start()), torch.full((n,), float(n)))
        await me.get(ac.all_reduce(x, out=out))
        oracle.same(out, torch.full((n,), float(n)))
    with me.case("prepared"), raising(InvalidArgumentError, "no gradient"):
        prepared.start()


def test_out_of_what_is_recorded_is_refused(pair: World) -> None:
    """torch's own functions refuse it, too: values written into ``out`` would carry no gradient."""
    pair.run(into_out)


# Blocks


@torch.no_grad()
def _metrics(weight: torch.Tensor, out: torch.Tensor) -> tuple[Any, Any]:
    return ac.all_reduce(weight * 5), ac.all_reduce(torch.full((2,), 7.0), out=out)


async def modes_in_a_block(me: Rank) -> None:
    n = me.size
    for order in (0, 1):
        weight = torch.ones(2, requires_grad=True)
        filled = torch.empty(2)

        with ac.coalescing():
            if order:
                quiet, into = _metrics(weight, filled)
            loss = ac.all_reduce(weight * 2)
            if not order:
                quiet, into = _metrics(weight, filled)
            with torch.inference_mode():
                inferred = ac.all_reduce(torch.full((2,), 1.0))
        with torch.no_grad():
            y = await me.get(loss)
        found = await me.get(quiet)
        assert not found.requires_grad
        oracle.same(found, torch.full((2,), 5.0 * n))
        assert await me.get(into) is filled
        oracle.same(filled, torch.full((2,), 7.0 * n))
        with torch.inference_mode():
            oracle.same(await me.get(inferred), torch.full((2,), 1.0 * n))
        y.sum().backward()
        oracle.same(weight.grad, torch.full((2,), 2.0 * n))


def test_each_call_of_a_block_is_recorded_as_where_it_was_made(world: World, runner: str) -> None:
    world.run(modes_in_a_block, runner=runner)


async def flushed_in_another_mode(me: Rank) -> None:
    n = me.size
    weight = torch.ones(2, requires_grad=True)
    with ac.coalescing():
        loss = ac.all_reduce(weight * 2)
        with torch.no_grad():
            sizes = ac.all_gather(me.rank)  # sends the deferred calls
            metric = ac.all_reduce(weight * 5)
        gathered = ac.all_gather(me.rank)
    y, seen = await me.get(loss), await me.get(metric)
    assert await me.get(sizes) == await me.get(gathered) == list(range(n))
    assert y.requires_grad
    assert not seen.requires_grad
    (y * seen).sum().backward()
    oracle.same(weight.grad, torch.full((2,), 2.0 * n * 5.0 * n))


def test_what_sends_a_block_says_nothing_of_its_modes(pair: World, runner: str) -> None:
    """Deferred calls may be sent by another kind of call under another autograd mode."""
    pair.run(flushed_in_another_mode, runner=runner)


async def outs_differ_by_rank(me: Rank) -> None:
    """Check that which calls are sent together does not depend on one rank's modes and out=."""
    n = me.size
    x = torch.full((2,), 1.0, requires_grad=me.rank == 0)
    with contextlib.nullcontext() if me.rank == 0 else torch.no_grad(), ac.coalescing():
        first = ac.all_reduce(x.detach(), out=torch.empty(2) if me.rank else None)
        second = ac.all_reduce(x.detach() * 2)
        with torch.no_grad():
            third = ac.all_reduce(x * 3, op="sum")
    for work, value in ((first, 1.0), (second, 2.0), (third, 3.0)):
        oracle.same((await me.get(work)).detach(), torch.full((2,), value * n))


def test_ranks_may_differ_in_modes_and_out(several: World) -> None:
    several.run(outs_differ_by_rank)


async def dependent(me: Rank) -> None:
    n = me.size
    grid = torch.ones(4, 4)
    t, u = torch.ones(4), torch.zeros(4)
    dependents: dict[str, list[Callable[[], Any]]] = {
        "twice in place": [lambda: ac.all_reduce(t, out=t), lambda: ac.all_reduce(t, out=t)],
        "chain": [lambda: ac.all_reduce(t, out=u), lambda: ac.broadcast(u, out=t)],
        "read after write": [lambda: ac.all_reduce(t, out=u), lambda: ac.all_reduce(u)],
        "write after read": [lambda: ac.all_reduce(t), lambda: ac.all_reduce(u, out=t)],
        "write after write": [lambda: ac.all_reduce(t, out=u), lambda: ac.all_reduce(torch.ones(4), out=u)],
        "part": [lambda: ac.all_reduce(grid, out=grid), lambda: ac.all_reduce(grid[1])],
        "column": [lambda: ac.all_reduce(grid[:, 1], out=grid[:, 1]), lambda: ac.all_reduce(grid[1])],
        "not put off": [lambda: ac.all_reduce(t, out=u), lambda: ac.all_gather(u)],
    }
    for name, (first, second) in dependents.items():
        with me.case(name):
            with (
                raising(InvalidArgumentError, "call at", "test_composed.py:", "await it first"),
                ac.coalescing(),
            ):
                lost = first()
                second()
            with raising(ac.CollectiveError, "not sent"):
                await me.get(lost)
    with ac.coalescing():
        columns = [ac.all_reduce(grid[:, k], out=grid[:, k]) for k in range(4)]
        await me.get(ac.all_reduce(t, out=t))  # awaited, so that the next one may follow
        again = ac.all_reduce(t, out=t)
        both = [ac.all_reduce(u), ac.all_reduce(u)]
    for work in columns:
        await me.get(work)
    oracle.same(grid, torch.full((4, 4), float(n)))
    oracle.same(await me.get(again), torch.full((4,), float(n * n)))
    for work in both:
        oracle.same(await me.get(work), torch.zeros(4))


def test_calls_of_a_block_that_depend_on_each_other_are_refused(several: World) -> None:
    """Together they would give 2, one after the other 4; columns that share no memory may be in one block."""
    several.run(dependent)


# Memory that a call fills, before it was waited for


async def passed_too_early(me: Rank) -> None:
    n = me.size
    large = 1 << 20  # large enough for several threads of a native library
    for x, part in (
        (y := torch.ones(3), y[:1]),
        (y := torch.ones(large), y[-1:]),
        (y := torch.ones(3, 2).t(), y.t()[1]),
        ({"a": (y := torch.ones(3)), "b": torch.ones(2)}, y[1:]),
        ({"a": torch.ones(large), "b": (y := torch.ones(large))}, y[1:]),
    ):
        for op, factor in (("sum", n), ("avg", 1)):
            before = float(part[0])
            prepared = ac.prepare("all_reduce", like=torch.ones(part.shape), out=part)
            first = ac.all_reduce(x, op=op, out=x)
            for again in (
                partial(ac.all_reduce, x, op=op, out=x),
                partial(ac.broadcast, part, src=0),
                partial(ac.all_gather_object, [part]),
                partial(ac.all_reduce, torch.ones(part.shape), out=part),
                prepared.start,
            ):
                with raising(InvalidArgumentError, "all_reduce #", __file__, "await it first"):
                    again()
            await me.get(first)
            await me.get(ac.all_reduce(x, op=op, out=x))
            oracle.same(part, torch.full(part.shape, before * factor**2))


def test_what_a_call_fills_is_nobody_elses_before_it_was_waited_for(several: World) -> None:
    """Two calls in flight on the same memory used to give 3 where one after the other they give 4."""
    several.run(passed_too_early)


async def passed_while_at_work(me: Rank) -> None:
    refused = (InvalidArgumentError, ac.PeerRefusedError)
    for turn in range(12):
        x = torch.ones(1 << (2 + 2 * (turn % 6)))
        ac.all_reduce(x, out=x).detach()
        try:
            total = await me.get(ac.all_reduce(x, out=x))
        except refused:
            continue
        oracle.same(total, torch.full_like(x, float(me.size**2)))
    await me.get(ac.barrier())


def test_what_nobody_waits_for_is_refused_while_it_is_written(several: World) -> None:
    """After detaching the first call, the second one is refused or gives what one after the other gives."""
    several.run(passed_while_at_work)


async def detached(me: Rank) -> None:
    def fresh() -> dict[str, torch.Tensor]:
        return {"a": _mine(me, 3), "b": torch.zeros(4, 2).t() + me.rank}

    def called(x: dict[str, torch.Tensor]) -> list[ac.Work[Any]]:
        return [ac.all_reduce(x, out=x)]

    def in_a_block(x: dict[str, torch.Tensor]) -> list[ac.Work[Any]]:
        with ac.coalescing():
            return [ac.all_reduce(leaf, out=leaf) for leaf in x.values()]

    def prepared(x: dict[str, torch.Tensor]) -> list[ac.Work[Any]]:
        x["b"] = x["b"].contiguous()
        return [ac.prepare("all_reduce", x, out=x).start()]

    def mapped(x: dict[str, torch.Tensor]) -> list[ac.Work[Any]]:
        return [ac.all_reduce(x, out=x).map(len).map(str)]

    for start in (called, in_a_block, prepared, mapped):
        x = fresh()
        for work in start(x):
            work.detach()
            del work
        with anyio.fail_after(20):
            while not all(bool((leaf == _total(me)).all()) for leaf in x.values()):
                await anyio.sleep(0.001)
        await me.get(ac.barrier())


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_what_is_detached_is_filled(several: World, loop: str) -> None:
    """Though no task waits, results of a tree, and in memory that is not contiguous, are copied there."""
    several.run(detached, runner=loop)


# Prepared operations


async def cut_while_out(me: Rank, cut: str, filled: bool) -> None:
    n = me.size
    for like in (torch.ones(3), {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float64)}):
        leaves = list(like.values()) if isinstance(like, dict) else [like]
        again = f"again {len(leaves)} {filled}"
        operation = ac.prepare("all_reduce", like, out=oracle.snapshot(like) if filled else None)
        held = None
        if me.rank == 0:  # the other ranks start only once this one has stopped waiting
            held = operation.start()
            if cut == "timed out":
                with raising(ac.CollectiveTimeoutError):
                    held.wait(timeout=0.05)
            else:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await held
                assert scope.cancelled_caught
            assert held.cut_short
            second = operation.start()  # queued on the lane behind the first, which is in flight
            me.show(again)
        else:
            await anyio.to_thread.run_sync(me.see, again)
            await operation.start()
            second = operation.start()
        result = await second
        for leaf in result.values() if isinstance(result, dict) else [result]:
            oracle.same(leaf, torch.full(leaf.shape, float(n), dtype=leaf.dtype))
        if held is not None:
            with raising(ac.CollectiveError, "started again"):
                await held
        for leaf in leaves:
            leaf.add_(1)
        result = await operation.start()  # as if nothing had happened
        for leaf in result.values() if isinstance(result, dict) else [result]:
            oracle.same(leaf, torch.full(leaf.shape, 2.0 * n, dtype=leaf.dtype))
        unawaited = operation.start()
        with raising(InvalidArgumentError, "before its last work was awaited"):
            operation.start()
        with contextlib.suppress(ac.PeerRefusedError):
            await unawaited


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("filled", [False, True], ids=["", "out"])
@pytest.mark.parametrize("cut", ["timed out", "cancelled"])
def test_a_prepared_operation_goes_on_after_a_wait_cut_short(
    several: World, cut: str, filled: bool, loop: str
) -> None:
    several.run(cut_while_out, cut, filled, runner=loop)


# Strides of a single element


async def of_one_element(me: Rank) -> None:
    n, x = me.size, (torch.arange(6.0).view(2, 3) + me.rank)[:1, 1]
    assert x.stride() == (3,)
    for gathered in (ac.all_gather(x, uneven=True), ac.all_gather_object(x)):
        for rank, got in enumerate(await me.get(gathered)):
            oracle.same(got, torch.tensor([1.0 + rank]))
    for sent in (ac.broadcast(x, safe_mode=True), ac.broadcast_object({"x": x}).map(lambda got: got["x"])):
        oracle.same(await me.get(sent), torch.tensor([1.0]))
    memory = torch.ones(n)
    rows, own = memory.as_strided((n, 1), (1, 2)), memory[me.rank : me.rank + 1].view(1, 1)
    await me.get(ac.reduce_scatter(rows, out=own))
    oracle.same(own, torch.full((1, 1), float(n)))


def test_a_single_element_has_any_stride(several: World) -> None:
    """torch refuses to view it as bytes, and to add to it with another stride that has no effect."""
    several.run(of_one_element)


# Averages


async def averaged(me: Rank) -> None:
    n = me.size
    for dtype, each in (
        (torch.float16, 40_000.0),
        (torch.bfloat16, 40_000.0),
        (torch.complex32, 40_000.0),
    ):
        for length in (4, 200_000):
            x = torch.full((length * n,), each).to(dtype)
            for name in ("all_reduce", "reduce_scatter", "reduce"):
                with me.case(f"{name} of {length} {dtype}"):
                    call = getattr(ac, name)
                    found = await me.get(call(x, op="avg"))
                    if found is not None:
                        oracle.same(found, x[: found.numel()], where=name)
                    kept = x.clone()
                    if name == "all_reduce":
                        await me.get(call(kept, op="avg", out=kept))
                        oracle.same(kept, x)
    half = torch.full((3,), 40_000.0, dtype=torch.float16)
    oracle.same(await me.get(ac.all_reduce([half], op="avg")), [half])
    wide = half.float()
    oracle.same(await me.get(ac.all_reduce(wide, op="avg", compression="fp16")), wide, rtol=1e-3)
    for dtype in (torch.float16, torch.bfloat16):
        rows = [(torch.tensor([0.1, 1.7, 3.3]) * (rank + 1)).to(dtype) for rank in range(n)]
        mean = torch.stack([row.float() for row in rows]).sum(0).div(n).to(dtype)
        oracle.same(await me.get(ac.all_reduce(rows[me.rank], op="avg")), mean, where="rounded once")


def test_averages_of_half_precision_do_not_overflow(world: World) -> None:
    world.run(averaged)


async def complex_halves(me: Rank) -> None:
    n = me.size
    x = torch.complex(torch.ones(3), torch.full((3,), float(me.rank))).to(torch.complex32)
    total = torch.complex(torch.full((3,), float(n)), torch.full((3,), _total(me)))
    oracle.same(await me.get(ac.all_reduce(x)), total.to(torch.complex32))
    product = torch.ones((), dtype=torch.complex64)
    for rank in range(n):
        product = product * complex(1, rank)
    found = await me.get(ac.all_reduce(x, op="product"))
    oracle.same(found, product.expand(3).contiguous().to(torch.complex32))


def test_complex_numbers_of_half_precision_are_reduced(world: World) -> None:
    world.run(complex_halves)


# Strides


def _strided(rank: int, shape: tuple[int, ...], way: int) -> torch.Tensor:
    """Return the same elements in different memory: channels last, transposed, with gaps, or plain."""
    plain = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + rank
    if way == 0:
        return plain.contiguous(memory_format=torch.channels_last)
    if way == 1:
        return plain.transpose(0, -1).contiguous().transpose(0, -1)
    if way == 2:
        gaps = torch.zeros(*shape[:-1], 2 * shape[-1])
        gaps[..., ::2] = plain
        return gaps[..., ::2]
    return plain


async def strides_kept(me: Rank) -> None:
    n = me.size
    for shape in ((2, 3, 2, 2), (8, 16, 24, 24)):
        for turn in range(4):
            x = _strided(me.rank, shape, (me.rank + turn) % 4)  # different on each rank
            plain = [_strided(rank, shape, 3) for rank in range(n)]
            total = torch.stack(plain).sum(0)
            wanted = torch.empty_like(x).stride()
            before = x.clone()
            out = torch.empty_like(x)
            found = {
                "sum": (await me.get(ac.all_reduce(x)), total),
                "out": (await me.get(ac.all_reduce(x, out=out)), total),
                "max": (await me.get(ac.all_reduce(x, op="max")), plain[-1]),
                "and": (await me.get(ac.all_reduce(x, op="and")), torch.stack(plain).ne(0).all(0).float()),
                "tree": ((await me.get(ac.all_reduce([x, x * 2])))[1], total * 2),
                "broadcast": (await me.get(ac.broadcast(x, src=n - 1)), plain[-1]),
                "permute": (
                    await me.get(ac.permute(x, [(r, (r + 1) % n) for r in range(n)])),
                    plain[me.rank - 1],
                ),
            }
            if (reduced := await me.get(ac.reduce(x, dst=0))) is not None:
                found["reduce"] = (reduced, total)
            with ac.coalescing():
                works = [ac.all_reduce(x), ac.all_reduce(x * 2)]
            found["coalesced"] = (await me.get(works[0]), total)
            await me.get(works[1])
            for name, (got, want) in found.items():
                oracle.same(got.contiguous(), want, where=f"{name} of {x.stride()}")
                assert got.stride() == wanted, (name, got.stride(), wanted)
            oracle.same(x.contiguous(), before.contiguous())
            leaf = x.clone().requires_grad_()
            y = await me.get(ac.all_reduce(leaf * 1.0))
            assert y.stride() == wanted
            (y * x).sum().backward()
            oracle.same(leaf.grad.contiguous(), total)


def test_results_have_the_strides_of_the_input(world: World) -> None:
    """They are those of torch.empty_like; ranks may have different strides, as elements match by index."""
    if "xla" in str(world):
        pytest.skip("tensors of XLA have no strides")
    world.run(strides_kept)


async def filled_behind_autograd(me: Rank) -> None:
    """Let each call fill ``b``, which the backward of ``b ** 2`` reads."""
    x = torch.ones(2, requires_grad=True)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda b: ac.all_reduce(b, out=b),
        "all_gather": lambda b: ac.all_gather(torch.ones(2 // me.size), out=b),
        "broadcast": lambda b: ac.broadcast(torch.ones(2), out=b),
        "tree": lambda b: ac.all_reduce([torch.ones(2), 1 * b], out=[b, torch.ones(2)]),
        "prepared": lambda b: ac.prepare("all_reduce", torch.ones(2), out=b).start(),
    }
    for name, call in calls.items():
        with me.case(name):
            b = x * 3
            c = (b**2).sum()
            await me.get(call(b.detach()))
            with raising(RuntimeError, "modified by an inplace operation"):
                c.backward()


def test_autograd_is_told_of_what_is_filled(pair: World) -> None:
    """A backward that needs the previous contents of ``out=`` raises instead of being silently wrong."""
    pair.run(filled_behind_autograd)


# The numbers and texts of a tree are sent together


def _numbers_of(rank: int) -> dict[str, Any]:
    """Return a tree of numbers of every kind, in which a NumPy scalar stands for its number."""
    numbers = {f"loss{i}": i + rank / 4 for i in range(60)}
    return {**numbers, "seen": 2**40 + rank, "ok": rank != 1, "z": complex(rank, -1), "np": np.float32(rank)}


def _texts_of(rank: int) -> dict[str, Any]:
    """Return such a tree with a tensor, and texts whose lengths differ and that may exceed one message."""
    texts = {"name": f"n\u00e9{rank}", "log": "x" * (700 * rank), "empty": "", "at": Path("/a") / str(rank)}
    return {**_numbers_of(rank), **texts, "x": torch.arange(3.0) + rank}


def _plain(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "np": float(tree["np"])}


async def _values_of_trees(me: Rank) -> None:
    numbers, texts = ([_plain(of(rank)) for rank in range(me.size)] for of in (_numbers_of, _texts_of))
    mine, told = _numbers_of(me.rank), _texts_of(me.rank)
    last = me.size - 1
    gathered = oracle.tree_map(oracle.gathered_leaf, texts)
    summed = oracle.tree_map(lambda leaves: oracle.reduced_leaf(leaves, "sum"), numbers)
    ends = {"n": mine["seen"], "ok": mine["ok"], "loss": mine["loss7"]}
    most = {"n": 2**40 + last, "ok": True, "loss": 7 + last / 4}
    await me.check("all_reduce", ac.all_reduce, mine, expect=summed)
    await me.check("max", ac.all_reduce, ends, op="max", expect=most)
    await me.check("reduce", ac.reduce, mine, dst=last, expect=summed if me.rank == last else None)
    await me.check("all_gather", ac.all_gather, told, expect=gathered)
    await me.check("gather", ac.gather, told, dst=last, expect=gathered if me.rank == last else None)
    await me.check("broadcast", ac.broadcast, told, src=last, expect=texts[last])
    for call in (ac.all_reduce, ac.reduce, ac.all_gather, ac.gather, ac.broadcast):
        work = call(mine)
        assert len(work.operations) == 1, f"{call.__name__}: {len(work.operations)} operations"
        await me.get(work)


def test_numbers_and_texts_of_a_tree_are_one_operation(world: World, runner: str) -> None:
    """However many and whatever they are, each keeps its type, and matches the one of its own name."""
    world.run(_values_of_trees, runner=runner)


async def _other_values(me: Rank) -> None:
    """Use trees of one structure whose leaves are of another kind on one rank."""
    differs = me.rank == me.size - 1
    for call in (ac.all_reduce, ac.all_gather):
        x = {"a": 1, "b": torch.ones(2) if differs else 2.0, "c": 3}
        with raising(ac.CollectiveMismatchError, call.__name__):
            await me.get(call(x))
    with raising(ac.CollectiveMismatchError, "all_gather"):
        await me.get(ac.all_gather({"a": 1, "b": "text" if differs else 2.0, "c": 3}))
    await me.check("afterwards", ac.all_reduce, {"a": 1, "b": 2}, expect={"a": me.size, "b": 2 * me.size})


def test_leaves_of_another_kind_on_one_rank_are_a_mismatch(several: World, runner: str) -> None:
    """Packed or not, a number never matches a text or a tensor; every rank gets the error."""
    several.run(_other_values, runner=runner)
