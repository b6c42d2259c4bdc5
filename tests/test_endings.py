"""How a rank ended is reported to those who wait for it: its exit code, its signal, its last error."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest

import jobs
from asynccoll import flight
from asynccoll.host import endings, handing, shared_memory
from asynccoll.launch import child, report
from asynccoll.launch.ranks import naming
from asynccoll.launch.witness import Witness
from patience import patient

SCRIPT = """
    import os, signal, sys, asynccoll as ac
    ac.initialize("BACKEND")
    ac.all_reduce(1).wait()
    if ac.get_rank() == 1:
        HOW
    else:
        try:
            ac.all_reduce(2, lane="gradients", timeout=30).wait()
        except ac.CollectiveError as error:
            print(type(error).__name__, error.ranks, error, flush=True)
        os._exit(0)
"""

#: What rank 1 does, and what rank 0 is told about it.
ENDS = {
    "ends": ("pass", r"it ended with exit code 0, \d\.\d s ago"),
    "exits with 3": ("sys.exit(3)", r"it ended with exit code 3, \d\.\d s ago"),
    "raises": ("raise LookupError('of my own')", r"it ended with LookupError: of my own \(exit code 1\)"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", r"its process was killed by SIGKILL"),
    "leaves": (
        "ac.finalize(); sys.stdin.read(); __import__('time').sleep(60)",
        r"has left its world \(finalize\) \(\d\.\d s ago",
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_how_a_rank_ended_is_told(tmp_path, how: str) -> None:
    does, said = ENDS[how]
    source = SCRIPT.replace("BACKEND", "gloo").replace("HOW", does)
    script = jobs.writing(tmp_path)(source)
    with jobs.starting(tmp_path) as start:  # otherwise the launcher would end rank 0 as soon as it looks
        (heard,) = start("run", "-n", 2, "--monitor-interval", 30, script).lines(1)
    assert heard.startswith("PeerLostError (1,) rank 1 (host "), heard
    assert re.search(
        said + r".*its last call was all_reduce #1 on lane 'default' at .*program.py:\d+", heard
    ), heard


# What a launcher sees


@pytest.fixture
def witness(tmp_path):
    """Return an observer of the ranks of a directory with a long name."""
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    watching = Witness(directory)
    yield watching
    watching.ended()


@pytest.fixture
def rank(witness):
    """Return a process with a flight recorder that joins there, and ends as it is told to."""
    program = (
        "import sys, os, signal\n"
        "from asynccoll import flight\n"
        "from asynccoll.host import handing\n"
        "recorder = flight.Recorder(1, 2)\n"
        "handing.hand_over(sys.argv[1], 1, recorder.descriptor)\n"
        "print(recorder.descriptor, flush=True)\n"
        "exec(sys.stdin.readline())\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(witness.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child.memory = int(child.stdout.readline())
    yield child
    child.kill()
    child.communicate()


CODES = {
    "sys.exit(0)": 0,
    "sys.exit(7)": 7,
    "os._exit(250)": 250,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
}


def end(rank: subprocess.Popen[str], how: str) -> None:
    rank.stdin.write(how + "\n")
    rank.stdin.flush()
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("how", CODES)
def test_who_starts_a_rank_writes_down_how_it_ended(witness, rank, how: str) -> None:
    """It writes to memory that the peers have open; a process waiting for the rank gets its exit code."""
    peers = shared_memory.look(rank.pid, rank.memory)
    witness.watch()
    while 1 not in witness.flights():
        pass  # until the watcher has seen it
    assert flight.read(peers).ending == "running"
    end(rank, how)
    assert shared_memory.exit_code(rank.pid) == CODES[how]
    while flight.read(peers).ending == "running":
        pass
    assert witness.ended() == [1]
    found = flight.read(peers)
    assert (found.ending, found.code) == ("exited", CODES[how])
    assert rank.wait(patient(10)) == CODES[how]


@pytest.mark.parametrize("reaped", [False, True])
def test_what_a_rank_recorded_is_kept_though_it_ends_before_anybody_looks(
    witness, rank, reaped: bool
) -> None:
    peers = shared_memory.look(rank.pid, rank.memory)
    end(rank, "os.kill(os.getpid(), signal.SIGKILL)")
    if reaped:
        rank.wait()
    assert witness.watch().ended() == [1]
    assert list(witness.flights()) == [1]
    found = flight.read(peers)
    assert (found.ending, found.code) == ("exited", None if reaped else -signal.SIGKILL)


@pytest.mark.parametrize("why", ["forbidden", "numbered otherwise"])
def test_a_rank_that_cannot_be_watched_is_not_said_to_have_ended(monkeypatch, witness, rank, why) -> None:
    """For example, a container may forbid process descriptors, or number its processes itself."""

    def forbidden(_pid: int) -> int:
        raise PermissionError

    if why == "forbidden":
        monkeypatch.setattr(os, "pidfd_open", forbidden)
    else:
        monkeypatch.setattr(handing, "_numbering", lambda: 0)
    assert witness.watch().ended() == []
    assert witness.flights()[1].ending == "running"


def test_a_rank_that_has_not_joined_is_seen_by_its_number(witness) -> None:
    """Also if its note is written within one tick of the kernel's clock after the directory was read."""
    changed = witness.directory.stat().st_mtime_ns
    witness._look()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as rank:
        (witness.directory / "3.pid").write_text(str(rank.pid))
        os.utime(witness.directory, ns=(changed, changed))
        witness.watch()
        while rank.pid not in witness._seen:
            pass
    assert witness.ended() == [3]


