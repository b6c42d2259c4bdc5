"""Ctrl-C between two statements of what this package does after a wait: the next wait has the same result."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import asynccoll as ac
from asynccoll.overlap.averaging import ParameterAverager
from asynccoll.overlap.buckets import FlaggedBucket
from asynccoll.overlap.gradients import GradientReducer
from asynccoll.overlap.rows import SparseGradient
from asynccoll.overlap.shards import ShardBucket
from asynccoll.testing import simulate
from ranks import Rank
from struck import Strike
from worlds import World

#: Each function is struck behind its first call, its second, and so on up to this one.
TIMES = 16


def struck(rank: int, left: int, code: types.CodeType, wait: Callable[[], object]) -> bool:
    """Wait, on the first rank with Ctrl-C behind the ``left``-th call of ``code``; returns whether it came.

    It comes once more as the next wait runs ``code`` again.
    """
    if rank:
        wait()
        return False
    for came in (False, True):
        with contextlib.suppress(KeyboardInterrupt), Strike(left, code):
            wait()
            return came
    wait()
    return True


def assert_struck(main: Callable[[int], int]) -> None:
    report = simulate(main, world_size=2, loop="none")
    report.check()
    assert report.results[0] > 1


@pytest.mark.parametrize("delay", [0, 1])
def test_an_average_that_ctrl_c_interrupts_corrects_each_parameter_once(delay: int) -> None:
    """Regression: the next wait corrected those before that once more."""

    def main(rank: int) -> int:
        came = 0
        for left in range(1, TIMES):
            parameters = [torch.full((2,), float(4 * rank + i), requires_grad=True) for i in range(3)]
            averaging = ac.overlap.average_parameters(parameters, every=1, delay=delay)
            for _ in range(delay):
                averaging.wait()
            came += struck(rank, left, ParameterAverager._take.__code__, averaging.wait)
            assert [x.tolist() for x in parameters] == [[2.0 + i] * 2 for i in range(3)], left
            averaging.finish().wait()
        return came

    assert_struck(main)


class Table(nn.Module):
    """Two dense parameters, and one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 1, sparse=True)
        self.one = nn.Parameter(torch.zeros(2))
        self.other = nn.Parameter(torch.zeros(2))

    def forward(self, factor: float) -> torch.Tensor:
        dense: torch.Tensor = self.one.sum() + self.other.sum() + self.rows(torch.tensor([1])).sum()
        return factor * dense


def gradients_of(model: nn.Module) -> list[list[float]]:
    found = [x.grad for x in model.parameters()]
    return [[] if x is None else x.to_dense().flatten().tolist() for x in found]


def handed_over(me: Rank, where: Callable[..., object], dtype: torch.dtype | None) -> None:
    came = 0
    for left in range(1, TIMES):
        model = Table()
        gradients = ac.overlap_gradients(model, bucket_bytes=8, first_bucket_bytes=8, reduce_dtype=dtype)
        for step in (1.0, 2.0, 3.0):
            model.zero_grad()
            model(step * (1 + me.rank)).backward()
            if step == 2.0:
                # Once the step has ended, another wait would begin the next one.
                wait = functools.partial(wait_unless_ended, gradients, gradients._works)
                came += struck(me.rank, left, where.__code__, wait)
            else:
                gradients.wait()
            dense = [1.5 * step] * 2
            assert gradients_of(model) == [dense, dense, [0.0, 1.5 * step, 0.0]], (left, step)
        gradients.close()
    assert me.rank or came > 1


def wait_unless_ended(gradients: ac.overlap.GradientReducer, works: list[object]) -> None:
    if gradients._works is works:
        gradients.wait()


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("where", [FlaggedBucket.adopt, SparseGradient.adopt, GradientReducer._end_step])
def test_gradients_that_are_handed_over_when_ctrl_c_comes(
    pair: World, where: Callable[..., object], dtype: torch.dtype | None
) -> None:
    """Regression: the next wait refused what the first had written, or the next step sent old gradients."""
    pair.run(handed_over, where, dtype)


def wait_reduced(optimizer: ac.overlap.ShardedOptimizer) -> None:
    optimizer.reduced().wait()


def test_gradients_of_a_part_that_accumulate_are_added_once() -> None:
    """Regression: the next wait added them again."""

    def main(rank: int) -> int:
        came = 0
        for left in range(1, TIMES):
            model = Table()
            model.rows.requires_grad_(False)
            trained = [model.one, model.other]
            optimizer = ac.overlap.shard_optimizer(
                model, torch.optim.SGD(trained, lr=1.0), bucket_bytes=8, first_bucket_bytes=8
            )
            model(float(2 * rank)).backward()
            optimizer.reduced().wait()
            model(float(8 * rank)).backward()
            wait = functools.partial(wait_reduced, optimizer)
            came += struck(rank, left, ShardBucket.adopt.__code__, wait)
            optimizer.step().wait()
            optimizer.gathered().wait()
            assert [x.tolist() for x in trained] == [[-5.0] * 2] * 2, left
            optimizer.close()
        return came

    assert_struck(main)


@pytest.mark.filterwarnings("ignore::asynccoll.UnawaitedWorkWarning")
@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("where", [GradientReducer._send, GradientReducer._begin])
def test_a_bucket_is_not_sent_twice_if_ctrl_c_comes_as_it_is_sent(
    where: Callable[..., object], limit: int | None
) -> None:
    """Regression: the other ranks took the second one for the next bucket, in silence if it was as large."""

    def main(rank: int) -> list[str]:
        told = []
        for left in range(1, TIMES // 2):
            model = nn.ParameterList([torch.zeros(8), torch.zeros(8)])
            gradients = ac.overlap_gradients(
                model, lane=f"{left}", bucket_bytes=8, first_bucket_bytes=8, max_in_flight_bytes=limit
            )
            first = functools.partial(struck, rank, left, where.__code__, gradients.wait)
            for wait in (first, gradients.wait):
                for index, own in enumerate(model):
                    own.grad = torch.full((8,), 2.0 * rank + 4.0 * index)
                try:
                    wait()
                except (ac.InvalidArgumentError, ac.PeerRefusedError) as error:
                    told.append(str(error))
                else:
                    told.append("right")
                    assert [x.grad.tolist() for x in model if x.grad is not None] == [[1.0] * 8, [5.0] * 8]
            gradients.close()
        return told

    report = simulate(main, world_size=2, loop="none")
    report.check()
    told, others = report.results[0], report.results[1]
    assert "right" in told
    assert any("close() this one on every rank" in one for one in told)
    # The others may have had all buckets of the first step, but none of those after it.
    assert told[::2].count("right") == told[1::2].count("right") == others[1::2].count("right")
