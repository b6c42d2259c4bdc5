"""``asynccoll run`` and its siblings with real processes that are started, broken and killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

import asynccoll
from asynccoll.cli.entry import main
from asynccoll.launch import report
from asynccoll.launch.report import Failure
from jobs import INHERITED, LIMIT_S, Job, on_linux

# --- as plain python ------------------------------------------------------------------------

SHOW_SELF = """
    '''Shows how a program finds itself.'''
    import json, pickle, sys
    import __main__

    class Thing:
        pass

    print(json.dumps({
        "argv": sys.argv, "name": __name__, "file": __file__, "path0": sys.path[0],
        "package": __package__, "doc": __doc__, "spec": getattr(__spec__, "name", None),
        "cached": __cached__, "globals": sorted(globals()), "builtins": str(__builtins__),
        "main": __main__.__dict__ is globals(), "loader": type(__loader__).__name__,
        "pickled": isinstance(pickle.loads(pickle.dumps(Thing())), Thing),
    }))
"""
ARGUMENTS = ["--", "a b", "--help", "-n", "3", "", "--", "-m", "$$", "$HOME", "${local_rank}"]


@pytest.mark.parametrize(
    ("flags", "plain", "name"),
    [
        ([], [], "program.py"),
        ([], [], "folder/../program.py"),
        (["-m"], ["-m"], "package.inner"),
        pytest.param(["-m"], ["-m"], "program", marks=pytest.mark.slow),
        pytest.param(["-m"], ["-m"], "package", marks=pytest.mark.slow),
        pytest.param([], [], "package", marks=pytest.mark.slow),
    ],
    ids=["script", "script-elsewhere", "submodule", "module", "package", "directory"],
)
def test_a_program_finds_itself_as_under_plain_python(tmp_path, start, script, flags, plain, name):
    script(SHOW_SELF)
    (tmp_path / "folder").mkdir()
    for part in ("__init__", "__main__", "inner"):
        script(SHOW_SELF if part != "__init__" else "", f"package/{part}.py")
    ranks = start("run", "-n", 2, *flags, name, *ARGUMENTS)
    alone = Job(tmp_path, *plain, name, *ARGUMENTS)
    code, output, errors = ranks.wait()
    assert (code, errors) == (0, "")
    expected = json.loads(alone.wait()[1])
    assert [json.loads(line) for line in output.splitlines()] == [expected] * 2


@pytest.mark.slow
def test_multiprocessing_finds_the_functions_of_the_script(start, script):
    script("""
        import multiprocessing

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [21]))
    """)
    assert start("run", "-n", 1, "program.py").wait() == (0, "[42]\n", "")


def test_whole_lines_come_out_and_the_environment_is_made_for_one_host(start, script):
    script("""
        import os, sys
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME",
                 "ASYNCCOLL_BACKEND"]
        print(*(os.environ.get(name) for name in names), int(os.environ["OMP_NUM_THREADS"]) > 0)
    """)
    job = start("run", "-n", 2, "--backend", "gloo", "program.py")
    lo = "lo0" if sys.platform == "darwin" else "lo"
    assert job.lines(2) == [f"{r} {r} 2 127.0.0.1 {lo} gloo True" for r in range(2)]
    assert job.wait() == (0, "", "")


@pytest.mark.slow
def test_what_the_user_set_wins(start, script):
    script("""
        import os
        print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["OMP_NUM_THREADS"])
    """)
    job = start("run", "-n", 2, "program.py", GLOO_SOCKET_IFNAME="eth7", OMP_NUM_THREADS="3")
    assert job.lines(2) == ["eth7 3", "eth7 3"]


@on_linux
def test_the_rendezvous_of_one_host_listens_on_loopback_only(start, script):
    script("""
        import os
        port = f"{int(os.environ['MASTER_PORT']):04X}"
        rows = [line.split() for file in ("/proc/net/tcp", "/proc/net/tcp6")
                for line in open(file).readlines()[1:]]
        print({row[1] for row in rows if row[3] == "0A" and row[1].endswith(":" + port)}
              == {"0100007F:" + port})
    """)
    assert start("run", "-n", 1, "program.py").wait() == (0, "True\n", "")


MEETS = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    print(dist.get_world_size(), x.tolist())
    dist.destroy_process_group()
"""