def test_what_a_rank_says_of_its_end_first_stands() -> None:
    recorder = flight.Recorder(0, 2)
    recorder.end("died", "LookupError: of my own", 1)
    recorder.end("finalized")
    found = flight.read(recorder.buffer)
    assert (found.ending, found.code, found.said["why"]) == ("died", 1, "LookupError: of my own")
    recorder.close()


def test_a_process_that_runs_has_no_exit_code() -> None:
    assert shared_memory.exit_code(os.getpid()) is None
    assert endings.in_words(3) == "exit code 3"
    assert endings.in_words(-9) == "killed by SIGKILL"
    assert endings.in_words(-63) == "killed by signal 63"
    assert endings.in_a_line(KeyError("a\nb")) == "KeyError: 'a\\nb'"


class Several(Exception):  # noqa: N818  # like ExceptionGroup, which Python 3.10 lacks
    def __init__(self, *exceptions: Exception) -> None:
        super().__init__(f"{len(exceptions)} sub-exceptions")
        self.exceptions = exceptions


def test_a_program_that_exits_with_0_has_not_failed() -> None:
    orderly = [None, SystemExit(), SystemExit(0)]
    failed = [SystemExit(1), SystemExit("no more"), KeyboardInterrupt(), ValueError(0)]
    assert [endings.is_failure(one) for one in (*orderly, *failed)] == [False] * 3 + [True] * 4


def test_an_exit_code_is_what_the_system_keeps_of_it() -> None:
    """-1 stands for 255, not for a signal."""
    assert [child._exit_code(SystemExit(code)) for code in (None, 3, -1, 256, "no more")] == [0, 3, 255, 0, 1]


def test_a_group_is_told_by_what_is_in_it() -> None:
    """That a group is unhandled and has a number of sub-exceptions does not say why a rank ended."""
    group = Several(ValueError("a"), Several(OSError("b")))
    assert endings.in_a_line(group) == "ValueError: a; OSError: b (in Several) (in Several)"


# What an abort means

DIFFER = """
    import asynccoll as ac, os, torch
    os.environ["ASYNCCOLL_NODE"] = os.environ["RANK"]  # of two nodes, so that they do not meet in memory
    ac.initialize(check="off")
    for _ in range(3000):
        ac.all_reduce(1).wait()
    ac.all_reduce(torch.ones(4 + 4 * ac.get_rank())).wait()
"""


def test_an_abort_of_native_code_is_explained(tmp_path) -> None:
    """gloo aborts on tensors of different sizes: the launcher says who called what, and what to do."""
    script = jobs.writing(tmp_path)(DIFFER)
    with jobs.starting(tmp_path) as start:
        code, _, said = start("run", "-n", 2, script).wait()
    assert code == 128 + signal.SIGABRT
    line = next(line for line in said.splitlines() if "native code gave up" in line)
    assert re.search(
        r"ranks called different things: lane 'default', #3001: rank 0: all_reduce float32\[4\] sum at .*:7; "
        r"rank 1: all_reduce float32\[8\] sum at .*:7; .*ASYNCCOLL_CHECK=full",
        line,
    ), line


def test_other_ends_are_not_explained() -> None:
    assert report.what_aborted(1, {}) == ""
    assert report.what_aborted(-signal.SIGKILL, {}) == ""
    assert "its output is above" in report.what_aborted(-signal.SIGABRT, {})


def test_a_launcher_makes_a_secret_unless_the_user_has_one(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("ASYNCCOLL_SECRET", raising=False)
    one, other = naming(tmp_path), naming(tmp_path)
    assert one["ASYNCCOLL_JOB_DIRECTORY"] == str(tmp_path)
    assert len(bytes.fromhex(one["ASYNCCOLL_SECRET"])) == 16
    assert one["ASYNCCOLL_SECRET"] != other["ASYNCCOLL_SECRET"]
    monkeypatch.setenv("ASYNCCOLL_SECRET", "mine")
    assert naming(tmp_path)["ASYNCCOLL_SECRET"] == "mine"


def test_of_ranks_that_are_seen_to_end_at_once_the_one_that_waited_for_nobody_is_first(witness) -> None:
    """mpiexec kills the others within milliseconds, which the launcher on a busy machine may not see."""
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE)) for _ in range(3)]
        recorders = [flight.Recorder(rank, 3) for rank in range(3)]
        for number, (process, recorder) in enumerate(zip(ranks, recorders, strict=True)):
            lane = recorder.lane("world", "default")
            text = recorder.learn("x", ("world", "default", "default", "all_reduce", "", "t.py:1"), None)
            ticket = recorder.note(text, lane, 1, 1, -1, 16, 1.0, 1.0)
            if number == 1:
                recorder.ended(ticket, 2.0)
            witness._take(
                witness._watch(number, process.pid),
                shared_memory.taken(os.dup(recorder.descriptor), write=True),
            )
    assert witness.watch().ended() == [1, 0, 2]
    for recorder in recorders:
        recorder.close()
