"""The world of real ranks that users test with, and its pytest fixture."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import asynccoll
import asynccoll as ac
import needs
from asynccoll.testing import RankError, World, live, world
from patience import patient

calls = 0


async def total(rank: int, more: int = 0) -> int:
    return await ac.all_reduce(rank + more)


def count(rank: int) -> tuple[int, int, int]:
    global calls
    calls += 1
    return rank, calls, os.getpid()


async def failing(rank: int) -> None:
    if rank == 1:
        raise LookupError("lost here")
    await ac.barrier()


def dying(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    ac.barrier().wait()


def hanging(rank: int) -> None:
    if rank == 1:
        threading.Event().wait()
    ac.barrier().wait()


def leaving(rank: int) -> None:
    """One rank continues without waiting for a call that the other never makes."""
    if rank == 0:
        ac.all_reduce(100).detach()


def timing_out(rank: int) -> None:
    if rank == 0:
        with pytest.raises(ac.CollectiveTimeoutError):
            ac.all_reduce(100, timeout=0.1).wait()


def finalizing(rank: int) -> None:
    ac.finalize()


async def received(rank: int) -> list[float]:
    return (await ac.broadcast(torch.full((2,), float(rank)), src=0)).tolist()


async def in_a_lane(rank: int) -> int:
    detached = ac.all_reduce(rank, lane="other")  # completes soon, as every rank has called it
    detached.detach()
    return os.getpid()


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with world(2) as ranks:
        yield ranks


def test_results_come_by_rank(pair: World) -> None:
    """Coroutine functions and plain ones return results, with arguments."""
    assert pair.run(total) == [1, 1]
    assert pair.run(total, 10) == [21, 21]
    assert [rank for rank, _, _ in pair.run(count)] == [0, 1]


def test_the_ranks_are_kept_alive(pair: World) -> None:
    """The same processes run one function after another."""
    before, after = pair.run(count), pair.run(count)
    assert [(rank, calls + 1, pid) for rank, calls, pid in before] == after
    assert len({pid for _, _, pid in after}) == 2


def test_failures_are_told_and_the_next_run_is_right(pair: World) -> None:
    """Failures come by rank, with tracebacks; remaining ranks are ended, and new ones start."""
    with pytest.raises(RankError) as told:
        pair.run(failing)
    says = ("failing failed", "rank 0: not done when another", "rank 1", "LookupError: lost here")
    assert all(text in str(told.value) for text in says), told.value
    assert (
        str(told.value).splitlines()[0].endswith(": rank 1: LookupError: lost here")
    )  # the cause comes first
    assert pair.run(total) == [1, 1]
    with pytest.raises(RankError, match="exit code 3") as told:
        pair.run(dying)
    assert "rank 1: its process has ended" in str(told.value)
    os.kill(pair.run(count)[1][2], signal.SIGKILL)
    pair._thread.join(patient(30))  # waits for the ranks, and ends them all
    with pytest.raises(RankError, match=r"rank \d has ended since the last run: rank 1 "):
        pair.run(total)
    assert pair.run(total) == [1, 1]


def test_a_run_that_is_not_done_says_for_whom_ranks_wait_and_where_they_are(pair: World) -> None:
    """A timeout alone would not say which rank is to blame."""
    assert pair.run(total) == [1, 1]  # so that the ranks exist, and the lane is open
    with pytest.raises(RankError, match="hanging failed") as told:
        pair.run(hanging, timeout=patient(3))
    says = (
        "World of 2 on gloo>: rank 1 has not called barrier #",
        " on lane 'default', in which rank 0 has waited ",
        "rank 0: not done after",
        f"it is in hanging ({Path(__file__).name}:{_line('ac.barrier().wait()')})",
        f"it is in hanging ({Path(__file__).name}:{_line('threading.Event().wait()')})",
    )
    assert all(text in str(told.value) for text in says), told.value


def _line(text: str) -> int:
    """Return the line number of ``hanging`` that contains ``text``."""
    lines, first = inspect.getsourcelines(hanging)
    return first + next(index for index, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("case", [leaving, timing_out, finalizing])
def test_what_a_function_leaves_is_not_in_the_next_one(pair: World, case: Callable[[int], None]) -> None:
    """Otherwise its calls would match the next function's, which would hang or get wrong numbers."""
    before = pair.run(count)
    assert pair.run(case) == [None, None]
    assert pair.run(received) == [[0.0, 0.0]] * 2
    assert pair.run(total) == [1, 1]
    assert {pid for _, _, pid in before}.isdisjoint(pid for _, _, pid in pair.run(count))


