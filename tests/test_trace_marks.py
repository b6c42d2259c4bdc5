"""Automatic marks (forward, backward, optimizer, steps), what torch.profiler shows, and hooks."""

from __future__ import annotations

import itertools
import logging
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import asynccoll as ac
from asynccoll.runtime.process import current
from ranks import Rank
from worlds import World


class Model(torch.nn.Module):
    """Nested modules, and outputs in a tree."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())

    def forward(self, x):
        return {"out": [self.inner(x)], "n": 3}


def marked(timeline):
    return [(span.name, span.place) for span in timeline.spans if not span.is_operation]


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3))["out"][0].sum().backward()
        optimizer.step()


def test_a_training_step_marks_itself():
    """Marked are the outermost module, its backward and the optimizer, which also ends the step."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ac.trace.recording() as timeline:
        train(model, optimizer, steps=2)
    once = [("forward", "Model"), ("backward", "Model"), ("optimizer", "SGD")]
    assert marked(timeline) == once * 2
    assert len(timeline.steps) == 2
    spans = timeline.spans
    for before, after in itertools.pairwise(spans):
        assert before.end is not None
        assert before.end <= after.start
    assert spans[2].end == pytest.approx(timeline.steps[0], abs=0.01)


def test_outside_of_a_recording_nothing_is_hooked():
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    def hooks():
        return [
            len(modules._global_forward_pre_hooks),
            len(modules._global_forward_hooks),
            len(optimizers._global_optimizer_pre_hooks),
            len(optimizers._global_optimizer_post_hooks),
        ]

    before = hooks()
    with ac.trace.recording():
        assert hooks() == [count + 1 for count in before]
    assert hooks() == before
    with ac.trace.recording(marks=False):
        assert hooks() == before


def test_gradients_are_the_same():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with ac.trace.recording():
        train(model, optimizer)
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, expected)


def test_what_the_program_marks_is_left_to_it():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ac.trace.recording() as timeline:
        with timeline.span("my step"):
            train(model, optimizer)
        timeline.step()
    assert marked(timeline) == [("my step", "")]
    assert len(timeline.steps) == 1
    assert timeline.steps[0] >= timeline.spans[0].end


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_module_that_raises_ends(error):
    """torch calls no hook for a KeyboardInterrupt."""

    class Broken(torch.nn.Module):
        def forward(self, x):
            self.inner(x)

        def inner(self, x):
            raise error

    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.broken = Broken()

        def forward(self, x):
            return self.broken(x)

    with ac.trace.recording() as timeline:
        with pytest.raises(error):
            Around()(torch.ones(1))
        Model()(torch.ones(1, 3))
    assert marked(timeline) == [("forward", "Around"), ("forward", "Model")]
    assert all(span.end is not None for span in timeline.spans)


