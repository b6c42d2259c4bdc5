"""Ctrl-C while a block (a lane, a scope, coalesced calls) is entered or left: behind each call of that."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asynccoll as ac
from asynccoll.host.blocks import Block, innermost
from asynccoll.ops.coalescing import own_block
from asynccoll.ops.scopes import current_lane
from asynccoll.testing import simulate
from asynccoll.waiting.work import scopes
from struck import Strike

BLOCKS: dict[str, Callable[[], Block[Any]]] = {
    "lane": lambda: ac.lane("inner"),
    "scope": ac.scope,
    "coalescing": ac.coalescing,
}


def around() -> tuple[object, ...]:
    return current_lane(), innermost(scopes), own_block()


def is_before_exit(interrupt: KeyboardInterrupt) -> bool:
    """Whether Ctrl-C came before the first statement of ``__exit__``, which had only been called."""
    *_, (frame, line), _ = traceback.walk_tb(interrupt.__traceback__)  # the last one is that of ``Strike``
    code = frame.f_code
    return code is Block.__exit__.__code__ and line == code.co_firstlineno


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("entered_twice", [False, True])
def test_a_block_that_is_struck_has_been_left(name: str, entered_twice: bool) -> None:
    """The calls behind it were made in it: on its lane, where no other rank made them, or were never sent."""
    for left in itertools.count(1):
        came = True
        with ac.lane("outer"), ac.scope(), ac.coalescing():
            block = BLOCKS[name]()
            with block if entered_twice else contextlib.nullcontext():
                expected = around()
                try:
                    with Strike(left), block:
                        pass
                    came = False
                except KeyboardInterrupt as interrupt:
                    if is_before_exit(interrupt):  # there no code of ours could know of it
                        block.__exit__()
                assert around() == expected, f"struck behind call {left}"
        assert around() == ("default", None, None), f"struck behind call {left}"
        if not came:
            break
    assert left > 5


def outcome(work: ac.Work[torch.Tensor]) -> object:
    try:
        return work.wait().tolist()
    except ac.CollectiveError as error:
        return type(error)


def insisting(x: torch.Tensor) -> object:
    """Sum ``x``, and once more where the call was lost behind another one, as its error says."""
    for _ in range(2):
        with contextlib.suppress(ac.PeerRefusedError):
            return ac.all_reduce(x).wait().tolist()
    return None


@pytest.mark.slow
def test_ctrl_c_at_the_end_of_a_block_loses_its_calls_on_all_ranks_or_on_none() -> None:
    """No rank waits for calls that were neither sent nor refused, and the next call is in step."""

    def main(rank: int) -> list[bool]:
        got: list[bool] = []
        for left in range(2, 320, 3):  # up to the second of three messages
            came = True
            xs = [torch.full((2,), float(rank + 1 + k)) for k in range(3)]
            works = []
            with contextlib.suppress(KeyboardInterrupt):
                with contextlib.ExitStack() as strikes, ac.coalescing():
                    works = [
                        ac.all_reduce(xs[0]),
                        ac.all_reduce(xs[1], op="max"),
                        ac.broadcast(xs[2], src=1),
                    ]
                    if not rank:
                        strikes.enter_context(Strike(left))
                came = False
            outcomes = [outcome(work) for work in works]
            for result, right in zip(outcomes, ([3.0] * 2, [3.0] * 2, [4.0] * 2), strict=True):
                assert result in (right, ac.CollectiveError, ac.PeerRefusedError), (left, outcomes)
            assert insisting(torch.ones(2)) == [2.0] * 2, (left, outcomes)
            got.append(came)
        return got

    report = simulate(main, world_size=2, loop="none", timeout=3600.0)
    report.check()
    assert sum(report.results[0]) > 90


def test_ctrl_c_in_a_context_manager_of_the_end_of_a_block_gives_no_call_a_false_result() -> None:
    """The calls were taken, and neither sent nor given up: with the interrupt at hand, each gave None."""
    entering = contextlib._GeneratorContextManager.__enter__.__code__

    def main(rank: int, left: int) -> bool:
        works = []
        try:
            with contextlib.ExitStack() as strikes, ac.coalescing():
                works = [ac.all_reduce(torch.ones(2)), ac.all_reduce(torch.ones(2), op="max")]
                if not rank:
                    strikes.enter_context(Strike(left, entering))
        except KeyboardInterrupt as interrupt:
            outcomes = [outcome(work) for work in works]
            assert all(one == [2.0] * 2 or isinstance(one, type) for one in outcomes), (interrupt, outcomes)
            return True
        return False

    struck = 0
    for left in range(1, 8):
        report = simulate(lambda rank, left=left: main(rank, left), world_size=2, loop="none", timeout=3600.0)
        assert report.errors.keys() <= {1}, report.errors
        struck += report.results[0]
    assert struck > 2