def test_ranks_meet_and_jobs_beside_each_other_do_not(start, script):
    script(MEETS)
    jobs = [start("run", "-n", 2, "program.py") for _ in range(2)]
    assert [job.lines(2) for job in jobs] == [["2 [3.0, 3.0, 3.0]"] * 2] * 2
    assert [job.wait()[0] for job in jobs] == [0, 0]


@pytest.mark.slow
def test_two_hosts_meet_where_told(start, script):
    script(MEETS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    where = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv_endpoint", endpoint]
    where += ["--local-addr", "127.0.0.1", "--rdzv-id", "job"]
    jobs = [start("run", *where, "-n", 1, "program.py", GLOO_SOCKET_IFNAME="lo") for _ in range(2)]
    assert [job.lines(1) for job in jobs] == [["2 [3.0, 3.0, 3.0]"]] * 2
    assert [job.wait()[0] for job in jobs] == [0, 0]


# --- failures -------------------------------------------------------------------------------


def test_the_failing_rank_is_shown_once_with_its_own_traceback(start, script):
    script("""
        import os

        def work(rank):
            if rank == 1:
                raise ValueError("the reason")
            import signal
            signal.pause()

        if os.environ["RANK"] == "1": print(os.getpid())  # the other one may have no time to
        work(int(os.environ["RANK"]))
    """)
    job = start("run", "-n", 2, "program.py")
    (pid,) = job.lines(1)
    code, _, errors = job.wait()
    assert code == 1
    assert errors.count("Traceback") == errors.count("ValueError: the reason") == 1
    assert f"rank 1 failed on {socket.gethostname()} (pid {pid}): exit code 1" in errors
    assert 'program.py", line 11, in <module>' in errors
    assert 'program.py", line 6, in work' in errors
    assert "child.py" not in errors
    assert "runpy" not in errors
    assert "stopped rank 0" in errors
    assert job.left() == []


def test_the_first_failure_is_shown_not_what_followed_from_it(tmp_path, start, script):
    os.mkfifo(tmp_path / "first-lives")
    script("""
        import os
        if os.environ["RANK"] == "1":
            end = open("first-lives", "w")
            raise ValueError("the reason")
        open("first-lives").read()  # returns when rank 1 is gone
        raise ConnectionError("peer is gone")
    """)
    code, _, errors = start("run", "-n", 2, "--monitor-interval", 1, "program.py").wait()
    assert code == 1
    assert errors.count("Traceback") == 1
    assert "ValueError: the reason" in errors
    assert re.search(r"rank 0 failed too at \S*program.py:7: ConnectionError: peer is gone", errors), errors


def test_how_a_forked_child_ends_is_not_how_its_rank_does(tmp_path, start, script):
    """Regression: the child's exit code was taken for the rank's, as the first failure."""
    os.mkfifo(tmp_path / "ended")
    script("""
        import os, signal, sys
        if os.environ["RANK"] == "1":
            open("ended").read()
            raise ValueError("the reason")
        child = os.fork()
        if not child: sys.exit(3)
        os.waitpid(child, 0)
        open("ended", "w").close()
        signal.pause()
    """)
    code, _, errors = start("run", "-n", 2, "program.py").wait()
    assert code == 1
    assert f"rank 1 failed on {socket.gethostname()}" in errors
    assert "rank 0 failed" not in errors


@pytest.mark.slow
def test_a_module_that_fails_is_shown_alike(start, script):
    script("1 / 0")
    code, _, errors = start("run", "-n", 1, "-m", "program").wait()
    assert code == 1
    assert errors.count("ZeroDivisionError") == 1
    assert "runpy" not in errors
    assert "child.py" not in errors


@pytest.mark.slow
def test_a_script_that_does_not_compile_is_shown_alike(start, script):
    script("x = = 1")
    code, _, errors = start("run", "-n", 1, "program.py").wait()
    assert code == 1
    assert errors.count("SyntaxError") == 1
    assert "child.py" not in errors


@pytest.mark.parametrize(
    ("leave", "code", "said"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        pytest.param("sys.exit('no more')", 1, "no more", marks=pytest.mark.slow),
        pytest.param("os._exit(9)", 9, "exit code 9", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "killed by SIGKILL"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGTERM)", 143, "killed by SIGTERM", marks=pytest.mark.slow
        ),
    ],
)
def test_the_exit_code_is_the_failing_ranks(start, script, leave, code, said):
    script(f"""
        import os, signal, sys
        if os.environ["RANK"] == "1":
            {leave}
    """)
    job = start("run", "-n", 2, "program.py")
    given, _, errors = job.wait()
    assert given == code
    assert said in errors
    assert "rank 1 failed" in errors
    assert "Traceback" not in errors


