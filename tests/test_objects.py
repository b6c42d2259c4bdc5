"""The *_object functions send any object, with an explicit codec."""

from __future__ import annotations

import argparse
import collections
import gc
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import asynccoll as ac
import oracle
import payloads
from ranks import Rank
from worlds import World


@dataclass
class Record:
    """Plain data with a name, which the default codec can encode."""

    name: str
    rank: int


class Opaque:
    """A class that only pickle can encode."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.rank == self.rank

    __hash__ = None


PLAIN = {
    "None": lambda rank: None,
    "int": lambda rank: 2**100 + rank,
    "float": lambda rank: 0.1 * rank,
    "text": lambda rank: "日本語" * rank,
    "bytes": lambda rank: b"\x00\xff" * rank,
    "nested": lambda rank: {"a": [rank, (1, "é", None)], 5: {"deep": True}},
    "tensor": lambda rank: {"x": oracle.moving(rank, (rank, 2), torch.float32)},
    "bfloat16": lambda rank: [oracle.moving(rank, (3,), torch.bfloat16)],
    "dataclass": lambda rank: Record(f"é{rank}", rank),
    "named tuple": lambda rank: payloads.Point(torch.full((2,), float(rank)), rank),
    "arguments": lambda rank: argparse.Namespace(lr=0.1, rank=rank, path=None),
    "defaultdict": lambda rank: collections.defaultdict(list, {rank: [1]}),
    "large": lambda rank: ["x" * 100_000] * (rank + 1),
    "large on one": lambda rank: list(range(30_000)) if rank == 0 else [],
}
PICKLED = {**PLAIN, "class": Opaque, "set": lambda rank: {rank}}


async def exchange(me: Rank, codec: str | None) -> None:
    table = PICKLED if codec else PLAIN
    tail: dict[str, Any] = {"codec": codec} if codec else {}
    for turn, (name, make) in enumerate(table.items()):
        root = turn % me.size
        every = [make(rank) for rank in range(me.size)]
        mine = every[me.rank]
        await me.check(f"all_gather {name}", ac.all_gather_object, mine, **tail, expect=every)
        await me.check(
            f"gather {name} to {root}",
            ac.gather_object,
            mine,
            dst=root,
            **tail,
            expect=every if me.rank == root else None,
        )
        await me.check(
            f"broadcast {name} from {root}",
            ac.broadcast_object,
            mine if me.rank == root else None,
            src=root,
            **tail,
            expect=every[root],
        )
        await me.check(
            f"scatter {name} from {root}",
            ac.scatter_object,
            every if me.rank == root else None,
            src=root,
            **tail,
            expect=mine,
        )


def test_plain_objects_by_the_default_codec(world: World, runner: str) -> None:
    """Containers, numbers, text, bytes and tensors are sent without executing code."""
    world.run(exchange, None, runner=runner)


def test_any_object_by_pickle(world: World, runner: str) -> None:
    """codec="pickle", asked for by name, sends any class."""
    world.run(exchange, "pickle", runner=runner)


@pytest.mark.parametrize("value", [np.float32(0.1), np.int16(3), np.bool_(True), np.array(1.5)])
@pytest.mark.parametrize("codec", [None, "pickle"])
def test_a_numpy_scalar_keeps_its_type(value: Any, codec: str | None) -> None:
    """This also holds if it is the whole object, which became a Python number before a codec saw it."""
    for got in (ac.broadcast_object(value, codec=codec).wait(), *ac.all_gather_object([value]).wait()[0]):
        assert type(got) is type(value)
        assert got.dtype == value.dtype
        assert got == value


class Trap:
    """An object whose unpickling executes a command."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        """Make unpickling run a command that leaves a trace in this process."""
        return (os.putenv, ("ASYNCCOLL_TRAP", "sprung"))


async def safe(me: Rank) -> None:
    for name, value in {"class": Opaque(1), "trap": Trap(), "function": len}.items():
        await me.refuses(name, (TypeError, ValueError), ac.all_gather_object, value, says=("pickle",))
    await me.check("afterwards", ac.all_gather_object, me.rank, expect=list(range(me.size)))


def test_the_default_codec_refuses_classes(world: World) -> None:
    """The sender refuses an object that would need code to decode; the error names pickle."""
    world.run(safe)


def vast() -> torch.Tensor:
    """Make an empty tensor whose shape takes more words than a slot has."""
    return torch.empty(0).as_strided((0, *[2**62] * 40), (1,) * 41)


async def refused(me: Rank) -> None:
    await me.refuses("codec", ValueError, ac.all_gather_object, 1, codec="xml", says=("xml", "pickle"))
    await me.refuses("dst", ValueError, ac.gather_object, 1, dst=me.size, says=(str(me.size),))
    await me.refuses("src", ValueError, ac.broadcast_object, 1, src=-1, says=("-1",))
    wordy = ac.Codec("own " * 200, lambda _: b"", bytes)
    says = ("800 bytes", "shorter name")
    await me.refuses("a long name", ValueError, ac.all_gather_object, 1, codec=wordy, says=says)
    await me.refuses("of many dimensions", ValueError, ac.all_gather, vast(), uneven=True, says=("fewer",))
    await me.refuses("unpicklable", (TypeError, ValueError), ac.all_gather_object, lambda: 0, codec="pickle")
    await me.check("afterwards", ac.all_gather_object, me.rank, expect=list(range(me.size)))


def test_bad_calls_are_refused(world: World) -> None:
    """Unknown codecs and ranks, and objects that cannot be encoded, are refused; the lane keeps working."""
    world.run(refused)


async def pipelined(me: Rank) -> None:
    works = []
    for turn in range(10):
        text = "é" * (50_000 if turn % 3 == 0 else turn)
        works.append((turn, text, ac.all_gather_object([text, me.rank])))
        works.append((turn, None, ac.all_reduce(turn)))
    for turn, text, work in reversed(works):
        with me.case(f"turn {turn}"):
            got = await me.get(work)
            if text is None:
                oracle.same(got, turn * me.size)
            else:
                oracle.same(got, [[text, rank] for rank in range(me.size)])


def test_programs_of_several_calls_stay_in_order(world: World, runner: str) -> None:
    """Objects (several messages each) and sums are in flight together, and awaited in reverse order."""
    world.run(pipelined, runner=runner)


async def left_alone(me: Rank) -> None:
    every = [[rank, "é" * 50_000 * rank] for rank in range(me.size)]
    with me.case("nobody waits"):
        work = ac.all_gather_object(every[me.rank])  # its second call is left to the progress thread
        me.look_until_done(work, "it stops after its first call")
        oracle.same(work.result(), every)
    with me.case("one waits for what comes after it"):
        first, second = ac.all_gather_object(every[me.rank]), ac.all_gather_object(me.rank)
        oracle.same(await me.get(second), list(range(me.size)))
        oracle.same(await me.get(first), every)


def test_objects_arrive_though_nobody_waits_for_them(world: World, runner: str) -> None:
    """This includes operations of several calls, which a waiter that waits immediately drives itself."""
    world.run(left_alone, runner=runner)


def unfinished() -> list[Any]:
    """Return this process's programs that still hold their data; earlier tests may have given some up."""
    return [one for one in gc.get_objects() if type(one).__name__ == "Job" and one.program is not None]


async def let_go(me: Rank) -> None:
    before = unfinished()
    for turn in range(10):
        oracle.same(await me.get(ac.all_gather_object("é" * 1000 * turn)), ["é" * 1000 * turn] * me.size)
    kept = [one for one in unfinished() if all(one is not other for other in before)]
    assert not kept, "what was sent is kept until the collector runs"


@pytest.mark.processes
def test_what_was_sent_is_let_go_of(pair: World, runner: str) -> None:
    """A completed program no longer holds its messages: tensors do not trigger the garbage collector."""
    pair.run(let_go, runner=runner)
