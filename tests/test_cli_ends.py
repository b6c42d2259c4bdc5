"""How jobs of ``asynccoll run`` end: by signals, restarts, ports in use, ranks that all fail."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asynccoll.backends.api import tcpstore
from asynccoll.launch import processes
from jobs import LIMIT_S, on_linux
from patience import patient, until
from ports import free_port

#: The launcher with a shorter grace period after Ctrl-C.
HASTY = f"""
import sys
from asynccoll.cli.entry import main
from asynccoll.backends.api import tcpstore
from asynccoll.launch import processes
assert processes.INTERRUPT_GRACE_S == {processes.INTERRUPT_GRACE_S}
processes.INTERRUPT_GRACE_S = 0.2
sys.exit(main(sys.argv[3:]))
"""

#: The launcher that does not retry names that do not resolve yet.
IMPATIENT = f"""
import sys
from asynccoll.backends.api import tcpstore
from asynccoll.cli.entry import main
assert tcpstore._NAME_SECONDS == {tcpstore._NAME_SECONDS}
tcpstore._NAME_SECONDS = 0.1
sys.exit(main(sys.argv[3:]))
"""

#: The launcher that reports its attempts to connect to the first host.
TELLS_ATTEMPTS = """
import socket, sys
from asynccoll.cli.entry import main
knock = socket.create_connection
def told(*where):
    print("knocking", flush=True)
    return knock(*where)