def test_a_rank_that_has_not_joined_is_told_who_started_it(start, script):
    script("""
        import asynccoll as ac
        ac.all_reduce(1)
    """)
    _, _, errors = start("run", "-n", 2, "program.py").wait()
    assert (
        "of 2 (according to the variables of `asynccoll run`), but ac.initialize() was not called" in errors
    )


@on_linux
def test_a_killed_rank_is_shown_with_its_last_call(start, script):
    """No peer may be left to report it: here the peer waits for nothing in which it would notice."""
    script("""
        import os, signal
        import asynccoll as ac

        ac.initialize("gloo")
        ac.all_reduce(1).wait()
        if ac.get_rank() == 1:
            work = ac.all_gather(1, lane="mine")
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    """)
    code, _, errors = start("run", "-n", 2, "program.py").wait()
    assert code == 128 + signal.SIGKILL
    told = (
        r"rank 1: its last call was all_gather #1 on lane 'mine' at \S+:8, \d\.\d s before it ended, queued$"
    )
    assert re.search(told, errors, re.MULTILINE), errors


def test_a_crash_in_native_code_shows_where_python_was(start, script):
    script("""
        import os

        def crash():
            os.abort()

        crash()
    """)
    code, _, errors = start("run", "-n", 1, "program.py").wait()
    assert code == 128 + signal.SIGABRT
    assert "killed by SIGABRT" in errors
    assert errors.count('program.py", line 5 in crash') == 1
    assert "child.py" not in errors


@pytest.mark.slow
def test_a_hook_of_the_script_prints_instead_of_the_launcher(start, script):
    script("""
        import sys
        sys.excepthook = lambda kind, error, trace: print("mine:", error, file=sys.stderr)
        raise ValueError("the reason")
    """)
    code, _, errors = start("run", "-n", 1, "program.py").wait()
    assert code == 1
    assert errors.count("the reason") == 1
    assert "mine: the reason" in errors


def test_a_restart_shows_the_failure_it_got_over(start, script):
    script("""
        import os
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("the first time")
        print("done")
    """)
    code, output, errors = start("run", "-n", 1, "--max-restarts", 1, "program.py").wait()
    assert (code, output) == (0, "done\n")
    assert errors.count("ValueError: the first time") == 1
    assert "child.py" not in errors


@on_linux
def test_a_restart_finds_nothing_of_the_attempt_before(start, script):
    script("""
        import os, pathlib, subprocess
        pid = pathlib.Path("pid")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            cleans = ["sh", "-c", "trap 'echo cleaned; exit' TERM; echo; while :; do sleep 0.1; done"]
            left = subprocess.Popen(cleans, stdout=open("left", "w"), start_new_session=True)
            pid.write_text(str(left.pid))
            while not os.path.getsize("left"):
                os.sched_yield()
            os.kill(os.getpid(), 9)
        print(os.path.exists(f"/proc/{pid.read_text()}"), open("left").read().strip())
    """)
    # Such a child belongs to no attempt.
    shell = ("sh", "-c", 'sleep 1000 > /dev/null 2>&1 & echo $!; exec "$@"', "sh", sys.executable)
    code, output, _ = start("run", "-n", 1, "--max-restarts", 1, "program.py", python=shell).wait()
    other, *told = output.split()
    assert (code, told) == (0, ["False", "cleaned"])
    os.kill(int(other), signal.SIGKILL)


@on_linux
def test_a_rank_killed_after_a_restart_has_no_call_of_the_attempt_before(start, script):
    script("""
        import os
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            import asynccoll as ac
            ac.initialize("gloo")
            ac.all_reduce(1).wait()
        os.kill(os.getpid(), 9)
    """)
    code, _, errors = start("run", "-n", 2, "--max-restarts", 1, "program.py").wait()
    assert code == 128 + 9
    assert "killed by SIGKILL" in errors
    assert "its last call" not in errors


