"""``auto_model``, ``auto_optim``, ``auto_dataloader``: the rules and warnings of ignite; ``async_optim``."""

from __future__ import annotations

import copy
import itertools
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import BatchSampler

import asynccoll as ac
import parity
import worlds
from asynccoll.auto.data import dataloader_for
from asynccoll.auto.models import load_in_place, model_for, optim_for
from asynccoll.auto.place import here
from ranks import raising
from training_helpers import without_ddp

DATA = TensorDataset(torch.arange(50.0).view(50, 1))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


@pytest.fixture(params=[1, 2, 4], ids=lambda size: f"gloo-{size}", scope="module")
def world(request):
    return worlds.world("gloo", request.param)


@pytest.fixture(scope="module")
def two():
    return worlds.world("gloo", 2)


# Data


def _told(loader):
    """Return what a loader was made of, and what it loads."""
    sampler = loader.sampler
    share = {
        name: getattr(sampler, name, None) for name in ("num_replicas", "rank", "shuffle", "num_samples")
    }
    batch = None if isinstance(loader.dataset, IterableDataset) else loader.batch_sampler
    return {
        "kind": type(loader).__name__,
        "sampler": type(sampler).__name__,
        "batch sampler": type(batch).__name__,
        "batch": loader.batch_size,
        "workers": loader.num_workers,
        "pinned": loader.pin_memory,
        "drop": loader.drop_last,
        **share,
        "loads": [
            [part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in loader
        ],
    }


def loaders(me):
    def make(idist, dataset, **kwargs):
        torch.manual_seed(11)
        return _told(idist.auto_dataloader(dataset() if callable(dataset) else dataset, **kwargs))

    def weighted(idist, **kwargs):
        torch.manual_seed(11)
        return make(idist, DATA, sampler=WeightedRandomSampler(torch.ones(50), 50), **kwargs)

    def given(idist, n, rank):
        return make(idist, DATA, sampler=DistributedSampler(DATA, num_replicas=n, rank=rank), batch_size=8)

    cases = {
        "plain": lambda i: make(i, DATA, batch_size=8),
        "not shuffled": lambda i: make(i, DATA, batch_size=8, shuffle=False),
        "batch below the world": lambda i: make(i, DATA, batch_size=1),
        "uneven batch": lambda i: make(i, DATA, batch_size=7, drop_last=True),
        "workers": lambda i: make(i, DATA, batch_size=8, num_workers=0),
        "pinned": lambda i: make(i, DATA, batch_size=8, pin_memory=False),
        "sequential": lambda i: make(i, DATA, batch_size=8, sampler=SequentialSampler(DATA)),
        "weighted": lambda i: weighted(i, batch_size=8),
        "distributed": lambda i: given(i, me.size, me.rank),
        "of another world": lambda i: given(i, 3, 2),
        "batch sampler": lambda i: make(
            i, DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)
        ),
        "iterable": lambda i: make(i, Stream, batch_size=4),
    }
    parity.told(me)
    for label, call in cases.items():
        parity.compare(me, label, call)
    for workers in (1, 2, 3, 5):
        with me.case(f"{workers} workers"):
            theirs, ours = (
                idist.auto_dataloader(DATA, num_workers=workers).num_workers for idist in parity.modules()
            )
            assert ours == theirs


def proxies(me):
    for module in parity.modules():
        assert module.DistributedProxySampler

    def draws(idist, epochs):
        sampler = idist.DistributedProxySampler(RandomSampler(DATA), num_replicas=4, rank=me.rank)
        found = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            found.append((len(sampler), list(sampler)))
        return found

    parity.compare(me, "draws", draws, 3)
    wrong = {
        "no sampler": lambda i: i.DistributedProxySampler([1, 2]),
        "distributed already": lambda i: i.DistributedProxySampler(DistributedSampler(DATA, 2, 0)),
        "endless": lambda i: i.DistributedProxySampler(torch.utils.data.Sampler(), 2, 0),
    }
    for label, call in wrong.items():
        parity.compare(me, label, call, fails=True)


def test_loaders_as_ignite(world):
    world.run(loaders, timeout=60.0)


def test_proxy_sampler_as_ignite(two):
    two.run(proxies)


