"""Exploring simulated worlds: faults strike where they say; failures are found, reduced and shown."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import random
import re
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
import racing
from asynccoll.cli.entry import main as command_line
from asynccoll.testing import (
    PCT,
    Cancel,
    Collect,
    Delay,
    Fail,
    Fault,
    Interrupt,
    Kill,
    Link,
    RandomWalk,
    Replay,
    Report,
    Stall,
    Stop,
    StoreLost,
    drawn_faults,
    explore,
    simulate,
)
from asynccoll.testing.exploration import _first_of
from jobs import on_linux
from patience import patient
from test_pages import fields_on

HERE = Path(__file__).parent
LOOPS = ["asyncio", "trio"]
TRANSPORTS = ["gloo", "mpi", "horovod", "xla", "nccl"]


async def steps(rank: int) -> list[float]:
    """Run four sums, one after the other, each awaited."""
    size = ac.get_world_size()
    sums = [(await ac.all_reduce(torch.tensor([rank + 10.0 * step]))).item() for step in range(4)]
    assert sums == [sum(r + 10.0 * step for r in range(size)) for step in range(4)]
    return sums


# Faults


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("fault", "least"),
    [
        (Stop(1, 3.0, after_call=2), 3.0),
        (Stop(1, 3.0, at=0.002), 3.0),
        (Stall(1, 3.0, after_call=2), 3.0),
        (Stall(1, 3.0, thread="gloo", after_call=2), 3.0),
        (Delay(1, 3.0, after_call=2), 3.0),
        (Delay(1, 3.0, at=0.0), 3.0),
        (Collect(1, after_call=2), 0.0),
    ],
    ids=str,
)
def test_what_is_late_is_right(fault: Fault, least: float, loop: str) -> None:
    for seed in range(3):
        report = simulate(steps, world_size=3, seed=seed, loop=loop, faults=[fault])
        report.check()
        assert least <= report.virtual_seconds < least + 3
        assert any(fault.__class__.__name__ in event.what for event in report.events)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("moment", [{"after_call": 2}, {"at": 0.003}], ids=["call", "time"])
def test_cancelling_and_interrupting(loop: str, moment: dict[str, Any]) -> None:
    """The rank it strikes ends as under asyncio or trio; the others are told that they have lost it."""
    for fault, kind in ((Cancel(1, **moment), "Cancelled"), (Interrupt(1, **moment), "KeyboardInterrupt")):
        report = simulate(steps, world_size=3, seed=5, loop=loop, faults=[fault])
        assert type(report.errors[1]).__name__.startswith(kind), report.errors
        assert all(isinstance(report.errors[rank], ac.PeerLostError) for rank in (0, 2)), report.errors
        assert report.deadlock is None


def test_interrupting_where_no_loop_is() -> None:
    def main(rank: int) -> None:
        for _ in range(4):
            ac.all_reduce(torch.ones(1)).wait()

    report = simulate(main, world_size=2, loop="none", faults=[Interrupt(1, after_call=2)])
    assert isinstance(report.errors[1], KeyboardInterrupt)
    assert isinstance(report.errors[0], ac.PeerLostError)
    with pytest.raises(ac.InvalidArgumentError, match="needs a task"):
        simulate(main, world_size=2, loop="none", faults=[Cancel(1, after_call=2)])


def test_a_host_without_power_is_named() -> None:
    """Its connections stay open, so that it is noticed only after the kernel's probes have failed."""
    for seed in range(5):
        report = simulate(steps, world_size=3, seed=seed, faults=[Kill(2, silent=True, after_call=2)])
        assert report.killed == [2]
        told = report.errors[0], report.errors[1]
        assert all(isinstance(error, ac.PeerLostError) and 2 in error.ranks for error in told), told
        assert 4 < report.virtual_seconds < 20


