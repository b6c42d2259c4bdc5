"""A call's input must stay unchanged until its work was waited for: torch counts the writes, we check."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asynccoll as ac
import oracle
from ranks import Rank, raising
from worlds import World

_SAYS = ("written to in place before its work was waited for", "all_reduce", "test_unwritten.py")


async def written(me: Rank) -> None:
    n = me.size
    for shape in (1,), (3, 5), (1 << 16,), (3 << 20,):  # copied at the call, read later, copied by a thread
        x = torch.ones(shape)
        work = ac.all_reduce(x)
        x.add_(1)
        with raising(ac.InvalidArgumentError, *_SAYS):
            await me.get(work)
        with raising(ac.InvalidArgumentError, *_SAYS):  # the same for every waiter
            await me.get(work.map(torch.sum))
        assert work.done() and isinstance(work.exception(), ac.InvalidArgumentError)
        total = await me.get(ac.all_reduce(torch.ones(shape)))  # the lane remains usable
        oracle.same(total, torch.full(shape, float(n)))
        x.add_(1)
    parameter = torch.nn.Parameter(torch.ones(4))
    works = [
        ac.all_gather(parameter),
        ac.all_reduce([parameter, torch.zeros(2)]),
        ac.all_reduce(parameter[:]),
    ]
    with torch.no_grad():
        parameter[1:2] = 7  # through a view, past autograd
    for work in works:
        with raising(ac.InvalidArgumentError, "written to"):
            await me.get(work)
    with ac.coalescing():
        work = ac.all_reduce(x)
        x.zero_()
    with raising(ac.InvalidArgumentError, *_SAYS):
        await me.get(work)
    prepared = ac.prepare("all_reduce", x)
    work = prepared.start()
    x.zero_()
    with raising(ac.InvalidArgumentError, *_SAYS):
        await me.get(work)
    oracle.same(await me.get(prepared.start()), torch.zeros_like(x))
    for name, how in (("broadcast", {}), ("all_reduce", {"out": torch.empty_like(x)})):
        work = ac.prepare(name, x, **how).start()
        x.add_(1)
        if me.rank and name == "broadcast":
            await me.get(work)  # not read: only an example here
        else:
            with raising(ac.InvalidArgumentError, "written to", name):
                await me.get(work)


def test_an_input_that_is_written_to_in_flight_is_an_error(world: World, runner: str) -> None:
    world.run(written, runner=runner)


async def of_many(me: Rank) -> None:
    def put_together(call: Callable[[], ac.Work[Any]]) -> ac.Work[Any]:
        with ac.coalescing():
            return call()

    src = me.size - 1
    calls: list[Callable[[torch.Tensor], ac.Work[Any]]] = [
        lambda x: ac.reduce([x, 1.0], dst=src),
        lambda x: ac.gather({"x": x}, dst=src),
        lambda x: ac.all_reduce([x], postscale=2.0),
        lambda x: ac.all_reduce([x, x], out=[torch.empty_like(x), torch.empty_like(x)]),
        lambda x: ac.prepare("all_reduce", {"x": x}, out={"x": torch.empty_like(x)}).start(),
        lambda x: ac.all_to_all([x] * me.size),
        lambda x: put_together(lambda: ac.all_reduce([x, x])),
        lambda x: put_together(lambda: ac.all_gather([x])),
    ]
    of_src: list[Callable[[torch.Tensor | None], ac.Work[Any]]] = [
        lambda x: ac.scatter(x, src=src),
        lambda x: ac.scatter(None if x is None else [{"x": x}] * me.size, src=src),
    ]
    for rows in me.size, me.size << 14:  # in one round, and in two
        for call in calls:
            x = torch.ones(rows, 2)
            work = call(x)
            x.add_(1)
            with raising(ac.InvalidArgumentError, "written to", "test_unwritten.py"):
                await me.get(work)
        for call in of_src:
            x = torch.ones(rows, 2)
            work = call(x if me.rank == src else None)
            x.add_(1)
            if me.rank == src:
                with raising(ac.InvalidArgumentError, "written to", "scatter", "test_unwritten.py"):
                    await me.get(work)
            else:
                await me.get(work)


def test_the_tensors_of_trees_and_lists_must_stay_as_they_are_too(world: World, runner: str) -> None:
    world.run(of_many, runner=runner)


async def allowed(me: Rank) -> None:
    n = me.size
    flat = torch.ones(8)
    first, rest = flat.view(2, 4).unbind()
    work = ac.all_reduce(first)
    rest.add_(1)  # another part of the same memory, which shares one version counter
    oracle.same(await me.get(work), torch.full((4,), float(n)))
    flat.add_(1)
    filled = torch.empty(4)
    oracle.same(await me.get(ac.all_reduce(filled.fill_(1), out=filled)), torch.full((4,), float(n)))
    turned = torch.ones(4, 3).t()
    mean = await me.get(ac.all_reduce(turned, op="avg", out=turned))  # filled by the waiter
    oracle.same(mean, torch.ones(3, 4))
    tree = [torch.ones(2), torch.ones(3).double()]
    await me.get(ac.all_reduce(tree, out=tree))
    await me.get(ac.prepare("all_reduce", tree, out=tree).start())
    rows = torch.zeros(n, 2)
    rows[me.rank] = 1.0
    oracle.same(await me.get(ac.all_gather(rows[me.rank : me.rank + 1], out=rows)), torch.ones(n, 2))
    with torch.inference_mode():
        x = torch.ones(3)
        work = ac.all_reduce(x)
        oracle.same(await me.get(work), torch.full((3,), float(n)))
        x.add_(1)
    example = torch.zeros(2)
    work = ac.broadcast(example if me.rank else torch.ones(2))
    example.add_(1)  # read on src only
    oracle.same(await me.get(work), torch.ones(2))
    grown = torch.ones(2, requires_grad=True)
    (await me.get(ac.all_reduce(grown))).sum().backward()
    oracle.same(grown.grad, torch.full((2,), float(n)))


def test_what_is_no_write_to_an_input_is_none(world: World, runner: str) -> None:
    world.run(allowed, runner=runner)


async def later_waiters(me: Rank) -> None:
    x = torch.ones(2)
    work = ac.all_reduce(x)
    mapped = work.map(torch.sum)
    await me.get(work)
    x.add_(1)  # the work has been waited for
    results: list[object] = []
    other = threading.Thread(target=lambda: results.append(work.wait()))
    other.start()
    other.join()
    assert results[0] is await me.get(work)
    assert float(await me.get(mapped)) == 2 * me.size


def test_whoever_waits_after_another_finds_the_input_free(world: World, runner: str) -> None:
    world.run(later_waiters, runner=runner)


async def messages(me: Rank) -> None:
    if me.lacks("send"):
        return
    x = torch.ones(2)
    if me.rank == 0:
        work = ac.send(x, dst=1)
        x.add_(1)
        with raising(ac.InvalidArgumentError, "written to"):
            await me.get(work)
    if me.rank == 1:
        work = ac.recv(x, src=0)
        x.add_(1)  # not read: only an example
        await me.get(work)


@pytest.mark.parametrize("loop", ["asyncio"])
def test_a_message_is_read_until_its_work_was_waited_for(pair: World, loop: str) -> None:
    pair.run(messages, runner=loop)
