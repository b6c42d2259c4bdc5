"""``asynccoll info`` and ``top``, tables on a terminal and in a pipe, and ``--json`` everywhere."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from asynccoll.cli import calls, main, output, top, trials, where
from asynccoll.flight import Call, Flight, Parting, Progress
from asynccoll.health.accounts import Account, Peer
from asynccoll.jobs import whereabouts
from asynccoll.jobs.live import Snapshot, command_of, hangs, survey
from asynccoll.jobs.whereabouts import Job, Whereabouts
from asynccoll.launch import planned_rank
from patience import patient

# --- info -----------------------------------------------------------------------------------------


def test_info_tries_each_backend(capsys):
    """A backend that works was tried; any other has a reason and the command to type."""
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
    """Its packages are installed, but a world of one fails: the entry has the error and the command in it."""
    monkeypatch.setattr(trials, "_PROGRAM", "raise ValueError('broken: pip install y')")
    monkeypatch.setattr(trials.table, "needs", lambda: {"gloo": ""})
    assert trials.try_all() == {
        "gloo": trials.Trial(works=False, why="ValueError: broken: pip install y", do="pip install y")
    }
    monkeypatch.setattr(trials, "_PROGRAM", "import os; os.abort()")
    assert trials.try_all()["gloo"].why == "a world of one was killed by signal 6"

    monkeypatch.setattr(trials, "_PROGRAM", "import signal; signal.pause()")
    monkeypatch.setattr(trials, "_LIMIT_S", 0.1)
    assert "busy machine, try again" in trials.try_all()["gloo"].why


# --- tables ---------------------------------------------------------------------------------------

TABLE = output.Table(
    ("name", "us"), [("a", "1.5"), ("[bold]", "10.25")], title="times", left=frozenset({"name"})
)


def test_files_below_the_working_directory_are_called_from_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output.show(output.Table(("line",), [(f"{tmp_path}/a/train.py:3",), ("/elsewhere.py:1",)]))
    assert capsys.readouterr().out.split() == ["line", "a/train.py:3", "/elsewhere.py:1"]
    output.show(f"'{tmp_path}/trace' ({tmp_path}/a.py:1) /mnt{tmp_path}/b.py")
    assert capsys.readouterr().out == f"'trace' (a.py:1) /mnt{tmp_path}/b.py\n"


def test_a_table_in_a_pipe_is_aligned_text(capsys):
    output.show(TABLE)
    assert capsys.readouterr().out == "times\nname       us\na         1.5\n[bold]  10.25\n"


WIDE = output.Table(
    ("job", "pid", "operation", "lane", "line"),
    [("7", "100", "all_reduce #5", "gradients/backward", "train.py:3"), ("7", "101", "-", "-", "-")],
    left=frozenset({"operation", "lane", "line"}),
    spare=("job",),
)


def on_terminal_of(columns, monkeypatch, capsys, *parts):
    """Return the lines shown on a terminal without colour."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"COLUMNS": str(columns), "TERM": "dumb", "TTY_COMPATIBLE": "0"}.items():
        monkeypatch.setenv(name, value)
    output.show(*parts)
    return capsys.readouterr().out.splitlines()


def test_a_table_that_fits_is_as_in_a_pipe(monkeypatch, capsys):
    output.show(WIDE)
    in_a_pipe = capsys.readouterr().out.splitlines()
    assert on_terminal_of(80, monkeypatch, capsys, WIDE) == in_a_pipe


def test_a_table_that_is_too_wide_leaves_columns_out_then_folds_words_between_words(monkeypatch, capsys):
    assert on_terminal_of(52, monkeypatch, capsys, WIDE) == [
        "pid  operation      lane                line",
        "100  all_reduce #5  gradients/backward  train.py:3",
        "101  -              -                   -",
    ]
    folded = [
        "pid  operation   lane                line",
        "100  all_reduce  gradients/backward  train.py:3",
        "     #5",
        "101  -           -                   -",
    ]
    assert on_terminal_of(47, monkeypatch, capsys, WIDE) == folded
    assert on_terminal_of(5, monkeypatch, capsys, WIDE) == folded  # words are never split