def test_without_the_store_calls_on_open_lanes_go_on() -> None:
    report = simulate(steps, world_size=3, faults=[StoreLost(after_call=2)])
    assert sorted(report.results) == [0, 1, 2]

    async def opens(rank: int) -> None:
        await ac.all_reduce(1)
        await ac.all_reduce(1, lane="new")

    report = simulate(opens, world_size=3, faults=[StoreLost(after_call=1)])
    assert all(isinstance(error, ac.CollectiveError) for error in report.errors.values())
    assert sorted(report.errors) == [0, 1, 2]


def test_faults_are_drawn_from_luck() -> None:
    kinds = {type(drawn_faults()(random.Random(seed), 3)[0]) for seed in range(200)}
    assert kinds == {Cancel, Collect, Delay, Fail, Interrupt, Kill, Stall, Stop, StoreLost}
    assert {type(drawn_faults("stop")(random.Random(seed), 3)[0]) for seed in range(20)} == {Stop}
    with pytest.raises(ac.InvalidArgumentError, match="no fault 'flood'; expected one of kill"):
        drawn_faults("flood")


# Worlds


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transports(transport: str, loop: str) -> None:
    for seed in range(5):
        report = simulate(steps, world_size=3, seed=seed, transport=transport, loop=loop)
        report.check()
        again = simulate(steps, world_size=3, seed=seed, transport=transport, loop=loop)
        assert report.digest == again.digest


def test_on_nccl_a_call_is_done_while_the_device_is_behind() -> None:
    async def main(rank: int) -> tuple[bool, float, float]:
        await ac.all_reduce(torch.ones(1))  # opens the lane
        work = ac.all_reduce(torch.ones(1 << 18))
        done, begun = work.done(), anyio.current_time()
        total = await work.on_host()
        return done, anyio.current_time() - begun, float(total.sum())

    for rank, (done, seconds, total) in simulate(
        main, world_size=2, transport="nccl", link=Link(1e-3, 1e9)
    ).results.items():
        assert done, rank
        assert seconds > 2e-3  # 1 ms of latency, and 1 MiB at 1 GB/s
        assert total == 2 * (1 << 18)


def test_one_world_after_the_other() -> None:
    async def main(rank: int) -> list[float]:
        sums = []
        for life in range(3):
            ac.initialize(timeout=5.0)
            sums.append((await ac.all_reduce(torch.tensor([life + 1.0]))).item())
            ac.finalize()
        return sums

    for seed in range(10):
        report = simulate(main, world_size=3, seed=seed, joined=False)
        assert list(report.results.values()) == [[3.0, 6.0, 9.0]] * 3


