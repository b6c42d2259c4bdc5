"""``asynccoll.sync`` on XLA replicas. ignite cannot be compared: torch_xla has removed what it calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asynccoll as ac
import needs
import spawned
import worlds
from ranks import raising

pytestmark = pytest.mark.skipif(
    not needs.has_package("torch_xla", "xla-tpu"),
    reason="torch_xla is not here; `make xla` runs this file in an environment that has it",
)


@pytest.fixture(params=[2, 4], ids=lambda size: f"xla-tpu-{size}", scope="module")
def world(request):
    return worlds.world("xla-tpu", request.param)


def queries(me):
    import asynccoll.sync as idist

    assert (idist.model_name(), idist.backend()) == ("xla-dist", "xla-tpu")
    assert idist.has_xla_support
    assert "xla-tpu" in idist.available_backends()
    assert (idist.get_rank(), idist.get_world_size()) == (me.rank, me.size)
    assert (idist.get_local_rank(), idist.get_nproc_per_node()) == (me.rank, me.size)
    assert (idist.get_nnodes(), idist.get_node_rank()) == (1, 0)
    assert idist.device().type == "xla"


def tensors(me):
    import asynccoll.sync as idist

    device = idist.device()
    ranks = range(me.size)
    for dtype in (torch.float32, torch.int64, torch.int32):
        with me.case(f"all_reduce {dtype}"):
            x = torch.tensor([1, 2], device=device, dtype=dtype) + me.rank
            assert idist.all_reduce(x) is x  # in place, as ignite's
            assert x.cpu().tolist() == [sum(1 + r for r in ranks), sum(2 + r for r in ranks)]
        for op, expected in {"MAX": me.size, "MIN": 1}.items():
            with me.case(f"{op} {dtype}"):
                x = torch.tensor([1], device=device, dtype=dtype) + me.rank
                assert idist.all_reduce(x, op).cpu().tolist() == [expected]
        with me.case(f"all_gather {dtype}"):
            x = torch.tensor([[me.rank, 7]], device=device, dtype=dtype)
            assert idist.all_gather(x).cpu().tolist() == [[r, 7] for r in ranks]
        with me.case(f"broadcast {dtype}"):
            x = torch.tensor([me.rank + 5], device=device, dtype=dtype)
            assert idist.broadcast(x, src=1) is x
            assert x.cpu().tolist() == [6]
    with me.case("0-d"):
        assert idist.all_gather(torch.tensor(me.rank, device=device)).cpu().tolist() == list(ranks)
    with me.case("past what float32 has"):  # which ignite sends ints through
        x = torch.tensor([16777217], device=device)
        assert idist.broadcast(x).cpu().tolist() == [16777217]
    with me.case("safe mode"):
        x = torch.ones(2, device=device) if me.rank == 0 else None
        assert idist.broadcast(x, safe_mode=True).cpu().tolist() == [1, 1]


def values(me):
    import asynccoll.sync as idist

    ranks = range(me.size)
    assert idist.all_reduce(me.rank + 1) == sum(r + 1 for r in ranks)
    assert idist.all_reduce(0.5) == 0.5 * me.size
    assert idist.all_gather(16777217 + me.rank) == [16777217 + r for r in ranks]
    assert idist.all_gather(f"é{me.rank}") == [f"é{r}" for r in ranks]
    assert idist.all_gather({"rank": me.rank}) == [{"rank": r} for r in ranks]  # not in ignite
    assert idist.broadcast(me.rank / 10, src=1) == 0.1
    assert idist.broadcast("日本語" if me.rank == 0 else "") == "日本語"
    assert idist.broadcast(Path("a") if me.rank == 0 else None, safe_mode=True) == Path("a")
    idist.barrier()
    with raising(ac.InvalidArgumentError, "Unsupported reduction operation: 'sum'"):
        idist.all_reduce(1, "sum")


def turns(me):
    import asynccoll.sync as idist

    order = []
    with idist.one_rank_first(rank=1):
        order.append(me.rank)
    assert order == [me.rank]

    @idist.one_rank_only(rank=1, with_barrier=True)
    def alone():
        return "here"

    assert alone() == ("here" if me.rank == 1 else None)


@pytest.mark.parametrize("case", [queries, tensors, values, turns], ids=lambda c: c.__name__)
def test_on_replicas(world, case):
    world.run(case, timeout=90.0)


def training(me):
    """``auto_optim``'s step averages and executes; every replica starts with the weights of rank 0."""
    import asynccoll.sync as idist
    from test_auto import _batch, expected_weights, linear

    model = linear()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():  # not torch's seed, which belongs to the process
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if me.rank:
                parameter.zero_()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    device = idist.device()
    for step in range(3):
        optimizer.zero_grad()
        x, y = (part.to(device) for part in _batch(me.rank + 10 * step))
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    shared = ac.broadcast_object(start).wait()
    expected = expected_weights(me.size, 3, 0.9, shared)
    for got, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def loading(me):
    import asynccoll.sync as idist

    data = torch.utils.data.TensorDataset(torch.arange(16.0))
    loader = idist.auto_dataloader(data, batch_size=2 * me.size, shuffle=False)
    assert type(loader).__name__ == "MpDeviceLoader"
    assert loader.sampler.rank == me.rank
    seen = [value for batch in loader for value in batch[0].cpu().tolist()]
    assert seen == [float(x) for x in range(me.rank, 16, me.size)]
    assert loader.sampler.state_dict()["seen"] == 16
    for turn, _ in enumerate(loader):  # prefetching does not count as seen
        assert loader.sampler.state_dict()["seen"] == 2 * me.size * (turn + 1)


