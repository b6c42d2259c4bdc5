"""Traces of all ranks: how clocks are aligned, what a trace reports, and how it survives a rank's death."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict, astuple, replace
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import asynccoll as ac
from asynccoll.cli import main
from asynccoll.host.store import Clients
from asynccoll.launch import engines, passing
from asynccoll.runtime.process import current
from asynccoll.testing import simulate
from asynccoll.trace import spooling
from asynccoll.trace.advice import advice, breaks_off, summary
from asynccoll.trace.clocks import Clock, align
from asynccoll.trace.findings import find
from asynccoll.trace.merged import Trace
from asynccoll.trace.parts import Part, Writer, read_part
from asynccoll.trace.recorder import Recorder
from asynccoll.trace.spans import Span, intersection, within
from ranks import Rank
from worlds import World

# --- clocks ---------------------------------------------------------------------------------------


def operations(seed, skews):
    """A hundred operations by clocks that are off by ``skews``; each ends after all ranks have begun it."""
    draw = random.Random(seed)
    found = [{} for _ in skews]
    for number in range(100):
        starts = [number + draw.uniform(0, 0.1) for _ in skews]
        for rank, skew in enumerate(skews):
            end = max(starts) + draw.uniform(0.001, 0.1)
            found[rank][number] = (starts[rank] - skew, end - skew)
    return found


def clocks(names, skews, seed=0, walls=None):
    return [
        Clock(name, wall, each)
        for name, wall, each in zip(names, walls or [0.0] * len(names), operations(seed, skews), strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_clocks_of_hosts_are_aligned_by_what_they_did_together(seed):
    """They are aligned to within the reported uncertainty, whatever the clocks read."""
    skews = [0.0, 0.0, 1234.5, 1234.5, -77.25]
    found = align(clocks("aabbc", skews, seed))
    assert found.uncertain is not None
    assert found.uncertain < 0.05
    for offset, skew in zip(found.offsets, skews, strict=True):
        assert offset == pytest.approx(skew, abs=found.uncertain + 1e-9)
    assert found.offsets[0] == found.offsets[1] == 0.0
    assert found.offsets[2] == found.offsets[3]


def test_ranks_of_one_host_read_one_clock():
    assert align(clocks("aaa", [0.0, 0.0, 0.0])).offsets == (0.0, 0.0, 0.0)
    assert align(clocks("aaa", [0.0, 0.0, 0.0])).uncertain == 0.0
    assert align([]).offsets == ()


def test_without_anything_in_common_the_wall_clocks_tell():
    found = align([Clock("a", 1000.0, {}), Clock("b", 1300.0, {})])
    assert (found.offsets, found.uncertain) == ((0.0, 300.0), None)


# --- what a trace says ----------------------------------------------------------------------------


def part(rank, spans, *, ranks=2, steps=(), seconds=10.0, clock="a", began=0.0, together=True, whole=True):
    return Part(
        rank, ranks, "host", 1, clock, began, 0.0, "gloo", together,
        seconds, tuple(sorted(spans, key=lambda span: span.start)), steps, whole,
    )  # fmt: skip


def compute(name, start, end):
    return Span(name, "MainThread", start, end)


def call(start, end, sequence=0, place="train.py:1", row="default", size_bytes=4):
    return Span("all_reduce", row, start, end, True, size_bytes, sequence, place)


def test_an_exchange_tells_nothing_of_clocks():
    """A rank that receives nothing from another need not have waited for it."""
    exchanged = Span("all_to_all", "default", 1.0, 2.0, True, 4, 1)
    assert not part(0, [exchanged]).as_clock().operations
    assert part(0, [call(1.0, 2.0, 1)]).as_clock().operations


def test_the_hidden_share_of_each_step():
    """Rank 0 hides half of step 0 and nothing of step 1; rank 1 hides all of step 0 and half of step 1."""
    found = find(
        [
            part(0, [call(0, 2, 0), call(4, 6, 1), compute("backward", 1, 3)], steps=(4.0, 8.0)),
            part(1, [call(0, 2, 0), call(4, 6, 1), compute("backward", 0, 5)], steps=(4.0, 8.0)),
        ]
    )
    assert [step.hidden for step in found.steps] == [pytest.approx(0.75), pytest.approx(0.25)]
    assert [(step.start, step.end) for step in found.steps] == [(0, 4), (4, 8)]
    assert [step.waited for step in found.steps] == [pytest.approx(0.5), pytest.approx(1.5)]
    assert found.hidden == pytest.approx(0.5)
    assert (found.in_flight, found.waited) == (pytest.approx(4.0), pytest.approx(2.0))


@pytest.mark.parametrize("failed", [False, True])
def test_what_is_not_over_does_not_count_in_the_hidden_share(failed):
    """A hang of ten seconds says nothing about the step before, and is not the line to look at."""
    stuck = replace(call(1.5, 9.5 if failed else None, 1, "hang.py:1"), failed=failed)
    found = find([part(0, [call(0, 1), compute("backward", 0, 0.5), stuck], steps=(1.0, 2.0))])
    assert (found.hidden, found.in_flight, found.waited) == (0.5, 1.0, 0.5)
    assert [step.in_flight for step in found.steps] == [1.0, 0.0]
    assert [one.place for one in found.waits] == ["train.py:1"]
    assert "(on average a rank waited for 500.0 ms of 1.00 s in flight)" in summary(found)
    assert "nothing that was sent has finished" in summary(
        find([part(0, [stuck, compute("backward", 0, 0.5)])])
    )


def test_the_first_of_several_steps_does_not_count():
    """Setup is waited for once: neither its line nor a rank that was late to it is blamed."""

    def rank(number, comes):
        setup = call(comes, 4.0, 0, "setup.py:1")
        steps = [call(5.0 + k, 5.5 + k, k + 1) for k in range(3)]
        marked = [compute("backward", 5.0 + k, 5.5 + k) for k in range(3)]
        return part(number, [setup, *steps, *marked], steps=(5.0, 6.0, 7.0))

    found = find([rank(0, 0.0), rank(1, 3.9)])
    assert (found.left_out, found.hidden, found.in_flight) == (1, 1.0, 1.5)
    assert [one.place for one in found.waits] == ["train.py:1"]
    assert found.lateness[0].total == 0.0
    assert (len(found.steps), found.operations) == (3, 8)
    assert "without the first step" in summary(found)


def test_what_hangs_is_told_first():
    """The advice says which rank has not called, and which ranks wait."""
    found = find([*(part(rank, [call(0, None, 7)], ranks=3) for rank in (0, 2)), part(1, [], ranks=3)])
    assert advice(found) == (
        "rank 1 has not called all_reduce #7 on lane 'default', in which ranks 0, 2 have waited 10.00 s "
        "(train.py:1)"
    )


def test_of_ranks_that_wait_for_each_other_the_fewest_are_told():
    """Rank 1 skipped the others' evaluation; the others have not made its next call either."""
    parts = [part(rank, [call(0.1, None, 1, "eval.py:1", row="eval")], ranks=3) for rank in (0, 2)]
    found = find([*parts, part(1, [call(0.0, None, 21)], ranks=3)])
    assert advice(found).startswith("rank 1 has not called all_reduce #1 on lane 'eval', in which ranks 0, 2")