def test_words_that_are_too_long_are_cut(monkeypatch, capsys):
    path = "/home/somebody/a_project_of_many/scripts/train.py:117"
    table = output.Table(("rank", "line"), [("0", path)], left=frozenset({"line"}))
    assert on_terminal_of(40, monkeypatch, capsys, table) == [
        "rank  line",
        f"   0  {path[:34]}",
        f"      {path[34:]}",
    ]
    assert on_terminal_of(40, monkeypatch, capsys, f"in {path}") == ["in", path[:40], path[40:]]


def test_letters_that_take_two_cells_are_aligned(capsys):
    output.show(output.Table(("lane", "us"), [("\u884c", "1"), ("ab", "2")], left=frozenset({"lane"})))
    assert capsys.readouterr().out == "lane  us\n\u884c     1\nab     2\n"


def on_terminal(program, **variables):
    """Return what ``program`` shows on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    wanted = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    env = {**wanted, "TERM": "xterm-256color", "COLUMNS": "80", **variables}
    subprocess.run([sys.executable, "-c", program], stdout=theirs, env=env, check=True, timeout=patient(60))
    os.close(theirs)
    shown = b""
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:  # the terminal's other end is closed
        pass
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def plain(shown):
    """Return ``shown`` without terminal escape codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


SHOWS = """
from asynccoll.cli import output
rows = [("a", "1.5"), ("[bold]", "10.25")]
output.show(output.Table(("name", "us"), rows, title="times", left=frozenset({"name"}), good={1}))
output.show("word " * 20)
"""
LINES = [
    "times",
    "name       us",
    "a         1.5",
    "[bold]  10.25",
    *["word " * 15 + "word", "word " * 3 + "word"],
]


def test_a_table_on_a_terminal_has_colour():
    """Its lines are the same as in a pipe."""
    shown = on_terminal(SHOWS)
    assert plain(shown).splitlines() == LINES
    assert "\x1b[32m[bold]\x1b[0m" in shown


def test_a_table_on_a_terminal_has_no_colour_where_it_is_not_wanted():
    """Bold is not a colour (https://no-color.org)."""
    shown = on_terminal(SHOWS, NO_COLOR="1")
    assert "[bold]  10.25\n" in shown
    assert plain(shown).splitlines() == LINES
    assert on_terminal(SHOWS, TERM="dumb").splitlines() == LINES


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
        called, called, ended, 0.0 if ended else called, "",
    )  # fmt: skip


def flight(rank, calls, lanes, *, pid=None, **said):
    reached = tuple(Progress("world", lane, place) for lane, place in lanes.items())
    process = 100 + rank if pid is None else pid
    return Flight(rank, 2, process, 0.0, 0.0, "running", 0.0, tuple(calls), reached, said=said)


def moment(at, *flights, states=None):
    by_pid = {one.pid: one for one in flights}
    kernel = dict.fromkeys(by_pid, "S") | (states or {})
    return Snapshot(at, by_pid, kernel, dict.fromkeys(by_pid, 7))


def test_who_is_behind_and_who_waits():
    """Rank 0 waits in a call on a lane that rank 1 has never used, because rank 1 is stopped."""
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
    verdict, state = top.remarks([first, second], hangs(now))
    assert verdict == (
        "rank 1 has not called all_reduce #1 on lane 'gradients', in which rank 0 has waited 9.00 s "
        "(train.py:5)"
    )
    assert state == "rank 1 (pid 101) is stopped"
    assert top.remarks([first], {}) == []


