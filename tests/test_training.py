"""Training helpers, one promise at a time: results are compared with ones by hand or of one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import asynccoll as ac
import worlds
from asynccoll.auto.models import optim_for
from asynccoll.auto.place import here
from asynccoll.testing import simulate
from programs import LOOPS, Alone, Program, differing, makes_sense, trained
from ranks import Rank, raising
from training_helpers import Auto as Reducing
from training_helpers import without_ddp
from worlds import World


def scalar(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value))


def reducing(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Wrap the optimizer as on a backend that DDP does not serve; the operations are the same on gloo."""
    return optim_for(without_ddp(here()), optimizer, options)


# ---------------------------------------------------------------- auto_optim, in the loops that people write


#: The loops used where each step of a loop is compiled first, which takes some five seconds a loop. The other
#: loops run if `ASYNCCOLL_TEST_TRAINING` is set, which adds programs elsewhere too.
COMPILED = ("accumulated", "no_sync", "clipped", "scaled", "without data", "interrupted")


def auto_optim_programs(size: int, backend: str) -> Iterator[Program]:
    """Every loop; on two ranks of gloo both with and without a second model, elsewhere in alternation."""
    every = backend != "xla-tpu" or "ASYNCCOLL_TEST_TRAINING" in os.environ
    for index, loop in enumerate(LOOPS if every else COMPILED):
        both = (None, "plain")
        seconds = both if (size, backend) == (2, "gloo") else both[index % 2 :][:1] if every else (None,)
        for second in seconds:
            model = ("plain", "unused", "tied")[index % 3]
            program = Program(model, loop, "auto_optim", "SGD foreach", second)
            if makes_sense(program, backend):
                yield program


async def as_alone(me: Rank) -> None:
    for program in auto_optim_programs(me.size, me.backend):
        with me.case(str(program)):
            alone = await trained(program, "", list(range(me.size)), me.size, Alone, seed=0)
            lane = f"{program.loop} {program.second}"
            got = await trained(program, lane, [me.rank], me.size, Reducing, seed=me.rank)
            wrong = differing(got, alone)
            assert not wrong, wrong


@pytest.mark.slow
def test_auto_optim_comes_to_what_one_process_does(several: World) -> None:
    """Gradients are clipped, scaled with an overflow on one rank, accumulated, skipped, of two models, ...

    On gloo the optimizer is made as on mpi; elsewhere it is what `auto_optim` returns.
    """
    several.run(as_alone, timeout=100)


def averaged_when_backward_returns(me: Rank) -> None:
    parameter = scalar()
    optimizer = reducing(torch.optim.SGD([parameter], lr=1.0))
    (parameter.sum() * (me.rank + 1)).backward()
    mean = (me.size + 1) / 2
    assert parameter.grad.tolist() == [mean, mean]
    nn.utils.clip_grad_norm_([parameter], 0.5)
    optimizer.step()
    moved = 0.5 / 2**0.5
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 1 - moved))


def test_gradients_are_averaged_when_backward_returns(pair: World) -> None:
    """So whatever reads them right afterwards, such as clipping, sees the average."""
    pair.run(averaged_when_backward_returns)


def closures(me: Rank) -> None:
    parameter = scalar()
    optimizer = reducing(torch.optim.LBFGS([parameter], lr=0.5, max_iter=4, tolerance_change=0))
    goal = float(me.rank)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter - goal).square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    mean = (me.size - 1) / 2
    torch.testing.assert_close(parameter.detach(), torch.full((2,), mean), atol=1e-3, rtol=0)


def test_a_closure_that_is_called_several_times(pair: World) -> None:
    """Each backward within it averages, so that LBFGS finds the minimum of the mean."""
    pair.run(closures)


