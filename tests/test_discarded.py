"""A result discarded where it is awaited: the call has changed nothing, although in torch it would have."""

from __future__ import annotations

import dis
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import asynccoll as ac
from asynccoll.testing import simulate
from asynccoll.waiting import discarded
from asynccoll.waiting.discarded import discarded_by


def call(*_: object, **__: object) -> Any:
    """Stand for a collective in the functions below, which are only read, never run."""


async def awaited() -> None:
    await call()


async def awaited_in_a_loop() -> None:
    for _ in range(2):
        await call(1, key=2)


def waited() -> None:
    call().wait()


def waited_with_a_limit(limit: float) -> None:
    call().wait(timeout=limit)


async def assigned() -> None:
    _ = await call()


async def returned() -> object:
    return await call()


async def passed_on() -> None:
    print(await call())


async def in_a_tuple() -> object:
    return (await call(), 1)


async def collected() -> object:
    return [await call() for _ in range(2)]


async def asked_of() -> None:
    (await call()).fill_(0)


def waited_and_passed_on() -> None:
    print(call().wait())


def kept() -> object:
    work = call()
    work.wait()
    return work


def called(function: Callable[..., object]) -> int:
    """Return where the bytecode of ``function`` calls ``call``."""
    steps = list(dis.get_instructions(function))
    loaded = next(step.offset for step in steps if step.argval == "call")
    return next(step.offset for step in steps if step.offset > loaded and step.opname.startswith("CALL"))


@pytest.mark.parametrize("function", [awaited, awaited_in_a_loop, waited, waited_with_a_limit])
def test_what_nobody_gets_is_discarded(function: Callable[..., object]) -> None:
    how = discarded_by(function.__code__, called(function))
    assert how == ("wait" if function in (waited, waited_with_a_limit) else "await")


@pytest.mark.parametrize(
    "function", [assigned, returned, passed_on, in_a_tuple, asked_of, waited_and_passed_on, kept]
)
def test_what_somebody_may_get_is_not(function: Callable[..., object]) -> None:
    assert not discarded_by(function.__code__, called(function))


def heard(main: Callable[[int], Coroutine[Any, Any, None]]) -> list[str]:
    """Return what the warnings tell two simulated ranks to write."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        simulate(main, world_size=2).check()
    return [
        str(one.message).split("`")[1] for one in found if issubclass(one.category, ac.DiscardedResultWarning)
    ]


def test_few_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that compiles its code at every step does not keep all of it in memory."""
    monkeypatch.setattr(discarded, "_MOST", 2)
    monkeypatch.setattr(discarded, "_known", {})
    for step in range(5):
        code = compile("print(end=str(how(0)))", f"step {step}", "exec")
        exec(code, {"how": discarded.thrown_away_by})
        assert len(discarded._known) <= 2


def test_each_rank_that_would_have_got_a_result_is_told() -> None:
    x = torch.ones(2)

    async def all_reduced(_: int) -> None:
        await ac.all_reduce(x)

    async def broadcast(_: int) -> None:
        await ac.broadcast(x, src=1)

    async def reduced(_: int) -> None:
        await ac.reduce({"a": x}, dst=1)

    async def scaled(_: int) -> None:
        ac.all_reduce(x, prescale=0.5).wait()

    async def of_the_largest(_: int) -> None:
        await ac.all_reduce(x, op="max")

    async def in_torchs_words(_: int) -> None:
        await ac.all_reduce(x, op=torch.distributed.ReduceOp.MAX)

    assert heard(all_reduced) == ["x = await ac.all_reduce(x)"] * 2
    assert heard(broadcast) == ["x = await ac.broadcast(x, src=1)"]
    assert heard(reduced) == ["x = await ac.reduce(x, dst=1)"]
    assert heard(scaled) == ["x = ac.all_reduce(x).wait()"] * 2
    assert heard(of_the_largest) == ["x = await ac.all_reduce(x, op='max')"] * 2
    assert heard(in_torchs_words) == ["x = await ac.all_reduce(x, op=...)"] * 2


def test_what_has_an_effect_or_is_kept_is_fine() -> None:
    async def main(rank: int) -> None:
        x = torch.ones(2)
        await ac.all_reduce(x, out=x)
        total = await ac.all_reduce(x)
        assert total.tolist() == [4.0, 4.0]
        await ac.all_reduce(1)  # a number cannot be filled, so the call can only be meant to wait
        await ac.barrier()
        work = ac.all_reduce(x)
        await work
        assert work.result().tolist() == [4.0, 4.0]
        totals = [await ac.all_reduce(x) for _ in range(2)]
        assert len(totals) == 2
        if rank == 0:
            await ac.broadcast(x)
        else:
            x = await ac.broadcast(x)

    assert heard(main) == []


def test_the_source_of_a_call_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once whether or not the result is discarded."""
    looked: list[int] = []
    real = discarded.discarded_by
    monkeypatch.setattr(discarded, "discarded_by", lambda *at: looked.append(1) or real(*at))

    async def main(_: int) -> None:
        x = torch.ones(2)
        for _ in range(3):
            await ac.all_reduce(x)

    assert len(heard(main)) == 6
    assert len(looked) == 1


def test_as_an_error_it_refuses_the_call_before_anything_is_sent() -> None:
    async def main(rank: int) -> None:
        x = torch.ones(2)
        if rank == 0:
            await ac.all_reduce(x)
        else:
            _ = await ac.all_reduce(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ac.DiscardedResultWarning)
        report = simulate(main, world_size=2)
    assert isinstance(report.errors[0], ac.DiscardedResultWarning)
    assert isinstance(report.errors[1], ac.PeerRefusedError)