socket.create_connection = told
sys.exit(main(sys.argv[3:]))
"""


@on_linux
@pytest.mark.parametrize("to", [os.kill, os.killpg], ids=["launcher", "group"])
def test_a_handler_of_sigterm_is_not_entered_twice(start, script, to):
    """The handler may be writing a checkpoint, which takes longer than the launcher waits after Ctrl-C."""
    script("""
        import signal, sys

        def save(*_):
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            again = signal.sigtimedwait([signal.SIGTERM], 1.5)
            print("again" if again else "saved")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        print("ready")
        signal.pause()
    """)
    job = start("run", "-n", 2, "program.py", python=(sys.executable, "-c", HASTY))
    assert job.lines(2) == ["ready", "ready"]
    to(job.process.pid, signal.SIGTERM)
    assert job.lines(2) == ["saved", "saved"]
    assert job.wait()[0] == 128 + signal.SIGTERM


@on_linux
@pytest.mark.parametrize(
    "again", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["once", "twice"]
)
def test_ctrl_c_ends_ranks_in_native_code(start, script, again):
    """Python cannot handle it there: SIGTERM follows, or, after a second Ctrl-C, SIGKILL immediately."""
    script("""
        import threading
        from datetime import timedelta
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        threading.Timer(0.05, print, ["ready"]).start()  # from beside the main thread, which is in there
        store.wait(["what nobody sets"], timedelta(seconds=1000))
    """)
    hasty = () if again else (sys.executable, "-c", HASTY)
    job = start("run", "-n", 2, "program.py", **({"python": hasty} if hasty else {}))
    assert job.lines(2) == ["ready", "ready"]
    job.process.send_signal(signal.SIGINT)
    if again:
        job.process.send_signal(signal.SIGINT)
    code, output, errors = job.wait()
    assert (code, output) == (128 + signal.SIGINT, "")
    assert errors == "asynccoll run: interrupted; all ranks stopped\n"
    assert job.left() == []


@on_linux
def test_a_second_sigterm_kills_ranks_that_are_still_saving(start, script):
    script("""
        import signal

        def save(*_):
            print("saving")
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            while True:
                signal.pause()

        signal.signal(signal.SIGTERM, save)
        print("ready")
        signal.pause()
    """)
    job = start("run", "-n", 2, "program.py")
    assert job.lines(2) == ["ready", "ready"]
    job.process.send_signal(signal.SIGTERM)
    assert job.lines(2) == ["saving", "saving"]
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == (128 + signal.SIGTERM, "", "asynccoll run: got SIGTERM; all ranks stopped\n")
    assert job.left() == []


def test_a_restart_meets_at_the_port_that_was_asked_for(start, script):
    script("""
        import os
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("the first time")
        print(os.environ["MASTER_PORT"])
        dist.destroy_process_group()
    """)
    port = free_port()
    job = start("run", "-n", 1, "--master-port", port, "--max-restarts", 1, "program.py")
    code, output, errors = job.wait()
    assert (code, output) == (0, f"{port}\n"), errors


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_port_that_is_taken_is_told_in_a_line(start, script, hosts):
    script("")
    where = ["--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1"] if hosts == 2 else []
    # On all addresses, as torch elastic listens at the rendezvous.
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        code, output, errors = start("run", *where, "--master-port", port, "program.py").wait()
    assert (code, output) == (2, "")
    assert errors.startswith("asynccoll: error: ")
    assert str(port) in errors
    assert "choose another" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (["--rdzv-backend", "pigeon", "--rdzv-endpoint", "127.0.0.1:1"], "'pigeon' is not registered"),
        (["--node-rank", 1, "--master-addr", "no-such-host.invalid"], "no-such-host.invalid:29500"),
        (["--node-rank", 0, "--master-addr", "no-such-host.invalid"], "no-such-host.invalid:29500"),
    ],
    ids=["unknown-backend", "unknown-first-host", "unknown-own-name"],
)
def test_a_place_where_hosts_cannot_meet_is_told_in_a_line(start, script, where, said):
    """torch reports each attempt to connect with a 20-line internal trace."""
    script("")
    job = start("run", "--nnodes", 2, *where, "program.py", python=(sys.executable, "-c", IMPATIENT))
    code, output, errors = job.wait()
    assert (code, output) == (2, "")
    assert said in errors
    assert len(errors.splitlines()) == 1


@on_linux
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)], ids=lambda n: n.name
)
def test_a_host_that_comes_before_the_first_waits_in_silence(start, script, number):
    """It also responds to signals meanwhile."""
    script("")
    # Bound but not listening: connections are refused, as by a host whose agent is not running yet.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        where = ["--node-rank", 1, "--master-addr", "127.0.0.1", "--master-port", port]
        job = start("run", "--nnodes", 2, *where, "program.py", python=(sys.executable, "-c", TELLS_ATTEMPTS))
        job.lines(2)
        job.process.send_signal(number)
        code, _, errors = job.wait()
    assert code == 128 + number
    assert errors.count("all ranks stopped") == 1
    assert len(errors.splitlines()) == 1
    assert job.left() == []


@on_linux
def test_a_rank_that_is_stopped_on_its_way_out_ends_with_its_own_code(tmp_path, start, script):
    """If every rank raises, the launcher stops some that have reported their error but not yet exited."""
    os.mkfifo(tmp_path / "told")
    script("""
        import atexit, os, signal

        def linger():
            open("told", "w").close()
            signal.pause()

        if os.environ["RANK"] == "0":
            atexit.register(linger)
        else:
            open("told").read()
        raise ValueError(f"the reason of {os.environ['RANK']}")
    """)
    code, _, errors = start("run", "-n", 2, "program.py").wait()
    assert code == 1
    assert errors.count("ValueError: the reason of 0") == 1
    assert "exit code 1" in errors
    assert "SIGTERM" not in errors


@on_linux
def test_a_rank_that_somebody_else_stops_is_named(start, script):
    """It exits like ranks that the launcher stops, but its peer had found it lost before that."""
    script("""
        import os, signal, asynccoll as ac
        ac.initialize("gloo")
        ac.barrier().wait()
        if ac.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which may be quicker than the news
        ac.all_reduce(1).wait()
    """)
    code, _, errors = start("run", "-n", 2, "program.py").wait()
    assert code == 128 + signal.SIGTERM
    assert re.search(
        r"^asynccoll run: rank 1 failed on \S+ \(pid \d+\): killed by SIGTERM$", errors, re.MULTILINE
    )
    assert re.search(
        r"asynccoll run: rank 0 failed too at \S*program.py:\d+: PeerLostError: rank 1", errors
    ), errors
    assert "stopped" not in errors


@on_linux
@pytest.mark.parametrize("by", ["a signal", "a failure"])
def test_a_stopped_rank_is_continued_to_end(start, script, by):
    """A stopped process does not notice SIGTERM, and used to be killed after thirty seconds instead."""
    script("""
        import os, signal, sys, asynccoll as ac

        def save(*_):
            print("saved")
            sys.exit(0)

        ac.initialize("gloo")
        signal.signal(signal.SIGTERM, save)
        print(os.getpid(), ac.get_rank())
        if ac.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.sigwait([signal.SIGTERM])
        save()
    """)
    job = start("run", "-n", 2, "program.py")
    first, stopped = (line.split()[0] for line in sorted(job.lines(2), key=lambda line: line.split()[1]))
    stat = Path(f"/proc/{stopped}/stat")
    assert until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", patient(10))
    if by == "a signal":
        job.process.send_signal(signal.SIGTERM)
        saved, expected = 2, 128 + signal.SIGTERM
    else:
        os.kill(int(first), signal.SIGKILL)
        saved, expected = 1, 128 + signal.SIGKILL
    code, output, errors = job.wait()
    assert (code, output.split()) == (expected, ["saved"] * saved), errors


@on_linux
def test_programs_that_are_no_scripts_end_as_scripts_do(start):
    """They end with their own exit code, and by Ctrl-C."""
    # The failing rank waits until the other, which would be stopped otherwise, has written.
    both = "echo out; touch by$RANK; until [ -e by0 ]; do sleep 0.05; done; exit $((RANK * 7))"
    code, output, errors = start("run", "-n", 2, "--no-python", "sh", "-c", both).wait()
    assert (code, output) == (7, "out\nout\n")
    assert "rank 1 failed" in errors
    assert "exit code 7" in errors
    job = start("run", "-n", 2, "--no-python", "sh", "-c", "echo ready; sleep 1000; echo never")
    assert job.lines(2) == ["ready", "ready"]
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == (128 + signal.SIGINT, "", "asynccoll run: interrupted; all ranks stopped\n")
    assert job.left() == []


@on_linux
def test_programs_that_are_no_scripts_die_with_the_launcher_too(start):
    program = "import os, signal; os.write(1, b'%d\\n' % os.getpid()); signal.pause()"
    job = start("run", "-n", 2, "--no-python", sys.executable, "-c", program)
    ends = [os.pidfd_open(int(pid)) for pid in job.lines(2)]
    job.process.kill()
    for end in ends:
        assert select.select([end], [], [], LIMIT_S / 2)[0], "a rank lives on"
        os.close(end)


def test_a_program_that_cannot_be_run_is_told_in_a_line(tmp_path, start):
    """Here it is a file that Linux cannot execute."""
    program = tmp_path / "program"
    program.write_text("echo no interpreter is named\n")
    program.chmod(0o755)
    code, output, errors = start("run", "-n", 1, "--no-python", program).wait()
    assert (code, output) == (126, "")
    assert f"{program} cannot be run: Exec format error" in errors
    assert "Traceback" not in errors


@on_linux
def test_ctrl_z_stops_the_ranks_as_well(tmp_path, start, script):
    """Their shell knows only the launcher; once the launcher continues, so do they."""
    for rank in range(2):
        os.mkfifo(tmp_path / f"went-on-{rank}")
    script("""
        import os, subprocess
        child = subprocess.Popen(["cat", "went-on-" + os.environ["RANK"]])  # a worker of a DataLoader, say
        print(os.getpid(), child.pid, flush=True)
        child.wait()
    """)
    job = start("run", "-n", 2, "program.py", apart=False)
    below = [int(pid) for line in job.lines(2) for pid in line.split()]
    job.process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(job.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)

    def stopped() -> bool:
        return all(") T " in Path(f"/proc/{pid}/stat").read_text() for pid in below)

    assert until(stopped, patient(10))
    job.process.send_signal(signal.SIGCONT)
    for rank in range(2):
        (tmp_path / f"went-on-{rank}").write_text("on\n")
    code, output, errors = job.wait()
    assert (code, output) == (0, "on\non\n"), errors


@on_linux
def test_ctrl_z_stops_nothing_that_no_shell_could_continue(start, script):
    """Under `ssh -t host asynccoll run` the kernel ignores it."""
    script("""
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
        print("ready", flush=True)
        signal.sigwait({signal.SIGCONT})  # what the launcher sends to go on
    """)
    job = start("run", "-n", 1, "program.py")
    assert job.lines(1) == ["ready"]
    job.process.send_signal(signal.SIGTSTP)
    code, _, errors = job.wait()
    assert code == 0, errors


@on_linux
def test_nohup_keeps_it_running(tmp_path, start, script):
    os.mkfifo(tmp_path / "hung-up")
    script("""
        import os
        print("ready")
        print(open("hung-up").read())
    """)
    job = start("run", "-n", 1, "program.py", python=("nohup", sys.executable))
    assert job.lines(1) == ["ready"]
    job.process.send_signal(signal.SIGHUP)
    (tmp_path / "hung-up").write_text("on")
    code, output, errors = job.wait()
    assert (code, output) == (0, "on\n"), errors


@on_linux
@pytest.mark.slow
def test_without_nohup_a_hangup_ends_it(start, script):
    script("""
        import signal, sys

        def save(*_):
            print("saved")
            sys.exit()

        signal.signal(signal.SIGTERM, save)
        print("ready")
        signal.pause()
    """)
    # These tests may run under nohup.
    job = start("run", "-n", 1, "program.py", python=("env", "--default-signal=HUP", sys.executable))
    assert job.lines(1) == ["ready"]
    job.process.send_signal(signal.SIGHUP)
    code, output, errors = job.wait()
    assert (code, output) == (128 + signal.SIGHUP, "saved\n")
    assert "got SIGHUP" in errors
    assert job.left() == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of Python 3.11")
def test_the_leaves_of_an_exception_group_are_told(tmp_path, start, script):
    os.mkfifo(tmp_path / "first-lives")
    script("""
        import os
        if os.environ["RANK"] == "1":
            end = open("first-lives", "w")
            raise ValueError("the reason")
        open("first-lives").read()  # returns when rank 1 is gone
        inner = ExceptionGroup("of a nursery", [KeyError("b")])
        raise ExceptionGroup("of tasks", [OSError("a"), inner])
    """)
    code, _, errors = start("run", "-n", 2, "--monitor-interval", 1, "program.py").wait()
    assert code == 1
    assert re.search(
        r"rank 0 failed too( at \S+)?: OSError: a; KeyError: .b. \(in ExceptionGroup: of a nursery", errors
    ), errors


def test_an_exception_that_cannot_be_told_is_shown_as_python_does(start, script):
    script("""
        class Shy(Exception):
            def __str__(self):
                raise RuntimeError("of the text")

        raise Shy
    """)
    code, _, errors = start("run", "-n", 1, "program.py").wait()
    assert code == 1
    assert errors.count("Shy: <exception str() failed>") == 1
    assert "RuntimeError" not in errors
    assert "child.py" not in errors


def test_a_rank_that_had_left_and_is_stopped_is_not_to_blame(start, script):
    """It has left its world but still runs; the launcher ends it because another rank made one more call."""
    script("""
        import os, time
        import asynccoll as ac

        ac.initialize("gloo")
        if ac.get_rank() == 0:
            ac.all_reduce(1).wait()
        else:
            ac.finalize()
            time.sleep(600)
    """)
    code, _, errors = start("run", "-n", 2, "program.py").wait()
    assert code == 1
    assert "asynccoll run: rank 0 failed" in errors
    assert "has left its world (finalize)" in errors
    assert "Traceback" in errors
    assert "stopped rank 1" in errors


@pytest.mark.parametrize("end", ["pass", "sys.exit()"])
def test_a_rank_that_was_exiting_is_not_said_to_have_been_stopped(tmp_path, start, script, end):
    os.mkfifo(tmp_path / "exiting")
    script(f"""
        import atexit, os, signal, sys

        def exiting():
            open("exiting", "w").close()
            signal.pause()

        if os.environ["RANK"] == "1":
            open("exiting").close()
            raise KeyError("of its own")
        atexit.register(exiting)
        {end}
    """)
    code, _, errors = start("run", "-n", 2, "program.py").wait()
    assert code == 1
    assert "rank 1 failed" in errors
    assert "rank 0" not in errors


#: The process between launcher and rank, where SIGTERM arrives as late as a test can send it.
KEEPER = f"""
import os, runpy, signal, sys

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

