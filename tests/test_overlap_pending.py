"""What methods with several waits return: awaited, waited for, asked for twice, and forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import asynccoll as ac
from asynccoll.testing import simulate


def sharded() -> tuple[nn.Linear, ac.overlap.ShardedOptimizer]:
    """Make an optimizer in a world of one, with gradients of one everywhere: a step subtracts 0.5."""
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
    model(torch.ones(1, 2)).sum().backward()
    return model, optimizer


def awaited() -> tuple[nn.Linear, Any]:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    optimizer = ac.async_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    model(torch.ones(1, 2)).sum().backward()
    return model, optimizer


@pytest.mark.parametrize("make", [sharded, awaited])
def test_without_an_event_loop(make: Any) -> None:
    model, optimizer = make()
    optimizer.step().wait()
    optimizer.close()
    assert model.weight.tolist() == [[0.5, 0.5]]


def late(rank: int) -> list[float]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if rank:
        ac.recv(torch.zeros(1), src=0).wait()
    model(torch.full((1, 2), float(rank))).sum().backward()
    step = optimizer.step()
    assert not step.done()
    if rank:
        step.wait(timeout=60)
    else:
        with pytest.raises(ac.CollectiveTimeoutError):
            step.wait(timeout=1.0)
        assert not step.done()
        ac.send(torch.zeros(1), dst=1).wait()
        step.wait()
    assert step.done()
    optimizer.close()
    return model.weight[0].tolist()  # type: ignore[no-any-return]  # torch's tolist is untyped


def test_a_wait_of_limited_time_is_continued_by_the_next() -> None:
    """A limit covers everything that the call waits for, as in ``Work.wait``."""
    report = simulate(late, world_size=2, loop="none")
    report.check()
    # Gradients of 0 and 1 average to 0.5, of which half is subtracted.
    assert report.results == {0: [0.75, 0.75], 1: [0.75, 0.75]}


def another(optimizer: Any) -> bool:
    """Call the method again, and wait. Return whether the first step is done then."""
    optimizer.step().wait()
    return True


def news(optimizer: Any) -> bool:
    """Drop gradients that this rank has already sent, which is refused; return that the step is not done."""
    with pytest.raises(ac.InvalidArgumentError, match=r"zero_grad\(\) before step\(\) was complete"):
        optimizer.zero_grad()
    return False


@pytest.mark.parametrize(
    ("make", "between"),
    [
        (lambda _, plain: ac.async_optim(plain), another),
        (ac.overlap.shard_optimizer, another),
        (ac.overlap.shard_optimizer, news),
    ],
)
def test_a_wait_continues_its_own_call_whatever_came_between(
    make: Any, between: Callable[[Any], bool]
) -> None:
    """Regression: it began another step, in which no other rank took part."""

    def main(rank: int) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        plain = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = make(model, plain)
        if rank:
            ac.recv(torch.zeros(1), src=0).wait()
        model(torch.full((1, 2), float(rank))).sum().backward()
        step = optimizer.step()
        if not rank:
            with pytest.raises(ac.CollectiveTimeoutError):
                step.wait(timeout=1.0)
            ac.send(torch.zeros(1), dst=1).wait()
            assert between(optimizer) == step.done()
        step.wait()
        step.wait()
        optimizer.close()
        return model.weight[0].tolist()  # type: ignore[no-any-return]  # torch's tolist is untyped

    report = simulate(main, world_size=2, loop="none")
    report.check()
    assert report.results == {0: [0.75, 0.75], 1: [0.75, 0.75]}, "as in `late`"


def test_a_last_average_that_another_call_has_waited_for_is_not_begun_anew() -> None:
    def main(rank: int) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.constant_(model.weight, rank)
        average = ac.overlap.average_parameters(model, every=4)
        if rank:
            ac.recv(torch.zeros(1), src=0).wait()
        finish = average.finish()
        if not rank:
            with pytest.raises(ac.CollectiveTimeoutError):
                finish.wait(timeout=1.0)
            ac.send(torch.zeros(1), dst=1).wait()
            average.finish().wait()
            assert finish.done()
        finish.wait()
        return model.weight[0].tolist()  # type: ignore[no-any-return]  # torch's tolist is untyped

    report = simulate(main, world_size=2, loop="none")
    report.check()
    assert report.results == {0: [0.5, 0.5], 1: [0.5, 0.5]}


@pytest.mark.parametrize("make", [sharded, awaited])
def test_a_step_that_is_awaited_twice_is_one(make: Any) -> None:
    async def main() -> None:
        model, optimizer = make()
        step = optimizer.step()
        assert model.weight.tolist() == [[1.0, 1.0]], "it begins when it is waited for"
        await asyncio.gather(step)
        await step
        step.wait()
        optimizer.close()
        assert model.weight.tolist() == [[0.5, 0.5]]

    asyncio.run(main())


@pytest.mark.parametrize("make", [sharded, awaited])
def test_a_step_that_has_failed_is_not_begun_anew(make: Any) -> None:
    """A later wait gets the same error: the other ranks, whose step is over, would never take part again."""
    called = []

    def closure() -> torch.Tensor:
        called.append(1)
        raise LookupError("no batch")

    async def main() -> None:
        model, optimizer = make()
        step = optimizer.step(closure)
        errors = []
        for _ in range(2):
            with pytest.raises(LookupError, match="no batch") as caught:
                await step
            errors.append(caught.value)
        with pytest.raises(LookupError) as caught:
            step.wait()
        assert {id(error) for error in [*errors, caught.value]} == {id(errors[0])}
        assert "failed" in repr(step)
        await optimizer.step()
        optimizer.close()
        assert model.weight.tolist() == [[0.5, 0.5]]

    asyncio.run(main())
    assert called == [1]


def test_a_step_that_was_refused_while_another_was_waited_for_may_be_awaited_again() -> None:
    """Nothing of the step had begun."""

    async def main(rank: int) -> None:
        model = nn.Linear(2, 1)
        optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(2):
            await optimizer.gathered()
            model(torch.ones(1, 2)).sum().backward()
            reduced, step = optimizer.reduced(), optimizer.step()
            first = asyncio.ensure_future(reduced._awaited())
            await asyncio.sleep(0)
            if not first.done():
                with pytest.raises(ac.InvalidArgumentError, match="another task waits in reduced"):
                    await step
                refused.append(rank)
            await first
            await step
        optimizer.close()

    refused: list[int] = []
    assert not simulate(main, world_size=2, seed=3, transport="gloo").errors
    assert refused


@pytest.mark.parametrize(("make", "name"), [(sharded, "ShardedOptimizer"), (awaited, "AsyncOptimizer")])
def test_a_forgotten_step_is_told(make: Any, name: str) -> None:
    """The user is told when it is dropped, and in the next call, which would be the other ranks' first."""
    model, optimizer = make()
    said = rf"{name}\.step\(\) at .*test_overlap_pending\.py:\d+ was never awaited, and has done nothing"
    with pytest.warns(ac.UnawaitedWorkWarning, match=said):
        optimizer.step()
    assert model.weight.tolist() == [[1.0, 1.0]]
    with pytest.raises(ac.InvalidArgumentError, match=said):
        optimizer.step()
    optimizer.step().wait()  # told once, the user may make up for it
    optimizer.close()
    assert model.weight.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize(("make", "name"), [(sharded, "ShardedOptimizer"), (awaited, "AsyncOptimizer")])
