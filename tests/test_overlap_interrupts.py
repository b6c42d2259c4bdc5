"""Ctrl-C between two statements of what this package does after a wait: the next wait has the same result."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import asynccoll as ac
from asynccoll.overlap.averaging import ParameterAverager
from asynccoll.overlap.buckets import Bucket, FlaggedBucket
from asynccoll.overlap.gradients import GradientReducer
from asynccoll.overlap.pending import Pending
from asynccoll.overlap.rows import SparseGradient
from asynccoll.overlap.sharded import ShardedOptimizer
from asynccoll.overlap.shards import ShardBucket
from asynccoll.overlap.steps import Resumable
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


def test_a_gradient_that_is_put_when_ctrl_c_comes_is_scaled_once() -> None:
    """Regression: one that backward had added to in its bucket was scaled again as the bucket was filled."""
    for left in itertools.count(1):
        parameter = torch.zeros(3, requires_grad=True)
        parameter.grad = torch.ones(3)
        bucket = Bucket([parameter])
        bucket.put(0, 1.0)
        bucket.begin()
        parameter.grad.fill_(4.0)
        came = True
        with contextlib.suppress(KeyboardInterrupt), Strike(left, Bucket.put.__code__, at="opcode"):
            bucket.put(0, 0.5)
            came = False
        bucket.fill(0.5)
        assert parameter.grad.tolist() == bucket.flat[:3].tolist() == [2.0] * 3, f"struck at {left}"
        if not came:
            break
    assert left > 20


def test_a_gradient_of_a_part_that_is_put_when_ctrl_c_comes_counts_as_ours() -> None:
    """Regression: it was refused as one that the user had changed, on all ranks, if gradients accumulate."""
    for left in itertools.count(1):
        parameter = nn.Parameter(torch.zeros(3))
        bucket = ShardBucket([parameter], rank=0, size=1)
        parameter.grad = torch.ones(3)
        bucket.noted(0)
        bucket.put(0, 1.0)
        bucket.adopt()
        bucket.begin()
        bucket.look(0)
        parameter.grad.add_(4.0)
        bucket.noted(0)
        came = True
        with contextlib.suppress(KeyboardInterrupt), Strike(left, Bucket.put.__code__, at="opcode"):
            bucket.fill(0.5)
            came = False
        bucket.fill(0.5)
        assert bucket.flat[:3].tolist() == [2.0] * 3, f"struck at {left}"
        if not came:
            break
    assert left > 20


def one_alone() -> tuple[nn.Parameter, ac.overlap.ShardedOptimizer]:
    """Make an optimizer in a world of one, whose next step subtracts one."""
    model = nn.ParameterList([torch.zeros(1)])
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model[0].sum().backward()
    return model[0], optimizer


@pytest.mark.parametrize("code", [ShardedOptimizer._step, torch.optim.SGD.step.__wrapped__])  # type: ignore[attr-defined]
def test_a_step_that_ctrl_c_cuts_off_says_so_from_then_on(code: Callable[..., object]) -> None:
    """Regression: each wait for it raised KeyboardInterrupt again, as if Ctrl-C had been pressed again."""
    parameter, optimizer = one_alone()
    step = optimizer.step()
    with pytest.raises(KeyboardInterrupt), Strike(1, code.__code__, at="opcode"):
        step.wait()
    again = optimizer.step()
    for wait in (step.wait, again.wait, optimizer.clip_grad_norm_(1.0).wait, optimizer.gather):
        with pytest.raises(ac.InvalidArgumentError, match=r"Ctrl-C came while step\(\) .* was computing"):
            wait()
    with pytest.raises(ac.InvalidArgumentError):
        parameter.sum().backward()
    optimizer.close()


@pytest.mark.parametrize(
    "where", [Resumable.called, Resumable.through, Resumable._first, Resumable._drop_ended]
)
def test_a_step_begins_and_ends_once_though_ctrl_c_comes(where: Callable[..., object]) -> None:
    """Regression: another one was made after it, if Ctrl-C came as it was noted."""
    for left in itertools.count(1):
        parameter, optimizer = one_alone()
        step = optimizer.step()
        came = True
        with contextlib.suppress(KeyboardInterrupt), Strike(left, where.__code__, at="opcode"):
            step.wait()
            came = False
        step.wait()
        optimizer.gathered().wait()
        assert parameter.tolist() == [-1.0], f"struck at {left}"
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step().wait()
        optimizer.close()
        assert parameter.tolist() == [-2.0], f"struck at {left}"
        if not came:
            break
    assert left > 5


def test_a_call_that_was_not_made_to_the_end_goes_in_silence(unraisable: list[object]) -> None:
    """Its finalizer would otherwise clutter the output of a program that was interrupted."""
    _, optimizer = one_alone()
    with pytest.raises(KeyboardInterrupt), Strike(1, Pending.__init__.__code__):
        optimizer.step()
    assert not unraisable
    optimizer.step().wait()
    optimizer.close()