class Shared(torch.utils.data.IterableDataset):
    """What its rank is to read of twelve numbers; asks ``module`` which rank that is."""

    def __init__(self, module):
        self.module = module

    def __iter__(self):
        return iter(range(self.module.get_rank(), 12, self.module.get_world_size()))


def sharing(me):
    """The loader reads ahead in a thread of its own, as this rank."""
    import asynccoll.sync as idist

    for module in (ac, idist):
        loader = idist.auto_dataloader(Shared(module), batch_size=2 * me.size)
        seen = [value for batch in loader for value in batch.cpu().tolist()]
        assert seen == list(range(me.rank, 12, me.size))


class Damaged(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index >= 6:
            raise ValueError(f"record {index} is damaged")
        return index


def damaged(me):
    """Regression: the epoch ended as if there were no more records."""
    import asynccoll.sync as idist

    loader = idist.auto_dataloader(Damaged(), batch_size=me.size, shuffle=False)
    for _ in range(2):
        seen = []
        with raising(ValueError, f"record {6 + me.rank} is damaged"):
            seen.extend(batch.item() for batch in loader)
        assert seen == list(range(me.rank, 6, me.size))
        assert loader.sampler.state_dict()["seen"] == 6


def hooked(me):
    """Backward runs in a thread of autograd's; regression: there, each rank was a world of one."""
    import asynccoll.sync as idist

    x = torch.ones(2, device=idist.device(), requires_grad=True)

    def summed(gradient):
        with ac.lane("hooks"):  # the default lane is this thread's
            return idist.all_reduce(gradient.clone())

    x.register_hook(summed)
    (x * (me.rank + 1)).sum().backward()
    assert x.grad.cpu().tolist() == [sum(range(1, me.size + 1))] * 2


@pytest.mark.parametrize("case", [training, loading, sharing, damaged, hooked], ids=lambda c: c.__name__)
def test_helpers_on_replicas(case):
    worlds.world("xla-tpu", 2).run(case, timeout=90.0)


def test_ranks_start_also_with_the_arguments_of_torch_xla(tmp_path):
    """ignite passes on how processes start, though our ranks are threads here."""
    import asynccoll.sync as idist

    with idist.Parallel("xla-tpu", nproc_per_node=2, start_method="fork", daemon=False) as parallel:
        parallel.run(spawned.tell_sync, str(tmp_path))
    assert [(one["rank"], one["total"]) for one in spawned.told(tmp_path)] == [(0, 3), (1, 3)]
