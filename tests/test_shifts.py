"""Ranks that are a call apart are warned about; ranks that merely call from different lines are not."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.flight import Comparison, Made, Recorder, made
from asynccoll.flight.layout import RECORDS
from asynccoll.health.shifts import Shifts
from asynccoll.testing import simulate
from jobs import LIMIT_S, starting, writing

Lines = Sequence[object]
STEPS = 40


# From plain lists of lines


def calls(lines: Lines, first: int = 1, group: str = "world") -> dict[int, Made]:
    return {
        place: Made(group, "default", "default", "all_reduce", "float32[]", f"train.py:{line}")
        for place, line in enumerate(lines, first)
    }


def told(one: Lines, other: Lines) -> str:
    """The warning of two ranks with these lines, whichever of them is the first; "" if there is no shift."""
    there, back = (Comparison((0, 1)).look(calls(a), calls(b)) for a, b in ((one, other), (other, one)))
    assert (there is None) == (back is None)
    return str(there or "")


def repeated(*lines: object, steps: int = STEPS) -> list[object]:
    return list(lines) * steps


def without(lines: Lines, *indices: int) -> list[object]:
    return [line for index, line in enumerate(lines) if index not in indices]


def test_a_skipped_call_is_told_with_both_lines() -> None:
    whole = repeated(12, 15)
    assert told(whole, without(whole, 6)) == (
        "ranks 0 and 1 are a call apart on lane 'default' since all_reduce #7: rank 0 made it at "
        "train.py:12, rank 1 at train.py:15; one of them has skipped a call or made one more, and results "
        "since then mix different calls"
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("lines", [(1, 2), (1, 2, 3), (1, 1, 2), (1, 1, 1, 2, 2, 3), (1, 2, 1, 3)])
def test_whichever_call_of_a_step_is_skipped(lines: Lines, steps: int) -> None:
    whole = repeated(*lines)
    for at in range(len(lines)):
        less = without(whole, steps * len(lines) + at)
        assert "are a call apart" in told(whole, less), at
        more = [*whole[: steps * len(lines)], lines[at], *whole[steps * len(lines) :]]
        assert "are a call apart" in told(whole, more), at


def test_two_skipped_calls() -> None:
    whole = repeated(1, 2, 3, 4, 5)
    text = told(whole, without(whole, 12, 13))
    assert "are 2 calls apart on lane 'default' since all_reduce #13: " in text
    assert "one of them has skipped calls or made more" in text


def test_a_line_that_comes_up_only_later_does_not_hide_it() -> None:
    """Rank 1 skips the first evaluation."""
    whole = [*repeated(1, 2, steps=5), 9, *repeated(1, 2)]
    assert "since all_reduce #11: rank 0 made it at train.py:9, rank 1 at train.py:1" in told(
        whole, without(whole, 10)
    )


def test_lines_that_ranks_choose_before_do_not_hide_it() -> None:
    def program(rank: int) -> list[object]:
        return [f"if{rank}", 1, f"if{rank}", *repeated(1, 2)]

    assert "since all_reduce #8" in told(program(0), without(program(1), 7))


def owner(rank: int, size: int) -> list[object]:
    """The ranks take turns making the call from one line, while the others make it from another."""
    return [7, *(("mine" if step % size == rank else "theirs") for step in range(200))]


def active(rank: int, size: int) -> list[object]:
    """As ``owner``, but half of the ranks at a time have their turn."""
    return [7, *(("in" if (step - rank) % size < size // 2 else "out") for step in range(200))]


def by_chance(rank: int, seed: int, often: float) -> list[object]:
    """Each rank chooses its line by its own data, except that all choose together in every tenth step."""
    both, own = random.Random(seed), random.Random(seed * 1000 + rank)
    return [
        "a" if (both if step % 10 == 0 else own).random() < often else "b" for step in range(10 * RECORDS)
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("program", [owner, active])
def test_turns_are_no_shift(program: Callable[[int, int], list[object]], size: int) -> None:
    """This holds although the lines of a rank are those of its predecessor, shifted by one place."""
    for rank in range(1, size):
        assert told(program(rank - 1, size), program(rank, size)) == ""


LEGAL = {
    "one line": ([1] * 50, [1] * 50),
    "one line, one call less": ([1] * 50, [1] * 49),
    "if and else": (repeated("if"), repeated("else")),
    "if and else in a step": (repeated(1, "if", 2), repeated(1, "else", 2)),
    "two of them": (repeated("if1", "if2"), repeated("else1", "else2")),
    "two of them the other way round": (repeated(7, "x", "y"), repeated(7, "y", "x")),
    "lines used together, then apart": (
        [*repeated(1, 2), *repeated("if", 2)],
        [*repeated(1, 2), *repeated("else", 2)],
    ),
    "one swap": ([*repeated(1, 2), 2, 1, *repeated(1, 2)], repeated(1, 2, steps=2 * STEPS)),
    "a skip and one more": (repeated(1, 2), [*repeated(1, 2, steps=5), 2, 1, *repeated(1, 2)]),
}


@pytest.mark.parametrize("what", LEGAL)
def test_other_lines_are_no_shift(what: str) -> None:
    one, other = LEGAL[what]
    assert told(one, other) == ""


@pytest.mark.parametrize("often", [0.5, 0.8, 0.95, 0.99])
def test_lines_chosen_by_chance_are_no_shift(often: float) -> None:
    for seed in range(8):
        assert told(by_chance(0, seed, often), by_chance(1, seed, often)) == ""


def test_what_is_seen_little_by_little_counts_together() -> None:
    """Each look sees only a few calls and none of those in between; one rank lags behind by some."""
    whole = repeated(1, 2, 3, steps=200)
    less = without(whole, 100)
    comparison = Comparison((2, 3))
    looks = 0
    found = None
    while found is None:
        first = 20 * looks
        one, other = whole[first : first + 6], less[first : first + 5]
        found = comparison.look(calls(one, first + 1), calls(other, first + 1))
        looks += 1
    assert looks == 5 + 2  # each look sees four new places
    assert "since all_reduce #101 or before: rank 2 made it at train.py:2, rank 3 at train.py:3" in str(found)


def test_a_look_that_sees_nothing_new_says_nothing() -> None:
    comparison = Comparison((0, 1))
    whole = repeated(1, 2, steps=5)
    for _ in range(20):
        assert comparison.look(calls(whole), calls(without(whole, 4))) is None
    assert comparison.look({}, calls(whole)) is None
    assert comparison.look(calls(repeated(1, 2)), calls(without(repeated(1, 2), 4))) is not None


# From recorders


def recorded(rank: int, lines: Iterable[object], group: str = "world", **failed: int) -> Recorder:
    recorder = Recorder(rank, 2)
    number = recorder.lane(group, "default")
    for place, line in enumerate(lines, 1):
        parts = (group, "default", "default", "all_reduce", "float32[]", f"train.py:{line}")
        text = recorder.texts.get(line) or recorder.learn(line, parts, None)
        ticket = recorder.note(text, number, place, 1, -1, 4, 1.0, 1.0)
        if failed.get("failed") == place:
            recorder.failed(ticket, "no", 2.0)
    return recorder


def test_what_is_compared_is_read_from_the_ring() -> None:
    recorder = recorded(0, islice(cycle((12, 15)), RECORDS + 10), failed=100)
    recorder.note(recorder.texts[12], 0, 0, 3, 1, 4, 1.0, 1.0)  # a message: not compared
    recorder.note(recorder.texts[12], 0, RECORDS + 10, 2, -1, 4, 1.0, 1.0)  # a second part: not compared
    assert sorted(made(recorder.buffer)) == [("world", "default")]
    found = made(recorder.buffer)["world", "default"]
    assert sorted(found) == [place for place in range(13, RECORDS + 11) if place != 100]
    assert {place % 2: one.place for place, one in found.items()} == {1: "train.py:12", 0: "train.py:15"}
    assert made(Recorder(0, 2).buffer) == {}


class Members:
    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks
        self.key = "world" if ranks == (0, 1, 2) else "-".join(map(str, ranks))


def warned(memory: dict[int, Recorder], rank: int, *groups: Members, looks: int = 4) -> Shifts:
    def seen(ranks: tuple[int, ...]) -> dict[int, memoryview]:
        return {one: memory[one].buffer for one in ranks if one in memory}

    shifts = Shifts(rank, memory[rank], seen)
    for _ in range(looks):
        shifts.look(groups)
    return shifts


def test_each_rank_looks_at_the_next_one_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    whole = repeated(1, 2)
    memory = {rank: recorded(rank, whole if rank != 1 else without(whole, 8)) for rank in range(3)}
    for rank in range(3):
        warned(memory, rank, Members(0, 1, 2))
    assert re.findall(r"ranks \d and \d are a call apart", caplog.text) == [
        "ranks 0 and 1 are a call apart", "ranks 1 and 2 are a call apart",
    ]  # fmt: skip


def test_a_group_is_compared_with_its_next_member(caplog: pytest.LogCaptureFixture) -> None:
    whole = repeated(1, 2)
    memory = {0: recorded(0, whole, "0-2"), 1: recorded(1, []), 2: recorded(2, without(whole, 8), "0-2")}
    warned(memory, 0, Members(0, 1, 2), looks=4)
    assert caplog.text == ""
    warned(memory, 0, Members(0, 1, 2), Members(0, 2), looks=4)
    assert caplog.text.count("ranks 0 and 2 are a call apart on lane 'default' of ranks 0, 2 since") == 1


def test_a_neighbour_that_is_seen_only_later_is_compared_from_its_beginning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was once compared from where its predecessor had ended, and under its predecessor's name."""
    whole = repeated(1, 2)
    memory = {rank: recorded(rank, whole if rank != 1 else without(whole, 8)) for rank in range(3)}
    late = memory.pop(1)
    shifts = warned(memory, 0, Members(0, 1, 2))
    assert caplog.text == ""
    memory[1] = late
    shifts.look([Members(0, 1, 2)])
    assert re.findall(r"ranks \d and \d are a call apart", caplog.text) == ["ranks 0 and 1 are a call apart"]