def broken(me: Rank) -> None:
    used, other = scalar(), scalar()
    optimizer = reducing(torch.optim.SGD([used, other], lr=1.0), bucket_bytes=1, first_bucket_bytes=1)

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            raise ZeroDivisionError

    stopping = Stop.apply if me.rank == 0 else torch.clone
    loss = (stopping(used * 1.0) + other).sum()
    if me.rank:
        loss.backward()
        optimizer.step()
    else:
        with raising(ZeroDivisionError):
            loss.backward()
        with raising(ac.InvalidArgumentError, "synchronize()", "earlier backward"):
            (used + other).sum().backward()
        optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.step()
    assert other.tolist() == [0.0] * 2, "averaged before it raised: every rank takes the same step"
    optimizer.zero_grad()
    (used * (me.rank + 1)).sum().backward()
    assert used.grad.tolist() == [(me.size + 1) / 2] * 2


def test_a_backward_that_raises_on_one_rank(pair: World) -> None:
    """The next backward names it; synchronize() brings the ranks back in step."""
    pair.run(broken)


def out_of_step(me: Rank) -> None:
    parameter = scalar()
    optimizer = reducing(torch.optim.SGD([parameter], lr=1.0))
    (parameter.sum()).backward()
    if me.rank:
        optimizer.step()
    with raising(ac.CollectiveMismatchError, "a different number", "synchronize"):
        parameter.sum().backward()


def test_ranks_that_have_lost_step_are_told(pair: World) -> None:
    """One extra backward on one rank would pair the gradients of different steps."""
    pair.run(out_of_step)


def taken_over(me: Rank) -> None:
    parameter, another = scalar(), scalar()
    old = reducing(torch.optim.SGD([parameter], lr=1.0))
    new = reducing(torch.optim.Adam([parameter, another], lr=1.0))
    with raising(ac.InvalidArgumentError, "close()"):
        reducing(torch.optim.SGD([another], lr=1.0))
    ((parameter + another).sum() * (me.rank + 1)).backward()
    assert parameter.grad.tolist() == [(me.size + 1) / 2] * 2
    old.step()
    new.step()


def test_another_optimizer_takes_over(pair: World) -> None:
    """It may take over all parameters of an earlier one; taking over only some is refused."""
    pair.run(taken_over)


def refused_then_trained(me: Rank) -> None:
    parameter = scalar()
    old = reducing(torch.optim.SGD([parameter], lr=1.0))
    for wrong in ({"bucket_byte": 8}, {"bucket_bytes": 0}, {"op": "nonsense"}):
        # On Horovod, its own optimizer gets the options that ours does not know.
        with pytest.raises((ac.AsyncCollError, TypeError)):
            reducing(torch.optim.Adam([parameter], lr=1.0), **wrong)
    (parameter.sum() * (me.rank + 1)).backward()
    assert parameter.grad.tolist() == [(me.size + 1) / 2] * 2
    old.step()


def test_a_refused_call_leaves_the_earlier_optimizer_in_use(pair: World) -> None:
    """Regression: it had closed the earlier one's reducer, and the ranks trained apart without an error."""
    pair.run(refused_then_trained)


async def stepped(me: Rank) -> None:
    parameter = scalar()
    async with ac.async_optim(torch.optim.SGD([parameter], lr=1.0)) as optimizer:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = parameter.sum() * (me.rank + 1)
            loss.backward()
            return loss

        assert (await optimizer.step(closure)).item() == 2 * (me.rank + 1)
        assert parameter.tolist() == [1 - (me.size + 1) / 2] * 2
        closure()
        await optimizer.reduced()
        nn.utils.clip_grad_norm_([parameter], 1.0)
        await optimizer.step()
    with raising(ac.UnsupportedOpError, "LBFGS"):
        async with ac.async_optim(torch.optim.LBFGS([parameter])) as other:
            await other.step(closure)


def test_an_awaited_step_with_a_closure(pair: World) -> None:
    pair.run(stepped)


# ---------------------------------------------------------------- what the ranks start from


