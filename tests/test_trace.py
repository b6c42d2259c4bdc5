"""Timelines: what is recorded, what recording costs when it is off, and the files it produces."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import re
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.host import words
from asynccoll.host.call_site import NOWHERE
from asynccoll.order.operation import Estimate, Operation
from asynccoll.plan.spec import Op, ReduceOp
from asynccoll.runtime.process import current
from asynccoll.tensors.common import Call, plan_for
from asynccoll.trace import recorder as recorder_module
from asynccoll.trace.plot import COMPUTE
from asynccoll.trace.spans import Span, covered, intersection, stack
from asynccoll.transport.completion import Promise, Ready
from patience import patient
from ranks import Rank, raising
from worlds import World


async def recorded(me: Rank) -> None:
    await me.get(ac.barrier())  # not recorded: it is over before the recording
    before = ac.all_reduce(1.0)
    with ac.trace.recording() as timeline:
        await me.get(before)
        first = ac.all_reduce(torch.ones(256))
        with ac.lane("side"):
            second = ac.all_gather(torch.ones(3, dtype=torch.int64))
        await me.get(second)
        await me.get(first)
    await me.get(ac.barrier())  # nor this
    reduced, gathered = (span for span in timeline.spans if span.is_operation)
    assert (reduced.name, reduced.row, reduced.size_bytes) == ("all_reduce", "default", 1024)
    assert (gathered.name, gathered.row, gathered.size_bytes) == ("all_gather", "side", 24)
    assert Path(__file__).name in reduced.place
    for span in (reduced, gathered):
        assert span.end is not None
        assert 0 <= span.start <= span.end <= timeline.seconds, (span, timeline.seconds)
    assert reduced.start <= gathered.start
    assert (timeline.rank, timeline.world_size) == (me.rank, me.size)
    assert f"rank {me.rank}: 2 spans" in repr(timeline)


def test_operations_are_recorded(world: World, runner: str) -> None:
    """A span has the name, lane, bytes, place and plausible times; nothing before or after is recorded."""
    world.run(recorded, runner=runner)


async def unfinished(me: Rank) -> None:
    if me.rank == 0:
        with ac.trace.recording() as timeline:
            work = ac.all_reduce(torch.ones(4))
        (span,) = timeline.spans
        assert span.end is None, "rank 1 has not come yet"
        assert math.isnan(timeline.hidden_fraction()), "nothing is marked"
        timeline.plot(me._signs / "open.png")
        timeline.to_chrome(me._signs / "open.json")
        event = json.loads((me._signs / "open.json").read_text())["traceEvents"][-1]
        assert event["args"]["in_flight"] is True
        me.show("looked")
        work.wait()
        (span,) = timeline.spans
        assert span.end is not None
    else:
        me.see("looked")
        ac.all_reduce(torch.ones(4)).wait()


def test_what_is_in_flight_stays_open(pair: World) -> None:
    """An operation that outlives the recording has no end until it completes; it can still be drawn."""
    pair.run(unfinished)


def test_what_was_waited_for_has_an_end_within_the_recording() -> None:
    """It has one even if the completing thread has yet to record it when the waiter resumes."""
    reached, held, ends = threading.Event(), threading.Event(), Promise()
    lane: Any = SimpleNamespace(
        name="default",
        key="default",
        group=SimpleNamespace(is_world=True, ranks=(0,)),
        world=SimpleNamespace(recorder=SimpleNamespace(ended=lambda ticket, now: None)),
    )
    timeline = ac.trace.Timeline()
    operation = Operation(lane, Estimate("all_reduce"), 1, ends, NOWHERE, 30.0, host.monotonic(), 1)

    def hold() -> None:
        reached.set()
        assert held.wait(patient(30))

    operation.add_waker(hold)  # is called first
    timeline.recorder.observe(operation, 4)
    assert [span.end for span in timeline.spans] == [None]
    completing = threading.Thread(target=ends.settle)
    completing.start()
    try:
        assert reached.wait(patient(30))
        operation.saw_end(host.monotonic())
        timeline.recorder.end()
        (span,) = timeline.spans
        assert span.end is not None
        assert 0 <= span.start <= span.end <= timeline.seconds
    finally:
        held.set()
        completing.join()
    assert timeline.spans == (span,), "the first who said so counts"


async def refused(me: Rank) -> None:
    with ac.trace.recording() as timeline, raising(ac.PayloadTypeError):
        ac.all_reduce(object())
    assert timeline.spans == ()
    assert await me.get(ac.all_reduce(1)) == me.size


def test_a_refused_call_is_no_operation(pair: World, runner: str) -> None:
    pair.run(refused, runner=runner)


async def in_groups(me: Rank) -> None:
    group = ac.new_group([0, 1])
    if me.rank < 2:
        with ac.trace.recording() as timeline:
            await me.get(ac.all_reduce(1, group=group))
        assert [span.row for span in timeline.spans] == ["default of [0, 1]"]


def test_the_row_names_the_group(four: World) -> None:
    """A lane of a subgroup is not mistaken for the world's lane of the same name."""
    four.run(in_groups)