@on_linux
def test_a_failing_rank_takes_what_it_started_with_it(start, script):
    script("""
        import os, subprocess
        subprocess.Popen(["sleep", "1000"])
        print("started")
        os.kill(os.getpid(), 9)
    """)
    job = start("run", "-n", 1, "program.py")
    assert job.wait()[0] == 128 + 9
    assert job.left() == []


# --- the end --------------------------------------------------------------------------------

WAITS = {
    "asleep": "signal.pause()",
    "deaf-to-interrupts": "signal.signal(2, signal.SIG_IGN); print('r'); signal.pause()",
    "slow-to-clean-up": """
        try:
            print('r'); signal.pause()
        finally:
            print('cleaned')
    """,
}


def waiting_script(script, wait):
    script(
        "import signal, subprocess, sys\n"
        "subprocess.Popen(['sleep', '1000'])\n"
        + (textwrap.dedent(wait) if "print('r')" in wait else f"print('r')\n{wait}\n")
    )


@on_linux
@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        (signal.SIGTERM, False),
        (signal.SIGINT, True),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.nightly),
    ],
)
def test_a_stop_signal_leaves_nobody_and_no_wall_of_text(start, script, number, to_group):
    check_stop(start, script, number, to_group, WAITS["asleep"])


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "wait"),
    [
        (signal.SIGINT, "deaf-to-interrupts"),
        (signal.SIGINT, "slow-to-clean-up"),
        pytest.param(signal.SIGTERM, "deaf-to-interrupts", marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, "slow-to-clean-up", marks=pytest.mark.nightly),
    ],
)
def test_a_stop_signal_reaches_those_too_who_do_not_end_at_once(start, script, number, wait):
    check_stop(start, script, number, False, WAITS[wait])


def check_stop(start, script, number, to_group, wait):
    waiting_script(script, wait)
    job = start("run", "-n", 2, "program.py")
    assert job.lines(2) == ["r", "r"]
    (os.killpg if to_group else os.kill)(job.process.pid, number)
    code, output, errors = job.wait()
    assert job.left() == []
    assert code == 128 + number
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 1
    if "finally" in wait and number == signal.SIGINT:
        assert output.count("cleaned") == 2


@on_linux
def test_a_second_signal_kills_what_does_not_want_to_end(start, script):
    script("""
        import signal, sys
        signal.signal(signal.SIGINT, lambda *_: print("no"))
        signal.signal(signal.SIGTERM, lambda *_: print("no"))
        print("ready")
        while True:
            signal.pause()
    """)
    job = start("run", "-n", 2, "program.py")
    job.lines(2)
    job.process.send_signal(signal.SIGINT)
    assert job.lines(2) == ["no", "no"]
    job.process.send_signal(signal.SIGINT)
    code, _, errors = job.wait()
    assert code == 128 + signal.SIGINT
    assert "Traceback" not in errors
    assert job.left() == []


@on_linux
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM, signal.SIGHUP],
    ids=lambda n: n.name,
)
def test_a_stop_signal_while_other_hosts_are_waited_for(tmp_path, start, script, number):
    """torch waits for them in native code, where Python cannot handle signals."""
    script("")
    made = tmp_path / "tmp"
    made.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", port]
    hears_all = ("env", "--default-signal", sys.executable)  # these tests may run under nohup
    job = start("run", "--nnodes", 2, *where, "program.py", python=hears_all, TMPDIR=str(made))
    while True:
        assert job.process.poll() is None, job.wait()
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            break
    job.process.send_signal(number)
    code, output, errors = job.wait()
    assert (code, output) == (128 + number, "")
    assert errors.count("all ranks stopped") == 1
    assert "Traceback" not in errors
    assert job.left() == []
    assert list(made.glob("asynccoll-*")) == []


@on_linux
def test_ranks_do_not_outlive_a_launcher_that_was_killed(start, script):
    script("""
        import os, signal
        print(os.getpid())
        signal.pause()
    """)
    job = start("run", "-n", 2, "program.py")
    ends = [os.pidfd_open(int(pid)) for pid in job.lines(2)]
    job.process.kill()
    for end in ends:
        assert select.select([end], [], [], LIMIT_S / 2)[0], "a rank lives on"
        os.close(end)