sys.last = Last()
sys.path.insert(0, {str(Path(processes.__file__).parent)!r})
sys.argv = ["keeper.py", "-c", "pass"]
runpy.run_path({str(Path(processes.__file__).with_name("keeper.py"))!r}, run_name="__main__")
"""


@on_linux
def test_who_waits_for_ranks_that_go_on_ends_as_its_rank_did(tmp_path):
    """The first to end makes the launcher stop the others, which are about to end."""
    (tmp_path / "attempt" / "0").mkdir(parents=True)
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    file = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempt" / "0" / "error.json")}
    ended = subprocess.run(
        [sys.executable, "-c", KEEPER], env=os.environ | place | file, check=False, timeout=LIMIT_S
    )
    assert ended.returncode == 0


SURVIVORS = """
    import asyncio, os, signal, sys
    import torch
    import asynccoll as ac

    async def main():
        rank = ac.get_rank()
        await ac.all_reduce(1)
        if rank == 1:
            {end}
        try:
            await ac.all_reduce(1)
        except ac.PeerLostError as error:
            assert error.ranks == (1,), error
        print("survivors", await ac.all_reduce(1, group=[0, 2]))

    ac.initialize("gloo")
    asyncio.run(main())
"""


@on_linux
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        pytest.param("sys.exit(7)", 7, "exit code 7", marks=pytest.mark.nightly),
        ("raise KeyError('gone')", 1, "KeyError: 'gone'"),
    ],
    ids=["killed", "exited", "raised"],
)
def test_survivors_go_on_where_that_is_asked_for(start, script, end, code, said):
    """The job's exit code is that of the first failed rank, once the others have ended."""
    script(SURVIVORS.format(end=end))
    job = start("run", "-n", 3, "--kill-on-bad-exit", 0, "program.py")
    got, output, errors = job.wait()
    assert (got, output) == (code, "survivors 2\n" * 2), errors
    assert "rank 1 failed" in errors
    assert said in errors
    assert "failed too" not in errors
    assert job.left() == []