#: The samplers that ``auto_dataloader`` makes, by its input.
MADE = {
    "given": lambda data: {"sampler": RandomSampler(data)},
    "shuffled": lambda _: {"shuffle": True},
    "in order": lambda _: {"shuffle": False},
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("steps", [0, 1, 3, "all"])
@pytest.mark.parametrize("length", [12, 13])
def test_a_resumed_epoch_gives_what_was_left(made, before, after, steps, length):
    """The rest follows the order that one rank would draw, also on another number of ranks."""

    def _samplers(ranks, length):
        data, place = range(length), here()
        places = [replace(place, rank=rank, world_size=ranks) for rank in range(ranks)]
        return [dataloader_for(one, data, MADE[made](data), shares_alone=True).sampler for one in places]

    (alone,) = _samplers(1, length)
    alone.set_epoch(5)
    whole = list(alone)
    assert sorted(whole) == list(range(length))

    states, seen = [], 0
    for sampler in _samplers(before, length):
        sampler.set_epoch(5)
        steps_here = len(sampler) if steps == "all" else steps
        drawn = list(itertools.islice(sampler, steps_here))
        due = whole[sampler.rank :: before][:steps_here]
        assert drawn[: len(due)] == due  # and one more, from another draw, where the length is not divisible
        states.append(sampler.state_dict())
        seen = min(steps_here * before, length)
    assert all(state == states[0] for state in states)

    resumed = _samplers(after, length)
    for sampler in resumed:
        sampler.load_state_dict(states[0])
        assert sampler.state_dict() == states[0]
        sampler.set_epoch(5)  # as a loop over the remaining epochs does
    shares = [(len(sampler), list(sampler)) for sampler in resumed]
    rounds = -(-(length - seen) // after)
    assert all(said == len(share) == rounds for said, share in shares)
    found = [one for turn in zip(*(share for _, share in shares), strict=True) for one in turn]
    assert found[: length - seen] == whole[seen:]

    for sampler, fresh in zip(resumed, _samplers(after, length), strict=True):
        fresh.set_epoch(5)
        assert list(sampler) == list(fresh)  # after the resumed epoch, epochs are complete again
        sampler.set_epoch(6)
        fresh.set_epoch(6)
        assert list(sampler) == list(fresh)


def trained(made, length, steps, state=None):
    """Return the samples of ``steps`` batches (None: all that remain), and the checkpoint after them."""
    data = TensorDataset(torch.arange(length))
    loader = ac.auto_dataloader(data, **MADE[made](data), batch_size=2 * ac.get_world_size())
    if state is not None:
        loader.sampler.load_state_dict(state)
    loader.sampler.set_epoch(5)
    seen = [sample for (batch,) in itertools.islice(loader, steps) for sample in batch.tolist()]
    return seen, loader.sampler.state_dict(taken=len(seen))


def trained_on_a_rank(me, *args):
    return trained(*args)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("length", [24, 25])
@pytest.mark.parametrize("alone_first", [True, False])
def test_one_script_resumes_with_and_without_a_launcher(two, alone_first, length, made):
    """One process resumes a checkpoint of two ranks and vice versa: each remaining sample is given once."""

    def run(alone, *args):
        if alone:
            return [trained(made, *args)]
        return two.run(trained_on_a_rank, made, *args, runner="blocking")

    def in_order(found):
        return [sample for turn in zip(*(seen for seen, _ in found), strict=True) for sample in turn]

    first = run(alone_first, length, 3)
    state = first[0][1]
    assert all(other == state for _, other in first)
    taken = in_order(first)
    assert state["seen"] == len(taken) == (6 if alone_first else 12)
    rest = in_order(run(not alone_first, length, None, state))
    assert len(rest) - (length - len(taken)) in (0, 1)  # one more if two ranks share an odd number
    assert sorted(taken + rest[: length - len(taken)]) == list(range(length))


def test_without_a_launcher_samplers_are_the_same():
    data = TensorDataset(torch.arange(6))
    loader = ac.auto_dataloader(data)
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(1)
    assert sorted(sample for (batch,) in loader for sample in batch.tolist()) == list(range(6))
    sampler = ac.DistributedProxySampler(RandomSampler(data))
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    batches = BatchSampler(SequentialSampler(data), 4, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is no rank to share with
        assert ac.auto_dataloader(data, batch_sampler=batches).batch_sampler is batches


def shares_by_default(me):
    sampler = ac.DistributedProxySampler(SequentialSampler(DATA))
    assert list(sampler) == list(range(me.rank, 50, me.size))


def test_a_proxy_sampler_shares_among_the_ranks_there_are(two):
    two.run(shares_by_default)


def test_sync_leaves_samplers_alone_in_a_world_of_one():
    """ignite does the same."""
    import asynccoll.sync as idist

    order = RandomSampler(DATA)
    assert idist.auto_dataloader(DATA, sampler=order).sampler is order


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch", [2, 3])  # 13 samples are left, so that the last batch is short for both
def test_a_resumed_loop_knows_its_last_batch(batch, workers):
    """Gradients accumulate over two batches, and no sample may remain in the sum when the epoch ends."""
    data = TensorDataset(torch.arange(17))
    state = {"epoch": 1, "seen": 4, "length": 17}
    loader = ac.auto_dataloader(data, sampler=RandomSampler(data), batch_size=batch, num_workers=workers)
    loader.sampler.load_state_dict(state)
    for epoch, samples in ((1, 13), (2, 17)):
        loader.sampler.set_epoch(epoch)
        batches = -(-samples // batch)
        steps, summed = [], []
        for i, (x,) in enumerate(loader):
            assert len(loader) == batches
            summed += x.tolist()
            if i % 2 == 1 or i == len(loader) - 1:
                steps.append(summed)
                summed = []
        assert summed == []
        assert len(steps) == -(-batches // 2)
        assert len({one for step in steps for one in step}) == samples
    list(loader)
    assert len(loader.sampler) == 17


def test_a_loader_that_draws_ahead_says_what_was_taken():
    sampler = ac.DistributedProxySampler(SequentialSampler(DATA), num_replicas=2, rank=1)
    batches = iter(DataLoader(DATA, batch_size=3, sampler=sampler, num_workers=1))
    first = next(batches)[0].flatten().tolist()
    assert first == [1.0, 3.0, 5.0]
    with pytest.warns(
        UserWarning, match=r"which draw ahead.*ac\.auto_dataloader\(dataset, sampler="
    ) as warned:
        assert sampler.state_dict()["seen"] > 6  # drawn for the worker
    assert warned[0].filename == __file__
    state = sampler.state_dict(taken=3)
    assert state == {"epoch": 0, "seen": 6, "length": 50}
    sampler.load_state_dict(state)
    assert list(sampler) == list(range(7, 50, 2))
    with pytest.raises(ac.InvalidArgumentError, match="taken=23, but 22 samples were drawn"):
        sampler.state_dict(taken=23)
    other = ac.DistributedProxySampler(SequentialSampler(range(4)), num_replicas=2, rank=1)
    with pytest.raises(ac.InvalidArgumentError, match="for 50 samples, but this sampler has 4"):
        other.load_state_dict(state)


def test_an_epoch_of_a_sampler_with_a_generator_can_be_resumed() -> None:
    """The generator is seeded for each epoch, so the order does not depend on the epochs drawn before."""

    def weighted() -> WeightedRandomSampler:
        return WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator().manual_seed(5))

    whole = [ac.DistributedProxySampler(weighted(), num_replicas=2, rank=rank) for rank in (0, 1)]
    orders = []
    for epoch in range(3):
        for one in whole:
            one.set_epoch(epoch)
        mine, others = map(list, whole)
        orders.append([x for pair in zip(mine, others, strict=True) for x in pair])
    assert orders[0] == list(weighted())  # the seed is that of the generator
    assert orders[0] != orders[1] != orders[2]

    left = ac.DistributedProxySampler(weighted(), num_replicas=2, rank=0)
    left.set_epoch(2)
    first = list(itertools.islice(left, 2))
    again = ac.DistributedProxySampler(weighted(), num_replicas=1, rank=0)
    again.load_state_dict(left.state_dict())
    assert (first, list(again)) == (orders[2][:4:2], orders[2][4:])


class Drawing(torch.utils.data.Sampler):
    """Draws each sample by itself from torch's random numbers."""

    def __len__(self) -> int:
        return 200

    def __iter__(self):
        for _ in range(200):
            yield int(torch.randint(1000, ()))
            os.sched_yield()  # without the GIL, so that other threads draw, too


def draw_epochs(meet: Callable[[], object]) -> list[list[int]]:
    sampler = ac.DistributedProxySampler(Drawing(), num_replicas=1, rank=0)
    orders = []
    for epoch in range(20):
        sampler.set_epoch(epoch)
        meet()
        orders.append(list(sampler))
    return orders


def test_ranks_that_are_threads_draw_the_same_order() -> None:
    """They share torch's random numbers. Regression: one seeded them while another was drawing."""
    expected, interval = draw_epochs(int), sys.getswitchinterval()
    meeting = threading.Barrier(3, timeout=30)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            drawn = list(pool.map(draw_epochs, [meeting.wait] * 3))
    finally:
        sys.setswitchinterval(interval)
    assert drawn == [expected] * 3


def test_a_sampler_leaves_the_random_numbers_of_the_loop_alone() -> None:
    """Or dropout, which ``manual_seed(by_rank=True)`` makes differ, is the same on all ranks."""
    after = []
    for rank in (0, 1):
        torch.manual_seed(7 + rank)
        expected = torch.rand(1)
        torch.manual_seed(7 + rank)
        list(ac.DistributedProxySampler(RandomSampler(DATA), num_replicas=2, rank=rank))
        after.append(torch.rand(1))
        assert after[-1] == expected
    assert after[0] != after[1]


@pytest.mark.parametrize(
    "state", [None, {}, {"epoch": 0, "seen": 5, "length": 4}, {"epoch": 0, "seen": -1, "length": 4}]
)
def test_a_state_of_no_sampler_is_refused(state):
    """Rather than resume an epoch of a negative length, or fail for want of a key."""
    sampler = ac.auto_dataloader(range(4)).sampler
    with pytest.raises((ac.InvalidArgumentError, ac.InvalidCallError), match=r"load what the state_dict\(\)"):
        sampler.load_state_dict(state)
    assert len(sampler) == 4


#: How a loader of ``auto_dataloader`` gets its batches: without workers, with workers, with persistent ones.
LOADED = {
    "alone": {},
    "workers": {"num_workers": 2},
    "lasting workers": {"num_workers": 1, "persistent_workers": True},
    "single samples": {"num_workers": 1, "batch_size": None},
}


@pytest.mark.parametrize("loaded", LOADED)
def test_a_loader_says_how_far_the_loop_is(loaded):
    """Not how far its workers have drawn: prefetched batches used to be missing from the resumed epoch."""
    data = TensorDataset(torch.arange(60))
    loader = ac.auto_dataloader(data, **{"batch_size": 4, **LOADED[loaded]})
    assert isinstance(loader, DataLoader)
    each = loader.batch_size or 1
    left = iter(loader)
    assert loader.sampler.state_dict()["seen"] == 0
    for turn in range(3):
        next(left)
        assert loader.sampler.state_dict()["seen"] == (turn + 1) * each
        assert loader.sampler.state_dict(taken=1)["seen"] == 1
    batches = iter(loader)  # abandons the other iterator half-way
    assert len(batches) == 60 // each
    seen = [one for _ in range(2) for one in next(batches)[0].flatten().tolist()]
    if loaded != "lasting workers":  # they serve one iterator
        next(left)
    state = loader.sampler.state_dict()
    assert state == {"epoch": 0, "seen": 2 * each, "length": 60}

    loader.sampler.load_state_dict(state)
    next(batches)  # of the previous iterator
    assert loader.sampler.state_dict() == state
    seen += [one for (batch,) in loader for one in batch.flatten().tolist()]
    assert sorted(seen) == list(range(60))
    assert loader.sampler.state_dict()["seen"] == 60


class HeldBack(torch.utils.data.Dataset):
    """Six numbers, of which the first blocks until a named pipe is opened for writing."""

    def __init__(self, pipe):
        os.mkfifo(pipe)
        self.pipe = pipe

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index or int(self.pipe.read_text())


def test_batches_that_come_out_of_order_are_told(tmp_path):
    """Resuming skips that many samples from the start, so some would be repeated and others skipped."""
    data = HeldBack(tmp_path / "first")
    loader = ac.auto_dataloader(data, batch_size=2, shuffle=False, num_workers=2, in_order=False)
    batches = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.sampler.state_dict()["seen"] == 0
    found = next(batches).tolist()
    assert found in ([2, 3], [4, 5])
    with pytest.warns(UserWarning, match="in_order=False") as warned:
        loader.sampler.state_dict()
    assert warned[0].filename == __file__
    data.pipe.write_text("0")
    found += [one for batch in batches for one in batch.tolist()]
    assert sorted(found) == list(range(6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.sampler.state_dict()["seen"] == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_dropped_are_not_left_for_later(workers):
    data = TensorDataset(torch.arange(14))
    loader = ac.auto_dataloader(data, batch_size=4, drop_last=True, num_workers=workers)
    found = []
    for (batch,) in loader:
        found += batch.tolist()
        assert loader.sampler.state_dict()["seen"] == len(found)
    assert (len(found), loader.sampler.state_dict()["seen"]) == (12, 14)


def test_a_loader_goes_on_for_others_as_torchs_does():
    loader = ac.auto_dataloader(TensorDataset(torch.arange(6)), batch_size=4, num_workers=1)
    other = type(loader)(loader.dataset, batch_sampler=loader.batch_sampler)  # as ignite replaces it
    assert sorted(sample for (batch,) in other for sample in batch.tolist()) == list(range(6))
    batches = iter(loader)
    assert batches._num_workers == 1
    assert not hasattr(batches, "nothing")
    with pytest.raises(NotImplementedError):  # as torch's iterator does
        copy.deepcopy(batches)


def test_a_sampler_that_draws_nothing_ends():
    class Empty(torch.utils.data.Sampler):
        def __len__(self):
            return 4

        def __iter__(self):
            return iter(())

    with pytest.raises(RuntimeError, match="draws nothing"):
        list(ac.DistributedProxySampler(Empty(), num_replicas=2, rank=0))


def test_a_batch_size_of_none_is_left_alone(two):
    two.run(no_batches)


def uneven_batches(me):
    for size, each in ((7, 3), (1, 1)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert ac.auto_dataloader(DATA, batch_size=size).batch_size == each
        expected = (
            [] if me.rank else [f"not a multiple of 2 ranks: each takes {each}, {2 * each} in total per step"]
        )
        assert len(told) == len(expected)
        assert all(words in str(one.message) for words, one in zip(expected, told, strict=True))
        assert all(one.filename == __file__ for one in told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ac.auto_dataloader(DATA, batch_size=8).batch_size == 4


def test_a_batch_that_is_not_shared_out_evenly_is_told_once(two):
    two.run(uneven_batches)


def no_batches(me):
    assert len(list(ac.auto_dataloader(DATA, batch_size=None))) == 25


# Models and optimizers


def models(me):
    def kinds(idist, **kwargs):
        model = idist.auto_model(network(), **kwargs)
        return [type(part).__name__ for part in model.modules()]

    parity.told(me)
    parity.compare(me, "plain", kinds)
    # torch has no such model on the CPU: it is compared up to DDP, which refuses it.
    parity.compare(me, "sync_bn, whole", lambda i: kinds(i, sync_bn=True), fails=me.size > 1)
    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", lambda model: model):
        parity.compare(me, "sync_bn", lambda i: kinds(i, sync_bn=True))
        with me.case("what sync_bn makes"):
            assert ("SyncBatchNorm" in kinds(ac, sync_bn=True)) == (me.size > 1)
    if me.size > 1:
        parity.compare(me, "kwargs", lambda i: i.auto_model(network(), bucket_cap_mb=7).bucket_bytes_cap)
    with me.case("optimizer"):
        for idist in (*parity.modules(), ac):
            optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
            assert idist.auto_optim(optimizer) is optimizer


def test_models_as_ignite(world):
    world.run(models)


def on_the_cpu_of_a_machine_with_gpus(me):
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        model = ac.auto_model(network())
    assert model.device_ids is None


def test_gloo_leaves_gpus_alone(two):
    """The device of the rank decides, not which others exist."""
    two.run(on_the_cpu_of_a_machine_with_gpus)


def _batch(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(6, 3, generator=generator), torch.randn(6, 2, generator=generator)


def autocast(me):
    plain = network()
    model = ac.auto_model(plain)
    x, y = _batch(me.rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        assert out.dtype is torch.bfloat16
        loss = nn.functional.mse_loss(out.float(), y)
    loss.backward()
    for parameter in plain.parameters():
        assert parameter.grad.dtype is torch.float32
        gathered = ac.all_gather(parameter.grad[None]).wait()
        assert (gathered == gathered[0]).all()


def test_autocast_around_auto_model(two):
    two.run(autocast)


def linear():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def expected_weights(size, steps, momentum, start=None):
    """Return the weights of training in one process on all ranks' data: on the mean of the ranks' losses."""
    model = linear()
    if start is not None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [_loss(model, rank + 10 * step) for rank in range(size)]
        (sum(losses) / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _loss(model, seed):
    x, y = _batch(seed)
    return nn.functional.mse_loss(model(x), y)


async def awaited(me):
    model = linear()
    if me.rank:
        nn.init.ones_(model[0].weight)
    await ac.overlap.broadcast_parameters(model)
    with ac.async_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) as optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer.wrapped, step_size=100)
        for step in range(3):
            optimizer.zero_grad()
            _loss(model, me.rank + 10 * step).backward()
            await optimizer.step()
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert optimizer.state_dict()["state"]
        assert "SGD" in repr(optimizer)
    for got, expected in zip(model.parameters(), expected_weights(me.size, 3, 0.9), strict=True):
        torch.testing.assert_close(got.detach(), expected)
    _loss(model, 0).backward()  # the hooks are gone, so this sends nothing


@pytest.mark.parametrize("runner", ["asyncio", "trio"])
def test_async_optim_steps_on_the_average(world, runner):
    world.run(awaited, runner=runner)


def reduced_by_the_step(me, with_closure):
    """Let ``step`` reduce gradients, as on mpi, where nothing else does; the operations are those on gloo."""

    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = optim_for(without_ddp(here()), optimizer, {"lane": f"step {with_closure}"})
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = _loss(model, me.rank + 10 * step)
            loss.backward()
            return loss

        if with_closure:
            assert optimizer.step(closure) > 0
        else:
            closure()
            optimizer.step()
    for got, expected in zip(model.parameters(), expected_weights(me.size, 3, 0.9), strict=True):
        torch.testing.assert_close(got.detach(), expected)


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_that_waits_for_gradients(two, with_closure):
    two.run(reduced_by_the_step, with_closure)


def reduced_already(me):
    model = network()
    with ac.overlap_gradients(model), pytest.raises(ac.InvalidArgumentError, match="already reduces"):
        ac.auto_model(model)
    assert ac.auto_model(model).module is model
    with (
        ac.overlap_gradients(model := network()),
        pytest.raises(ac.InvalidArgumentError, match="already reduces"),
    ):
        model_for(replace(here(), device=torch.device("meta")), model, True, {})
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_a_model_that_is_reduced_already_is_not_wrapped(two):
    """Both would send its gradients, and each would find them changed by the other."""
    two.run(reduced_already)


def test_a_world_of_one_is_left_alone():
    model = network()
    assert ac.auto_model(model) is model
    assert isinstance(ac.auto_dataloader(DATA), DataLoader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert ac.auto_optim(optimizer) is optimizer


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, ac.async_optim])
def test_a_loaded_state_leaves_the_groups_that_a_scheduler_writes_to(wrap):
    """Regression: the list went to the wrapper, and the wrapped optimizer read groups of its own."""
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    wrapped = wrap(optimizer)
    group = optimizer.param_groups[0]
    load_in_place(wrapped, wrapped.state_dict())
    assert optimizer.param_groups[0] is group


# apex


def test_apex_is_refused(monkeypatch):
    """The traces that apex leaves are recognized; apex itself is discontinued, and on no package index."""
    patched = type("FusedLayerNorm", (nn.Module,), {"__module__": "apex.normalization"})
    with pytest.raises(ac.UnsupportedOpError, match=r"apex\.normalization\.FusedLayerNorm.*torch\.autocast"):
        ac.auto_model(nn.Sequential(patched()))
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    optimizer._amp_stash = object()
    for helper in (ac.auto_optim, ac.async_optim):
        with pytest.raises(ac.UnsupportedOpError, match=r"apex\.amp.*torch\.amp\.GradScaler"):
            helper(optimizer)
    state = types.SimpleNamespace(opt_properties=types.SimpleNamespace(enabled=True))
    module = types.ModuleType("apex.amp._amp_state")
    module._amp_state = state
    monkeypatch.setitem(sys.modules, "apex.amp._amp_state", module)
    with pytest.raises(ac.UnsupportedOpError, match=r"apex\.amp is not supported"):
        ac.auto_model(network())


def test_under_a_launcher_nothing_is_guessed(monkeypatch):
    """``ac`` asks to be initialized, ``sync`` acts as in a world of one."""
    import asynccoll.sync as idist

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    model = network()
    with pytest.raises(ac.NotInitializedError):
        ac.auto_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert idist.auto_model(model) is model
    with raising(ac.NotInitializedError):
        ac.auto_dataloader(DATA)
