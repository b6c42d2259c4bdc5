"""check="full": calls that differ between ranks raise on all of them, and the error shows both sides."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asynccoll as ac
import oracle
import scripts
import worlds
from asynccoll.health.checks import mismatch
from asynccoll.host.call_number import CHILD
from asynccoll.runtime import state
from asynccoll.testing import simulate
from ranks import Rank, raising
from worlds import World


@pytest.fixture(scope="session", params=worlds.BACKENDS)
def checked(request: pytest.FixtureRequest) -> World:
    """Return a world of two ranks with check="full"."""
    return worlds.world(request.param, 2, check="full")


Call = Callable[[], Any]
#: name -> what rank 0 calls, what rank 1 calls, what the error must show of each.
MISMATCHES: dict[str, tuple[Call, Call, tuple[str, str]]] = {
    "op": (
        lambda: ac.all_reduce(torch.ones(4)),
        lambda: ac.all_gather(torch.ones(4)),
        ("all_reduce", "all_gather"),
    ),
    "reduction": (
        lambda: ac.all_reduce(torch.ones(4), op="sum"),
        lambda: ac.all_reduce(torch.ones(4), op="max"),
        ("sum", "max"),
    ),
    "shape": (
        lambda: ac.all_reduce(torch.ones(4)),
        lambda: ac.all_reduce(torch.ones(8)),
        ("[4]", "[8]"),
    ),
    "layout of the same size": (
        lambda: ac.all_reduce(torch.ones(2, 3)),
        lambda: ac.all_reduce(torch.ones(3, 2)),
        ("[2, 3]", "[3, 2]"),
    ),
    "dtype": (
        lambda: ac.all_reduce(torch.ones(4)),
        lambda: ac.all_reduce(torch.ones(4, dtype=torch.int32)),
        ("float32", "int32"),
    ),
    "root of broadcast": (
        lambda: ac.broadcast(torch.ones(4), src=0),
        lambda: ac.broadcast(torch.ones(4), src=1),
        ("src=0", "src=1"),
    ),
    "root of reduce": (
        lambda: ac.reduce(torch.ones(4), dst=0),
        lambda: ac.reduce(torch.ones(4), dst=1),
        ("dst=0", "dst=1"),
    ),
    "gathered shape": (
        lambda: ac.all_gather(torch.ones(2, 3)),
        lambda: ac.all_gather(torch.ones(2, 4)),
        ("[2, 3]", "[2, 4]"),
    ),
    "scattered shape": (
        lambda: ac.reduce_scatter(torch.ones(4)),
        lambda: ac.reduce_scatter(torch.ones(6)),
        ("reduce_scatter", "reduce_scatter"),
    ),
    "barrier": (
        ac.barrier,
        lambda: ac.all_reduce(torch.ones(1)),
        ("barrier", "all_reduce"),
    ),
    "number and tensor": (
        lambda: ac.all_reduce(1),
        lambda: ac.all_reduce(torch.ones(3)),
        ("all_reduce", "all_reduce"),
    ),
    "objects": (
        lambda: ac.all_gather_object([1]),
        lambda: ac.all_reduce(torch.ones(3)),
        ("all_gather_object", "all_reduce"),
    ),
    "tree": (
        lambda: ac.all_reduce({"a": torch.ones(2), "b": torch.ones(3)}),
        lambda: ac.all_reduce({"a": torch.ones(2), "c": torch.ones(3)}),
        ("all_reduce", "all_reduce"),
    ),
}


async def differ(me: Rank, name: str) -> None:
    mine, says = MISMATCHES[name][me.rank], MISMATCHES[name][2]
    await me.refuses(name, ac.CollectiveMismatchError, mine, says=(*says, "rank 0", "rank 1"))
    await me.check(f"after {name}", ac.all_reduce, torch.ones(3), expect=torch.full((3,), 2.0))


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_raises_on_every_rank(checked: World, name: str, runner: str) -> None:
    """CollectiveMismatchError shows both sides on both ranks, and the lane still works."""
    checked.run(differ, name, runner=runner)


async def order(me: Rank) -> None:
    calls = [ac.all_reduce, ac.all_gather]
    if me.rank == 1:
        calls.reverse()
    works = [call(torch.full((2,), 1.0)) for call in calls]
    for k, work in enumerate(works):
        with me.case(f"number {k}"), raising(ac.CollectiveMismatchError, "all_reduce", "all_gather"):
            await me.get(work)
    await me.check("afterwards", ac.all_reduce, 1, expect=2)


def test_crossed_calls_raise_on_every_rank(checked: World, runner: str) -> None:
    """Two calls in opposite order are in flight: both raise, and the lane still works."""
    checked.run(order, runner=runner)


async def places(me: Rank) -> None:
    await me.refuses(
        "places",
        ac.CollectiveMismatchError,
        MISMATCHES["shape"][me.rank],
        says=("test_checks.py:",),
    )


def test_the_error_tells_the_places(checked: World) -> None:
    """The error names the file and line of each side's call."""
    checked.run(places)