def test_ranks_that_wait_on_two_lanes_are_not_mixed_up():
    """Each is behind on the other's lane: its peer waits for it on that lane, not in its own call."""
    lanes = [{"metrics": 6, "default": 6}, {"metrics": 5, "default": 7}]
    calls = [
        [call(1, called=11.0, sequence=6, lane="metrics")],
        [call(2, called=12.0, sequence=7, lane="default")],
    ]
    now = moment(20.0, *map(flight, (0, 1), calls, lanes))
    ranks = survey(now, moment(10.0))
    assert [(one.behind, one.behind_on) for one in ranks] == [(1, "default"), (1, "metrics")]
    (verdict,) = top.remarks(ranks, hangs(now))
    assert verdict.startswith(
        "ranks wait in a circle: rank 0 waits in all_reduce #6 on lane 'metrics' (train.py:1) for rank 1, "
        "and rank 1 in all_reduce #7 on lane 'default' (train.py:2) for rank 0, for 9.00 s: "
    )


def test_jobs_are_told_apart_by_where_their_ranks_met():
    """One shell has started two jobs, and one job with a process between the launcher and each rank."""
    places = {100: "a:1", 101: "a:1", 102: "b:2", 103: "b:2", 200: "c:3", 201: "c:3"}
    flights = {pid: flight(pid % 2, [], {}, pid=pid, meets=place) for pid, place in places.items()}
    parents = {100: 7, 101: 7, 102: 7, 103: 7, 200: 20, 201: 21, 20: 9, 21: 9, 9: 7, 7: 1}
    now = Snapshot(20.0, flights, dict.fromkeys(flights, "S"), parents)
    assert [(one.job, one.rank, one.pid) for one in survey(now, now)] == [
        (9, 0, 200), (9, 1, 201), (100, 0, 100), (100, 1, 101), (102, 0, 102), (102, 1, 103),
    ]  # fmt: skip


def test_top_on_a_terminal_ends_with_ctrl_c(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    def interrupted(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=interrupted))
    assert main(["top"]) == 0
    assert main(["top", "-n", "3"]) == 130  # stopped before its three views
    capsys.readouterr()


def test_top_prints_a_document_in_each_line(monkeypatch, capsys):
    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=lambda _seconds: None))
    snapshots = moment(2.0, flight(0, [call(1, called=1.0)], {"default": 1}))
    monkeypatch.setattr("asynccoll.jobs.live.snapshot", lambda _root: snapshots)
    assert main(["top", "-n", "2", "--json"]) == 0
    assert [json.loads(line)[0]["rank"] for line in capsys.readouterr().out.splitlines()] == [0, 0]