async def different_starts(me: Rank) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for x in (*model.parameters(), model[1].running_mean):
        x.data.fill_(me.rank + 1.0)
    with ac.overlap_gradients(model):
        for x in (*model.parameters(), model[1].running_mean):
            assert (x == 1).all()
    for x in model.parameters():
        x.data.fill_(me.rank + 1.0)
    with ac.overlap_gradients(model, init_sync=False):
        assert (model[0].weight == me.rank + 1).all()
    optimizer = reducing(torch.optim.SGD(model.parameters(), lr=1.0))
    assert (model[0].weight == 1).all()
    del optimizer


def test_different_initial_weights(several: World) -> None:
    """They become those of the first rank, including the buffers, as with DDP."""
    several.run(different_starts)


def in_a_group(me: Rank) -> None:
    model = nn.BatchNorm1d(2)
    for x in (*model.parameters(), model.running_mean):
        x.data.fill_(me.rank)
    members = list(range(1, me.size))
    me.prepare(members)
    group = ac.new_group(members)
    if me.rank == 0:
        return
    with ac.overlap_gradients(model, group=group, broadcast_buffers=True) as gradients:
        for x in (*model.parameters(), model.running_mean):
            assert x.tolist() == [1, 1]
        model.running_mean.fill_(me.rank)
        gradients.wait()
        assert model.running_mean.tolist() == [1, 1]


def test_start_of_a_group() -> None:
    """The start is that of the group's first rank, whatever its rank in the world."""
    worlds.world("gloo", 3).run(in_a_group)


def other_layouts(me: Rank) -> None:
    conv = nn.Conv2d(2, 3, 2)
    if me.rank:
        conv = conv.to(memory_format=torch.channels_last)
    with raising(
        ac.CollectiveMismatchError,
        "memory format",
        "strides [8, 4, 2, 1], requires_grad=True, and rank 1 has tensor weight",
    ):
        ac.overlap_gradients(conv)
    differing = (
        "rank 0 (of the group) has tensor weight of shape [3, 3]",
        "rank 1 has tensor weight of shape [2, 3]",
    )
    with raising(ac.CollectiveMismatchError, *differing):
        ac.overlap_gradients(nn.Linear(3, 2) if me.rank else nn.Linear(3, 3))
    with raising(
        ac.CollectiveMismatchError, "rank 0 (of the group) has tensor 1.weight", "rank 1 has no other one"
    ):
        ac.overlap_gradients(nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2 - me.rank))))


def another_order(me: Rank) -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("ba" if me.rank else "ab")})
    with raising(
        ac.CollectiveMismatchError, "rank 0 (of the group) has tensor a.weight", "rank 1 has tensor b.weight"
    ):
        ac.overlap_gradients(model)
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "ab"})
    model["b" if me.rank else "a"].requires_grad_(False)
    with raising(
        ac.CollectiveMismatchError, "a.weight", "requires_grad=False, and rank 1 has tensor a.weight"
    ):
        ac.overlap_gradients(model)
    model.requires_grad_(True)
    gradients = ac.overlap_gradients([x for name in "ab" for x in model[name].parameters()])
    model["a"](torch.ones(1, 3)).sum().backward()
    gradients.wait()
    assert model["a"].weight.grad is not None and model["b"].weight.grad is None


def test_models_that_differ_are_refused(pair: World) -> None:
    """They may differ in shape or in memory format, which would sum up unrelated elements."""
    pair.run(other_layouts)


def test_layers_in_another_order_are_refused(pair: World) -> None:
    """Layers of one shape, in another order or with others frozen, would be averaged with each other."""
    pair.run(another_order)


async def kept_buffers(me: Rank) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with ac.overlap_gradients(model, broadcast_buffers=True) as gradients:
        for step in range(2):
            model(torch.full((5, 3), float(me.rank + step))).sum().backward()
            await gradients
            own = ac.all_gather(model[1].running_mean[None]).wait()
            assert (own == own[0]).all()
            assert model[1].num_batches_tracked.item() == step + 1
            model.zero_grad()
    with raising(ac.InvalidArgumentError, "needs the module"):
        ac.overlap_gradients(model.parameters(), broadcast_buffers=True)