# In worlds


def apart(rank: int, steps: int, skipped: int | None = None) -> Any:
    async def main() -> None:
        for step in range(steps):
            if not (rank == 1 and step == skipped):
                await ac.all_reduce(torch.ones(2))
            await ac.all_reduce(torch.zeros(2))
            host.sleep(0.5)

    return main()


@pytest.fixture
def warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn on warnings of stalls, and with them warnings of shifts."""
    monkeypatch.setenv("ASYNCCOLL_STALL_WARNING", "30")


APART = re.compile(
    r"ranks (\d) and (\d) are a call apart on lane 'default' since all_reduce #7: rank \d made it at "
    r"\S+test_shifts.py:\d+, rank \d at \S+test_shifts.py:\d+; one of them has skipped a call or made one"
)


@pytest.mark.usefixtures("warning")
@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi"])
@pytest.mark.parametrize("size", [2, 3])
def test_it_is_warned_of_while_the_program_runs(
    loop: str, size: int, transport: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning is logged long before rank 1 ends and the others are left waiting."""
    said: list[str] = []

    async def main(rank: int) -> None:
        await apart(rank, 20, skipped=3)
        said.append(caplog.text)
        if rank == 1:
            await ac.all_reduce(torch.zeros(2))

    report = simulate(main, world_size=size, seed=3, loop=loop, transport=transport)
    report.check()
    pairs = [("0", "1"), ("1", "2")][: size - 1]
    assert sorted(APART.findall(said[0])) == pairs
    assert sorted(APART.findall(caplog.text)) == pairs
    assert sorted(APART.findall(capsys.readouterr().err)) == pairs