# ---------------------------------------------------------------- spans of compute


def test_spans_of_threads_and_tasks() -> None:
    """A span is in the row of its thread or in the row given; nested spans are all kept."""
    with ac.trace.recording() as timeline:
        with timeline.span("outer"), timeline.span("inner", row="chosen"):
            pass

        def work() -> None:
            with timeline.span("there"):
                pass

        thread = threading.Thread(target=work, name="helper")
        thread.start()
        thread.join()

        async def main() -> None:
            async def task(name: str) -> None:
                with timeline.span(name):
                    await anyio.lowlevel.checkpoint()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(task, "one")
                tasks.start_soon(task, "two")

        anyio.run(main)
    by_name = {span.name: span for span in timeline.spans}
    main_row = threading.current_thread().name
    assert {name: span.row for name, span in by_name.items()} == {
        "outer": main_row,
        "inner": "chosen",
        "there": "helper",
        "one": main_row,
        "two": main_row,
    }
    assert by_name["outer"].start <= by_name["inner"].start
    assert by_name["inner"].end <= by_name["outer"].end
    assert not any(span.is_operation for span in timeline.spans)


def test_a_span_that_raises_ends() -> None:
    with ac.trace.recording() as timeline, pytest.raises(KeyError), timeline.span("fails"):
        raise KeyError
    assert timeline.spans[0].end is not None


def test_an_operation_is_recorded_from_its_call_on() -> None:
    """Copying the input and issuing count, as clock alignment needs starts that precede every end."""
    lane, done = current().world.lane("default"), {}
    x = torch.ones(4)

    def note(what: str) -> None:
        done[what] = host.monotonic()

    def start(_communicator: object) -> Ready:
        note("asked")
        return Ready()

    plan = plan_for(lane, Op.ALL_REDUCE, x, ReduceOp.SUM)
    with ac.trace.recording() as timeline:
        Call(plan, start, x, None, fill=lambda: note("copied")).begin(lane, None)
        Call(plan, None, x, None, fill=lambda: note("copied again"), program=_program_of(start)).begin(
            lane, None
        )
        lane.issue(lane.estimate("all_reduce", 0), lambda _communicator: note("alone") or Ready())
    first, second, third = (timeline.recorder.began + span.start for span in timeline.spans)
    assert first <= done["copied"] < done["asked"]
    assert second <= done["copied again"]
    assert third <= done["alone"]


def _program_of(start: Callable[[object], Ready]) -> Callable[[object], Generator[Ready, None, Ready]]:
    def program(communicator: object) -> Generator[Ready, None, Ready]:
        yield start(communicator)
        return Ready()

    return program


# ---------------------------------------------------------------- switching it on and off


def test_off_means_nobody_observes() -> None:
    """Outside a recording, and after one that raised, a lane has an empty tuple of observers."""
    assert current().observers == ()
    during: list[Any] = []
    with contextlib.suppress(KeyError), ac.trace.recording():
        during.extend(current().observers)
        raise KeyError
    assert len(during) == 1
    assert current().observers == ()