def test_a_rank_that_others_outlive_is_named_by_its_own_process(start, script):
    """Between it and the launcher there is a process that waits for the others."""
    script("""
        import os, sys

        if os.environ["RANK"] == "1":
            print(os.getpid())
            sys.exit(7)
    """)
    code, output, errors = start("run", "-n", 2, "--kill-on-bad-exit", 0, "program.py").wait()
    assert code == 7
    assert f"(pid {int(output)})" in errors


@on_linux
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "sockets"])
def test_survivors_are_told_what_they_cannot_open_without_rank_0(start, script, memory):
    """Rank 0 serves the store. Lanes already open still work until one of the survivors refuses a call."""
    script(f"""
        import os, signal
        import torch
        import asynccoll as ac

        def lost(work):
            try:
                work.wait()
            except ac.PeerLostError as error:
                return error
            raise AssertionError("nothing is lost")

        ac.initialize("gloo", memory={memory})
        rank, rest, x = ac.get_rank(), [1, 2], torch.ones(2)
        if rank:
            ac.all_reduce(1, group=rest).wait()
        ac.barrier().wait()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        assert lost(ac.all_reduce(x)).ranks == (0,)
        peer = {{"dst": 2}} if rank == 1 else {{"src": 1}}
        for work in (
            ac.all_reduce(1, group=rest, lane="new"),
            ac.all_reduce(1, group=[1, 2], lane="other"),
            (ac.send if rank == 1 else ac.recv)(x, group=rest, **peer),
        ):
            error = lost(work)
            assert error.ranks == (0,) and "init_method='file" in str(error), error
            assert ac.all_reduce(1, group=rest).wait() == 2
        if rank == 1:
            try:
                ac.all_reduce(object(), group=rest)
            except ac.PayloadTypeError:
                print("refused", flush=True)
            signal.pause()
        lost(ac.all_reduce(x, group=rest))
        print("told", flush=True)
        signal.pause()
    """)
    job = start("run", "-n", 3, "--kill-on-bad-exit", 0, "program.py")
    assert sorted(job.lines(2)) == ["refused", "told"]
    job.process.send_signal(signal.SIGTERM)
    job.wait()


@on_linux
def test_a_signal_reaches_ranks_that_go_on_once(start, script):
    script("""
        import signal, sys

        def save(*_):
            print("saving")
            sys.exit(3)

        signal.signal(signal.SIGTERM, save)
        print("ready")
        signal.pause()
    """)
    job = start("run", "-n", 2, "--kill-on-bad-exit=0", "program.py")
    assert job.lines(2) == ["ready", "ready"]
    job.process.send_signal(signal.SIGTERM)
    code, output, errors = job.wait()
    assert (code, sorted(output.split())) == (128 + signal.SIGTERM, ["saving", "saving"])
    assert errors == "asynccoll run: got SIGTERM; all ranks stopped\n"
    assert job.left() == []


def test_what_is_to_come_of_survivors_is_0_or_1(start, script):
    script("")
    code, _, errors = start("run", "--kill-on-bad-exit", "no", "program.py").wait()
    assert code == 2
    assert "--kill-on-bad-exit no: expected 0" in errors