@on_linux
def test_what_a_rank_has_started_in_the_background_is_reaped_while_the_job_runs(start, script):
    """Such a process becomes the launcher's child; as a zombie it would count against the process limit."""
    script("""
        import os, subprocess, time
        import asynccoll as ac
        ac.initialize()
        shell = ["sh", "-c", "sleep 0.3 > /dev/null & echo $!"]
        pid = int(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)
        end = time.monotonic() + 20
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
            os.sched_yield()
        print(os.path.exists(f"/proc/{pid}"))
    """)
    assert start("run", "-n", 2, "program.py").wait() == (0, "False\nFalse\n", "")


def test_nothing_is_left_in_the_temporary_directory(tmp_path, start, script):
    script("raise ValueError")
    made = tmp_path / "tmp"
    made.mkdir()
    assert start("run", "-n", 1, "program.py", TMPDIR=str(made)).wait()[0] == 1
    assert list(made.iterdir()) == []


@pytest.mark.slow
def test_logs_are_kept_where_the_user_wants_them(tmp_path, start, script):
    script("print('to a file')")
    job = start("run", "-n", 1, "--log-dir", "logs", "--redirects", 3, "program.py")
    assert job.wait() == (0, "", "")
    (kept,) = (tmp_path / "logs").rglob("stdout.log")
    assert kept.read_text() == "to a file\n"


# --- usage ----------------------------------------------------------------------------------

