"""Gradients: those of the sum of all ranks' losses, as one process computes them.

Each case is written twice: the collective on the ranks, and the same function of all ranks' inputs in one
process, by plain tensor operations. The loss of rank r weights its result differently from other ranks, so
that a gradient from the wrong rank shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import asynccoll as ac
import oracle
from ranks import Rank, raising
from worlds import World

Collective = Callable[[Tensor, int], Any]
#: All ranks' inputs -> all ranks' outputs, in one process.
Model = Callable[[Sequence[Tensor]], list[Tensor]]


def every(x: Tensor, size: int) -> list[Tensor]:
    """Return the same output for every rank."""
    return [x] * size


def exchanged(xs: Sequence[Tensor], splits: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return each rank's output if piece b of rank a's tensor goes to rank b."""
    pieces = [x.split(list(row)) for x, row in zip(xs, splits, strict=True)]
    return [torch.cat([pieces[a][b] for a in range(len(xs))]) for b in range(len(xs))]


def permuted(xs: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return each rank's output; a rank that receives nothing has zeros."""
    source = {b: a for a, b in pairs}
    return [xs[source[rank]] if rank in source else torch.zeros_like(xs[rank]) for rank in range(len(xs))]


def ring(size: int) -> list[tuple[int, int]]:
    """Return each rank's output if every rank sends to the next one."""
    return [(rank, (rank + 1) % size) for rank in range(size)]


def uneven(size: int) -> list[list[int]]:
    """Return how many rows rank a sends to rank b."""
    return [[(a + 2 * b) % 3 for b in range(size)] for a in range(size)]


def cases(size: int) -> dict[str, tuple[tuple[int, ...], Collective, Model]]:
    """Return by name: the shape of the input, the collective on a rank, the one-process model."""
    rows = uneven(size)
    return {
        "all_reduce sum": (
            (3, 2),
            lambda x, rank: ac.all_reduce(x),
            lambda xs: every(torch.stack(list(xs)).sum(0), size),
        ),
        "all_reduce avg": (
            (3, 2),
            lambda x, rank: ac.all_reduce(x, op="avg"),
            lambda xs: every(torch.stack(list(xs)).mean(0), size),
        ),
        "all_reduce 0-d": (
            (),
            lambda x, rank: ac.all_reduce(x),
            lambda xs: every(torch.stack(list(xs)).sum(0), size),
        ),
        "all_gather": (
            (2, 3),
            lambda x, rank: ac.all_gather(x),
            lambda xs: every(torch.cat(list(xs)), size),
        ),
        "all_gather dim 1": (
            (2, 3),
            lambda x, rank: ac.all_gather(x, dim=1),
            lambda xs: every(torch.cat(list(xs), dim=1), size),
        ),
        "all_gather 0-d": (
            (),
            lambda x, rank: ac.all_gather(x),
            lambda xs: every(torch.stack(list(xs)), size),
        ),
        "reduce_scatter": (
            (2 * size, 3),
            lambda x, rank: ac.reduce_scatter(x),
            lambda xs: list(torch.stack(list(xs)).sum(0).chunk(size)),
        ),
        "reduce_scatter avg dim 1": (
            (3, 2 * size),
            lambda x, rank: ac.reduce_scatter(x, op="avg", dim=1),
            lambda xs: list(torch.stack(list(xs)).mean(0).chunk(size, dim=1)),
        ),
        "all_to_all": (
            (2 * size, 2),
            lambda x, rank: ac.all_to_all(x),
            lambda xs: exchanged(xs, [[2] * size] * size),
        ),
        "broadcast": (
            (4,),
            lambda x, rank: ac.broadcast(x, src=size - 1),
            lambda xs: every(xs[size - 1], size),
        ),
        "permute": (
            (2, 2),
            lambda x, rank: ac.permute(x, ring(size)),
            lambda xs: permuted(xs, ring(size)),
        ),
        "permute to one only": (
            (2, 2),
            lambda x, rank: ac.permute(x, [(0, size - 1)]),
            lambda xs: permuted(xs, [(0, size - 1)]),
        ),
        "uneven all_to_all": (
            (-1, 2),
            lambda x, rank: ac.all_to_all(
                x,
                input_split_sizes=rows[rank],
                output_split_sizes=[row[rank] for row in rows],
            ),
            lambda xs: exchanged(xs, rows),
        ),
    }


def random(rank: int, shape: Sequence[int], seed: int) -> Tensor:
    """Return numbers that differ on every rank and agree in every process."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


def inputs_of(size: int, shape: tuple[int, ...]) -> list[Tensor]:
    """Return every rank's input; a first dimension of -1 stands for the sum of its uneven splits."""
    lengths = [sum(row) for row in uneven(size)]
    shapes = [(lengths[r], *shape[1:]) if shape[:1] == (-1,) else shape for r in range(size)]
    return [random(rank, shapes[rank], 1).requires_grad_() for rank in range(size)]


def loss(y: Tensor, rank: int) -> Tensor:
    """Return a scalar with second derivatives, with different weights on every rank."""
    weights = random(rank, y.shape, 2)
    return (weights * y + y**3).sum()


async def gradients(me: Rank) -> None:
    for name, (shape, collective, model) in cases(me.size).items():
        with me.case(name):
            alone = inputs_of(me.size, shape)
            results = model(alone)
            want = torch.autograd.grad(
                sum(loss(y, rank) for rank, y in enumerate(results)),
                alone[me.rank],
                allow_unused=True,
            )[0]
            want = torch.zeros_like(alone[me.rank]) if want is None else want
            x = alone[me.rank].detach().clone().requires_grad_()
            y = await me.get(collective(x, me.rank))
            torch.testing.assert_close(y.detach(), results[me.rank].detach())
            loss(y, me.rank).backward()
            assert x.grad is not None, "no gradient"
            torch.testing.assert_close(x.grad, want)


def test_gradients_are_those_of_the_sum_of_all_losses(world: World, runner: str) -> None:
    """Each differentiable collective has the gradient that one process computes."""
    world.run(gradients, runner=runner)


async def layouts(me: Rank) -> None:
    for name, layout in oracle.LAYOUTS.items():
        with me.case(name):
            base = random(me.rank, (4, 3), 1).requires_grad_()
            y = await me.get(ac.all_reduce(layout(base)))
            y.sum().backward()
            plain = random(me.rank, (4, 3), 1).requires_grad_()
            (layout(plain) * me.size).sum().backward()
            torch.testing.assert_close(base.grad, plain.grad)


def test_gradients_through_any_layout(pair: World) -> None:
    """Gradients also flow through non-contiguous inputs."""
    pair.run(layouts)


def numerically(me: Rank) -> None:
    x = random(0, (3,), 5).requires_grad_()
    for op in ("sum", "avg"):

        def reduced(x: Tensor, op: str = op) -> Tensor:
            return ac.all_reduce(x, op=op).wait() ** 2

        with me.case(f"gradcheck {op}"):
            assert torch.autograd.gradcheck(reduced, (x,))
        with me.case(f"gradgradcheck {op}"):
            assert torch.autograd.gradgradcheck(reduced, (x,))


def test_all_reduce_passes_gradcheck_and_gradgradcheck(pair: World) -> None:
    """First and second derivatives agree with finite differences, in step on all ranks."""
    pair.run(numerically, timeout=60)


async def twice(me: Rank) -> None:
    for name, (shape, collective, model) in cases(me.size).items():
        with me.case(name):
            alone = inputs_of(me.size, shape)
            total = sum(loss(y, rank) for rank, y in enumerate(model(alone)))
            firsts = torch.autograd.grad(total, alone, create_graph=True, allow_unused=True)
            second = sum((one**2).sum() for one in firsts if one is not None)
            want = torch.autograd.grad(second, alone[me.rank], allow_unused=True)[0]
            want = torch.zeros_like(alone[me.rank]) if want is None else want
            x = alone[me.rank].detach().clone().requires_grad_()
            y = await me.get(collective(x, me.rank))
            (first,) = torch.autograd.grad(loss(y, me.rank), x, create_graph=True)
            (got,) = torch.autograd.grad((first**2).sum(), x)
            torch.testing.assert_close(got, want)


def test_second_derivatives(pair: World) -> None:
    """Gradients of gradients are those that one process computes."""
    pair.run(twice)


async def no_gradient(me: Rank) -> None:
    calls = {
        "max": lambda x: ac.all_reduce(x, op="max"),
        "min": lambda x: ac.all_reduce(x, op="min"),
        "product": lambda x: ac.all_reduce(x, op="product"),
        "reduce_scatter max": lambda x: ac.reduce_scatter(x, op="max"),
    }
    for name, call in calls.items():
        with me.case(name):
            x = torch.full((2,), 1.0 + me.rank, requires_grad=True)
            y = await me.get(call(x))
            with raising(ac.AsyncCollError, name.split()[-1]):
                y.sum().backward()
    assert await me.get(ac.all_reduce(1)) == me.size


def test_what_has_no_gradient_raises_in_backward(pair: World, runner: str) -> None:
    """Backward raises instead of giving a zero; the forward result remains available."""
    pair.run(no_gradient, runner=runner)


async def grad_mode(me: Rank) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        quiet = ac.all_reduce(x)
    loud = ac.all_reduce(x)
    assert not (await me.get(quiet)).requires_grad, "recorded although called under no_grad"
    with torch.no_grad():
        got = await me.get(loud)
    assert got.requires_grad, "not recorded although called with gradients on"
    plain = await me.get(ac.all_reduce(torch.ones(2)))
    assert not plain.requires_grad


def test_grad_mode_is_that_of_the_call(pair: World, runner: str) -> None:
    """The grad mode at the call counts, not that at the await."""
    pair.run(grad_mode, runner=runner)


async def any_order(me: Rank) -> None:
    x = torch.ones(4, requires_grad=True)
    works = [ac.all_reduce(x * (k + 1)) for k in range(6)]
    results: list[Any] = [None] * 6
    for k in range(6) if me.rank else reversed(range(6)):
        results[k] = await me.get(works[k])
    order = results if me.rank else results[::-1]
    sum((y**2).sum() for y in order).backward()
    a = torch.ones(4, requires_grad=True)
    sum(((me.size * a * (k + 1)) ** 2).sum() for k in range(6)).backward()
    torch.testing.assert_close(x.grad, a.grad)


def test_awaits_in_another_order_on_every_rank(pair: World, runner: str) -> None:
    """Backward follows the order of the calls, not of the awaits."""
    pair.run(any_order, runner=runner)


async def beside(me: Rank) -> None:
    x = torch.full((3,), 1.0, requires_grad=True)
    y = await me.get(ac.all_reduce(x))
    out = [ac.all_reduce(torch.full((3,), float(k))) for k in range(10)]
    (y * (me.rank + 1)).sum().backward()
    for k, work in enumerate(out):
        oracle.same(await me.get(work), torch.full((3,), 2.0 * k))
    torch.testing.assert_close(x.grad, torch.full((3,), 3.0))


def test_backward_does_not_cross_what_is_in_flight(pair: World, runner: str) -> None:
    """The collectives of backward run on their own lane."""
    pair.run(beside, runner=runner)


async def trees(me: Rank) -> None:
    tree = {
        "w": torch.full((2,), 1.0, requires_grad=True),
        "b": torch.full((3,), 2.0, requires_grad=True),
        "n": 5,
    }
    got = await me.get(ac.all_reduce(tree))
    assert got["n"] == 5 * me.size
    ((got["w"] * 3).sum() + (got["b"] * (me.rank + 1)).sum()).backward()
    torch.testing.assert_close(tree["w"].grad, torch.full((2,), 3.0 * me.size))
    torch.testing.assert_close(tree["b"].grad, torch.full((3,), 1.0 * sum(range(1, me.size + 1))))


def test_gradients_through_trees(pair: World, runner: str) -> None:
    """Leaves of a reduced tree keep their gradients."""
    pair.run(trees, runner=runner)


async def no_gradients(me: Rank) -> None:
    x = torch.ones(2, requires_grad=True)
    parts = await me.get(ac.all_gather(x, uneven=True))
    parts[0].mul_(2)  # like any other result
    with raising(ac.UnsupportedOpError, "uneven"):
        torch.cat(parts).sum().backward()
    total = await me.get(ac.reduce(x, dst=0))
    if me.rank == 0:
        total /= me.size
        assert total.tolist() == [1.0, 1.0]
        with raising(ac.UnsupportedOpError, "reduce"):
            total.sum().backward()
    sent = await me.get(ac.broadcast(x if me.rank == 0 else None, safe_mode=True))
    if me.rank == 0:
        with raising(ac.UnsupportedOpError, "safe_mode"):
            sent.sum().backward()


def test_what_has_no_gradient_says_so(pair: World, runner: str) -> None:
    """Backward raises instead of leaving a part of the loss out of the gradient."""
    pair.run(no_gradients, runner=runner)
