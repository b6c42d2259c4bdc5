"""Calls of a simulation that were paired at different lines, and what `explore` reports about them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.cli.entry import main as command_line
from asynccoll.host.endings import in_a_line
from asynccoll.host.words import shortened
from asynccoll.runtime import process as runtime
from asynccoll.testing import Kill, Stray, explore, simulate
from asynccoll.testing.exploration import Exploration
from racing import skipping

WHERE = skipping.__code__.co_filename
LOSS = skipping.__code__.co_firstlineno + 4
NUMBER, LAST = LOSS + 2, LOSS + 4


def lines(stray: Stray) -> dict[int, int]:
    return {rank: int(place.rpartition(":")[2]) for rank, place in stray.places.items()}


def test_calls_of_different_lines_that_were_paired_are_told_and_no_error() -> None:
    report = simulate(skipping, world_size=3)
    report.check()
    assert [(one.operation, one.sequence, one.times) for one in report.strays] == [
        ("all_reduce", 6, 1),
        ("all_reduce", 7, 1),
        ("all_reduce", 8, 1),
    ]
    assert list(map(lines, report.strays)) == [
        {0: NUMBER, 1: LOSS, 2: NUMBER},
        {0: LOSS, 1: NUMBER, 2: LOSS},
        {0: NUMBER, 1: LAST, 2: NUMBER},
    ]
    assert str(report.strays[0]) == (
        f"all_reduce #6 on lane 'default' was made from different lines: {WHERE}:{NUMBER} on ranks 0, 2, "
        f"{WHERE}:{LOSS} on rank 1"
    )


def test_with_lines_same_they_are_an_error() -> None:
    with pytest.raises(AssertionError, match="all_reduce #6 on lane 'default' was made from different lines"):
        simulate(skipping, world_size=2, lines="same").check()
    found = explore(skipping, seeds=range(3), world_size=3, lines="same", shrink_seconds=5.0)
    assert (found.seed, found.world_size) == (0, 2)
    assert "lines='same'" in found.script
    with pytest.raises(ac.InvalidArgumentError, match="lines must be one of 'any', 'same'"):
        simulate(skipping, lines="all")


def test_an_error_that_follows_is_told_with_them() -> None:
    async def shorter(rank: int) -> None:
        for step in range(2):
            await ac.all_reduce(1.0)
            if not (rank == 1 and step == 0):
                await ac.all_reduce(torch.ones(()).item())
        await ac.all_gather(torch.ones(3)) if rank == 1 else await ac.barrier()

    with pytest.raises(AssertionError) as raised:
        simulate(shorter, world_size=2).check()
    assert "a rank has skipped a call there, or made one more" in str(raised.value)
    assert "all_reduce #2 on lane 'default' was made from different lines" in str(raised.value)


async def _in_step(rank: int) -> None:
    """Neither messages nor different lanes are pairs of calls from different lines."""
    await ac.barrier()
    group = ac.new_group([0, 1])
    if rank < 2:
        await ac.all_reduce(1.0, group=group)
    if rank == 0:
        await ac.send(torch.ones(2), dst=1)
    elif rank == 1:
        await ac.recv(torch.ones(2), src=0)
    lanes = ("a", "b") if rank == 0 else ("b", "a")
    await asyncio.gather(*(ac.all_reduce(1.0, lane=lane) for lane in lanes))


async def _other_shape(rank: int) -> None:
    await ac.all_reduce(torch.ones(2)) if rank == 0 else (await ac.all_reduce(torch.ones(3)))


def test_what_is_meant_and_what_has_failed_is_not_among_them() -> None:
    report = simulate(_in_step, world_size=3)
    report.check()
    assert report.strays == []
    report = simulate(_other_shape, world_size=2)
    assert {type(error) for error in report.errors.values()} == {ac.CollectiveMismatchError}
    assert report.strays == []


async def _refused_elsewhere(rank: int) -> None:
    """A call fails that has the name and the number of a stray one, but another lane or group."""
    for where in ({"lane": "x"}, {"group": [0, 1]}):
        with pytest.raises((ac.InvalidArgumentError, ac.PeerRefusedError)):
            await ac.all_reduce(torch.ones(2), out=torch.ones(2 + (rank == 0)), **where)
    if rank == 0:
        await ac.all_reduce(1.0)
    else:
        await ac.all_reduce(1.0)


def test_what_fails_on_another_lane_hides_none() -> None:
    (stray,) = simulate(_refused_elsewhere, world_size=3).strays
    assert (stray.lane, stray.sequence) == ("lane 'default'", 1)


def test_those_of_one_pair_of_lines_are_one() -> None:
    async def branch(rank: int) -> None:
        for _ in range(5):
            if rank == 0:
                await ac.broadcast(torch.ones(2), src=0)
            else:
                await ac.broadcast(torch.zeros(2), src=0)

    (one,) = simulate(branch, world_size=3).strays
    assert (one.sequence, one.times) == (1, 5)
    assert str(one).startswith(
        "5 calls of broadcast on lane 'default', the first #1, were made from different"
    )


def test_looking_for_them_changes_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from asynccoll.testing.strays import Strays

    with_them = simulate(skipping, world_size=3, seed=5).digest
    monkeypatch.setattr(Strays, "observer", lambda *_: lambda *_: None)
    assert simulate(skipping, world_size=3, seed=5).digest == with_them


def test_the_worlds_that_ranks_join_one_after_the_other_are_told_apart() -> None:
    async def twice() -> None:
        async with ac.session():
            await ac.all_reduce(1.0)
            if ac.get_rank() == 0:
                await ac.all_reduce(1.0, group=[0])
        async with ac.session():
            await ac.all_reduce(2.0)
            await ac.all_reduce(2.0)

    report = simulate(twice, world_size=2, joined=False)
    report.check()
    assert report.strays == []


def test_faults_leave_them_as_they_are() -> None:
    found = explore(skipping, seeds=range(2), world_size=3, faults=[Kill(2, after_call=30)])
    assert found.wrong is None
    assert [one.sequence for one in found.strays] == [6, 7, 8]


def test_exploring_adds_them_up() -> None:
    for jobs in (1, 2):
        found = explore(skipping, seeds=range(40), jobs=jobs, world_size=2)
        found.check()
        assert [(one.sequence, one.times) for one in found.strays] == [(6, 40), (7, 40), (8, 40)]


async def _closing(rank: int) -> None:
    """Rank 0 alone closes a lane that all continue to use."""
    for _ in range(3):
        await ac.all_reduce(1.0, lane="eval")
        if rank == 0:
            ac.close_lane("eval")


async def _evaluating(rank: int) -> None:
    """Rank 0 alone evaluates, in a task of its own."""
    async with ac.create_task_group() as group:
        await ac.all_reduce(1.0)
        if rank == 0:
            group.start_soon(_evaluate)


async def _evaluate() -> None:
    await ac.all_reduce(1.0, op="avg")


async def _evaluating_apart(rank: int) -> None:
    """Ranks 0 and 1 have one more child task of that name, which calls in their own group."""
    pair = ac.new_group([0, 1])
    for groups in ([pair] if rank < 2 else [], [None]):
        async with ac.create_task_group() as group:
            for one in groups:
                group.start_soon(_evaluate_in, one, name="eval")


async def _evaluate_in(group: ac.Group | None) -> None:
    await ac.all_reduce(1.0, group=group)


async def _recording(rank: int) -> None:
    """Autograd records the call on rank 0 only, so that rank 0 alone communicates in its backward."""
    total = await ac.all_reduce(torch.ones(2, requires_grad=rank == 0))
    (total * torch.ones(2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("main", "said"),
    [
        (_recording, "on inputs that require grad on all or on none"),
        (_evaluating_apart, "some of them have started more child tasks of that name"),
        (_closing, "some of them have closed and reopened this lane"),
        (_evaluating, "made no call there, or closed lane 'default/_evaluate' of the world"),
    ],
)
def test_the_cause_is_said(main: Any, said: str) -> None:
    found = explore(main, seeds=range(3), world_size=3, shrink_seconds=5.0)
    assert found.wrong is not None
    assert said in found.wrong.partition("\nrank ")[0]


def test_one_schedule_is_one() -> None:
    assert str(Exploration(schedules=1)).startswith("1 schedule in")
    assert str(Exploration(schedules=1000)).startswith("1,000 schedules in")


def test_errors_come_in_the_order_in_which_they_were_raised_however_long_leaving_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(rank: int) -> None:
        await ac.barrier()
        await asyncio.sleep(rank)
        raise ValueError(rank)

    def leave(*, abort: bool = False) -> None:
        host.sleep(5.0 * (ac.get_rank() == 0))
        finalize(abort=abort)

    finalize = runtime.finalize
    monkeypatch.setattr(runtime, "finalize", leave)
    report = simulate(main, world_size=2)
    assert list(report.errors) == [0, 1]
    with pytest.raises(AssertionError, match="seed 0: rank 0 raised ValueError: 0\nrank 1"):
        report.check()


def test_a_text_that_is_too_long_ends_behind_a_clause() -> None:
    assert shortened("rank 0 waits", 12) == "rank 0 waits"
    assert shortened("rank 0 waits for rank 1; rank 1 at train.py:12", 40) == "rank 0 waits for rank 1; ..."
    assert shortened("rank 0 waits for rank 1 at train.py:12", 36) == "rank 0 waits for rank 1 at  ..."
    assert shortened("x" * 20, 10) == "x" * 6 + " ..."


# On the command line

_LOOP = """
import asynccoll as ac