def test_buckets_are_not_told_to_leave_from_backward():
    sends = [part(rank, [call(0, 2, row="gradients/backward"), compute("x", 3, 4)]) for rank in range(2)]
    assert "smaller buckets are sent earlier" in advice(find(sends))


class Counted(list):
    """A list that counts how often its items are looked at."""

    looks = 0

    def __getitem__(self, at):
        self.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("seed", range(10))
def test_what_lies_within_is_found_without_a_look_at_all(seed):
    """A long trace has as many intervals to search as operations to search them for."""
    luck = random.Random(seed)
    ends = sorted(luck.sample(range(100_000), 20_000))
    times = Counted(zip(ends[::2], ends[1::2], strict=True))
    start = luck.randrange(100_000)
    for end in (start, start + 1, start + 50):
        times.looks = 0
        assert within(times, start, end) == intersection([(start, end)], list(times))
        assert times.looks < 200


def test_nothing_marked_is_not_nothing_hidden():
    found = find([part(0, [call(0, 2)], steps=(3.0,)), part(1, [call(0, 2)], steps=(3.0,))])
    assert (found.marked, found.hidden, found.steps[0].hidden) == (False, None, None)
    found = find([part(0, [call(0, 2), compute("forward", 3, 4)]), part(1, [call(0, 2)])])
    assert (found.marked, found.hidden) == (True, 0.0)


