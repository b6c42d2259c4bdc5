"""``asynccoll.sync`` on Horovod, compared with ignite's own Horovod model in the same job."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

import asynccoll as ac
import needs
import parity
import worlds
from ranks import raising
from test_sync_parity import NUMBERS, OBJECTS, STRINGS, TENSORS

pytestmark = pytest.mark.skipif(
    not needs.has_package("horovod", "horovod"),
    reason="horovod is not here; `make horovod` runs this file in an environment that has it",
)

#: What Horovod itself can reduce; only we reduce bfloat16, bool and small integers.
REDUCED = ("float32", "float64 matrix", "int64", "int32", "0-d")
GATHERED = (*REDUCED, "uint8", "float16", "large")


@pytest.fixture(
    params=[1, 2, pytest.param(4, marks=pytest.mark.nightly)],
    ids=lambda size: f"horovod-{size}",
    scope="module",
)
def world(request):
    """Without a torch group, which ignite would take for the world."""
    return worlds.world("horovod", request.param, torch_group=False)


def queries(me):
    names = ["backend", "device", "model_name", "get_world_size", "get_rank", "get_local_rank", "hostname"]
    names += ["get_nproc_per_node", "get_nnodes", "get_node_rank", "available_backends"]
    for name in names:
        parity.compare(me, name, lambda idist, name=name: getattr(idist, name)())
    _, ours = parity.modules()
    assert ours.model_name() == "horovod-dist"


def reductions(me):
    for name in REDUCED:
        for op in ("SUM", "AVERAGE", "MIN", "MAX", "PRODUCT"):
            if op == "AVERAGE" and name.startswith("int"):
                continue  # Horovod rounds down; we refuse
            if (name, op) == ("int32", "PRODUCT"):
                continue  # Horovod returns int64
            x = TENSORS[name](me.rank)
            parity.compare(me, f"{name} {op}", lambda i, x, op=op: i.all_reduce(x, op), x)
    for name in ("int", "negative", "float"):
        for op in ("SUM", "MIN", "MAX", "PRODUCT"):
            parity.compare(
                me, f"{name} {op}", lambda i, x, op=op: i.all_reduce(x, op), NUMBERS[name](me.rank)
            )
    parity.compare(me, "average", lambda i: i.all_reduce(me.rank + 0.5, "AVERAGE"))
    parity.compare(me, "an unknown op", lambda i: i.all_reduce(1, "mean"), fails=True)


def moves(me):
    for name in GATHERED:
        parity.compare(me, f"all_gather {name}", lambda i, x: i.all_gather(x), TENSORS[name](me.rank))
    for name, make in {**NUMBERS, **STRINGS, **OBJECTS}.items():
        if name in ("bool", "complex"):
            continue  # Horovod has neither
        parity.compare(me, f"all_gather {name}", lambda i, x: i.all_gather(x), make(me.rank))
    for src in range(me.size):
        for name in GATHERED:
            parity.compare(
                me,
                f"broadcast {name} {src}",
                lambda i, x, s=src: i.broadcast(x, src=s),
                TENSORS[name](me.rank),
            )
        for value in ("abc", Path("a/b"), 2.5):
            for safe in (False, True):
                mine = value if me.rank == src or not safe else None
                parity.compare(
                    me,
                    f"broadcast {value!r} {src} {safe}",
                    lambda i, x, s=src, safe=safe: i.broadcast(x, src=s, safe_mode=safe),
                    mine,
                )
    parity.compare(me, "barrier", lambda i: i.barrier())


def groups(me):
    """ignite has groups for all_gather of tensors only; here every collective has them."""
    import horovod.torch as hvd

    _, ours = parity.modules()
    if me.size == 1:
        return
    made = ours.new_group([0, 1])
    assert isinstance(made, hvd.ProcessSet)
    inside = me.rank < 2
    parity.compare(me, "all_gather", lambda i, x: i.all_gather(x, group=made), torch.tensor([me.rank]))
    for group in (made, [0, 1]):
        assert ours.all_reduce(torch.tensor([me.rank + 1]), group=group).item() == (
            3 if inside else me.rank + 1
        )
        assert ours.all_gather({"r": me.rank}, group=group) == (
            [{"r": 0}, {"r": 1}] if inside else {"r": me.rank}
        )
    assert ours.all_reduce(torch.tensor([1]), group=[1]).item() == 1
    late = ours.new_group([1])  # Horovod has had a set of these ranks since the line above
    assert isinstance(late, hvd.ProcessSet)
    assert late.process_set_id == ours.new_group([1]).process_set_id
    assert ours.new_group(list(range(me.size))) is hvd.global_process_set


def beyond(me):
    """Dtypes that Horovod refuses; and Adasum, which this build lacks by Horovod's own account."""
    _, ours = parity.modules()
    assert ours.all_reduce(torch.ones(2, dtype=torch.bfloat16)).tolist() == [me.size] * 2
    assert ours.all_reduce(torch.tensor([True]), "AND").tolist() == [True]
    assert ours.all_gather(me.rank == 0) == [rank == 0 for rank in range(me.size)]
    if me.size > 1:
        with raising(Exception, "dasum"):
            ours.all_reduce(torch.ones(2), "ADASUM")
        if me.rank == 0:  # alone in its group: it must not wait for the others
            with raising(ac.UnsupportedOpError, "ADASUM runs over the world"):
                ours.all_reduce(torch.ones(2), "ADASUM", group=ac.new_group([0]))
        else:
            ac.new_group([0])