def test_nodes_have_quick_links_within() -> None:
    async def main(rank: int) -> int:
        await ac.all_reduce(torch.zeros(1 << 20), group=[rank // 2 * 2, rank // 2 * 2 + 1])
        return ac.get_node_rank()

    far, near = Link(1e-3, 1e9), Link(1e-6, 1e12)
    together = simulate(main, world_size=4, nodes=2, link=far, local_link=near)
    apart = simulate(main, world_size=4, nodes=4, link=far, local_link=near)
    assert together.results == {0: 0, 1: 0, 2: 1, 3: 1}
    assert apart.results == {0: 0, 1: 1, 2: 2, 3: 3}
    assert together.virtual_seconds < apart.virtual_seconds - 4e-3  # 4 MiB at 1 GB/s
    with pytest.raises(ac.InvalidArgumentError, match="4 ranks cannot be divided evenly among 3 nodes"):
        simulate(main, world_size=4, nodes=3)


@pytest.mark.parametrize("loop", LOOPS)
def test_worker_threads(loop: str) -> None:
    """Worker threads of anyio, of asyncio and of trio can wait."""

    async def main(rank: int) -> float:
        work = ac.all_reduce(torch.tensor([rank + 1.0]))
        total = await anyio.to_thread.run_sync(work.wait)
        if loop == "asyncio":
            assert await asyncio.to_thread(work.wait) is total
        return float(total)

    assert simulate(main, world_size=2, loop=loop).results == {0: 3.0, 1: 3.0}


def test_a_report_says_what_happened(tmp_path: Path) -> None:
    report = simulate(steps, world_size=2, faults=[Delay(1, 0.5, after_call=3)])
    told = [str(event) for event in report.events]
    assert sum("all_reduce(1, torch.float32, sum) on world/default" in line for line in told) == 8
    assert any("rank 1 is struck by Delay" in line for line in told)
    assert [event.seconds for event in report.events] == sorted(event.seconds for event in report.events)
    spans = report.timelines[0].spans
    assert [span.name for span in spans] == ["all_reduce"] * 4
    assert max(span.end - span.start for span in spans if span.end) > 0.5
    assert report.timelines[0].to_chrome(tmp_path / "trace.json").stat().st_size > 100


# Orders


@pytest.mark.parametrize("schedule", [RandomWalk(), PCT()], ids=["walk", "PCT"])
@pytest.mark.parametrize("statements", [(), ("asynccoll.order.queue", "asynccoll.waiting.work")])
def test_a_replay_is_the_same(schedule: Any, statements: tuple[str, ...]) -> None:
    for seed in range(5):
        first = simulate(steps, world_size=3, seed=seed, schedule=schedule, statements=statements)
        again = simulate(steps, world_size=3, seed=seed, schedule=Replay(first.taken), statements=statements)
        assert first.digest == again.digest


@pytest.mark.slow
def test_a_race_between_statements_is_found_where_one_asks_for_them() -> None:
    explore(racing.main, seeds=range(100), world_size=2).check()
    found = explore(
        racing.main, seeds=range(1000), world_size=2, statements=["racing"], shrink_seconds=patient(30.0)
    )
    assert found.wrong is not None
    assert "AssertionError" in found.wrong
    assert found.world_size <= 2
    assert len(found.taken) <= 3
    code = racing.count.__code__
    assert not any("statement" in name for name in code.co_names)  # restored


def test_modules_without_source_are_refused() -> None:
    for name in ("no.such.module", "math", "asynccoll.testing.world"):
        with pytest.raises(ac.InvalidArgumentError, match="statements: no source"):
            simulate(steps, statements=[name])


# Exploring


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    shown: list[int] = []
    found = explore(
        racing.fine, seeds=range(40), world_size=3, progress=lambda so_far: shown.append(so_far.schedules)
    )
    found.check()
    assert found.wrong is None
    assert shown == list(range(1, 41))
    assert str(found).startswith("40 schedules in")


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_found_is_made_small_and_shown_again(jobs: int, tmp_path: Path) -> None:
    found = explore(racing.crossed, seeds=range(50), jobs=jobs, world_size=5, faults=drawn_faults("stall"))
    assert found.wrong is not None
    assert "LaneOrderError" in found.wrong
    assert (found.world_size, found.faults, found.taken) == (2, (), {})
    with pytest.raises(AssertionError, match="from racing import crossed"):
        found.check()
    shown = _run(tmp_path, found.script)
    assert shown.returncode == 1
    assert "LaneOrderError" in shown.stderr


def _run(directory: Path, script: str) -> subprocess.CompletedProcess[str]:
    (directory / "shows.py").write_text(script)
    return _python(directory, ["shows.py"])


#: A script that explores its own function, and checks with another one.
_SCRIPT = """
import sys
import asynccoll as ac
from asynccoll.testing import explore


class Loops:
    @staticmethod
    async def main(rank):
        await ac.barrier()


def judge(report):
    report.check()
    assert report.steps < 0, "too many steps"


if __name__ == "__main__":
    main = (lambda: ac.barrier()) if "lambda" in sys.argv else Loops.main
    print(explore(main, seeds=range(1), world_size=2, shrink_seconds=0, expect=judge).script)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("prog.py", ["prog.py"]),
        ("sub/train-loop.py", ["sub/train-loop.py"]),
        ("sub/prog.py", ["-m", "sub.prog"]),
    ],
)
def test_what_a_script_finds_in_itself_is_shown_by_a_program_that_runs(
    name: str, typed: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(_SCRIPT)
    shown = _run(tmp_path, _python(tmp_path, typed).stdout)
    assert shown.returncode == 1
    assert "AssertionError: too many steps" in shown.stderr, shown.stderr


def test_what_no_other_program_can_import_is_to_be_defined_there(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(_SCRIPT)
    for typed in (["prog.py", "lambda"], ["-c", _SCRIPT, "lambda"]):
        told = _python(tmp_path, typed).stdout
        assert "# Define main here: no other program can import it from where it is.\n" in told
        assert "simulate(main, world_size=2" in told


def _python(directory: Path, typed: list[str]) -> subprocess.CompletedProcess[str]:
    package = str(Path(ac.__file__).parent.parent)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([package, str(HERE)])}
    return subprocess.run(
        [sys.executable, *typed],
        cwd=directory, env=environ, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_the_cause_is_told_and_not_what_it_caused() -> None:
    async def main(rank: int) -> None:
        await ac.all_reduce(1)
        if rank == 2:
            raise ZeroDivisionError("of its own")
        await ac.all_reduce(1)

    report = simulate(main, world_size=3)
    assert sorted(report.errors) == [0, 1, 2]
    with pytest.raises(AssertionError, match="rank 2 raised ZeroDivisionError"):
        report.check()


def test_what_one_expects_can_be_said() -> None:
    def never_two(report: Any) -> None:
        report.check()
        assert report.steps < 10, "too many steps"

    found = explore(racing.fine, seeds=range(5), world_size=2, expect=never_two, shrink_seconds=1.0)
    assert "too many steps" in (found.wrong or "")
    with pytest.raises(AssertionError) as told:
        found.check()
    assert str(told.value).count("too many steps") == 1


def test_on_nodes_it_is_shrunk_to_as_many_ranks_as_these_can_have() -> None:
    """One rank on two nodes was refused, and the refusal raised instead of what had been found."""
    found = explore(racing.failing, seeds=range(1), world_size=6, nodes=2)
    assert "LookupError" in (found.wrong or "")
    assert found.world_size == 2
    assert "nodes=2" in found.script


def test_what_goes_wrong_only_once_is_shown() -> None:
    """It was not told what had gone wrong, and that it had been in another process."""
    times = []

    async def main(rank: int) -> None:
        times.append(rank)
        if len(times) == 1:
            raise LookupError("of the first time")

    found = explore(main, seeds=range(5), world_size=1)
    assert found.seed == 0
    assert "not deterministic" in (found.wrong or "")
    assert "LookupError: of the first time" in (found.wrong or "")


def test_of_the_seeds_that_other_processes_find_the_one_that_was_given_first_is_taken() -> None:
    """It was the lowest, of those that happened to be found."""

    def submit(seeds: list[int]) -> Future[object]:
        future: Future[object] = Future()
        future.set_result((1, (seeds[0], "it is wrong"), []))
        return future

    assert _first_of(2, submit, iter(range(90, 0, -1)), lambda *_: None) == (90, "it is wrong")


def test_other_processes_must_find_the_function() -> None:
    async def inside(rank: int) -> None:
        """Not at the top level of a module."""

    with pytest.raises(
        ac.InvalidArgumentError, match="jobs= needs a function that other processes can import"
    ):
        explore(inside, seeds=range(2), jobs=2)


@pytest.fixture
def asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``asynccoll explore ...`` in this directory: exit code and output."""
    monkeypatch.chdir(HERE)

    def ask(*arguments: str) -> tuple[int, str, str]:
        code = command_line(["explore", *arguments])
        return code, *capsys.readouterr()

    return ask


def test_who_passes_no_expect_is_told_that_results_are_not_checked() -> None:
    """Only ``expect`` finds wrong numbers."""
    told = str(explore(racing.fine, seeds=range(1), world_size=2))
    assert told.endswith("(no error, hang or mismatch; results are checked only with expect=, or --expect)")
    told = str(explore(racing.fine, seeds=range(1), world_size=2, expect=lambda report: None))
    assert told.endswith("nothing was found")


@pytest.mark.slow
def test_the_command_line(asked: Any) -> None:
    code, told, errors = asked("racing.py::fine", "--seeds", "60", "--faults", "kill,delay", "--loop", "trio")
    assert (code, errors) == (0, "")
    assert "60 schedules in" in told
    assert "nothing was found (no error, hang or mismatch; results are checked only with expect=" in told
    code, told, _ = asked("racing.py::fine", "--seeds", "1", "--jobs", "1", "--json")
    assert (code, json.loads(told).keys()) == (0, fields_on("json.md")["`explore`"])
    code, told, _ = asked(
        "racing.py::crossed", "--seeds", "60", "--transport", "mpi", "-n", "4", "--jobs", "1"
    )
    assert code == 1
    assert "LaneOrderError" in told
    assert "simulate(crossed, world_size=2, seed=0, transport='mpi', schedule=Replay({}))" in told
    assert "sys.path" not in told


@pytest.mark.slow
def test_the_program_that_shows_it_finds_a_file_of_another_folder(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of-loops").mkdir()
    (tmp_path / "of-loops" / "dying.py").write_text(
        "async def main(rank):\n    raise KeyError('of its own')\n"
    )
    monkeypatch.chdir(tmp_path)
    code, told, _ = asked("of-loops/dying.py::main", "--seeds", "1", "--jobs", "1")
    assert code == 1
    shown = _run(tmp_path, told.partition("# Shows it again:\n")[2])
    assert "KeyError: 'of its own'" in shown.stderr


def test_the_command_line_takes_what_joins_the_world_itself(asked: Any) -> None:
    code, told, _ = asked("racing.py::script", "--seeds", "2", "--jobs", "1", "--not-joined")
    assert code == 0, told
    code, told, _ = asked("racing.py::script", "--seeds", "2", "--jobs", "1", "--shrink", "0")
    assert code == 1
    assert "--not-joined" in told


def test_a_script_that_reads_its_arguments_gets_none(asked: Any, tmp_path: Path) -> None:
    """It would otherwise parse the command's own arguments, and print a usage of asynccoll."""
    (tmp_path / "reading.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--die', default='never')\n"
        "given = parser.parse_args()\n\n\nasync def main(rank):\n    assert given == parser.parse_args()\n"
    )
    before = list(sys.argv)
    code, told, _ = asked(f"{tmp_path}/reading.py::main", "--seeds", "2", "--jobs", "1", "-n", "2")
    assert code == 0, told
    assert sys.argv == before
    code, told, _ = asked(f"{tmp_path}/reading.py::main", "--seeds", "2", "--jobs", "2", "-n", "2")
    assert code == 0, told


def test_the_command_line_names_files_that_schedules_leave_each_other(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a loop that resumes from a checkpoint, only the first schedule would start at the beginning."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "old.txt").write_text("as it was")
    (tmp_path / "saving.py").write_text(
        "import pathlib\n\n\nasync def main(rank):\n    for name in ('b.pt', 'kept/a.pt', 'c', 'd'):\n"
        "        pathlib.Path(name).open('a').write('step 28')\n\n\nasync def none(rank):\n    pass\n"
    )
    typed = ("--seeds", "1", "--jobs", "1", "-n", "1")
    code, told, _ = asked("saving.py::main", *typed)
    assert code == 0
    assert "Files were written meanwhile: b.pt, c, d, and 1 more. Files are not simulated" in told
    code, told, _ = asked("saving.py::main", *typed, "--json")  # they are written again
    assert json.loads(told)["files"] == ["b.pt", "c", "d", "kept/a.pt"]
    assert "Files were" not in asked("saving.py::none", *typed)[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["racing.py"], "expected a file and a function"),
        (["no.py::main"], "there is no file 'no.py'"),
        (["racing.py::nothing"], "racing.py has no function 'nothing'"),
        (["racing.py::fine", "--faults", "flood"], "there is no fault 'flood'"),
        (["racing.py::fine", "--transport", "ucc"], "transport must be one of 'gloo', 'memory', 'mpi'"),
    ],
)
def test_what_is_typed_wrong(asked: Any, arguments: list[str], told: str) -> None:
    code, _, errors = asked(*arguments, "--jobs", "1")
    assert code == 2
    assert told in errors


def test_a_file_is_not_taken_for_another_of_its_name(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other file's function of that name would be called."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "alike", raising=False)
    one, other = tmp_path / "alike.py", tmp_path / "below" / "alike.py"
    other.parent.mkdir()
    one.write_text("def main(rank): pass\ndef expected(report): pass\n")
    other.write_text("def expected(report): assert False\n")
    typed = f"{one}::main", "--jobs", "1", "--seeds", "1"
    assert asked(*typed, "--expect", f"{one}::expected")[0] == 0
    code, _, errors = asked(*typed, "--expect", f"{other}::expected")
    assert code == 2
    assert f"{other} cannot be imported: another module has its name, {one}; rename it" in errors
    taken, dotted = tmp_path / "statistics.py", tmp_path / "alike.v2.py"
    for file, told in ((taken, "another module has its name"), (dotted, "with a dot in its name")):
        file.write_text(one.read_text())
        code, _, errors = asked(f"{file}::main", "--jobs", "1")
        assert code == 2
        assert told in errors


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_in_a_line(start: Any, script: Any) -> None:
    script("""
        import asynccoll as ac

        async def main(rank):
            print("tried", flush=True)
            await ac.all_reduce(1)
    """)
    job = start("explore", "program.py::main", "--seeds", 1_000_000, "--jobs", 2, "-s")
    job.lines(1)
    os.killpg(job.process.pid, signal.SIGINT)  # to all of them, as a terminal sends it
    code, _, errors = job.wait()
    assert code == 130
    assert re.fullmatch(r"interrupted after [\d,]+ schedules? in \S+ s: nothing was found.*\n", errors)


def test_ctrl_c_while_what_was_found_is_shrunk_still_tells_it(asked: Any, tmp_path: Path) -> None:
    """It said that nothing had been found."""
    (tmp_path / "striking.py").write_text(
        "times = []\n\n\nasync def main(rank):\n    pass\n\n\n"
        "def judge(report):\n    times.append(report)\n"
        "    if len(times) == 3:\n        raise KeyboardInterrupt\n    assert False, 'as ever'\n"
    )
    path = tmp_path / "striking.py"
    code, _, errors = asked(f"{path}::main", "--expect", f"{path}::judge", "--jobs", "1", "-n", "2")
    assert code == 130
    assert re.fullmatch(r"interrupted after 1 schedule in \S+ s: seed 0 goes wrong\nas ever\n", errors)


@pytest.mark.slow
def test_of_a_process_that_dies_the_seed_is_told_and_no_other_is_left(asked: Any) -> None:
    """It was a bare BrokenProcessPool."""
    code, _, errors = asked("racing.py::dying", "--seeds", "20", "--jobs", "2", "--first", "100", "-n", "2")
    assert code == 2
    assert (
        "error: one of the processes that try seeds (jobs=2) was killed by SIGKILL while it tried seed 102: "
        "if it ran out of memory, dmesg says so: then pass fewer jobs. Otherwise try that seed by itself, in "
        "this process: seeds=[...], jobs=1 (--first, --seeds 1, --jobs 1)"
    ) in errors
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_script_whose_processes_would_start_more_is_told_what_to_write(tmp_path: Path) -> None:
    """Each of them imports the script, which calls ``explore`` again."""
    (tmp_path / "alone.py").write_text(
        "from asynccoll.testing import explore\n\n\nasync def main(rank):\n    pass\n\n\n"
        "explore(main, seeds=range(20), jobs=2).check()\n"
    )
    ended = _python(tmp_path, ["alone.py"])
    assert ended.returncode == 1
    *_, told = ended.stderr.strip().splitlines()
    assert told.startswith("asynccoll.errors.SpawnError: one of the processes that try seeds (jobs=2) ended")
    assert "with exit code 1 before it had tried a seed: it imports the program first, so a script " in told


@on_linux
@pytest.mark.slow
def test_processes_that_try_seeds_end_with_the_one_that_started_them(start: Any, script: Any) -> None:
    """They waited for more seeds forever."""
    script("""
        import os

        told = []

        async def main(rank):
            if not told:
                told.append(rank)
                print(os.getpid(), flush=True)
    """)
    job = start("explore", "program.py::main", "--seeds", 1_000_000, "--jobs", 2, "-s")
    (pid,) = job.lines(1)
    ended = os.pidfd_open(int(pid))
    os.kill(job.process.pid, signal.SIGKILL)
    assert select.select([ended], [], [], patient(20))[0]
    os.close(ended)


def test_links_are_checked() -> None:
    for latency, bandwidth in (((2.0, 1.0), 1.0), (-1.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ac.InvalidArgumentError, match="expected latency from 0 up"):
            Link(latency, bandwidth)
    assert Link(1.0, math.inf).seconds(1e9) == 1.0


async def goes_on_after_a_failure(rank: int) -> list[str]:
    """Return the results of three calls, or the types of their errors."""
    said = []
    for step in range(3):
        try:
            said.append(str((await ac.all_reduce(torch.tensor([rank + step]))).item()))
        except ac.CollectiveError as error:
            said.append(type(error).__name__)
    return said


@pytest.mark.parametrize("seed", range(6))
def test_a_call_that_a_transport_does_not_take_is_refused(seed: int) -> None:
    """The error is raised on the rank where it fails; others are told, and the lane still works on all."""
    report = simulate(goes_on_after_a_failure, world_size=3, seed=seed, faults=[Fail(1, after_call=2)])
    report.check()
    lost = "PeerRefusedError"
    for rank, said in report.results.items():
        assert said[0] == "3"
        assert said[1] == ("CollectiveError" if rank == 1 else lost)
        assert said[2] == "9"


async def drops_and_fails(rank: int) -> None:
    ac.all_reduce(torch.ones(1))
    raise LookupError(f"of {rank}")


def test_what_is_made_smaller_shows_no_warning_again() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = explore(drops_and_fails, seeds=[3], world_size=2, shrink_seconds=patient(1.0))
    assert found.world_size == 1
    dropped = [one for one in heard if issubclass(one.category, ac.UnawaitedWorkWarning)]
    assert len(dropped) == 4  # one per rank when it was found, and one per rank before the reduction


async def _reading_early(rank: int) -> float:
    """Read what a call fills before waiting for it."""
    await ac.barrier()  # opens the lane: a queued call would fill nothing yet
    gradient = torch.full((4,), float(rank))
    work = ac.all_reduce(gradient, out=gradient)
    seen = float(gradient.sum())
    await work
    return seen


def _is_own(report: Report) -> None:
    report.check()
    assert report.results == {rank: 4.0 * rank for rank in report.results}


@pytest.mark.parametrize("transport", ["mpi", "nccl", "memory"])
def test_reading_what_a_call_fills_before_its_end_is_found(transport: str) -> None:
    found = explore(
        _reading_early, seeds=range(40), world_size=3, expect=_is_own, transport=transport, shrink_seconds=1.0
    )
    assert found.wrong is not None
    assert str(found) == f"{found.verdict}\n{found.wrong}"


async def _in_a_scope(rank: int) -> int:
    async with ac.scope():
        for _ in range(5):
            ac.all_reduce(torch.ones(2))
            await ac.barrier()
    return rank


def test_of_a_rank_that_is_killed_nothing_is_heard_and_the_others_may_say_so() -> None:
    for seed in range(10):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            report = simulate(_in_a_scope, world_size=2, seed=seed, faults=[Kill(1, after_call=4)])
        assert [str(one.message) for one in heard] == []
        report.check(faults=True)
        with pytest.raises(AssertionError, match="PeerLostError"):
            report.check()