def test_top_of_a_process_ends_with_it(monkeypatch, capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:

        def ends(_seconds):
            child.communicate(b"\n", timeout=patient(30))

        monkeypatch.setattr(top, "time", SimpleNamespace(sleep=ends))
        assert main(["top", str(child.pid), "-n", "3"]) == 0
        told = capsys.readouterr()
        assert f"process {child.pid} is not a rank of asynccoll" in told.out
        assert told.err == f"process {child.pid} has ended\n"
        for command in ("top", "where"):
            assert main([command, str(child.pid)]) == 2
            assert f"there is no process {child.pid} on this host" in capsys.readouterr().err


def test_the_program_of_a_job_is_named():
    program = "import time; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program, "--epochs", "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()  # by now it has its final command line
        job = Job(1, "", (Whereabouts(0, Peer("", 0, "", child.pid, "", -1, 0), Account(0, near=True)),))
        assert job.command == f"-c {program} --epochs 3"
        child.communicate(b"\n", timeout=patient(30))
    assert job.command == ""


def test_a_rank_that_spawn_had_a_launcher_start_is_shown_as_the_program(tmp_path):
    """Between them there are the launcher, here a shell, and its helper processes."""
    plan = tmp_path / "job"
    os.mkfifo(plan)  # on which the rank blocks
    launcher = ["sh", "-c", '"$@" & echo $!; wait', "sh", sys.executable, planned_rank.__file__, str(plan)]
    program = f"import subprocess; subprocess.run({launcher})"
    with subprocess.Popen(
        [sys.executable, "-c", program, "--epochs", "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        pid = int(child.stdout.readline())
        with plan.open("wb"):  # by now it has its final command line
            assert command_of(pid) == f"-c {program} --epochs 3"
        child.communicate(timeout=patient(30))


SCREEN = """
from asynccoll.cli import output
table = output.Table(("rank",), [(str(k),) for k in range(9)])
with output.Screen() as screen:
    screen.show("rank 1 is stopped", table)
    print("again")
    screen.show("rank 1 is stopped", output.Table(("rank",), [("7",)]))
"""


def test_a_screen_shows_as_much_as_it_has_room_for_and_leaves_what_it_showed_last():
    first, last = on_terminal(SCREEN, LINES="5").split("again")
    assert [line.strip() for line in plain(first).splitlines() if line][:5] == [
        "rank 1 is stopped",
        "rank",
        "0",
        "1",
        "...",
    ]
    assert plain(last).rstrip().splitlines()[-3:] == ["rank 1 is stopped", "rank", "   7"]


RESIZED = """
import fcntl, os, struct, termios
from asynccoll.cli import output
os.dup2(1, 0)
table = output.Table(("job", "rank"), [("1", "2" * 20)], spare=("job",))
with output.Screen() as screen:
    for columns in (10, 40):
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("4H", 25, columns, 0, 0))
        screen.show(table)
        print("again")
"""


def test_a_screen_has_the_width_that_its_terminal_has_now():
    """A line that the terminal would fold is cut, since a redrawn region counts its lines."""
    narrow, _, wide = plain(on_terminal(RESIZED, COLUMNS="")).split("again")
    assert [line for line in narrow.splitlines() if line.strip()][-1].strip() == "2" * 10
    assert wide.rstrip().splitlines()[-1] == f"  1  {'2' * 20}"


@pytest.mark.parametrize(
    ("ranks", "made", "told"),
    [
        ((0, 1), 1, "ranks 0, 1 made the same calls, as far as is recorded\n"),
        ((0, 1), 0, "ranks 0, 1 have called nothing, as far as is recorded\n"),
        ((0,), 1, "fewer than two ranks are known: nothing to compare\nnothing is known about rank 1: "),
        ((), 0, "fewer than two ranks are known: nothing to compare\n"),
    ],
)
def test_ranks_of_which_nothing_is_known_have_not_called_the_same(capsys, ranks, made, told):
    recorded = {rank: flight(rank, [call(1, called=1.0)] * made, {}) for rank in ranks}
    assert calls.print_partings([], recorded) is False
    assert capsys.readouterr().out.startswith(told)


def test_where_the_ranks_of_a_group_part_the_group_is_named(capsys):
    calls.print_partings([Parting("absent", "0-2", "default", 4, {0: None, 2: None})], {})
    assert "lane 'default' of ranks 0, 2: not all ranks have called at #5" in capsys.readouterr().out


def test_only_a_rank_that_is_known_to_have_called_nothing_is_shown_without_a_call(capsys, monkeypatch):
    """Nothing is known of one that does not answer, and with ``--calls 0`` no past call is shown."""
    flights = (flight(0, [], {}), flight(1, [call(1, called=1.0, ended=2.0)], {}), None)
    ranks = tuple(
        Whereabouts(rank, Peer("", 0, "host", 7, "", -1, 0), Account(rank, one))
        for rank, one in enumerate(flights)
    )
    monkeypatch.setattr(whereabouts, "find_jobs", lambda _job: [Job(3, "", ranks)])
    assert main(["where", "--calls", "0"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(" *[012] ", line)]
    assert [bool(re.search(" no call +-", line)) for line in rows[:3]] == [True, False, False]


def test_stacks_that_are_the_same_are_shown_once():
    stacks = [{"": ("f",), "task 'a'": ("g",)}, {"": ("f",)}, {"": ("h",)}]
    ranks = [Whereabouts(k, None, Account(k, stacks=told)) for k, told in enumerate(stacks)]
    assert where.same_stacks(Job(3, "", tuple(ranks))) == {
        ("", ("f",)): [0, 1],
        ("task 'a'", ("g",)): [0],
        ("", ("h",)): [2],
    }


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