async def all_agree(me: Rank) -> None:
    x = oracle.counting(me.rank, (4, 2), torch.float32)
    inputs = oracle.by_rank(oracle.counting, 2, (4, 2), torch.float32)
    total = oracle.reduced(inputs, "sum")
    await me.check("all_reduce", ac.all_reduce, x, expect=total, value=True)
    await me.check("reduce", ac.reduce, x, dst=1, expect=total if me.rank else None, value=True)
    await me.check("broadcast", ac.broadcast, x, src=1, expect=inputs[1])
    await me.check("all_gather", ac.all_gather, x, expect=oracle.concatenated(inputs))
    await me.check("gather", ac.gather, x, dst=1, expect=oracle.concatenated(inputs) if me.rank else None)
    await me.check("scatter", ac.scatter, inputs if me.rank == 0 else None, expect=x)
    await me.check(
        "reduce_scatter",
        ac.reduce_scatter,
        x,
        expect=oracle.reduce_scatter(inputs, "sum")[me.rank],
        value=True,
    )
    await me.check("all_to_all", ac.all_to_all, x, expect=oracle.all_to_all(inputs)[me.rank])
    sent = [1, 3] if me.rank == 0 else [4, 0]
    received = [1, 4] if me.rank == 0 else [3, 0]
    splits = [[1, 3], [4, 0]]
    await me.check(
        "uneven all_to_all",
        ac.all_to_all,
        x,
        input_split_sizes=sent,
        output_split_sizes=received,
        expect=oracle.all_to_all(inputs, splits)[me.rank],
    )
    await me.check("permute", ac.permute, x, [(0, 1), (1, 0)], expect=inputs[1 - me.rank])
    await me.check("barrier", ac.barrier, expect=None)
    await me.check("number", ac.all_reduce, me.rank, expect=1)
    await me.check("text", ac.all_gather, "é" * me.rank, expect=["", "é"])
    await me.check("object", ac.all_gather_object, {me.rank: "x"}, expect=[{0: "x"}, {1: "x"}])
    rows = [torch.ones(rank, 2) for rank in range(2)]
    await me.check("uneven", ac.all_gather, rows[me.rank], uneven=True, expect=rows)
    tree = {"b": x, "a": me.rank} if me.rank else {"a": me.rank, "b": x}
    await me.check("tree", ac.all_reduce, tree, expect={"a": 1, "b": total}, value=True)
    if me.rank == 0:
        await me.check("send", ac.send, x, dst=1, expect=None)
    else:
        await me.check("recv", ac.recv, x, src=0, expect=inputs[0])


def test_what_agrees_passes(checked: World, runner: str) -> None:
    """Every collective works as without checks; arguments that may differ between ranks are not compared."""
    checked.run(all_agree, runner=runner)


async def does_not_block(me: Rank) -> None:
    if me.rank == 1:
        me.see("issued")
        await me.get(ac.all_reduce(torch.ones(2)))
    else:
        work = ac.all_reduce(torch.ones(2))
        assert not work.done()
        me.show("issued")
        await me.get(work)


def test_the_comparison_does_not_block_the_call(checked: World, runner: str) -> None:
    """The call returns before the peer has made its own."""
    checked.run(does_not_block, runner=runner)


FROM_ENVIRONMENT = """
    import torch, asynccoll as ac
    ac.initialize("gloo")
    x = torch.ones(4 if ac.get_rank() == 0 else 8)
    try:
        ac.all_reduce(x).wait()
    except ac.CollectiveMismatchError as error:
        print("[4]" in str(error), "[8]" in str(error))
    ac.finalize()
"""


