"""A step that one rank leaves out of a loop with ``overlap_gradients`` is reported in the next reduction."""

from __future__ import annotations

import copy
import io
import linecache
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import asynccoll as ac
from asynccoll.overlap.forwards import left_out
from ranks import Rank
from worlds import World

STEPS = 6


class Heard(logging.Handler):
    """Collects the messages about steps."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("asynccoll.shift").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("asynccoll.shift").removeHandler(self)
        super().close()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def no_forward(net: nn.Module, x: torch.Tensor) -> None:
    pass


def without_gradients(net: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        net(x)


def evaluated(net: nn.Module, x: torch.Tensor) -> None:
    net.eval()
    net(x)
    net.train()


def another(net: nn.Module, x: torch.Tensor) -> None:
    copy.deepcopy(net)(x)


def pickled(net: nn.Module, x: torch.Tensor) -> None:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    torch.load(file, weights_only=False)(x)


#: What one rank may do between two steps without causing a message.
MEANT = {one.__name__: one for one in (no_forward, without_gradients, evaluated, another, pickled)}


async def trained(
    me: Rank, left: dict[int, int], extra: Callable[[nn.Module, torch.Tensor], None]
) -> list[str]:
    """``left`` says which step each rank leaves out after its forward. All ranks await equally often."""
    heard = Heard()
    net = model()
    with ac.overlap_gradients(net) as gradients:
        done, step = 0, 0
        while done < STEPS:
            net.zero_grad()
            x = torch.full((2, 2), float(me.rank + step))
            loss = net(x).sum()
            step += 1
            if left.get(me.rank) == step - 1:
                continue
            loss.backward()
            await gradients
            if me.rank == 0:
                extra(net, x)
            done += 1
    heard.close()
    return heard.texts


async def one_leaves_out(me: Rank, left: dict[int, int]) -> None:
    heard = await trained(me, left, no_forward)
    if me.rank:
        assert heard == []
        return
    (told,) = heard
    ranks = sorted(left)
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    # Both backwards arrive at the place of the step that was left out: the third, counting from 0.
    assert told.startswith("before reduction 3 on lane 'gradients/backward' (")
    assert f") {named} (of the group) ran the model's" in told
    file, _, line = told.partition(" (")[2].partition(")")[0].rpartition(":")
    assert "await gradients" in linecache.getline(file, int(line))


@pytest.mark.parametrize("left", [{1: 2}, {0: 2}], ids=str)
def test_the_rank_that_leaves_a_step_out_is_named(several: World, loop: str, left: dict[int, int]) -> None:
    several.run(one_leaves_out, left, runner=loop)


async def all_alike(me: Rank) -> None:
    """All ranks may leave a step out; a rank may also leave out the first one, or what precedes it."""
    assert await trained(me, dict.fromkeys(range(me.size), 2), no_forward) == []
    assert await trained(me, {1: 0}, no_forward) == []


def test_what_all_ranks_leave_out_is_meant(several: World) -> None:
    several.run(all_alike)


async def meant(me: Rank, name: str) -> None:
    assert await trained(me, {}, MEANT[name]) == []


@pytest.mark.parametrize("name", MEANT)
def test_what_is_not_for_training_is_no_step(pair: World, name: str) -> None:
    pair.run(meant, name)


async def without_backward(me: Rank) -> None:
    """A rank whose loss is not finite still awaits: it contributes zeros, and there is no message."""
    heard = Heard()
    net = model()
    with ac.overlap_gradients(net, op="sum") as gradients:
        for step in range(STEPS):
            net.zero_grad()
            loss = net(torch.ones(1, 2)).sum()
            if not (me.rank == 1 and step == 2):
                loss.backward()
            await gradients
            share = net[2].bias.grad
            assert share is not None
            assert share.item() == float(me.size - (step == 2))
    heard.close()
    assert heard.texts == []


def test_a_rank_that_awaits_without_backward_is_in_step(several: World) -> None:
    several.run(without_backward)


async def two_forwards(me: Rank) -> None:
    """One backward follows several forwards, whose number differs between ranks, as in rollouts and crops."""
    heard = Heard()
    net = model()
    with ac.overlap_gradients(net) as gradients:
        for _ in range(STEPS):
            net.zero_grad()
            sum((net(torch.ones(1, 2)).sum() for _ in range(me.rank + 2)), torch.zeros(())).backward()
            await gradients
    heard.close()
    assert heard.texts == []


def test_several_forwards_for_one_backward_are_meant(several: World) -> None:
    several.run(two_forwards)


def test_the_hook_goes_with_the_reducer(pair: World) -> None:
    pair.run(hooks_go)


async def hooks_go(me: Rank) -> None:
    net = model()
    gradients = ac.overlap_gradients(net)
    assert len(net._forward_pre_hooks) == 1
    gradients.close()
    assert not net._forward_pre_hooks
    gradients = ac.overlap_gradients(net)
    del gradients
    assert not net._forward_pre_hooks


async def other_kinds(me: Rank, kind: str) -> None:
    """Counting forwards must not interfere with what torch makes of a module."""
    heard = Heard()
    net = torch.jit.script(model()) if kind == "scripted" else model()
    with ac.overlap_gradients(net) as gradients:
        called = torch.compile(net, fullgraph=True, backend="eager") if kind == "compiled" else net
        for step in range(STEPS):
            net.zero_grad()
            called(torch.full((2, 2), float(me.rank + step))).sum().backward()
            await gradients
    heard.close()
    assert heard.texts == []


@pytest.mark.parametrize("kind", ["scripted", "compiled"])
def test_scripted_and_compiled_modules_train_as_ever(pair: World, kind: str) -> None:
    pair.run(other_kinds, kind)


@pytest.mark.parametrize(
    ("unanswered", "ranks"), [([False, True], "rank 1"), ([True, False, True], "ranks 0, 2")]
)
def test_the_text_names_them(unanswered: list[bool], ranks: str) -> None:
    told = left_out(unanswered, 7, "gradients", "train.py:3")
    assert told.startswith(f"before reduction 7 on lane 'gradients' (train.py:3) {ranks} ")


@pytest.mark.parametrize("unanswered", [[False, False], [True, True], [True], [False]])
def test_nothing_is_said_where_all_did_alike(unanswered: list[bool]) -> None:
    assert left_out(unanswered, 7, "gradients", "train.py:3") == ""