async def main(rank):
    for step in range(4):
        print(f"step {step} of rank {rank}")
        await ac.all_reduce(1.0)
        if not (rank == 1 and step == 2):
            await ac.all_reduce(float(step))
    if rank == 1:
        await ac.all_reduce(0.0)


async def wrong(rank):
    print(f"rank {rank} begins")
    assert await ac.all_reduce(rank) == 7
"""

Asked = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: Any
) -> Asked:
    """Run ``asynccoll explore`` on a function of ``_LOOP``; return the exit code and what is printed."""
    monkeypatch.chdir(tmp_path)
    name = f"loop_{abs(hash(request.node.name))}.py"
    Path(name).write_text(_LOOP)

    def ask(function: str, *arguments: str) -> tuple[int, str, str]:
        code = command_line(["explore", f"{name}::{function}", "--jobs", "1", *arguments])
        return code, *capsys.readouterr()

    return ask


def test_the_command_tells_of_them_and_shows_no_prints(asked: Asked) -> None:
    code, told, _ = asked("main", "--seeds", "2")
    assert code == 0
    assert told.startswith("2 schedules in")
    assert "nothing was found" in told
    assert "calls made from different lines were paired" in told
    assert "2 calls of all_reduce on lane 'default', the first #6, were made from different lines:" in told
    assert "step" not in told
    code, told, _ = asked("main", "--seeds", "2", "--lines", "same", "--shrink", "0")
    assert code == 1
    assert "was made from different lines" in told
    assert told.count("#6") == 1


def test_the_command_shows_what_the_case_that_goes_wrong_printed(asked: Asked) -> None:
    code, told, _ = asked("wrong", "--seeds", "2", "-n", "2")
    assert code == 1
    assert told.startswith("1 schedule in")
    assert "# What its ranks printed:\n\nrank 0 begins\n" in told
    assert told.count("rank 0 begins") == 1
    code, told, _ = asked("wrong", "--seeds", "2", "-n", "2", "--shrink", "0", "-s")
    assert "rank 0 begins\n" in told.partition("1 schedule")[0]
    assert "# What its ranks printed" not in told


def test_a_script_that_runs_while_it_is_imported_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "runs_at_once.py"
    script.write_text(
        "import asyncio\nfrom pathlib import Path\nimport asynccoll as ac\n\n\n"
        "async def main():\n    async with ac.session():\n        await ac.all_reduce(1.0)\n"
        "    Path(__file__).with_name('checkpoint.pt').touch()\n\n\nasyncio.run(main())\n"
    )
    assert command_line(["explore", f"{script}::main", "--not-joined", "--seeds", "1", "--jobs", "1"]) == 2
    assert 'under `if __name__ == "__main__":`' in capsys.readouterr().err
    assert not (tmp_path / "checkpoint.pt").exists()


def test_what_a_rank_died_of_is_its_first_line_without_the_colon_before_the_next() -> None:
    error = ac.CollectiveMismatchError("ranks called different things:\n  rank 0: barrier")
    assert in_a_line(error) == "asynccoll.errors.CollectiveMismatchError: ranks called different things"


def of_two_lines(rank: int) -> None:
    """Rank 1 skips a call."""
    for step in range(6):
        if rank != 1 or step != 3:
            _ = ac.all_reduce(torch.ones(3)).wait()
        _ = ac.all_reduce(torch.ones(3)).wait()
    ac.barrier().wait()


def of_their_own_shapes(rank: int) -> None:
    if rank == 0:
        _ = ac.all_reduce(torch.ones(3)).wait()
    else:
        _ = ac.all_reduce(torch.ones(4)).wait()


@pytest.mark.parametrize("check", ["local", "full"])
@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_a_mismatch_says_where_a_call_was_probably_skipped_before(check: str, transport: str) -> None:
    """Of a loop that makes the same call at two lines, every rank names the first call whose lines differ."""

    def main(rank: int) -> str:
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            of_two_lines(rank)
        return str(caught.value)

    report = simulate(main, world_size=3, check=check, transport=transport, loop="none")
    report.check()
    file = r"\S+test_simulated_strays.py:\d+"
    likely = rf"\(likely at #7, the first .* lines: {file} on ranks 0, 2, {file} on rank 1\)"
    for said in report.results.values():
        assert "as call #12 on" in said
        assert re.fullmatch(likely, said.splitlines()[-1]), said


@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_a_mismatch_does_not_speak_of_one_that_was_caught_before(transport: str) -> None:
    """After a skipped call and its mismatch, the program makes another mismatch that is unrelated."""

    def main(rank: int) -> str:
        with pytest.raises(ac.CollectiveMismatchError, match="likely at #7"):
            of_two_lines(rank)
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            of_their_own_shapes(rank)
        return str(caught.value)

    report = simulate(main, world_size=3, transport=transport, loop="none")
    report.check()
    for said in report.results.values():
        assert "as call #13 on" in said
        assert "likely at" not in said


def test_lines_that_differ_on_purpose_are_not_blamed_for_a_mismatch_of_one_line() -> None:
    def main(rank: int) -> str:
        for _ in range(2):
            if rank == 0:
                _ = ac.all_reduce(torch.ones(3)).wait()
            else:
                _ = ac.all_reduce(torch.ones(3)).wait()
            ac.barrier().wait()
        with pytest.raises(ac.CollectiveMismatchError) as caught:
            _ = ac.all_reduce(torch.ones(3 + rank)).wait()
        return str(caught.value)

    report = simulate(main, world_size=2, loop="none")
    report.check()
    assert not [said for said in report.results.values() if "likely" in said or "skipped" in said]