def test_a_forgotten_step_is_told_by_the_next_backward(make: Any, name: str, is_kept: bool) -> None:
    """In a training loop, backward precedes the optimizer's next call; the step may also have been kept."""
    model, optimizer = make()
    cure = r"write `await optimizer\.step\(\)` \(or \.step\(\)\.wait\(\)\)"
    said = rf"^{name}\.step\(\) at .*test_overlap_pending\.py:\d+ was never awaited.*: {cure}$"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        step = optimizer.step()
        if not is_kept:
            del step
        with pytest.raises(ac.InvalidArgumentError, match=said):
            model(torch.ones(1, 2)).sum().backward()
        if is_kept:
            step.wait()
        else:
            optimizer.step().wait()
    assert len(heard) == (not is_kept), "once an error has said it, no warning need"
    optimizer.close()


def test_gradients_that_are_returned_do_not_hide_that_a_step_was_forgotten() -> None:
    """``torch.autograd.grad`` adds nothing to gradients in flight, and is not refused."""
    model, optimizer = awaited()
    step = optimizer.step()
    torch.autograd.grad(model(torch.ones(1, 2)).sum(), [*model.parameters()])
    with pytest.raises(ac.InvalidArgumentError, match=r"step\(\) at .* was never awaited"):
        model(torch.ones(1, 2)).sum().backward()
    step.wait()
    optimizer.close()


@pytest.mark.parametrize("make", [sharded, awaited])
def test_a_second_backward_names_the_calls_of_the_optimizer(make: Any) -> None:
    model, optimizer = make()
    with pytest.raises(ac.InvalidArgumentError) as refused:
        model(torch.ones(1, 2)).sum().backward()
    told = str(refused.value)
    assert "`await optimizer.step()` (or .step().wait()) after each backward" in told
    assert "`with optimizer.no_sync():`" in told
    assert "gradients.wait()" not in told
    optimizer.close()