@pytest.mark.usefixtures("warning")
def test_at_the_end_it_is_looked_for_once_more(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """The check at the end finds the shift in a program that is over before the first regular check."""

    async def main(rank: int) -> None:
        for step in range(20):
            if not (rank == 1 and step == 3):
                await ac.all_reduce(torch.ones(2))
            await ac.all_reduce(torch.zeros(2))
        if rank == 1:
            await ac.all_reduce(torch.zeros(2))

    simulate(main, world_size=2, seed=3, loop=loop).check()
    assert APART.findall(caplog.text) == [("0", "1")]
    caplog.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ASYNCCOLL_STALL_WARNING", "0")
        simulate(main, world_size=2, seed=3, loop=loop).check()
    assert caplog.text == ""


async def branches(rank: int, step: int) -> None:
    if rank == 0:
        await ac.broadcast(torch.ones(2), src=0)
    else:
        await ac.broadcast(torch.zeros(2), src=0)


async def owners(rank: int, step: int) -> None:
    for who in range(ac.get_world_size()):
        if who == rank:
            await ac.all_reduce(torch.ones(2))
        else:
            await ac.all_reduce(torch.zeros(2))


async def uneven_lanes(rank: int, step: int) -> None:
    ahead = ac.all_reduce(torch.ones(2), lane="ahead")
    if rank == 0:
        host.sleep(0.3)
    await ac.all_reduce(torch.ones(2))
    await ac.all_reduce(torch.ones(2))
    await ahead
    await ac.all_reduce(torch.ones(2), lane="ahead")


async def groups(rank: int, step: int) -> None:
    if rank != 1:
        pair = ac.new_group([0, 2])
        await ac.all_reduce(torch.ones(2), group=pair)
        await ac.all_reduce(torch.ones(2), group=pair)


async def blocks(rank: int, step: int) -> None:
    with ac.coalescing():
        works = [ac.all_reduce(torch.ones(2)) for _ in range(1 + step % 3)]
    for work in works:
        await work
    await ac.all_reduce(torch.ones(2))


async def tasks(rank: int, step: int) -> None:
    """The lanes of the children have the same names in each step."""

    async def child() -> None:
        for _ in range(1 + step % 2):
            await ac.all_reduce(torch.ones(2))
        await ac.all_reduce(torch.ones(2))

    async with ac.create_task_group() as group:
        group.start_soon(child)
        group.start_soon(child)


async def prepared(rank: int, step: int) -> None:
    call = ac.prepare("all_reduce", torch.ones(2))
    await call.start()
    await call.start()


async def hooks(rank: int, step: int) -> None:
    """The buckets are alike, and each is sent by the hook of its last gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    gradients = ac.overlap_gradients(model, bucket_bytes=64)
    try:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            await gradients
    finally:
        gradients.close()


@pytest.mark.usefixtures("warning")
@pytest.mark.parametrize(
    "program",
    [branches, owners, uneven_lanes, groups, blocks, tasks, prepared, hooks],
    ids=lambda one: one.__name__,
)
def test_what_is_no_shift_is_not_warned_of(
    program: Callable[[int, int], Any], loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(rank: int) -> None:
        await ac.barrier()
        for step in range(24):
            await program(rank, step)
            host.sleep(0.3)

    simulate(main, world_size=3, seed=5, loop=loop, timeout=600.0).check()
    assert "apart" not in caplog.text


#: Both ranks run until rank 0 has been warned, which the same call tells both of them.
LIVE = """
    import logging, time
    import torch
    import asynccoll as ac

    told = []

    class Hear(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    logging.getLogger("asynccoll.shift").addHandler(Hear())
    ac.initialize(backend="gloo")
    rank = ac.get_rank()
    until = time.monotonic() + {seconds}

    def over(value):
        if time.monotonic() > until:
            raise SystemExit("nobody was told")
        time.sleep(0.01)
        return bool(value)

    step = 0
    while True:
        step += 1
        if not ({skips} and rank == 1 and step == 10):
            if over(ac.all_reduce(float(bool(told))).wait()):
                break
        if over(ac.all_reduce(float(bool(told) or {ends} and step == 40)).wait()):
            break
    ac.finalize()
    print(rank, len(told))
"""


@pytest.mark.processes
@pytest.mark.parametrize("memory", ["1", pytest.param("0", marks=pytest.mark.nightly)])
def test_processes_are_warned_while_they_run(tmp_path: Path, memory: str) -> None:
    write = writing(tmp_path)
    made_at = [number for number, line in enumerate(LIVE.splitlines(), 1) if "ac.all_reduce" in line]
    environ = {"ASYNCCOLL_STALL_WARNING": "30", "ASYNCCOLL_MEMORY": memory}
    with starting(tmp_path) as start:
        write(LIVE.format(seconds=LIMIT_S / 2, skips=True, ends=False))
        code, output, errors = start("run", "-n", 2, "program.py", **environ).wait()
        assert (code, sorted(output.split("\n"))) == (0, ["", "0 1", "1 0"]), errors
        said = re.findall(
            r"ranks 0 and 1 are a call apart on lane 'default' since all_reduce #19: rank 0 made it at "
            r"\S+program.py:(\d+), rank 1 at \S+program.py:(\d+); one of them has skipped",
            errors,
        )
        assert len(said) == 1, errors
        assert [int(line) for line in said[0]] == made_at
        write(LIVE.format(seconds=LIMIT_S / 2, skips=False, ends=True))
        code, output, errors = start("run", "-n", 2, "program.py", **environ).wait()
        assert (code, sorted(output.split("\n"))) == (0, ["", "0 0", "1 0"]), errors
        assert "apart" not in errors
