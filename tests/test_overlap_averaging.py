"""Local SGD: parameters equal those of a loop that averages with blocking calls."""

from __future__ import annotations

import anyio
import pytest
import torch
from torch import nn

import asynccoll as ac
import oracle
from overlapping import batch, close, loss_of, network
from ranks import Rank, raising
from worlds import World

STEPS = 11


class Twin:
    """The same rounds with blocking calls, written out step by step."""

    def __init__(self, model: nn.Module, every: int, delay: int) -> None:
        self.parameters = [parameter.detach() for parameter in model.parameters()]
        self.every, self.delay, self.step = every, delay, 0
        self.due: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def after_step(self) -> None:
        self.step += 1
        self.correct()
        if self.step % self.every == 0:
            copies = [parameter.clone() for parameter in self.parameters]
            averages = [ac.all_reduce(copy, op="avg").wait() for copy in copies]
            self.due[self.step + self.delay] = copies, averages
            self.correct()

    def correct(self) -> None:
        if self.step in self.due:
            copies, averages = self.due.pop(self.step)
            for parameter, copy, average in zip(self.parameters, copies, averages, strict=True):
                parameter.copy_(average if self.delay == 0 else parameter + (average - copy))


async def against_blocking(me: Rank, every: int, delay: int) -> None:
    ours, twin = network(), network()
    steps = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, twin)]
    averaging = ac.overlap.average_parameters(ours, every=every, delay=delay)
    blocking = Twin(twin, every, delay)
    for step in range(STEPS):
        for model, optimizer in zip((ours, twin), steps, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch(me.rank, step)).backward()
            optimizer.step()
        await me.get(averaging)
        blocking.after_step()
        for mine, its in zip(ours.parameters(), twin.parameters(), strict=True):
            assert close(mine, its)
            if me.size <= 2:  # a sum of two does not depend on its order
                oracle.same(mine.detach(), its.detach())
    if me.runner == "blocking":
        averaging.finish().wait()
    else:
        await averaging.finish()
    for mine in ours.parameters():
        everybody = ac.all_gather(mine.detach().unsqueeze(0)).wait()
        assert all(torch.equal(one, everybody[0]) for one in everybody), "the same on every rank"


@pytest.mark.parametrize(("every", "delay"), [(1, 0), (4, 0), (4, 3), (3, 3), (1, 1)])
def test_as_blocking_rounds(world: World, runner: str, every: int, delay: int) -> None:
    """A round is waited for immediately, some steps later, or when the next round begins."""
    if delay != 3 and runner == "trio":
        runner = "asyncio"
    world.run(against_blocking, every, delay, runner=runner)


async def hidden(me: Rank) -> None:
    model = nn.Linear(4, 4)
    averaging = ac.overlap.average_parameters(model, every=2, delay=2)
    with ac.trace.recording() as timeline:
        begun = []
        for _ in range(4):
            await me.get(averaging)
            begun.append(sum(span.is_operation for span in timeline.spans) > 0)
            if me.rank == 0 and len(begun) == 2:
                me.show("round begun")  # the other rank has not reached its first step yet
            if me.rank == 1 and len(begun) == 1:
                me.see("round begun")
        await averaging.finish()
    assert begun == [False, True, True, True]
    assert {span.row for span in timeline.spans if span.is_operation} == {"averaging/backward"}


def test_a_round_is_not_waited_for_before_it_is_due(pair: World) -> None:
    """A rank continues while another has not even begun the round."""
    pair.run(hidden, runner="asyncio")


async def cut_short(me: Rank) -> None:
    parameter = nn.Parameter(torch.full((3,), float(me.rank)))
    averaging = ac.overlap.average_parameters([parameter], every=1, delay=0)
    if me.rank == 0:
        if me.runner == "blocking":
            with raising(ac.CollectiveTimeoutError):
                averaging.wait(timeout=0.05)
        else:
            with anyio.move_on_after(0.05) as limit:
                await averaging
            assert limit.cancelled_caught, "nobody else has begun the round"
        me.show("gave up")
    else:
        me.see("gave up")
    await me.get(averaging)
    oracle.same(parameter.detach(), torch.full((3,), 0.5))
    assert "step 1: nothing in flight" in repr(averaging)


def test_a_round_that_is_late_is_taken_up_again(pair: World, runner: str) -> None:
    pair.run(cut_short, runner=runner)


async def cut_short_at_the_end(me: Rank, delay: int) -> None:
    """Rank 0's await of the second round is cancelled; the delayed average of the first is due in it."""
    parameter = nn.Parameter(torch.full((3,), float(me.rank)))
    averaging = ac.overlap.average_parameters([parameter], every=1, delay=delay)
    if delay and me.rank == 0:
        await averaging
    if me.rank == 0:
        with anyio.move_on_after(0.05) as limit:
            await averaging
        assert limit.cancelled_caught
        me.show("gave up")
    else:
        me.see("gave up")
        for _ in range(1 + delay):
            await averaging
    await averaging.finish()
    oracle.same(parameter.detach(), torch.full((3,), 0.5))
    for step in range(2 + delay, 4):  # in step with the others
        await averaging
        assert f", step {step}:" in repr(averaging)
    await averaging.finish()


