"""``asynccoll info`` and ``top``, tables on a terminal and in a pipe, and ``--json`` everywhere."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from asynccoll.cli import main, output, top, trials
from asynccoll.flight import Call, Flight, Progress
from asynccoll.trace.live import Snapshot, survey

# --- info -----------------------------------------------------------------------------------------


def test_info_tries_each_backend(capsys):
    """What works has been tried; what does not says why, and the line to type."""
    assert main(["info", "--json"]) == 0
    backends = json.loads(capsys.readouterr().out)["backends"]
    assert {"gloo", "nccl", "mpi", "horovod", "xla-tpu", "serial"} <= backends.keys()
    for name in ("gloo", "serial"):
        assert backends[name] == {"works": True, "why": "", "do": ""}
    for one in backends.values():
        assert one["works"] or one["why"]


def test_what_is_not_there_is_told_with_the_line_to_type(capsys, monkeypatch):
    monkeypatch.setattr(trials.table, "needs", lambda: {"mpi": "mpi4py and an MPI library: pip install x"})
    assert main(["info"]) == 0
    assert re.search(
        r"^mpi +no +it needs mpi4py and an MPI library +pip install x$", capsys.readouterr().out, re.MULTILINE
    )


def test_a_backend_that_breaks_does_not_work(monkeypatch):
    """Its parts are there, but the world of one fails: what it said, and what it says is to be typed."""
    monkeypatch.setattr(trials, "_PROGRAM", "raise ValueError('broken: pip install y')")
    monkeypatch.setattr(trials.table, "needs", lambda: {"gloo": ""})
    assert trials.try_all() == {
        "gloo": trials.Trial(works=False, why="ValueError: broken: pip install y", do="pip install y")
    }
    monkeypatch.setattr(trials, "_PROGRAM", "import os; os.abort()")
    assert trials.try_all()["gloo"].why == "a world of one was killed by signal 6"


# --- tables ---------------------------------------------------------------------------------------

TABLE = output.Table(
    ("name", "us"), [("a", "1.5"), ("[bold]", "10.25")], title="times", left=frozenset({"name"})
)


def test_files_below_the_working_directory_are_called_from_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output.print_table(output.Table(("line",), [(f"{tmp_path}/a/train.py:3",), ("/elsewhere.py:1",)]))
    assert capsys.readouterr().out.split() == ["line", "a/train.py:3", "/elsewhere.py:1"]


def test_a_table_in_a_pipe_is_aligned_text(capsys):
    output.print_table(TABLE)
    assert capsys.readouterr().out == "times\nname       us\na         1.5\n[bold]  10.25\n"


@pytest.mark.parametrize("rich", [True, False])
def test_a_table_on_a_terminal(rich):
    """Drawn by rich, if that is there; else the same as in a pipe. Markup in it is text."""
    ours, theirs = pty.openpty()
    program = (
        f"import sys\n{'' if rich else 'sys.modules[chr(114) + chr(105) + chr(99) + chr(104)] = None'}\n"
        "from asynccoll.cli import output\n"
        "rows = [('a', '1.5'), ('[bold]', '10.25')]\n"
        "output.print_table(output.Table(('name', 'us'), rows, title='times'))\n"
    )
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", program], stdout=theirs, env=env, check=True, timeout=60)
    os.close(theirs)
    shown = b""
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:  # the terminal's other end is closed
        pass
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert "[bold]" in text
    assert "10.25" in text
    assert ("\u2500" in text) == rich
    assert (b"\x1b[" in shown) == rich


def test_explain_as_json(capsys):
    assert main(["explain", "all_reduce", "--dtype", "int16", "--no-memory", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["operation"], found["backend"]) == ("all_reduce", "gloo")
    assert found["why"]


# --- top ------------------------------------------------------------------------------------------


def call(ticket, *, called, ended=0.0, operation="all_reduce", sequence=None, lane="default", size_bytes=100):
    number = ticket if sequence is None else sequence
    return Call(
        ticket, "world", lane, lane, operation, "", f"train.py:{ticket}", number, 1, -1, size_bytes,
        called, called, ended, 0.0, "",
    )  # fmt: skip


def flight(rank, calls, lanes):
    reached = tuple(Progress("world", lane, place) for lane, place in lanes.items())
    return Flight(rank, 2, 100 + rank, 0.0, 0.0, "running", 0.0, tuple(calls), reached)


def moment(at, *flights, states=None):
    by_pid = {one.pid: one for one in flights}
    kernel = dict.fromkeys(by_pid, "S") | (states or {})
    return Snapshot(at, by_pid, kernel, dict.fromkeys(by_pid, 7))


def test_who_is_behind_and_who_waits():
    """Rank 0 waits in a call on a lane that rank 1 has never used, because it is stopped."""
    before = moment(10.0, flight(0, [], {}), flight(1, [], {}))
    done = [call(k, called=10 + k / 10, ended=10.05 + k / 10) for k in range(1, 5)]
    waits = call(5, called=11.0, sequence=1, lane="gradients")
    now = moment(
        20.0,
        flight(0, [*done, waits], {"default": 4, "gradients": 1}),
        flight(1, done, {"default": 4}),
        states={101: "T"},
    )
    first, second = survey(now, before)
    assert (first.rank, first.in_flight, first.seconds, first.behind) == (0, 1, 9.0, 0)
    assert (first.operation, first.sequence, first.lane, first.place) == (
        "all_reduce",
        1,
        "gradients",
        "train.py:5",
    )
    assert (first.calls_per_second, first.bytes_per_second) == (0.5, 50.0)
    assert (second.in_flight, second.behind, second.state) == (0, 1, "stopped")
    assert second.idle == pytest.approx(9.6)
    (said,) = top.remarks([first, second])
    assert said.startswith("rank 1 (pid 101, stopped) is 1 behind: rank 0 has waited 9.00 s in all_reduce #1")
    assert top.remarks([first]) == []


def test_ranks_outside_of_a_group_are_not_behind():
    inside = flight(0, [], {})
    alone = Flight(1, 2, 101, 0.0, 0.0, "running", 0.0, (), (Progress("1", "default", 9),))
    found = survey(moment(2.0, inside, alone), moment(1.0))
    assert [one.behind for one in found] == [0, 0]


# --- what is typed without knowing ----------------------------------------------------------------


def test_explain_says_when_the_backend_that_was_asked_for_has_the_call(capsys):
    assert main(["explain", "all_reduce", "--backend", "gloo"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("all_reduce on memory")
    assert "gloo has it between hosts (--nodes 2) and without memory (--no-memory)" in told
    assert main(["explain", "all_reduce", "--backend", "gloo", "--no-memory"]) == 0
    assert "--no-memory" not in capsys.readouterr().out