def test_the_environment_asks_for_full_checks(tmp_path: Path) -> None:
    """ASYNCCOLL_CHECK=full means check="full" for a program that passes no ``check``."""
    for ended in scripts.run(tmp_path, FROM_ENVIRONMENT, ranks=2, env={"ASYNCCOLL_CHECK": "full"}):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["True", "True"]


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit argument overrides the environment; a wrong value of the variable is refused and named."""
    # As if in a new process: after finalize, nothing else could be called in this one.
    monkeypatch.setattr(state.process, "__dict__", vars(state.Process()))
    monkeypatch.setenv("ASYNCCOLL_CHECK", "everything")
    with pytest.raises(ac.InvalidArgumentError, match="everything"):
        ac.initialize("serial")
    ac.initialize("serial", check="off")
    ac.finalize()
    for name in ("ASYNCCOLL_CHECK", "ASYNCCOLL_MEMORY"):
        monkeypatch.setenv(name, "")  # as in a template whose value is left out
    ac.initialize("serial")
    ac.finalize()


async def after_a_block(me: Rank) -> None:
    works = []
    with contextlib.suppress(LookupError):
        async with ac.coalescing():
            works = [ac.all_reduce(torch.ones(2)), ac.broadcast(torch.ones(2), src=0)]
            if me.rank == 1:
                raise LookupError("no data")
    for work in works:
        with raising(ac.CollectiveError, "no data"):
            await me.get(work)
    await me.check("behind it", ac.all_reduce, torch.ones(2), expect=torch.full((2,), 2.0))


def test_a_call_behind_a_block_that_one_rank_has_not_sent_is_none_of_it(checked: World) -> None:
    checked.run(after_a_block)


@pytest.mark.parametrize("check", ["local", "full"])
@pytest.mark.parametrize("transport", ["gloo", "memory"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_long_texts_that_differ_where_they_are_cut_are_told_apart(
    check: str, transport: str, nodes: int
) -> None:
    """Both sides looked alike, so that the error spoke of two calls on one line, and of their cause."""
    named = [
        f"{number:x}" * 5 for number in range(7**5 % 1000, 9000, 3)
    ]  # too many to name the one that differs

    async def main(rank: int) -> str:
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            await ac.all_reduce({**dict.fromkeys(named, torch.ones(1)), "~": torch.ones(3 + rank)})
        return str(caught.value)

    report = simulate(main, world_size=2, check=check, transport=transport, nodes=nodes)
    report.check()
    for said in report.results.values():
        for rank in range(2):
            assert re.search(rf"rank {rank}: all_reduce .*checksum of all: .* at .*test_checks\.py:\d+", said)
        assert "different calls from one line" not in said


SKIPPED = (
    "(a rank may have skipped {} before this one, or made one more: do all ranks have the same number of "
    "batches, is a call under `if rank == 0`? If earlier calls were alike, their results may be mixed up)"
)
DIFFERENT_LINES = ("all_reduce sum float32[3] at x.py:5", "all_reduce max float32[3] at x.py:6")
#: What two ranks call, the number of the call on the lane (0: unknown), and the hint in the error.
HINTED: dict[str, tuple[tuple[str, str], int, str]] = {
    "first dimensions": (
        ("all_gather float32[3, 2] at x.py:5", "all_gather float32[4, 2] at x.py:5"),
        7,
        "(ac.all_gather with uneven=True takes tensors of different shapes)",
    ),
    "of what has no uneven=": (
        ("all_reduce sum float32[3] at x.py:5", "all_reduce sum float32[4] at x.py:5"),
        7,
        "",
    ),
    "more dimensions": (("all_gather float32[3] at x.py:5", "all_gather float32[3, 1] at x.py:5"), 7, ""),
    "lines": (DIFFERENT_LINES, 0, SKIPPED.format("a call")),
    "lines, at a call that is known": (DIFFERENT_LINES, 7, SKIPPED.format("one of the 6 calls")),
    "lines, at the second call": (DIFFERENT_LINES, 2, SKIPPED.format("the call")),
    "lines, at the first call": (DIFFERENT_LINES, 1, ""),
    "lines, at the first call of the second child": (DIFFERENT_LINES, CHILD + 1, ""),
}


def test_ranks_that_called_the_same_are_a_line() -> None:
    texts = ["barrier at x.py:5", "all_reduce sum float32[3] at x.py:6", "barrier at x.py:5"]
    shown = str(mismatch("lane 'default'", (0, 1, 4), texts)).splitlines()
    assert shown[1:3] == ["  ranks 0, 4: barrier at x.py:5", "  rank 1: all_reduce sum float32[3] at x.py:6"]


@pytest.mark.parametrize("case", HINTED)
def test_what_may_be_behind_a_mismatch_is_said(case: str) -> None:
    texts, place, hint = HINTED[case]
    shown = str(mismatch("lane 'default'", (0, 1), texts, place=place))
    assert shown.splitlines()[3:] == ([hint] if hint else [])