def test_the_longest_waits_come_with_their_lines():
    """Concurrent calls of one line are counted once; what is hidden does not count as waiting."""
    spans = [
        call(0, 2, 0, "train.py:10"),
        call(1, 3, 1, "train.py:10"),
        call(4, 9, 2, "train.py:20"),
        compute("backward", 4, 8),
    ]
    first, second = find([part(0, spans, ranks=1)]).waits
    assert (first.place, first.total, first.calls, first.longest) == ("train.py:10", 3.0, 2, 2.0)
    assert (second.place, second.total, second.calls) == ("train.py:20", 1.0, 1)


def test_the_slow_rank_is_named_and_what_it_was_in():
    parts = [
        part(rank, [call(k + late, k + 0.9, k), compute("load", k + 0.1, k + late)], ranks=3)
        for rank, late in enumerate((0.1, 0.7, 0.1))
        for k in [0]
    ]
    late = find(parts).lateness[0]
    assert (late.rank, late.last, late.of, late.doing) == (1, 1, 1, "load")
    assert late.total == pytest.approx(0.6)
    assert find(parts).late is None  # once is not repeatedly


def test_where_a_slow_rank_was_that_marks_nothing_there():
    """Most of its lateness falls between two marks; the single longest delay would name another."""

    def rank(number, late, *others):
        spans = [*others]
        for k, by in enumerate(late):
            spans += [compute("forward", k + by, k + by + 0.05), call(k + by + 0.05, k + 0.8, k)]
            spans.append(compute("optimizer", k + 0.9, k + 0.95))
        return part(number, spans, seconds=4.0)

    slow = rank(1, [0.1, 0.35, 0.3, 0.3], compute("backward", 1.1, 1.34))
    found = find([rank(0, [0.1] * 4), slow])
    assert found.late is not None
    assert (found.late.rank, found.late.doing) == (1, "between optimizer and forward")
    assert "it takes longer between optimizer and forward" in advice(found)


def steps_of(rank, *, marked=False, within=0.0, ranks=3):
    """Rank 2 loads for 30 ms more; all call after 60 ms of backward, or sooner by ``within``."""
    spans, steps = [], []
    now = 0.0
    for k in range(10):
        late = 0.03 if rank == 2 else 0.0
        loaded = now + 0.001 + late
        spans += [compute("load", now + 0.001, loaded + 0.0001)] if marked else []
        forward = loaded + 0.001
        called = forward + 0.07 - within
        done = now + 0.11 - within
        spans += [
            compute("forward", forward, forward + 0.005),
            compute("backward", forward + 0.01, max(done, called) if within else called + 0.001),
            call(called, done, k),
            compute("optimizer", now + 0.115, now + 0.118),
        ]
        now += 0.12
        steps.append(now)
    return part(rank, spans, ranks=ranks, steps=tuple(steps), seconds=now)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ({}, "between optimizer and forward"),
        ({"marked": True}, "load"),
        ({"within": 0.055}, "between optimizer and forward"),
    ],
)
def test_what_makes_a_rank_late_is_what_takes_longer_there(how, where):
    """It is not what the rank does while the others wait, which takes all ranks equally long."""
    found = find([steps_of(rank, **how) for rank in range(3)])
    assert found.late is not None
    assert (found.late.rank, found.late.doing) == (2, where)


def test_of_marks_within_each_other_the_inner_one_is_told():
    def rank(number, late):
        for k in range(10):
            yield compute("epoch", k + 0.1, k + 0.4 + late)
            yield compute("load", k + 0.1, k + 0.2 + late)
            yield call(k + 0.3 + late, k + 0.9, k)

    found = find([part(number, rank(number, late)) for number, late in enumerate((0.0, 0.3))])
    assert found.lateness[0].doing == "load"


def test_a_phase_in_which_the_others_wait_counts_by_what_is_computed_before_the_call():
    """All ranks are in it equally long: the late rank computes there while the others wait for it."""
    parts = [
        part(
            rank,
            [one for k in range(10) for one in (compute("forward", k, k + 0.9), call(k + late, k + 0.9, k))],
        )
        for rank, late in enumerate((0.1, 0.8, 0.1))
    ]
    assert find(parts).lateness[0].doing == "forward"