def test_recordings_nest_and_overlap() -> None:
    """Each sees what happens while it runs, in whatever order they end."""
    outer, inner = ac.trace.recording(), ac.trace.recording()
    first = outer.__enter__()
    ac.all_reduce(1.0).wait()
    second = inner.__enter__()
    ac.all_reduce(1.0).wait()
    outer.__exit__(None, None, None)
    ac.all_reduce(1.0).wait()
    inner.__exit__(None, None, None)
    assert (len(first.spans), len(second.spans)) == (2, 2)
    assert current().observers == ()


# ---------------------------------------------------------------- arithmetic


def test_union_and_intersection() -> None:
    assert covered([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert intersection([(0, 2), (3, 6)], [(1, 4), (5, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert intersection([], [(0, 1)]) == []


def test_tracks_never_overlap() -> None:
    """Overlapping spans of a row are put on separate tracks; compute precedes communication."""
    spans = [
        Span("all_reduce", "default", 0.0, 3.0, is_operation=True),
        Span("forward", "main", 0.5, 1.0),
        Span("all_reduce", "default", 1.0, None, is_operation=True),
        Span("backward", "main", 1.0, 2.0),
        Span("all_reduce", "default", 3.0, 4.0, is_operation=True),
    ]
    (main, compute), (default, operations) = stack(spans)
    assert (main, [len(track) for track in compute]) == ("main", [2])
    assert (default, [len(track) for track in operations]) == ("default", [2, 1])


def test_the_hidden_fraction() -> None:
    """The share of in-flight time that is covered by compute spans; unknown if there are none."""
    timeline = ac.trace.Timeline()
    assert math.isnan(timeline.hidden_fraction())
    _add(timeline, "all_reduce", 0.0, 4.0, is_operation=True)
    _add(timeline, "all_reduce", 1.0, 3.0, is_operation=True)
    assert math.isnan(timeline.hidden_fraction())
    _add(timeline, "optimizer", 5.0, 6.0)
    assert timeline.hidden_fraction() == 0.0
    _add(timeline, "backward", 0.5, 2.5)
    _add(timeline, "optimizer", 4.0, 5.0)
    assert timeline.hidden_fraction() == pytest.approx(0.5)


def _add(
    timeline: Any, name: str, start: float, end: float, *, is_operation: bool = False, size: int = 0
) -> None:
    """Add a span with known times."""
    row = "default" if is_operation else "training"
    recorder = timeline.recorder
    begun = ac.trace.Span(name, row, recorder.began + start, None, is_operation, size)
    entry = recorder_module._Entry(begun, False, [recorder.began + end])
    recorder.entries.append(entry)
    recorder.ended = max(recorder.ended or 0.0, recorder.began + end)


def test_a_recording_can_end_while_other_threads_call() -> None:
    """A garbage collection can hand over to a thread that makes a call between any two allocations."""
    recorder, running = recorder_module.Recorder(), Operation.__new__(Operation)
    running._wakers = None

    def call(*_: object) -> None:
        recorder._running[recorder_module._Entry(ac.trace.Span("all_reduce", "default", 0.0, None))] = running

    for _ in range(5000):  # more than CPython has tuples in reserve, which need no allocation
        call()
    before = gc.get_threshold()
    gc.callbacks.append(call)
    gc.set_threshold(1)
    try:
        recorder.end()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(call)


@pytest.fixture
def timeline() -> Any:
    made = ac.trace.Timeline(1, 2)
    _add(made, "forward", 0.0, 0.010)
    _add(made, "backward", 0.010, 0.030)
    _add(made, "all_reduce", 0.015, 0.025, is_operation=True, size=3 << 19)
    _add(made, "all_reduce", 0.020, 0.034, is_operation=True, size=500)
    return made


# ---------------------------------------------------------------- files


def test_chrome(timeline: Any, tmp_path: Path) -> None:
    """Perfetto can read the file: processes are ranks, threads are rows, times are microseconds."""
    path = timeline.to_chrome(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {
        ("process_name", "rank 1 of 2"),
        ("thread_name", "training"),
        ("thread_name", "lane default"),
        ("thread_name", "lane default (2)"),  # overlaps the first
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {1}
    assert [event["name"] for event in spans] == ["forward", "backward", "all_reduce", "all_reduce"]
    assert spans[1]["dur"] == pytest.approx(20e3)
    assert spans[1]["ts"] - spans[0]["ts"] == pytest.approx(10e3, abs=1)
    assert spans[2]["args"]["bytes"] == 3 << 19
    assert len({event["tid"] for event in spans}) == 3, "what overlaps is on threads of its own"


def test_plot(timeline: Any, tmp_path: Path) -> None:
    """The picture has a title, a row for each lane and thread, and a legend."""
    svg = timeline.plot(tmp_path / "timeline.svg").read_text()
    for said in (
        "Rank 1 of 2: 79% of the communication is hidden behind compute",
        "training",
        "lane default",
        "forward",
        "backward",
        "communication hidden behind compute",
        "communication waited for",
        "time in ms",
    ):
        assert said in svg, said
    png = timeline.plot(tmp_path / "timeline.png", title="mine").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) < 200_000


def test_colours_do_not_depend_on_what_came_first(tmp_path: Path) -> None:
    """Two recordings of one program can be compared, whichever part each begins with."""
    filled = []
    for parts in (("forward", "backward"), ("backward", "forward")):
        made = ac.trace.Timeline(0, 2)
        for k, part in enumerate(parts):
            _add(made, part, 0.1 * k, 0.1 * (k + 1))
        svg = made.plot(tmp_path / "parts.svg").read_text()
        used = [
            fill for fill in re.findall(r"fill: (#\w{6})", svg) if fill.upper() in map(str.upper, COMPUTE)
        ]
        filled.append(dict(zip(parts, used, strict=False)))
    assert filled[0] == filled[1]
    assert len(set(filled[0].values())) == 2


def test_plot_of_nothing_marked(tmp_path: Path) -> None:
    """The title says so, rather than that nothing is hidden."""
    made = ac.trace.Timeline(0, 2)
    _add(made, "all_reduce", 0.0, 1.0, is_operation=True)
    svg = made.plot(tmp_path / "bare.svg").read_text()
    assert "Rank 0 of 2: nothing is marked as compute" in svg
    assert "%" not in svg.split("Rank 0 of 2")[1][:80]


def test_plot_of_hundreds_in_flight(tmp_path: Path) -> None:
    """The picture stays within a screen or two in height: rows become thinner."""
    made = ac.trace.Timeline(0, 2)
    for k in range(300):
        _add(made, "all_reduce", 0.001 * k, 1.0 + 0.001 * k, is_operation=True, size=4096)
    png = made.plot(tmp_path / "many.png").read_bytes()
    assert 1_000 < int.from_bytes(png[20:24], "big") < 3_000, "pixels high"


@pytest.mark.parametrize(
    ("size", "text"),
    [(8, "8 B"), (1000, "1000 B"), (1024, "1.0 KiB"), (3 << 19, "1.5 MiB"), (25 << 20, "25 MiB")],
)
def test_sizes_in_words(size: int, text: str) -> None:
    assert words.size(size) == text


def test_plot_of_nothing(tmp_path: Path) -> None:
    """An empty recording gives an empty picture, not an error."""
    with ac.trace.recording() as timeline:
        pass
    assert timeline.plot(tmp_path / "empty.png").stat().st_size > 0
    assert timeline.to_chrome(tmp_path / "empty.json").stat().st_size > 0


def test_plot_without_matplotlib(timeline: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The typed error has the line that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ac.BackendNotFoundError, match="pip install 'matplotlib"):
        timeline.plot(tmp_path / "timeline.png")


def test_importing_does_not_load_matplotlib() -> None:
    """It is loaded when something is drawn, not with the package."""
    import subprocess

    program = "import sys, asynccoll; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_world_that_is_joined_within_a_recording_is_not_in_it() -> None:
    """A warning says so. Leaving a world within a recording causes no warning."""
    recording = ac.trace.recording()
    timeline = recording.__enter__()
    ac.initialize("serial")
    ac.all_reduce(1).wait()
    with pytest.warns(UserWarning, match=r"began before .*rank 0 of 1.* was joined"):
        recording.__exit__(None, None, None)
    assert timeline.spans == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ac.trace.recording():
            ac.finalize()