WRONG = {
    "no-script": (["run", "-n", "2", "nowhere.py"], "no 'nowhere.py'"),
    "no-such-program": (["run", "--no-python", "no-such-program"], "no program 'no-such-program'"),
    "mpi": (["run", "--backend", "mpi", __file__], "mpiexec"),
    "horovod": (["run", "--backend", "Horovod", __file__], "horovodrun"),
    "no-program": (["run"], r"required: program(, arguments)?\nexample: asynccoll run -n "),
    "nothing-to-explain": (
        ["explain"],
        r"required: operation\nexample: asynccoll explain all_reduce --shape ",
    ),
    "nothing-to-explore": (["explore"], r"required: FILE::FUNCTION\nexample: asynccoll explore \S+::main"),
    "nothing-to-trace": (["trace"], r"required: WHAT\nexample: asynccoll trace run -n "),
    "nothing-to-merge": (["trace", "merge"], r"required: DIR\nexample: asynccoll trace merge "),
    "nothing-to-compare": (["trace", "diff"], r"required: DIR\nexample: asynccoll trace diff "),
    "nobody-late": (["trace", "stragglers"], r"required: DIR\nexample: asynccoll trace stragglers "),
    "not-a-pid": (["top", "x"], r"'x'\nexample: asynccoll top "),
    "unknown-flag": (["run", "--nprocs", "2", __file__], "unrecognized arguments: --nprocs"),
    "word-for-number": (["run", "-n", "two", __file__], "two"),
    "no-ranks": (["run", "-n", "0", __file__], "-n 0: expected at least one rank"),
    "fewer-than-no-ranks": (["run", "-n", "-1", __file__], "-n -1: expected at least one rank"),
    "no-hosts": (["run", "--nnodes", "0", __file__], "--nnodes 0: expected at least one host"),
    "host-beyond-the-last": (
        ["run", "--nnodes", "2", "--node-rank", "2", "--master-addr", "127.0.0.1", __file__],
        "--node-rank 2: expected a number from 0 to 1, as --nnodes is 2",
    ),
    "port-beyond-the-last": (["run", "--master-port", "65536", __file__], "--master-port 65536: expected"),
    "port-below-the-first": (["run", "--master-port", "-5", __file__], "--master-port -5: expected"),
    "nowhere-to-log": (
        ["run", "--log-dir", "/dev/null/logs", __file__],
        "--log-dir /dev/null/logs cannot be",
    ),
    "logs-that-cannot-be-written": (
        ["run", "--log-dir", "/proc/self", __file__],
        "--log-dir /proc/self cannot be",
    ),
    "word-for-hosts": (
        ["run", "--nnodes", "two", __file__],
        "--nnodes two: expected a number of hosts, or MI",
    ),
    "too-many-hosts": (["run", "--nnodes", "1:2:3", __file__], "--nnodes 1:2:3: expected a number of hosts"),
    "no-interval": (["run", "--monitor-interval", "-1", __file__], "--monitor-interval -1.0: expected a"),
    "endless-interval": (["top", "-i", "inf"], "--interval inf is not possible; .* at most a day"),
    "digit-that-is-no-number": (["where", "²"], "'²' is not a job"),
    "no-name-of-a-file": (["where", "x" * 300], "is not a job"),
    "nodes-backwards": (["run", "--nnodes", "2:1", __file__], "min_nodes"),
    "nowhere-to-meet": (["run", "--nnodes", "2", __file__], "--master-addr HOST is missing.*--rdzv-endpoint"),
    "which-host": (
        ["run", "--nnodes", "2", "--master-addr", "host0", __file__],
        "--node-rank RANK is missing",
    ),
    "word-for-restarts": (["run", "--max-restarts", "x", __file__], "--max-restarts"),
    "no-command": ([], "what each has in flight"),
    "unknown-command": (["walk"], "invalid choice: 'walk'"),
    "unknown-operation": (["explain", "all_reduse"], "'all_reduse'.*all_reduce"),
    "unknown-dtype": (["explain", "all_reduce", "--dtype", "float31"], "'float31'"),
    "unknown-backend": (["explain", "all_reduce", "--backend", "glue"], "'glue'.*gloo"),
    "meaningless": (["explain", "all_reduce", "--dtype", "int64", "--op", "avg"], "is not defined"),
    "bad-shape": (["explain", "all_reduce", "--shape", "4,x"], "shape '4,x'"),
    "negative-shape": (["explain", "all_reduce", "--shape=-4"], "shape '-4'"),
    "empty-world": (["explain", "all_reduce", "--world-size", "0"], "--world-size: 0 is not possible"),
    "no-lines": (
        ["trace", "stragglers", "-n", "0", "."],
        "-n/--most: 0 is not possible; it must be at least 1",
    ),
    "no-seeds": (["explore", "x.py::main", "--seeds", "0"], "argument --seeds: 0 is not possible"),
    "no-ranks-to-measure": (["bench", "--ranks", "0"], "argument --ranks: 0 is not possible"),
    "fewer-calls-than-none": (["where", "-n", "-1"], "-n/--calls: -1 is not possible; it must be at least 0"),
    "word-for-calls": (["where", "-n", "all"], "-n/--calls: invalid number value: 'all'"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_line_is_told_and_ends_with_2(capsys, monkeypatch, arguments, said):
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "1")  # which keeps `run` from setting it in this process
    try:
        code = main(arguments)
    except SystemExit as stop:  # as argparse does
        code = stop.code
    output, errors = capsys.readouterr()
    assert (code, output) == (2, "")
    assert re.search(said, errors, re.DOTALL)
    assert "Traceback" not in errors


def test_a_program_that_may_not_be_read_is_told(monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda _path, mode: mode == os.F_OK)
    assert main(["run", __file__]) == 2
    assert capsys.readouterr().err == f"asynccoll run: {__file__!r} cannot be read\n"


def test_a_wrong_command_line_ends_with_2_for_the_shell_too(start):
    code, output, errors = start("run", "nowhere.py").wait()
    assert (code, output) == (2, "")
    assert errors == "asynccoll run: there is no 'nowhere.py' to run\n"


@pytest.mark.parametrize("words", [["-np", "2"], ["-np2"], ["-np=2"]])
def test_the_np_of_other_launchers_is_told_as_ours(capsys, words):
    assert main(["run", *words, "train.py", "--epochs", "3"]) == 2
    assert capsys.readouterr().err == "asynccoll run: -np 2 is mpiexec's and horovodrun's: write -n 2\n"


def test_help_tells_the_flags_in_one_spelling(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert "--nproc-per-node" in output
    assert "--rdzv-endpoint" in output
    assert "--nproc_per_node" not in output


_LIGHT = """
import contextlib, sys
from asynccoll.cli import main
with contextlib.suppress(SystemExit):
    main(sys.argv[1:])
sys.exit("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "words", [["--help"], ["where"], ["top"], ["run", "--backend", "mpi", "-n", "2", "nowhere.py"]]
)
def test_what_starts_ranks_and_what_looks_at_them_does_not_load_torch(words):
    """Loading torch takes two seconds of CPU time."""
    done = subprocess.run(
        [sys.executable, "-c", _LIGHT, *words], capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"asynccoll {asynccoll.__version__}\n"


@pytest.fixture
def unlaunched(monkeypatch):
    """Remove any launcher's variables from this process."""
    for name in os.environ:
        if INHERITED.search(name):
            monkeypatch.delenv(name)
    return monkeypatch


def test_info_tells_versions_backends_and_who_launched(capsys, unlaunched):
    assert main(["info", "--no-try", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"].startswith("2.")
    assert "gloo" in found["backends"]
    assert found["launcher"] == "serial: rank 0 of 1, node 0 of 1"
    assert "shared by ranks of a host" in found["memory"]
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        unlaunched.setenv(name, value)
    assert main(["info", "--no-try"]) == 0
    assert re.search(r"^launcher +torchrun: rank 1 of 2", capsys.readouterr().out, re.MULTILINE)


def test_info_tells_what_is_wrong_with_the_environment(capsys, unlaunched):
    unlaunched.setenv("RANK", "1")
    assert main(["info", "--no-try"]) == 0
    assert "missing WORLD_SIZE" in capsys.readouterr().out


def test_explain_prints_the_plan_and_why(capsys):
    arguments = ["explain", "reduce_scatter", "--shape", "4,4", "--dtype", "int16"]
    assert main([*arguments, "--backend", "gloo", "--world-size", "4"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("reduce_scatter on memory: ")
    assert "  - through memory that ranks share" in output
    assert main([*arguments, "--world-size", "4", "--no-memory"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("reduce_scatter on gloo: ")
    assert "  - gloo: memory=False" in output
    assert main([*arguments, "--world-size", "4", "--nodes", "2"]) == 0
    assert "  - gloo: these ranks are on 2 hosts" in capsys.readouterr().out


# --- the report, without processes ----------------------------------------------------------

A = {"host": "h", "pid": 1}


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([Failure(0, code=1, time=5.0, **A), Failure(1, code=1, time=4.0, **A)], 1),
        ([Failure(0, code=1, time=5.0, **A), Failure(1, code=-9, **A)], 1),
        ([Failure(0, code=-15, **A), Failure(1, code=1, time=4.0, **A)], 1),
        ([Failure(0, code=-15, **A), Failure(1, code=3, **A)], 1),
        ([Failure(0, code=-15, **A), Failure(1, code=-15, **A)], 0),
        ([Failure(0, code=-6, time=4.0, **A), Failure(1, code=-6, **A)], 1),
        ([Failure(0, code=1, time=4.0, lost=(1,), **A), Failure(1, code=-15, **A)], 1),
        ([Failure(0, code=1, time=4.0, left=(1,), **A), Failure(1, code=1, time=5.0, **A)], 1),
        ([Failure(0, code=1, time=4.0, left=(1,), **A), Failure(1, code=-15, **A)], 0),
        ([Failure(0, code=1, time=4.0, lost=(1,), **A), Failure(1, code=1, time=5.0, **A)], 1),
        (
            [
                Failure(0, code=1, time=5.0, lost=(1,), **A),
                Failure(1, code=-15, **A),
                Failure(2, code=1, time=4.0, **A),
            ],
            2,
        ),
    ],
)
def test_the_cause_comes_before_its_consequences(failures, first):
    assert report.first_failure(failures).rank == first


def test_ranks_that_fail_in_the_same_way_are_told_together():
    """Each keeps its own exit code; a mismatch, say, raises on every rank with the same multi-line text."""
    mismatch = "CollectiveMismatchError: ranks called different things:\n  rank 0: all_reduce"
    said = [mismatch, mismatch, "OSError: gone", mismatch, "OSError: gone", ""]
    failures = [
        report.Failure(rank, 100 + rank, 1, "host", time=1.0 + rank, message=text)
        for rank, text in enumerate(said)
    ]
    failures.append(report.Failure(6, 106, -signal.SIGTERM, "host"))
    failures.append(report.Failure(7, 107, -signal.SIGTERM, "host", ended=True))  # while it exited
    assert report.report(failures).splitlines() == [
        "asynccoll run: rank 0 failed on host (pid 100): exit code 1",
        "asynccoll run: ranks 1, 3 failed in the same way",
        "asynccoll run: ranks 2, 4 failed too: OSError: gone",
        "asynccoll run: rank 5 failed too: exit code 1",
        "asynccoll run: stopped rank 6",
    ]


def test_what_differs_in_numbers_alone_is_one_way_to_fail():
    """Times waited and the reporting rank may differ, but not the rank that is reported on."""
    texts = [
        "TimeoutError: no rank 3 after 6.003 s; its last call was 0.1 s ago, in flight; this is rank 0",
        "TimeoutError: no rank 3 after 6.007 s; its last call was 0.0 s ago, finished; this is rank 1",
        "OSError: 17 bytes of 20 from rank 3",
        "OSError: 5 bytes of 20 from rank 3",
        "OSError: 5 bytes of 20 from rank 4",
    ]
    failures = [Failure(rank, code=1, time=1.0 + rank, message=text, **A) for rank, text in enumerate(texts)]
    assert report.report(failures).splitlines()[1:] == [
        "asynccoll run: rank 1 failed in the same way (other numbers in its error)",
        "asynccoll run: ranks 2, 3 failed too: OSError: 17 bytes of 20 from rank 3",
        "asynccoll run: rank 4 failed too: OSError: 5 bytes of 20 from rank 4",
    ]


def test_how_far_a_work_was_is_no_other_way_to_fail():
    text = "PayloadTypeError: `/` of <Work all_reduce #1 of the world from a.py:5: {}>, which is the handle"
    failures = [
        Failure(rank, code=1, time=1.0 + rank, message=text.format(state), **A)
        for rank, state in enumerate(["in flight", "done", "in flight"])
    ]
    assert report.report(failures).splitlines()[1:] == ["asynccoll run: ranks 1, 2 failed in the same way"]


def test_a_loss_without_gradients_is_explained_where_there_are_tasks():
    """torch raises its error in the training task; the cause is a ``no_grad`` in another task."""
    text = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
    trace = f'Traceback:\n  File "{asyncio.__file__}", line 12, in run\n{text}'
    told = report.report([Failure(0, code=1, time=1.0, message=text, trace=trace, **A)])
    assert "ac.isolated(...)" in told
    plain = f'Traceback:\n  File "train.py", line 12, in main\n{text}'
    assert "isolated" not in report.report([Failure(0, code=1, time=1.0, message=text, trace=plain, **A)])


def test_alike_on_another_line_says_on_which():
    """A wrong call may look the same on all ranks, except for the line that needs the fix."""

    def failed(rank, line):
        trace = f'Traceback:\n  File "train.py", line {line}, in main\n    await work\nOSError: gone'
        return Failure(rank, code=1, time=1.0 + rank, message="OSError: gone", trace=trace, **A)

    told = report.report([failed(0, 12), failed(1, 30), failed(2, 12), failed(3, 30)]).splitlines()
    assert told[-2:] == [
        "asynccoll run: rank 2 failed in the same way",
        "asynccoll run: ranks 1, 3 failed in the same way, at train.py:30",
    ]


WHERE = "(asynccoll trace diff /tmp/asynccoll-0/7e0f shows where the ranks diverge)"


def told_second(message):
    """Return the line about a rank that failed after another one."""
    failures = [
        Failure(0, code=1, time=1.0, message="OSError: gone", **A),
        Failure(1, code=1, time=2.0, message=message, **A),
    ]
    return report.report(failures).splitlines()[-1]


def test_a_long_message_keeps_where_to_look():
    told = told_second(f"TimeoutError: {'word ' * 200}{WHERE}")
    assert told.endswith(f"... {WHERE}")
    assert len(told) < 600


def test_a_long_message_of_a_group_ends_with_a_sentence_and_where_to_look():
    """It ends neither with the exception group it was raised in nor in the middle of a word."""
    says = f"TimeoutError: {'word ' * 50}; {'more ' * 30}. This rank's {'call ' * 20}{WHERE}"
    group = "(in ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception))"
    assert told_second(f"{says} {group}").endswith(f" word ; ... {WHERE}")


def test_an_unknown_signal_and_long_messages_are_told_all_the_same():
    failures = [
        Failure(0, code=-99, **A),
        Failure(1, code=1, time=1.0, message="x" * 900 + "\nmore", **A),
        Failure(2, code=-9, **A),
        Failure(3, code=-15, **A),
    ]
    text = report.report(failures[::-1])
    assert "rank 0 failed on h (pid 1): killed by signal 99" in text or "rank 2" in text
    assert max(map(len, text.splitlines())) < 600