def test_between_marks_that_the_others_do_not_have_nobody_knows_what_is_usual():
    """Rank 1 has fewer marks: the time between its marks is not excess, though others have none so named."""

    def rank(late, *names):
        for k in range(10):
            yield call(k + late, k + 0.9, k)
            for n, name in enumerate(names):
                yield compute(name, k + 0.91 + n / 50, k + 0.92 + n / 50)

    found = find([part(0, rank(0.1, "x", "y")), part(1, rank(0.8, "x"))])
    assert found.late is not None
    assert (found.late.rank, found.late.doing) == (1, "")
    assert advice(found).endswith(
        "no mark takes longer there: put ac.trace.span(name) around more of the loop"
    )


def test_a_call_that_a_rank_has_not_made_says_nothing_of_who_was_last():
    """In a hang the last rank to wait is not late. Calls of a smaller group count by its members."""
    side = [call(0.3, 0.4, row="side of [0, 2]")]
    parts = [part(rank, [call(0.1, 0.2, 0), call(0.5 + rank, None, 1), *side], ranks=3) for rank in (0, 2)]
    found = find([*parts, part(1, [call(0.15, 0.2, 0)], ranks=3)])
    assert [(one.rank, one.last, one.of) for one in found.lateness] == [(1, 1, 2), (0, 1, 2), (2, 0, 2)]


def test_a_lane_may_have_any_name():
    """Only a list of ranks at its end is one of a smaller group."""
    rows = [call(0.1, 0.2, row="mean of [CLS]"), call(0.3, 0.4, row="of [")]
    found = find([part(0, rows), part(1, [*rows, call(0.5, None, row="mean of [CLS] of [1]")])])
    assert found.lateness[0].of == 2
    assert [one.missing for one in found.unfinished] == [()]


