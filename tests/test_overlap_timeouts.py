"""A timeout that ended only a wait is waited for again; one that an operation failed with is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import asynccoll as ac
from asynccoll.overlap import averaging, divergence, gradients, shards
from asynccoll.testing import simulate

#: Waits for a call again, after it has failed, in a world of one.
Again = Callable[[], object]


def timed_out(*_: object) -> NoReturn:
    raise ac.CollectiveTimeoutError("the backend timed out")


def failing(*_: object, **__: object) -> ac.Work[NoReturn]:
    """Return what a call is whose native operation has timed out."""
    return ac.all_reduce(torch.zeros(1), group=[ac.get_rank()]).map(timed_out)


def linear() -> nn.Linear:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    return model


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()


@contextmanager
def reducer(failing_in: Callable[..., None]) -> Iterator[Again]:
    model = linear()
    with ac.overlap_gradients(model) as reduced:

        def step() -> None:
            backward(model)
            reduced.wait()

        failing_in(gradients, "all_reduce", step)
        yield step


@contextmanager
def optimizer_of(failing_in: Callable[..., None], make: Any, module: Any, name: str) -> Iterator[Again]:
    model = linear()
    optimizer = make(model, optimizer_for(model))

    def step() -> None:
        backward(model)
        optimizer.step().wait()

    failing_in(module, name, step)
    yield step
    optimizer.close()


def awaited(failing_in: Callable[..., None]) -> Any:
    return optimizer_of(failing_in, lambda _, plain: ac.async_optim(plain), gradients, "all_reduce")


def sharded(failing_in: Callable[..., None]) -> Any:
    return optimizer_of(failing_in, ac.overlap.shard_optimizer, shards, "reduce_scatter")


@contextmanager
def closing(failing_in: Callable[..., None]) -> Iterator[Again]:
    model = linear()
    optimizer = ac.overlap.shard_optimizer(model, optimizer_for(model))

    def step_and_close() -> None:
        optimizer.step().wait()
        optimizer.close()

    backward(model)
    failing_in(shards, "all_gather", step_and_close)
    assert not model._forward_pre_hooks
    optimizer.close()
    yield ac.overlap.check_parameters(model).wait  # waits for parameters that are on their way


@contextmanager
def averager(failing_in: Callable[..., None]) -> Iterator[Again]:
    averaged = ac.overlap.average_parameters(linear(), every=1)
    failing_in(averaging, "all_reduce", averaged.wait)
    yield averaged.wait


@contextmanager
def last_average(failing_in: Callable[..., None]) -> Iterator[Again]:
    averaged = ac.overlap.average_parameters(linear(), every=2)
    failing_in(averaging, "all_reduce", lambda: averaged.finish().wait())
    yield averaged.wait


@contextmanager
def checker(failing_in: Callable[..., None]) -> Iterator[Again]:
    checking = ac.overlap.check_parameters(linear())
    failing_in(divergence, "all_gather", checking.wait)
    yield checking.wait


@contextmanager
def window(failing_in: Callable[..., None]) -> Iterator[Again]:
    flight = ac.overlap.InFlight(max_in_flight_bytes=8)
    flight.start_blocking(failing, torch.ones(1))
    failing_in(divergence, "all_gather", flight.wait)
    yield flight.wait
    assert flight.in_flight_bytes == 0


@pytest.mark.parametrize(
    "make", [reducer, awaited, sharded, closing, averager, last_average, checker, window]
)
def test_a_call_that_has_timed_out_is_not_waited_for_again(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was taken for one in flight, and each later wait, even ``close()``, failed with it."""

    def failing_in(module: Any, name: str, call: Again) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, failing)
            with pytest.raises(ac.CollectiveTimeoutError, match="the backend timed out") as raised:
                call()
        assert not raised.value.pending

    with make(failing_in) as again:
        again()


def test_a_failed_call_of_several_remains_failed() -> None:
    """A ``Pending`` keeps the error with which it has failed, as a work does."""
    model = linear()
    optimizer = ac.overlap.shard_optimizer(model, optimizer_for(model))
    backward(model)
    step = optimizer.step(timed_out)
    for _ in range(2):
        with pytest.raises(ac.CollectiveTimeoutError, match="the backend timed out"):
            step.wait()
        assert step.done()
    optimizer.close()


def waits_for_another(rank: int) -> None:
    if rank:
        ac.recv(torch.zeros(1), src=0).wait()
    inner = ac.all_reduce(torch.ones(1))
    if rank:
        inner.wait()
        return
    outer = ac.all_reduce(torch.ones(1), group=[0]).map(lambda _: inner.wait(0.1))
    with pytest.raises(ac.CollectiveTimeoutError) as raised:
        inner.wait(0.1)
    assert raised.value.pending
    assert not inner.done()
    with pytest.raises(ac.CollectiveTimeoutError) as raised:
        outer.wait()
    assert not raised.value.pending
    assert outer.done()
    ac.send(torch.zeros(1), dst=1).wait()
    assert inner.wait().item() == 2


def test_a_timeout_tells_whether_its_work_is_still_pending() -> None:
    """That of a work which ``map`` was to wait for is final for the mapped work, which has failed."""
    simulate(waits_for_another, world_size=2, loop="none").check()


def in_a_scope(slow: ac.Work[torch.Tensor], late: list[ac.Work[torch.Tensor]]) -> None:
    with ac.scope():
        failed = failing(None)
        failed.map(lambda _: None)
        late.append(ac.all_reduce(torch.ones(1), lane="late", timeout=0.1))
        with pytest.raises(ac.CollectiveTimeoutError, match="the backend"):
            failed.wait()
        with pytest.raises(ac.CollectiveTimeoutError):
            slow.wait()  # until the deadline of the other has passed as well


def leaves_a_scope(rank: int) -> None:
    if rank:
        ac.recv(torch.zeros(1), src=0).wait()
        ac.all_reduce(torch.ones(1), lane="slow").wait()
        ac.all_reduce(torch.ones(1), lane="late").wait()
        return
    slow = ac.all_reduce(torch.ones(1), lane="slow", timeout=0.5)
    late: list[ac.Work[torch.Tensor]] = []
    with pytest.raises(ac.CollectiveTimeoutError, match="is not ready after"):
        in_a_scope(slow, late)
    ac.send(torch.zeros(1), dst=1).wait()
    ac.wait_all([slow, *late]).wait()


def test_a_scope_with_a_failed_timeout_still_waits_for_the_rest() -> None:
    """Regression: a work whose deadline had passed was left in flight without an error."""
    simulate(leaves_a_scope, world_size=2, loop="none").check()