def test_a_step_of_the_wrapped_optimizer_names_the_awaited_one() -> None:
    _, optimizer = awaited()
    with pytest.raises(ac.InvalidArgumentError, match=r"`await optimizer\.step\(\)`.*\.reduced\(\)`"):
        optimizer.wrapped.step()
    optimizer.close()


def test_what_takes_arguments_is_written_so() -> None:
    _, optimizer = sharded()
    with pytest.warns(ac.UnawaitedWorkWarning, match=r"write `await optimizer\.clip_grad_norm_\(\.\.\.\)`"):
        optimizer.clip_grad_norm_(1.0)


@pytest.mark.parametrize("how", ["overlap_gradients", "async_optim", "shard_optimizer"])
def test_a_rank_with_fewer_batches_is_told_what_to_do(how: str) -> None:
    """Once it has left, the others' error says what to do, with the calls that the program makes."""

    async def main(rank: int) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        made: Any = {
            "overlap_gradients": lambda: ac.overlap_gradients(model),
            "async_optim": lambda: ac.async_optim(optimizer),
            "shard_optimizer": lambda: ac.overlap.shard_optimizer(model, optimizer),
        }[how]()
        for _ in range(2 if rank == 1 else 3):
            model(torch.ones(1, 2)).sum().backward()
            await (made if how == "overlap_gradients" else made.step())
        if how == "shard_optimizer":
            await made.gathered()

    error = simulate(main, world_size=3, seed=1).errors[0]
    assert isinstance(error, ac.PeerLostError)
    awaited = "gradients" if how == "overlap_gradients" else "optimizer.step()"
    cure = f"Fewer batches on rank 1? A rank without data for a step just awaits `{awaited}`"
    assert str(error).endswith(f". {cure}"), error


@pytest.mark.parametrize("make", [sharded, awaited])
def test_it_is_waited_for_by_itself(make: Any) -> None:
    """A step begins when it is waited for, and calls collectives, whereas works are in flight already."""
    _, optimizer = make()
    step = optimizer.step()
    for works in (step, [step], [optimizer.gradients]):
        with pytest.raises(
            ac.InvalidCallError, match=r"steps of optimizers are awaited one by one.*a wait\(\)"
        ):
            ac.wait_all(works)
    step.wait()
    optimizer.close()


def test_it_is_not_its_result() -> None:
    _, optimizer = sharded()
    norm = optimizer.clip_grad_norm_(1.0)
    with pytest.raises(ac.PayloadTypeError, match=re.escape("<ShardedOptimizer.clip_grad_norm_() at ")):
        norm > 1.0  # noqa: B015  # what a user writes who forgot to await
    assert norm.wait().item() == pytest.approx(3**0.5)
    optimizer.close()


def test_one_whose_misuse_has_raised_does_not_warn_as_well() -> None:
    """Still, it has done nothing, which the next call says."""
    _, optimizer = sharded()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with contextlib.suppress(ac.PayloadTypeError):
            float(optimizer.clip_grad_norm_(1.0))
    assert heard == []
    with pytest.raises(ac.InvalidArgumentError, match="was never awaited"):
        optimizer.step()
    optimizer.close()


def test_one_that_failed_fails_again() -> None:
    """It raises the same error; a late waiter is not told that the step is done."""
    _, optimizer = sharded()

    def closure() -> float:
        raise ArithmeticError("no loss")

    step = optimizer.step(closure)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="no loss"):
            step.wait()
    optimizer.close()


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=6),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("shares_out", [False, True])
def test_schedulers_take_it(name: str, shares_out: bool) -> None:
    """Rates, and so the weights, equal those of torch's optimizer under the same scheduler."""

    def train(wrap: Any) -> tuple[list[float], list[list[float]]]:
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, -1.0]]))
            model.bias.zero_()
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            step = optimizer.step()
            if isinstance(step, ac.overlap.Pending):
                step.wait()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        if isinstance(optimizer, ac.overlap.ShardedOptimizer):
            optimizer.gathered().wait()
        return rates, model.weight.tolist()

    def ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
        return ac.overlap.shard_optimizer(model, optimizer) if shares_out else ac.async_optim(optimizer)

    rates, weights = train(ours)
    expected_rates, expected = train(lambda _, optimizer: optimizer)
    assert rates == expected_rates
    assert weights[0] == pytest.approx(expected[0])


def test_a_scheduler_that_watches_a_loss_takes_it() -> None:
    _, optimizer = sharded()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.close()