class Around(torch.optim.Optimizer):
    """An optimizer that steps another one in its own step, as ZeroRedundancyOptimizer does."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step(closure)
        return self.inner.step()


def test_an_optimizer_that_calls_others_is_one():
    model = Model()
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    with ac.trace.recording() as timeline:
        train(model, optimizer, steps=2)
    assert marked(timeline) == [("forward", "Model"), ("backward", "Model"), ("optimizer", "Around")] * 2
    assert all(span.end is not None for span in timeline.spans)
    assert len(timeline.steps) == 2


def test_a_step_that_raises_ends():
    """It does not count as a step. Its span ends, and does not cover what follows it."""
    model = Model()
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))

    calls = itertools.count()

    def closure():
        model(torch.ones(2, 3))
        if next(calls) == 0:
            raise KeyError

    with ac.trace.recording() as timeline:
        with pytest.raises(KeyError):
            optimizer.step(closure)
        model(torch.ones(2, 3))
        optimizer.step(closure)
    raised, inside, after, step, inner = timeline.spans
    assert [span.name for span in timeline.spans] == [
        "optimizer",
        "forward",
        "forward",
        "optimizer",
        "forward",
    ]
    assert inside.end <= raised.end <= after.start
    assert step.start <= inner.start <= inner.end <= step.end
    assert len(timeline.steps) == 1


def test_a_backward_that_raises_ends():
    model = torch.nn.Linear(3, 3)
    model.weight.register_hook(lambda gradient: 1 / 0)
    with ac.trace.recording() as timeline:
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 3)).sum().backward()
        caught = timeline.spans
    assert [(span.name, span.end is None) for span in caught] == [("forward", False), ("backward", False)]


def test_a_checkpoint_that_is_computed_again_is_backward():
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Linear(3, 3)
    with ac.trace.recording() as timeline:
        checkpoint(model, torch.ones(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert marked(timeline) == [("forward", "Linear"), ("backward", "Linear")]


def test_spans_of_code_that_does_not_know_who_records():
    """``ac.trace.span`` and ``step`` go to every running recording, and nowhere else."""
    with ac.trace.span("nobody looks"):
        ac.trace.step()
    with ac.trace.recording() as outer, ac.trace.recording() as inner, ac.trace.span("mine", row="chosen"):
        ac.trace.step()
    for timeline in (outer, inner):
        assert [(span.name, span.row) for span in timeline.spans] == [("mine", "chosen")]
        assert len(timeline.steps) == 1


# --- torch.profiler ---------------------------------------------------------------------------------


async def profiled(me: Rank) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with ac.trace.span("validate"):
            work = ac.all_reduce(torch.ones(4), lane="side")
        await me.get(work)
        await me.get(ac.all_gather({"a": torch.ones(2), "b": 1}))
    await me.get(ac.all_reduce(1.0))
    names = [event.name for event in prof.events()]
    assert names.count("validate") == 1
    assert names.count("asynccoll.all_reduce [side]") == 1
    assert "asynccoll.all_gather [default]" in names
    (shown,) = (event for event in prof.events() if event.name == "asynccoll.all_reduce [side]")
    assert shown.time_range.elapsed_us() > 0


def test_the_profiler_of_torch_shows_operations_lanes_and_spans(pair: World, runner: str) -> None:
    pair.run(profiled, runner=runner)


def events_of(prof: profile, name: str) -> list[float]:
    """Return the durations of the events called ``name``, in microseconds."""
    return [event.time_range.elapsed_us() for event in prof.events() if event.name == name]


async def profiled_partly(me: Rank) -> None:
    await me.get(ac.all_reduce(1.0, lane="side"))  # opens the lane
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        span = ac.trace.span("validate")
        span.__enter__()
        if me.rank == 0:
            work = ac.all_reduce(torch.ones(4), lane="side")
    await me.get(ac.barrier())  # the other ranks continue only after rank 0's profiler has stopped
    if me.rank:
        work = ac.all_reduce(torch.ones(4), lane="side")
    with profile(activities=[ProfilerActivity.CPU]) as later:
        assert (await me.get(work)).tolist() == [me.size] * 4
        span.__exit__(None, None, None)
    assert len([us for us in events_of(prof, "validate") if us > 0]) == 1
    assert len([us for us in events_of(prof, "asynccoll.all_reduce [side]") if us > 0]) == (me.rank == 0)
    assert not events_of(later, "validate")
    # torch's own events would end later, when gloo's thread gets to them, in memory freed by then
    assert not [event.name for event in prof.events() if event.name.startswith("gloo:")]


def test_what_goes_on_when_the_profiler_stops_ends_there(pair: World, runner: str) -> None:
    """A later end would be written to freed memory of the profiler and crash the process anywhere."""
    pair.run(profiled_partly, runner=runner)


async def profiled_beside_torch(me: Rank) -> None:
    group = ac.new_group(range(me.size)).process_group()
    assert "gloo" in torch.distributed.get_backend_config(group)  # the profiler asks for this of every group


def test_the_profiler_of_torch_knows_the_groups_that_torch_runs_on(pair: World) -> None:
    pair.run(profiled_beside_torch)


# --- hooks ------------------------------------------------------------------------------------------


async def hooked(me: Rank) -> None:
    told: list[ac.trace.Finished] = []
    remove = ac.trace.add_hook(told.append)
    await me.get(ac.all_reduce(torch.ones(8), lane="side"))
    remove()
    await me.get(ac.all_reduce(torch.ones(8)))
    (done,) = told
    assert (done.operation, done.lane, done.size_bytes, done.failed) == ("all_reduce", "side", 32, False)
    assert done.ranks == tuple(range(me.size))
    assert "test_trace_marks.py" in done.place
    assert 0 < done.seconds < 100
    assert current().observers == ()


def test_a_hook_is_told_of_what_is_over(pair: World, runner: str) -> None:
    pair.run(hooked, runner=runner)


def test_opentelemetry_gets_a_span_and_metrics_of_each_operation():
    from opentelemetry import metrics, trace
    from opentelemetry.sdk import trace as sdk
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, reader, provider = InMemorySpanExporter(), InMemoryMetricReader(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
    remove = ac.trace.opentelemetry()
    ac.all_reduce(torch.ones(8), lane="side").wait()
    remove()
    ac.all_reduce(torch.ones(8)).wait()
    (span,) = spans.get_finished_spans()
    assert (span.name, span.attributes["asynccoll.lane"], span.attributes["asynccoll.bytes"]) == (
        "all_reduce",
        "side",
        32,
    )
    assert 0 <= span.end_time - span.start_time < 10**10
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {one.name: one.data.data_points[0] for one in scope.metrics}
    assert found["asynccoll.operation.size"].sum == 32
    assert found["asynccoll.operation.duration"].count == 1


def test_opentelemetry_that_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ac.BackendNotFoundError, match="pip install opentelemetry-api"):
        ac.trace.opentelemetry()


def test_a_hook_that_raises_changes_nothing(caplog):
    def broken(_done):
        raise KeyError("mine")

    remove = ac.trace.add_hook(broken)
    with caplog.at_level(logging.ERROR):
        assert ac.all_reduce(2).wait() == 2
    remove()
    assert "a hook on operations has raised" in caplog.text
    assert "mine" in caplog.text