def write(directory, parts):
    """Write the files of the ranks."""
    for one in parts:
        about = {name: value for name, value in asdict(one).items() if name != "spans"}
        about["steps"] = [(end, True) for end in one.steps]
        lines = [{"format": 1, **about}, *([n, *astuple(span)] for n, span in enumerate(one.spans))]
        (directory / f"rank-{one.rank:05}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_stragglers_of_a_recording_are_counted_as_in_its_trace(tmp_path, capsys):
    """The first step is left out, though rank 0 is later there than rank 1 in all others; one verdict."""
    late = [[9.0, *[0.1] * 10], [0.1, *[0.5] * 10]]
    steps = tuple(10.0 + k for k in range(11))
    parts = [
        part(rank, [call(k + 9 * (k > 0) + by, k + 9 * (k > 0) + 9.5 - 8.6 * (k > 0), k)
                    for k, by in enumerate(times)], steps=steps, seconds=21.0)
        for rank, times in enumerate(late)
    ]  # fmt: skip
    write(tmp_path, parts)
    assert main(["trace", "stragglers", str(tmp_path), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["rank"], shown["calls"], shown["last"]) == (1, 10, 10)
    assert shown["total"] == pytest.approx(find(parts).lateness[0].total) == pytest.approx(4.0)
    assert main(["trace", "stragglers", str(tmp_path)]) == 0
    verdict, _, title, *_ = capsys.readouterr().out.splitlines()
    assert verdict.startswith("rank 1 is late: last in 10 of 10 operations, the others waited 4.00 s for it")
    assert title == "who was last, of 10 operations that all their ranks called, without the first step"


def test_a_run_that_records_nothing_leaves_earlier_recordings(tmp_path, monkeypatch, capsys):
    """They were deleted before the launcher had looked at its options: a mistyped one cost them."""
    out, program = tmp_path / "out", tmp_path / "program.py"
    (out / "world-2").mkdir(parents=True)
    program.write_text("")
    line = ["trace", "run", "-o", str(out), "-n", "1", str(program)]
    for directory in (out, out / "world-2"):
        write(directory, [part(rank, [call(0.1, 0.2)]) for rank in range(2)])
    before = {one: one.read_text() for one in out.rglob("rank-*")}

    def refused(_request):
        raise ac.InvalidArgumentError("--nnodes 1x: expected a number of hosts, or MIN:MAX")

    for start, code in ((refused, 2), (lambda _: 3, 3)):
        monkeypatch.setattr(engines, "run", start)
        assert main(line) == code
        assert {one: one.read_text() for one in out.rglob("rank-*")} == before
        assert len(before) == 4
    assert "--nnodes 1x" in capsys.readouterr().err

    def recorded(_request):
        write(out, [part(0, [call(0.1, 0.2)], ranks=1)])
        return 0

    monkeypatch.setattr(engines, "run", recorded)
    assert main(line) == 0
    assert [one.name for one in out.rglob("rank-*")] == ["rank-00000.jsonl"]
    assert len(ac.trace.load(out).parts) == 1


def test_a_run_that_is_given_up_leaves_earlier_recordings(tmp_path, monkeypatch):
    """While the launcher waits for other hosts in native code, another thread ends the process."""
    out, program, left = tmp_path / "out", tmp_path / "program.py", []
    out.mkdir()
    program.write_text("")
    write(out, [part(0, [call(0.1, 0.2)], ranks=1)])

    def ends(_code):
        left.extend(out.iterdir())
        raise SystemExit

    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setattr(passing, "processes", Mock())
    monkeypatch.setattr(engines, "run", lambda _request: passing.give_up(signal.SIGTERM))
    with pytest.raises(SystemExit):
        main(["trace", "run", "-o", str(out), "-n", "1", str(program)])
    assert left == [out / "rank-00000.jsonl"]


@pytest.mark.parametrize("recorded", [False, True])
def test_what_a_killed_run_had_set_aside_is_settled_by_the_next(tmp_path, monkeypatch, recorded):
    """Put back, or deleted if the killed one had recorded. Regression: it lay there forever."""
    out, program, found = tmp_path / "out", tmp_path / "program.py", []
    program.write_text("")
    for directory in (out, out / "world-2"):
        directory.mkdir()
        write(directory, [part(0, [call(0.1, 0.2)], ranks=1)])
    line = ["trace", "run", "-o", str(out), "-n", "1", str(program)]

    def killed(_request):
        if recorded:
            write(out, [part(0, [call(0.3, 0.4)], ranks=1)])
        found.extend((one, one.read_text()) for one in sorted(out.rglob("rank-*")))
        return 3

    monkeypatch.setattr(engines, "run", killed)
    with monkeypatch.context() as patched:
        patched.setattr(passing, "undoing", lambda _: nullcontext())
        main(line)
    before = [] if recorded else [(one.with_suffix(".jsonl"), text) for one, text in found]
    before += [one for one in found if recorded and one[0].suffix == ".jsonl"]
    assert len(before) == 2 - recorded

    monkeypatch.setattr(engines, "run", lambda _: 3)
    main(line)
    assert [(one, one.read_text()) for one in sorted(out.rglob("rank-*"))] == before


def test_chance_makes_no_rank_late():
    """On a busy host one rank may be late for two or three times as long as another."""
    spans = [
        [call(k + 0.3 * ((k % 4 == 0) == (rank == 1)), k + 0.5, k) for k in range(8)] for rank in range(2)
    ]  # rank 0 is late in three of four, rank 1 in one
    found = find([part(rank, each, seconds=8.0) for rank, each in enumerate(spans)])
    assert found.late is None


def uneven(*late):
    """The findings of two ranks that are late by these seconds, one number per step."""
    steps = tuple(float(k + 1) for k in range(len(late[0])))

    def spans(by):
        for k, seconds in enumerate(by):
            yield call(k + 0.1 + seconds, k + 0.11 + max(rank[k] for rank in late), k)
            yield compute("forward", k + 0.01, k + 0.02)

    return find([part(rank, spans(by), steps=steps, seconds=steps[-1]) for rank, by in enumerate(late)])


def test_a_rank_that_is_late_in_nearly_every_step_is_named_beside_spikes_of_others():
    """The spikes add up to a third of its lateness: chance makes a few long delays, but not in every step."""
    found = uneven([0.0] * 17 + [0.5] * 3, [0.3] * 17 + [0.0] * 3)
    assert [one.total for one in found.lateness] == [pytest.approx(16 * 0.3), pytest.approx(3 * 0.5)]
    assert [one.steady for one in found.lateness] == [pytest.approx(19 * 0.3), 0.0]
    assert found.late is not None
    assert found.late.rank == 1
    assert advice(found).startswith("rank 1 is late: ")


def test_four_of_five_steps_are_chance_where_there_are_only_five():
    """One more is added for the first, which does not count; with eight steps, it is no longer chance."""

    def found(count):
        return uneven([0.0] * (count - 1) + [0.5], [0.3] * (count - 1) + [0.0])

    assert found(6).lateness[0].total == pytest.approx(4 * 0.3)
    assert (found(6).lateness[0].steady, found(6).late) == (0.0, None)
    assert found(9).late is not None


def test_a_few_long_times_make_no_rank_late_but_the_ranks_uneven():
    """However much they add up to: without them, this rank is late by no more than the other."""
    found = uneven([0.02] * 16 + [0.0] * 30 + [0.8] * 4, [0.0] * 16 + [0.02] * 30 + [0.0] * 4)
    assert found.lateness[0].total > 5 * found.lateness[1].total
    assert found.late is None
    assert advice(found).startswith("the ranks are uneven, with none by far the latest: they waited 4.10 s")


def test_overlap_gradients_is_advised_for_what_may_be_gradients_alone():
    """It is not advised for a few bytes, such as a loss, nor where it is already used."""

    def told(size_bytes, *more):
        spans = [call(0.1, 1.0, 0, "train.py:4", size_bytes=size_bytes), compute("x", 2, 3)]
        return advice(find([part(rank, [*spans, *more]) for rank in range(2)]))

    assert "overlap_gradients" in told(1 << 20)
    assert told(8).endswith("at train.py:4: start it earlier, or compute before the await")
    assert "overlap_gradients" not in told(1 << 20, call(4, 4.1, 1, row="gradients/backward"))


def test_the_rank_that_holds_the_others_up_is_named_and_else_the_line():
    """There is no advice if the others are late as well, or if communication is hidden."""

    def found(*late, marked=True):
        work = [compute("forward", n, n + 0.01) for n in range(5)] if marked else []
        return find(
            [
                part(rank, [*(call(n + by, n + 0.9, n) for n in range(5)), *work])
                for rank, by in enumerate(late)
            ]
        )

    one = found(0.1, 0.8)
    assert one.late is not None
    assert one.late.rank == 1
    assert advice(one).startswith(
        "rank 1 is late: last in 5 of 5 operations, the others waited 3.50 s for it"
    )
    alike = found(0.1, 0.1)
    assert alike.late is None
    assert re.match(r"most of the waiting is in all_reduce at .*: start it earlier", advice(alike))
    assert advice(found(0.1, 0.1, marked=False)) == ""


def test_what_hangs_names_who_has_not_called():
    """The last operation has no end on ranks 0 and 2, and rank 1 has not called it."""
    parts = [
        part(0, [call(0, 1, 0), call(2, None, 1), call(3, None, 0, row="side of [0, 2]")], ranks=3),
        part(1, [call(0, 1, 0)], ranks=3),
        part(2, [call(0, 1, 0), call(2, None, 1), call(4, None, 0, row="side of [0, 2]")], ranks=3),
    ]
    found = find(parts).unfinished
    assert [(one.rank, one.lane, one.missing) for one in found] == [
        (0, "default", (1,)),
        (2, "default", (1,)),
        (0, "side of [0, 2]", ()),
        (2, "side of [0, 2]", ()),
    ]
    assert found[0].seconds == 8.0


async def reopening(rank):
    """Rank 1 makes no call on the second lane ``a``, and is late to the call on the first."""
    await asyncio.sleep(5.0 * rank)
    _ = await ac.all_reduce(torch.ones(4), lane="a")
    ac.close_lane("a")
    if rank == 0:
        _ = await ac.all_reduce(torch.ones(4), lane="a")
    await asyncio.sleep(30)


def test_lanes_that_had_one_name_one_after_the_other_are_told_apart():
    """Both are called ``a`` and both count from 1; clock alignment distinguishes them too."""
    report = simulate(reopening, world_size=2, operation_timeout=10.0, timeout=500.0)
    parts = [part(rank, timeline.spans) for rank, timeline in sorted(report.timelines.items())]
    found = find(parts)
    assert [(one.rank, one.sequence, one.missing) for one in found.unfinished] == [(0, 1, (1,))]
    assert [(one.rank, one.last, one.of) for one in found.lateness] == [(1, 1, 1), (0, 0, 1)]
    first, second = (span.key for span in parts[0].spans)
    assert first != second
    assert list(parts[0].as_clock().operations) == list(parts[1].as_clock().operations) == [first]


@pytest.mark.parametrize(("seconds", "missing"), [(2.9, ()), (3.5, (1,))])
def test_of_what_a_killed_rank_did_last_nothing_is_claimed(seconds, missing):
    """Its file ends at ``seconds``: it may have made a call that the others began later than that."""
    found = find([part(0, [call(3.0, None, 7)]), part(1, [], seconds=seconds, whole=False)])
    assert [one.missing for one in found.unfinished] == [missing]
    assert (found.hang is not None) == bool(missing)
    assert breaks_off(found).startswith("rank 1 ended abruptly: ")


def test_that_nothing_was_sent_is_said_only_where_it_is_known():
    assert summary(find([part(0, []), part(1, [])])) == "nothing was sent"
    killed = find([part(0, []), part(1, [], whole=False)])
    assert (summary(killed), killed.to_dict()["broken_off"]) == ("nothing was recorded", (1,))


def test_parts_lie_on_one_clock():
    """The clocks of two hosts are a thousand seconds apart; time begins with the first event."""
    parts = [
        part(0, [call(1.0, 1.010, 0), call(2.0, 2.010, 1)], clock="a", began=50.0),
        part(1, [call(1.5, 1.506, 0), call(2.5, 2.506, 1)], clock="b", began=1049.503),
    ]
    trace = Trace(parts)
    (first, _), (other, _) = (each.spans for each in trace.parts)
    assert first.start == 0.0
    assert trace.uncertain == pytest.approx(0.008)
    assert other.start == pytest.approx(0.002, abs=trace.uncertain)


# --- files ----------------------------------------------------------------------------------------


async def written(me: Rank) -> None:
    context = current()
    recorder = Recorder()
    path = me._signs / f"rank-{me.rank}.jsonl"
    writer = Writer(recorder, context, path)
    with recorder.span("forward"):
        writer.write()
        (open_span,) = read_part(path).spans
        assert (open_span.name, open_span.end) == ("forward", None)
    recorder.step()
    writer.write()
    whole = path.read_text()
    path.write_text(whole + '[2, "all_re')  # the rank was killed while it wrote a line
    read = read_part(path)
    assert [(span.name, span.end is None) for span in read.spans] == [("forward", False)]
    assert (read.rank, read.world_size, len(read.steps)) == (me.rank, me.size, 1)
    assert read.spans == recorder.spans
    assert not read.is_whole
    path.write_text(whole)
    writer = Writer(recorder, context, path)
    writer.end()
    assert read_part(path).is_whole
    assert writer._file.closed


def test_a_file_can_be_read_at_any_moment(pair: World) -> None:
    pair.run(written)


def test_each_end_of_a_step_is_written_once(tmp_path):
    """If each write repeated all of them, an hour of short steps would take gigabytes."""
    recorder, path = Recorder(), tmp_path / "rank-00000.jsonl"
    writer = Writer(recorder, current(), path)
    for _ in range(1000):
        recorder.step(marked=False)
    writer.write()
    before = path.stat().st_size
    writer.write()
    assert path.stat().st_size - before < 100
    assert read_part(path).steps == recorder.steps
    recorder.step()
    writer.end()
    assert read_part(path).steps == recorder.steps == (recorder.step_ends[-1][0] - recorder.began,)


def test_a_file_that_can_be_written_no_more_ends_the_recording_and_not_the_program(tmp_path):
    recorder, path = Recorder(), tmp_path / "rank-00000.jsonl"
    writer = Writer(recorder, current(), path)
    recorder.begin("written")
    writer.write()
    with open(os.devnull) as unwritable:  # as if the disk were full
        os.dup2(unwritable.fileno(), writer._file.fileno())
    recorder.begin("lost")
    with pytest.warns(UserWarning, match="cannot be written any more .*: the program goes on"):
        writer.write()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.write()
        writer.end()
    assert writer._file.closed
    read = read_part(path)
    assert ([span.name for span in read.spans], read.is_whole) == (["written"], False)


def test_hooks_of_several_threads_all_end():
    """Each thread adds and removes its own hook, and no change is lost to another thread."""
    before, interval = current().observers, sys.getswitchinterval()

    def come_and_go():
        for _ in range(3000):
            ac.trace.add_hook(print)()

    threads = [Thread(target=come_and_go) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert current().observers == before


def test_a_rank_is_recorded_although_rank_0_is_not(tmp_path, monkeypatch):
    """The variable may be set on only one of two hosts, which must not keep the job from starting."""
    monkeypatch.setattr(spooling, "_PATIENCE_SECONDS", 0.05)
    context = SimpleNamespace(closed=False, clients=Clients(dist.HashStore()))
    with pytest.warns(UserWarning, match="ASYNCCOLL_TRACE has to be set for all ranks"):
        assert spooling._told(context, 1) == 1
    context.clients.close()


def test_a_rank_that_leaves_while_another_joins_is_written_to_its_end(tmp_path):
    """Where ranks are threads, each goes through all recordings, of which one may end meanwhile."""
    said, finished = iter([False, True]), []
    recordings = spooling._Recordings(tmp_path)
    recordings._open.append((SimpleNamespace(), lambda: finished.append("first")))
    recordings._finish(lambda _context: next(said, True))
    recordings._finish()
    assert finished == ["first"]


class Operation:
    """An operation that is already complete."""

    name, sequence, part, peer, place, started = "all_reduce", 3, 1, -1, "train.py:1", 0.0

    def __init__(self, failure):
        self.failure = failure
        group = SimpleNamespace(is_world=True, ranks=(0,))
        self.lane = SimpleNamespace(name="default", key="default", group=group)

    def add_waker(self, wake):
        wake()


def test_a_failure_is_written_at_once(tmp_path, monkeypatch):
    """The launcher may end this rank before the next interval."""
    monkeypatch.setattr(spooling, "_EVERY_SECONDS", 3600.0)
    context, path = current(), tmp_path / "rank-00000.jsonl"
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDWR)) as written:
        finish = spooling._record(context, lambda: path)
        try:
            (observe,) = context.observers
            observe(Operation(ac.PeerLostError("rank 1 is gone")), 16)
            _, operation = (json.loads(written.readline()) for _ in range(2))
        finally:
            finish()
    assert (operation[1], operation[-2:]) == ("all_reduce", [True, "default"])


def test_what_is_no_recording_is_told(tmp_path):
    with pytest.raises(ac.InvalidArgumentError, match="no recording in"):
        ac.trace.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b"\xff\xfe", b"5\n", b'{"format": 1}\n', b'{"format": 1}\n[0, "x"]\n']
)
def test_what_is_no_recording_of_a_rank_is_told(tmp_path, content):
    (tmp_path / "rank-00000.jsonl").write_bytes(content)
    with pytest.raises(ac.InvalidArgumentError, match="is not a recording of a rank"):
        ac.trace.load(tmp_path)


async def gathered(me: Rank) -> None:
    with ac.trace.recording() as timeline:
        await me.get(ac.all_reduce(torch.ones(4)))
    trace = await me.get(ac.trace.gather(timeline))
    if me.rank != 0:
        assert trace is None
        return
    assert [each.rank for each in trace.parts] == list(range(me.size))
    for each in trace.parts:
        assert [span.name for span in each.spans] == ["all_reduce"]
    events = json.loads(trace.to_perfetto(me._signs / "all.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(me.size))


def test_all_ranks_in_one_trace(pair: World, runner: str) -> None:
    pair.run(gathered, runner=runner)


def test_each_rank_is_looked_at_once_for_the_clock_of_its_host():
    """It does not happen once for each rank of the other host: either may have hundreds."""

    class Counted(dict):
        times = 0

        def keys(self):
            Counted.times += 1
            return super().keys()

        def items(self):
            Counted.times += 1
            return super().items()

    align([replace(clock, operations=Counted(clock.operations)) for clock in clocks("aabb" * 5, [0.0] * 20)])
    assert Counted.times == 20