@pytest.mark.parametrize("delay", [0, 1])
def test_a_step_that_was_cut_short_before_the_end(pair: World, loop: str, delay: int) -> None:
    """Regression: the rank took its next step for this one, and stayed one step behind."""
    pair.run(cut_short_at_the_end, delay, runner=loop)


async def failed(me: Rank) -> None:
    parameter = nn.Parameter(torch.full((3,), float(me.rank)))
    averaging = ac.overlap.average_parameters([parameter], every=2)
    await averaging
    with raising(ac.CollectiveMismatchError, "at another step"):
        await (averaging if me.rank == 0 else averaging.finish())
    await averaging.finish()
    oracle.same(parameter.detach(), torch.full((3,), 0.5))


def test_after_a_round_that_failed_comes_another(pair: World, loop: str) -> None:
    """Regression: the error of the failed round was raised forever."""
    pair.run(failed, runner=loop)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"every": 0}, "every"),
        ({"every": 2, "delay": 3}, "at most every=2"),
        ({"every": 2, "delay": -1}, "-1"),
    ],
)
def test_refused(given: dict[str, int], says: str) -> None:
    with raising(ac.InvalidArgumentError, says):
        ac.overlap.average_parameters(network(), **given)
    with raising(ac.InvalidArgumentError, "requires_grad"):
        ac.overlap.average_parameters([torch.ones(1)], every=1)


def without_a_member(me: Rank) -> None:
    model, group = network(), ac.new_group([0])
    if me.rank:
        with raising(ac.InvalidArgumentError, "rank 1 is not in", "no parameters to average"):
            ac.overlap.average_parameters(model, every=2, group=group)
    else:
        ac.overlap.average_parameters(model, every=2, group=group).finish().wait()


def test_a_rank_that_is_not_in_the_group_is_refused(pair: World) -> None:
    """It is told where the averager is made. Regression: it was told in the first round."""
    pair.run(without_a_member, runner="blocking")


def in_another_order(me: Rank) -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("ba" if me.rank else "ab")})
    with raising(
        ac.CollectiveMismatchError, "rank 0 (of the group) has tensor a.weight", "rank 1 has tensor b."
    ):
        ac.overlap.average_parameters(model, every=2)
    model["b"].requires_grad_(me.rank == 0)
    with raising(ac.CollectiveMismatchError, "rank 0 (of the group) has", "freeze the same parameters"):
        ac.overlap.average_parameters(model, every=2)
    model.requires_grad_(False)
    averaging = ac.overlap.average_parameters([*model.parameters(), nn.Parameter(torch.ones(1))], every=1)
    averaging._given[-1].requires_grad_(False)
    with raising(ac.InvalidArgumentError, "nothing to average"):
        averaging.wait()


def test_layers_in_another_order_are_refused(pair: World) -> None:
    """Regression: layers of one shape were averaged with other layers, in silence."""
    pair.run(in_another_order, runner="blocking")


def frozen_differently(me: Rank) -> None:
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    averaging = ac.overlap.average_parameters(model, every=1)
    model[me.rank % 2].requires_grad_(False)
    with raising(ac.CollectiveMismatchError, "some are frozen", "the same parameters on every rank"):
        averaging.wait()
    with raising(ac.CollectiveMismatchError, "some are frozen"):
        averaging.finish().wait()
    model.requires_grad_(True)
    averaging.finish().wait()
    ac.overlap.check_parameters(model).wait()


def test_layers_that_are_frozen_on_some_ranks_only_are_refused(several: World) -> None:
    """Regression: a layer was averaged with another one of its shape, in silence."""
    several.run(frozen_differently, runner="blocking")


def averaged_after_sharded_steps(me: Rank) -> None:
    model = network()
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    averaging = ac.overlap.average_parameters(model, every=2, delay=1)
    twin = network()
    alone = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(model, batch(me.rank, step)).backward()
        for rank in range(me.size):
            (loss_of(twin, batch(rank, step)) / me.size).backward()
        optimizer.step().wait()
        averaging.wait()  # averages what is the same on all ranks
        alone.step()
    averaging.finish().wait()
    assert all(map(close, model.parameters(), twin.parameters()))
    optimizer.close()


def test_an_average_that_is_due_while_a_sharded_step_is_gathered(pair: World) -> None:
    """Regression: it was added to parameters that had not arrived, and the next forward was refused."""
    pair.run(averaged_after_sharded_steps, runner="blocking")


def steps_on(me: Rank) -> None:
    model = network()
    averaging = ac.overlap.average_parameters(model, every=2)
    if me.rank == 0:
        with raising(ac.CollectiveTimeoutError):
            averaging.finish().wait(timeout=0.05)
        with raising(ac.InvalidArgumentError, "finish()", "again first"):
            averaging.wait()
        ac.barrier().wait()
    else:
        ac.barrier().wait()  # only then is it that late
    averaging.finish().wait()
    averaging.wait()
    ac.overlap.check_parameters(model).wait()


def test_a_step_after_a_finish_that_was_cut_short_is_refused(pair: World) -> None:
    """This rank would miss the last average, and a later finish() would wait for ranks that had theirs."""
    pair.run(steps_on, runner="blocking")