@pytest.mark.parametrize("case", [queries, reductions, moves, groups, beyond], ids=lambda c: c.__name__)
def test_as_ignite_on_horovod(world, case):
    world.run(case, timeout=90.0)


# A Horovod world that the user has joined


def joined(me):
    import horovod.torch as hvd

    import asynccoll.sync as idist

    assert idist.model_name() == "serial"
    hvd.init()
    assert idist.model_name() == "horovod-dist"
    assert (idist.get_rank(), idist.get_world_size()) == (hvd.rank(), hvd.size())
    assert idist.all_gather(idist.get_rank()) == list(range(me.size))
    idist.finalize()
    assert not hvd.is_initialized()
    assert idist.model_name() == "serial"


def trained(me):
    """Every rank ends with the weights of one process that trained on all ranks' data."""
    import horovod.torch as hvd

    import asynccoll.sync as idist
    from test_auto import _loss, expected_weights, linear

    idist.initialize("horovod", comm=None)
    model = linear()
    if me.rank:
        torch.nn.init.ones_(model[0].weight)
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    assert hasattr(optimizer, "synchronize")
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, me.rank + 10 * step).backward()
        optimizer.step()
    for got, expected in zip(model.parameters(), expected_weights(me.size, 3, 0.9), strict=True):
        torch.testing.assert_close(got.detach(), expected)
    idist.finalize()
    assert not hvd.is_initialized()


def step_on(model, optimizer, *seeds):
    """Make a step on the mean of the losses."""
    from test_auto import _loss

    optimizer.zero_grad()
    (sum(_loss(model, seed) for seed in seeds) / len(seeds)).backward()
    optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def with_state(me, resumed, own):
    import horovod.torch as hvd

    from test_auto import linear

    model, alone = linear(), linear()
    optimizer, expected = adamw(model), adamw(alone)
    if resumed:
        step_on(alone, expected, 99)
        if me.rank == 0:  # which alone has read the checkpoint
            step_on(model, optimizer, 99)
            optimizer.zero_grad()
    model = ac.auto_model(model)
    options = {"named_parameters": model.named_parameters(), "compression": hvd.Compression.none}
    optimizer = ac.auto_optim(optimizer, **(options if own else {}))
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    for seed in range(0, 30, 10):
        step_on(model, optimizer, me.rank + seed)
        step_on(alone, expected, *(rank + seed for rank in range(me.size)))
    for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.detach(), wanted.detach())


@pytest.mark.parametrize("own", [False, True], ids=["ours", "horovods"])
@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
def test_auto_optim_takes_the_state_of_rank_0_and_makes_no_step(world, resumed, own):
    """Horovod's function makes one without state: it decayed the weights, on some ranks alone."""
    world.run(with_state, resumed, own, timeout=60)


def unlike(me):
    model = torch.nn.Linear(3, 2, bias=me.rank == 0)
    with raising(ac.CollectiveMismatchError, "do not have the same parameters"):
        ac.auto_optim(adamw(model))


def test_optimizers_of_other_parameters_are_refused_on_every_rank():
    worlds.world("horovod", 2, torch_group=False).run(unlike, timeout=60)


def with_comm(me):
    """``comm`` is passed to ``hvd.init``; groups can be made as usual."""
    import asynccoll.sync as idist

    idist.initialize("horovod", comm=list(range(me.size)))
    assert (idist.model_name(), idist.get_rank(), idist.get_world_size()) == (
        "horovod-dist",
        me.rank,
        me.size,
    )
    assert idist.all_reduce(me.rank + 1.0, "AVERAGE") == (me.size + 1) / 2
    group = idist.new_group([0])
    assert idist.all_reduce(torch.ones(1), group=group).item() == 1
    idist.finalize()


def with_an_mpi_communicator(me):
    """Horovod itself reports what it was built without."""
    import asynccoll.sync as idist

    with raising(Exception, "MPI"):
        idist.initialize("horovod", comm=object())
    assert idist.model_name() == "serial"


@pytest.mark.parametrize(
    "case", [joined, trained, with_comm, with_an_mpi_communicator], ids=lambda c: c.__name__
)
def test_a_job_of_its_own(case):
    with worlds.fresh("horovod", 2, bare=True) as world:
        world.run(case, timeout=90.0)


def on_gpus(me):
    """Only torch reports these GPUs: nothing is put on them."""
    current = [0]
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "current_device", side_effect=lambda: current[0]),
        mock.patch.object(torch.cuda, "set_device", lambda one: current.__setitem__(0, one.index)),
    ):
        ac.finalize()
        ac.initialize("horovod", torch_group=False)
        theirs, ours = parity.modules()
        seen = [ac.device(), ours.device(), theirs.device()]
        total = ac.all_reduce(me.rank).wait()
    ac.finalize()
    ac.initialize("horovod", torch_group=False)
    return seen, total, ac.device()


def test_the_device_is_this_ranks_gpu():
    """The device is ignite's: cuda:local_rank, or the CPU where there is no GPU."""
    with worlds.fresh("horovod", 2, torch_group=False) as world:
        results = world.run(on_gpus, timeout=60)
    for rank, (seen, total, after) in enumerate(results):
        assert seen == [torch.device("cuda", rank)] * 3
        assert (total, after) == (1, torch.device("cpu"))