def test_buffers_as_ddp_keeps_them(pair: World) -> None:
    pair.run(kept_buffers)


async def compared(me: Rank) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    await ac.overlap.broadcast_parameters(model)
    await ac.overlap.check_parameters(model)
    if me.rank == me.size - 1:
        with torch.no_grad():
            model[0].bias[0].copy_(torch.nextafter(model[0].bias[0], torch.tensor(10.0)))
    with raising(ac.CollectiveMismatchError, "0.bias", f"[{me.size - 1}]"):
        await ac.overlap.check_parameters(model)
    await ac.overlap.check_parameters([model[0].weight])
    model[0].bias.data.zero_()
    model[1].running_mean.fill_(me.rank)
    with raising(
        ac.CollectiveMismatchError, "buffer 1.running_mean (one of 7)", "All parameters are the same"
    ):
        await ac.overlap.check_parameters(model)
    await ac.overlap.check_parameters(model.parameters())


async def compared_now_and_then(me: Rank) -> None:
    parameter = scalar(float(me.rank))
    checking = ac.overlap.check_parameters([parameter], every=3, timeout=30)
    for turn in range(1, 7):
        with ac.trace.recording() as timeline:
            if turn % 3 == 0:
                with raising(ac.CollectiveMismatchError, "number 0"):
                    await checking
            elif turn % 3 == 1:
                await checking
            else:
                checking.wait()
        sent = [span for span in timeline.spans if span.is_operation]
        assert bool(sent) is (turn % 3 == 0)
    parameter.data.fill_(1.0)
    with raising(ac.InvalidArgumentError, "every"):
        ac.overlap.check_parameters([parameter], every=0)


def test_parameters_are_compared_every_so_many_steps(pair: World) -> None:
    pair.run(compared_now_and_then)


async def compared_after_a_cut(me: Rank) -> None:
    parameter = scalar()
    checking = ac.overlap.check_parameters([parameter], timeout=30)
    with ac.trace.recording() as timeline:
        if me.rank == 0:
            with anyio.move_on_after(0.05) as limit:
                await checking
            assert limit.cancelled_caught
            me.show("gave up comparing")
        else:
            await anyio.to_thread.run_sync(me.see, "gave up comparing")
        await checking
    assert len([span for span in timeline.spans if span.is_operation]) == 1


def test_a_comparison_that_was_cut_short(pair: World) -> None:
    """The next await waits for the same comparison."""
    pair.run(compared_after_a_cut)


def test_diverged_parameters_are_told(pair: World) -> None:
    """A difference of one bit is reported, with the tensor and the rank."""
    pair.run(compared)


# ---------------------------------------------------------------- buckets


async def fused(me: Rank) -> None:
    for make in (torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD):
        ours, alone = (nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last) for _ in range(2))
        for model in (ours, alone):
            generator = torch.Generator().manual_seed(3)
            for parameter in model.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        steps = [make(model.parameters(), lr=0.1, fused=True) for model in (ours, alone)]
        x = torch.randn(me.size, 4, 2, 5, 5, generator=torch.Generator().manual_seed(4))
        with ac.overlap_gradients(ours) as gradients:
            for _ in range(3):
                ours(x[me.rank]).square().mean().backward()
                await gradients
                assert ours.weight.grad.stride() == ours.weight.stride()
                sum(alone(part).square().mean() / me.size for part in x).backward()
                for step in steps:
                    step.step()
                    step.zero_grad()
        torch.testing.assert_close(ours.weight, alone.weight)


def test_memory_format_and_fused_optimizers(pair: World) -> None:
    """Gradients have the layout of their parameters, for optimizers that traverse memory linearly."""
    pair.run(fused)


