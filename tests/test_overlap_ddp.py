"""DDP's gradients on our lanes: bit for bit those of DDP alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import asynccoll as ac
import oracle
import scripts
import worlds
from asynccoll.overlap import ddp
from overlapping import Heads as Headed
from overlapping import alike, batch, close, loss_of, network, rows
from ranks import Rank, raising
from worlds import World


@pytest.fixture(scope="module", params=[2, 4])
def ddp_world(request: pytest.FixtureRequest) -> World:
    return worlds.world("gloo", request.param)


async def as_ddp_alone(me: Rank) -> None:
    group = ac.new_group(range(me.size)).process_group()
    theirs = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=1e-3)
    ours = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=1e-3)
    ours.register_comm_hook(ac.overlap.DDPState(), ac.overlap.ddp_hook)
    with ac.trace.recording() as timeline:
        for step in range(3):
            beside = ac.all_reduce(step)  # on another lane, while the buckets are in flight
            for model in (theirs, ours):
                model.zero_grad()
                loss_of(model, batch(me.rank, step)).backward()
            assert await me.get(beside) == step * me.size
            for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert close(mine.grad, its.grad)
                if me.size == 2:  # a sum of two does not depend on its order
                    oracle.same(mine.grad, its.grad)
    sent = [span for span in timeline.spans if span.is_operation and span.row == "ddp/backward"]
    assert len(sent) > 3, "several buckets a step"


def test_the_gradients_of_ddp(ddp_world: World) -> None:
    """There are several buckets, and DDP rebuilds them between steps."""
    ddp_world.run(as_ddp_alone, runner="asyncio")


async def reduced_twice(me: Rank) -> None:
    model = DistributedDataParallel(network(), process_group=ac.new_group(range(me.size)).process_group())
    with raising(ac.InvalidArgumentError, "DistributedDataParallel", "ddp_hook"):
        ac.overlap_gradients(model)
    with raising(ac.InvalidArgumentError, "ddp_hook"):
        ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = ac.auto_model(network())
    for reduces in (
        lambda: ac.overlap_gradients(model.parameters()),
        lambda: ac.async_optim(torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: ac.overlap.shard_optimizer(model.module, torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        with raising(ac.InvalidArgumentError, "auto_model", "ddp_hook"):
            reduces()


def test_a_model_in_ddp_is_refused_by_what_reduces_itself(pair: World) -> None:
    """Both would write the same gradients."""
    pair.run(reduced_twice)


async def accumulated(me: Rank) -> None:
    group = ac.new_group(range(me.size)).process_group()
    models = []
    for hooked in (True, False):
        model = DistributedDataParallel(alike(Headed()), process_group=group, find_unused_parameters=True)
        if hooked:
            model.register_comm_hook(ac.overlap.DDPState(lane="accumulated"), ac.overlap.ddp_hook)
        with model.no_sync():
            model(rows(me.rank, 0), [0, 1]).backward()
        model(rows(me.rank, 1), [1]).backward()
        models.append(model)
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        assert close(mine.grad, its.grad)


def test_no_sync_and_unused_parameters(ddp_world: World) -> None:
    """DDP's own features work as usual."""
    ddp_world.run(accumulated, runner="blocking")


def test_a_bucket_that_times_out_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the callback waited for a second timeout after the thread's."""
    waits: list[object] = []

    class Late:
        def wait(self) -> None:
            waits.append(self)
            raise ac.CollectiveTimeoutError("late")

    monkeypatch.setattr(ddp, "all_reduce", lambda *_, **__: Late())
    with raising(RuntimeError, "CollectiveTimeoutError: late"):
        ac.overlap.DDPState().reduce(torch.ones(1)).wait()
    assert len(waits) == 1


def test_another_state_is_refused() -> None:
    """The error has the line to write."""
    with pytest.raises(ac.InvalidArgumentError, match=r"register_comm_hook\(ac\.overlap\.DDPState\(\)"):
        ac.overlap.ddp_hook(None, None)


LOSES = """
    import os, torch, asynccoll as ac
    from torch.nn.parallel import DistributedDataParallel
    ac.initialize("gloo")
    group = ac.new_group([0, 1]).process_group()
    model = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=group)
    model.register_comm_hook(ac.overlap.DDPState(), ac.overlap.ddp_hook)
    for _ in range(2):  # DDP makes its buckets anew in the second
        model(torch.ones(1, 3)).sum().backward()
    ac.barrier().wait()
    if ac.get_rank() == 1:
        os._exit(0)
    try:
        model(torch.ones(1, 3)).sum().backward()
    except RuntimeError as error:
        print(error)
    ac.finalize(abort=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    """Backward raises DDP's RuntimeError with our text."""
    ended = scripts.run(tmp_path, LOSES, ranks=2)
    assert "PeerLostError" in ended[0].out and "rank 1" in ended[0].out, ended[0].out + ended[0].err