def test_ranks_are_in_step_by_the_calls_of_the_ranks_of_each_group() -> None:
    """On MPI a call may complete on one rank before the others make theirs, so nothing need be in flight."""
    everyone, two = (0, 1, 2), (0, 2)
    whole = {"world/default": (everyone, 3)}
    assert live._in_step([whole] * 3)
    assert live._in_step([{**whole, "0-2/default": (two, 1)}, whole, {**whole, "0-2/default": (two, 1)}])
    assert not live._in_step([whole, whole, {}])
    assert not live._in_step([{**whole, "0-2/default": (two, 1)}, whole, whole])
    assert not live._in_step([whole, whole, None])


def test_calls_that_all_have_made_are_waited_for(pair: World) -> None:
    """Such calls need nothing more from other ranks."""
    assert pair.run(in_a_lane) == pair.run(in_a_lane)


def test_what_cannot_be_run_is_refused() -> None:
    """No rank is started for it."""
    with world(2) as ranks:
        for wrong in (lambda rank: rank, 7):
            with pytest.raises(ac.PayloadTypeError, match="top level"):
                ranks.run(wrong)
    for size in (0, "2", True):
        with pytest.raises(ac.InvalidArgumentError, match="an int of 1 or more, got "):
            world(size)
    with pytest.raises(ac.BackendNotFoundError):
        world(2, "carrier pigeon")


SUITE = """
import os, pytest
import asynccoll as ac

pids = []

async def where(rank):
    return os.getpid(), ac.backend(), ac.get_world_size(), await ac.all_reduce(1)

@pytest.mark.ranks(1, backend="serial")
def test_one(ranks):
    assert ranks.run(where)[0][1:] == ("serial", 1, 1)

@pytest.mark.parametrize("turn", range(3))
def test_two(ranks, turn):
    found = ranks.run(where)
    assert [one[1:] for one in found] == [("gloo", 2, 2)] * 2
    pids.append([one[0] for one in found])
    assert pids[-1] == pids[0]

def test_fails(ranks):
    ranks.run(fails)

def fails(rank):
    assert rank == 0, "told by its rank"
"""


ON_MPI = """
import asynccoll as ac

async def where(rank):
    return ac.backend(), rank, ac.get_world_size(), await ac.all_reduce(rank + 1)

def test_two(ranks):
    assert ranks.run(where) == [("mpi", 0, 2, 3), ("mpi", 1, 2, 3)]

def test_fails(ranks):
    ranks.run(fails)

def fails(rank):
    assert rank == 0, "told by its rank"

def test_two_again(ranks):
    test_two(ranks)
"""


def test_the_fixture(tmp_path: Path) -> None:
    """Tests that ask for the same world share it; a failure on a rank fails the test."""
    _check_suite(tmp_path, SUITE, "1 failed, 4 passed")


def test_the_fixture_on_mpi(tmp_path: Path) -> None:
    """The command-line option selects MPI for all tests whose mark does not say otherwise."""
    needs.need_package("mpi4py", "mpi", "`make mpi` has environments with mpi4py")
    _check_suite(tmp_path, ON_MPI, "1 failed, 2 passed", "--ranks-backend=mpi")


def _check_suite(directory: Path, source: str, counts: str, *options: str) -> None:
    """Run a test suite in its own pytest; the failing test must fail on its rank."""
    directory.joinpath("conftest.py").write_text('pytest_plugins = ["asynccoll.testing.pytest_plugin"]')
    directory.joinpath("test_suite.py").write_text(source)
    here = str(Path(asynccoll.__file__).parent.parent)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--import-mode=importlib",
            "--strict-markers",
            *options,
        ],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert counts in done.stdout, done.stdout + done.stderr
    assert "told by its rank" in done.stdout