async def laid_out_later(me: Rank) -> None:
    conv = nn.Conv2d(2, 3, 2)
    with ac.overlap_gradients(conv) as gradients:
        conv(torch.ones(1, 2, 3, 3) * (me.rank + 1)).sum().backward()
        await gradients
        conv.to(memory_format=torch.channels_last)
        conv(torch.ones(1, 2, 3, 3) * (me.rank + 1)).sum().backward()
        await gradients
        assert conv.weight.grad.stride() == conv.weight.stride()
        assert (conv.weight.grad == 2 * 4 * (me.size + 1) / 2).all()
        conv.double()
        with raising(ac.InvalidArgumentError, "torch.float32", "torch.float64"):
            conv(torch.ones(1, 2, 3, 3).double()).sum().backward()


def test_a_model_that_is_converted_later(pair: World) -> None:
    """Gradients follow a new memory format; a new dtype is refused, and the error names both dtypes."""
    pair.run(laid_out_later)


async def in_float32(me: Rank) -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    for op, want in (("avg", (256 + me.size - 1) / me.size), ("sum", 256 + me.size - 1)):
        with ac.overlap_gradients([parameter], op=op, reduce_dtype=torch.float32) as gradients:
            # bfloat16 rounds 257 to 256, whatever is added to it after.
            (parameter.sum() * (256.0 if me.rank == 0 else 1.0)).backward()
            await gradients
        exact = torch.full((4,), want).to(torch.bfloat16)
        assert parameter.grad.equal(exact)
        assert parameter.grad.dtype is torch.bfloat16
        parameter.grad = None
    with raising(ac.InvalidArgumentError, "reduce_dtype"):
        ac.overlap_gradients([parameter], reduce_dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        parameter = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
        with ac.overlap_gradients([parameter], reduce_dtype=dtype) as gradients:
            (parameter.real + 2 * parameter.imag).sum().backward()
            await gradients
        assert parameter.grad.equal(torch.full((4,), 1 + 2j, dtype=torch.complex64))


@pytest.mark.parametrize("size", [2, 5])
def test_bfloat16_gradients_summed_in_float32(size: int) -> None:
    """Sums are rounded once, at the end: 256 + 1 + 1 + 1 + 1 is 260."""
    worlds.world("gloo", size).run(in_float32)


# ---------------------------------------------------------------- one backward after another


async def unsynced_between(me: Rank) -> None:
    parameter = scalar()
    with ac.overlap_gradients([parameter]) as gradients:
        (parameter * 2).sum().backward()
        with gradients.no_sync(), raising(ac.InvalidArgumentError, "await gradients", "no_sync"):
            parameter.sum().backward()
        await gradients
        parameter.grad = None
        with gradients.no_sync():
            parameter.sum().backward()
        (parameter * (me.rank + 1)).sum().backward()
        await gradients
        assert parameter.grad.tolist() == [1 + (me.size + 1) / 2] * 2


def test_no_sync_between_a_backward_and_its_await(pair: World) -> None:
    """It is refused, as it would add to gradients that are being sent."""
    pair.run(unsynced_between)


async def summed_twice(me: Rank) -> None:
    used, idle = scalar(), scalar()
    ranks = me.size * (me.size + 1) / 2
    with ac.overlap_gradients([used, idle], op="sum") as gradients:
        for turn in range(1, 4):
            ((used + (idle if turn == 1 else 0)) * (me.rank + 1)).sum().backward()
            await gradients
            torch.testing.assert_close(used.grad, torch.full((2,), turn * ranks))
            torch.testing.assert_close(idle.grad, torch.full((2,), ranks))
        torch.autograd.grad((used * 2).sum(), [used])  # not a backward: it changes no gradient
        torch.testing.assert_close(used.grad, torch.full((2,), 3 * ranks))
        for to_none in (True, False):
            for parameter in (used, idle):
                if to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()
            with gradients.no_sync():
                ((used + idle) * (me.rank + 1)).sum().backward()
            (used * (me.rank + 1)).sum().backward()
            await gradients
            torch.testing.assert_close(used.grad, torch.full((2,), 2 * ranks))
            torch.testing.assert_close(idle.grad, torch.full((2,), ranks))


def test_sums_of_several_backwards(several: World) -> None:
    """What has been summed is not summed again, whether a later backward adds to it or not."""
    several.run(summed_twice)


async def added(me: Rank) -> None:
    model = nn.ParameterDict({"first": scalar(), "frozen": scalar()})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD([model["first"]], lr=1.0)
    plain = [scalar()]
    optimizer.add_param_group({"params": plain})
    with (
        ac.overlap_gradients(model) as gradients,
        ac.async_optim(torch.optim.SGD(plain, lr=1.0), lane="added") as awaited,
    ):
        later = scalar()
        awaited.add_param_group({"params": [later]})
        for turn in range(2):
            model["frozen"].requires_grad_(True)
            model["added"] = model["added"] if turn else scalar()
            total = sum(model.values()) + plain[0] + later
            (total * (me.rank + 1)).sum().backward()
            await gradients
            await awaited.reduced()
            for parameter in (*model.values(), *plain, later):
                assert parameter.grad.tolist() == [(me.size + 1) / 2] * 2
                parameter.grad = None


def two(values: Sequence[float], order: Sequence[str]) -> nn.ParameterDict:
    """Return a model that has frozen parameters of one shape, added in this order."""
    made = dict(zip("ab", map(scalar, values), strict=True))
    model = nn.ParameterDict({"first": scalar()})
    for name in order:
        model[name] = made[name].requires_grad_(False)
    return model


async def added_unlike(me: Rank) -> None:
    """Two different parameters used to be summed, or parameters with different values stepped alike."""
    last = me.rank == me.size - 1
    for case, order, value, says in (
        ("order", "ba" if last else "ab", 1.0, ("'a'", f"and rank {me.size - 1} has", "'b'")),
        ("number", "a" if last else "ab", 1.0, ("'b'", "no other one")),
        ("values", "ab", 2.0 if last else 1.0, ("'b'", "checksum")),
    ):
        with me.case(case):
            model = two((1.0, 1.0), order if case == "order" else "ab")
            with ac.overlap_gradients(model, init_sync=case != "order") as gradients:
                for name in order:
                    model[name].requires_grad_(True).data.fill_(value if name == "b" else 1.0)
                for _ in range(1 if case == "number" else 2):  # later steps would be wrong
                    sum(model.values()).sum().backward()
                    with raising(ac.CollectiveMismatchError, "added or unfrozen", *says):
                        await me.get(gradients)
                    assert model["first"].grad is not None


def test_parameters_that_come_later_and_differ_are_told_by_name(pair: World) -> None:
    pair.run(added_unlike)


@pytest.mark.parametrize("awaited", [False, True])
def test_parameters_that_one_rank_adds_alone_are_told_by_name(awaited: bool) -> None:
    """Only that rank compares them, and its comparison meets the others' gradients of the next step."""
    said: dict[int, str] = {}

    async def main(rank: int) -> None:
        model = two((1.0, 1.0), "ab")
        if awaited:
            optimizer = ac.async_optim(torch.optim.SGD([*model.values()], lr=1.0), timeout=5.0)
        else:
            gradients = ac.overlap_gradients(model, timeout=5.0)
        model["a"].requires_grad_(rank == 1)
        try:
            for _ in range(2):
                sum(model.values()).sum().backward()
                await (optimizer.step() if awaited else gradients)
        except ac.CollectiveMismatchError as error:
            said[rank] = str(error)

    simulate(main, world_size=3, seed=7, transport="gloo")
    name = "a parameter" if awaited else "the parameter 'a'"
    assert f"this rank has added or unfrozen {name} of shape [2], and ranks that call all_reduce" in said[1]
    for rank in (0, 2):
        assert "has added or unfrozen no parameter, and ranks that call all_gather have" in said[rank]
    assert not any("different steps" in text for text in said.values())


async def added_with_other_values(me: Rank) -> None:
    model = two((1.0, float(me.rank)), "ab")
    with ac.overlap_gradients(model, init_sync=False) as gradients:
        model.requires_grad_(True)
        (sum(model.values()) * (me.rank + 1)).sum().backward()
        await me.get(gradients)
        for parameter in model.values():
            assert parameter.grad.tolist() == [(me.size + 1) / 2] * 2
    plain = [scalar()]
    with ac.async_optim(torch.optim.SGD(plain, lr=1.0), lane="added") as awaited:
        awaited.add_param_group({"params": [scalar(float(me.rank))]})
        plain[0].sum().backward()
        with raising(ac.CollectiveMismatchError, "added or unfrozen", "shape [2]") as caught:
            await me.get(awaited.step())
        assert "different steps" not in str(caught.error)


def test_values_of_later_parameters_are_compared_if_the_first_ones_were_sent(pair: World) -> None:
    pair.run(added_with_other_values)


def test_parameters_that_come_later(pair: World) -> None:
    """Unfrozen, added to the module, or added to the optimizer: they take part from that step on."""
    pair.run(added)


async def with_a_graph(me: Rank) -> None:
    parameter = scalar()
    with ac.overlap_gradients([parameter]) as gradients:
        with raising(ac.InvalidArgumentError, "create_graph=True", "torch.autograd.grad"):
            parameter.square().sum().backward(create_graph=True)
        await gradients  # completes the step with the gradients there are
        parameter.grad = None
        with gradients.no_sync(), raising(ac.InvalidArgumentError, "create_graph=True"):
            parameter.square().sum().backward(create_graph=True)
        parameter.grad = None
        (gradient,) = torch.autograd.grad(parameter.square().sum(), [parameter], create_graph=True)
        (gradient.square().sum() * (me.rank + 1)).backward()
        await gradients
        assert parameter.grad.tolist() == [8 * (me.size + 1) / 2] * 2


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients(pair: World) -> None:
    """It is refused where the graph would be lost; the error names the way to keep it."""
    pair.run(with_a_graph)


# ---------------------------------------------------------------- averaging and windows


async def finished(me: Rank) -> None:
    parameter = scalar(float(me.rank))
    averaging = ac.overlap.average_parameters([parameter], every=10, timeout=30)
    with ac.trace.recording() as timeline:
        if me.rank == 0:
            with anyio.move_on_after(0.05) as limit:
                await averaging.finish()
            assert limit.cancelled_caught
            me.show("gave up")
        else:
            await anyio.to_thread.run_sync(me.see, "gave up")
        await averaging.finish()
    assert parameter.tolist() == [(me.size - 1) / 2] * 2
    names = [span.name for span in timeline.spans if span.is_operation]
    assert names == ["all_reduce"] * 2, "the parameters, and the number of the step"
    parameter.data.fill_(me.rank + 1.0)
    await averaging.finish()
    assert parameter.tolist() == [(me.size + 1) / 2] * 2


def test_a_finish_that_was_cut_short(pair: World) -> None:
    """The next finish() waits for the same average."""
    pair.run(finished)


async def shared_window(me: Rank) -> None:
    window = ac.overlap.InFlight(max_in_flight_bytes=1 << 20)
    x = torch.ones(4)
    await window.start(ac.all_reduce, x, lane="a")

    async def other() -> None:
        with raising(ac.InvalidArgumentError, "belongs to", "each task"):
            await window.start(ac.all_reduce, x, lane="b")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
    await window.drain()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(window.start, ac.all_reduce, x)
    await window.drain()


@pytest.mark.parametrize("runner", ["asyncio", "trio"])
def test_a_window_belongs_to_a_task(pair: World, runner: str) -> None:
    """Two tasks that share one, on different lanes, would wait for each other on different ranks."""
    pair.run(shared_window, runner=runner)


def test_nothing_is_left_of_a_dropped_optimizer() -> None:
    """Its reducer goes with it once the garbage collector finds the cycle."""
    parameter = scalar()
    optimizer = ac.async_optim(torch.optim.SGD([parameter], lr=1.0))
    del optimizer
    gc.collect()
    assert not parameter._post_accumulate_grad_hooks
