"""Parts of the launchers, each by itself: no rank is started here."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch.multiprocessing as mp
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig

import asynccoll as ac
from asynccoll.environment.nodes import Nodes
from asynccoll.host import handing
from asynccoll.launch import (
    LaunchInfo,
    child,
    detect,
    elastic,
    job,
    libraries,
    passing,
    planned_rank,
    spawn,
)
from asynccoll.launch.job import Job
from asynccoll.launch.mpiexec import Mpiexec
from asynccoll.launch.ranks import without_place
from asynccoll.launch.request import RunRequest
from asynccoll.launch.witness import Witness
from asynccoll.runtime import process
from jobs import on_linux
from patience import patient
from struck import Strike

_on_stop_signals = passing.on_stop_signals


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Keep launchers from handling the signals of this process; the mock is told what they would do."""
    mock = Mock()
    monkeypatch.setattr(passing, "on_stop_signals", mock)
    return mock


class Started:
    """A process as multiprocessing has it, which ends as soon as it is terminated."""

    def __init__(self, sentinel: int = -1) -> None:
        self.sentinel = sentinel
        self.ended = False

    def join(self, timeout: float | None = None) -> None:
        pass

    def terminate(self) -> None:
        self.ended = True

    kill = terminate


def is_of(descriptor: int, other: int) -> bool:
    """Return whether both refer to one file; a closed descriptor may be another thread's by now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.fstat(other))
    except OSError:
        return False


def test_where_a_rank_cannot_be_started_those_before_it_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for the missing rank. The socket that listened for them is closed, too."""
    ranks = [Started(), Started()]
    left, listening = list(ranks), []

    def start(*_: object, **__: object) -> SimpleNamespace:
        if not left:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return SimpleNamespace(processes=[left.pop()], error_files=[])

    def listen(directory: Path) -> socket.socket:
        listening.append(socket.socket())
        return listening[-1]

    monkeypatch.setattr(mp, "start_processes", start)
    monkeypatch.setattr(handing, "listen", listen)
    with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
        ac.spawn("gloo", print, nproc_per_node=3)
    assert all(rank.ended for rank in ranks)
    assert [one.fileno() for one in listening] == [-1]


def test_who_spawns_on_a_thread_hears_that_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that have been started end, and the copies of descriptors that could be made are closed."""
    reader, writer = os.pipe()
    ranks = [Started(reader), Started()]
    copies, copied = [], os.dup

    def dup(descriptor: int) -> int:
        if descriptor != reader:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        copies.append(copied(descriptor))
        return copies[-1]

    heard: list[Any] = []

    def ask() -> None:
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as caught:
            ac.spawn("gloo", print, nproc_per_node=2)
        heard.append(caught.value.errno)

    starting = iter(ranks)
    monkeypatch.setattr(
        mp, "start_processes", lambda *_, **__: SimpleNamespace(processes=[next(starting)], error_files=[])
    )
    monkeypatch.setattr(os, "dup", dup)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(10)
    assert heard == [errno.EMFILE]
    assert all(rank.ended for rank in ranks)
    assert not any(is_of(copy, reader) for copy in copies)
    os.close(reader)
    os.close(writer)


def test_ranks_end_at_a_ctrl_c_that_comes_before_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python would wait for them when it ends, however long they take."""
    rank, told = Started(), tmp_path / "error"
    told.touch()
    started = SimpleNamespace(processes=[rank], error_files=[str(told)])
    monkeypatch.setattr(mp, "start_processes", lambda *_, **__: started)
    monkeypatch.setattr(Witness, "watch", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ac.spawn("gloo", print)
    assert rank.ended
    assert not told.exists()


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stand in for this process's environment: empty at first."""
    made: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", made)
    return made


def test_an_empty_secret_is_none(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Launchers of several hosts must not each make a secret: their ranks would not trust each other."""
    environ["ASYNCCOLL_SECRET"] = ""
    given = Namespace(standalone=False, nnodes="2", nproc_per_node="1")
    elastic._set_environment(given, None, tmp_path)
    assert environ["ASYNCCOLL_SECRET"] == ""

    told: list[Any] = []

    def start(_rank: object, args: tuple[Any, ...], *_: object, **__: object) -> SimpleNamespace:
        told.append(args)
        return SimpleNamespace(processes=[], error_files=[])

    monkeypatch.setattr(mp, "start_processes", start)
    where = {"nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 1}
    ac.spawn("gloo", print, join=False, **where)
    ac.spawn("gloo", print, join=False, nnodes=1)
    several, one = (named.get("ASYNCCOLL_SECRET", "") for *_, named in told)
    assert several == ""
    assert one


def test_an_empty_address_is_none(environ: dict[str, str]) -> None:
    environ["MASTER_ADDR"] = ""
    assert Nodes(2, master_port=2222).address == "127.0.0.1"
    environ["MASTER_ADDR"] = "10.0.0.1"
    assert Nodes(2, master_port=2222).address == "10.0.0.1"


#: The variables that a rank has from its launcher before it spawns ranks or runs an inner launcher.
OUTER = {
    "torchrun": {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "outer.json",
    },
    "kubernetes": {"RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "1"},
    "slurm": {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
    },
    "slurm-nodes": {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    },
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "2"},
}


class Task:
    """A rank's job: detect its place."""

    def __init__(self) -> None:
        self.place: LaunchInfo | None = None

    def carry_out(self, *_: object, **__: object) -> None:
        self.place = detect(os.environ)


@pytest.mark.parametrize("outer", OUTER)
def test_spawned_ranks_have_no_place_but_their_own(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, outer: str
) -> None:
    """This holds whichever launcher started the parent; variables that define no place stay."""
    monkeypatch.setattr(child, "die_with_launcher", lambda: None)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1234}
    for ranks in (1, 2):
        for rank in range(ranks):
            environ.clear()
            environ |= {**OUTER[outer], "PATH": "/bin"}
            task: Any = Task()
            spawn._rank(0, rank, task, Nodes(ranks), where, {})
            assert task.place == LaunchInfo("torchrun", rank, ranks, rank, ranks, 0, 1, "127.0.0.1", 1234)
            assert environ["PATH"] == "/bin"
            assert environ.get("SLURM_JOB_ID") == OUTER[outer].get("SLURM_JOB_ID")
            assert not [name for name in environ if name.startswith("TORCHELASTIC_")]
    environ |= OUTER[outer]
    task = Task()
    spawn._rank(0, 0, task, Nodes(2, 2, 1, "n1", 1234), where, {})
    assert task.place == LaunchInfo("torchrun", 2, 4, 0, 2, 1, 2, "127.0.0.1", 1234)


@pytest.mark.parametrize("outer", OUTER)
def test_ranks_of_mpiexec_have_no_place_but_their_own(environ: dict[str, str], outer: str) -> None:
    """The outer launcher's variables do not reach ranks of `asynccoll run` or of `spawn`."""
    environ |= {**OUTER[outer], "PATH": "/bin"}
    own = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}
    for told in (libraries._environment("mpi", 3, "errors"), without_place(environ)):
        assert detect(told | own) == LaunchInfo("mpich", 0, 3, 0, 3, 0, 1)
        assert told["PATH"] == "/bin"


@pytest.mark.parametrize("mark", ["PALS_RANKID", "ALPS_APP_PE", "PMI_ID", "PMIX_RANK"])
def test_ranks_that_are_started_within_another_have_no_mark_of_its_launcher(mark: str) -> None:
    """Examples are the ranks of spawn on xla-tpu, which have no other place either."""
    assert detect(without_place({mark: "1"})) == LaunchInfo("serial")


def test_errors_are_recorded_for_the_launcher_of_this_rank(environ: dict[str, str], tmp_path: Path) -> None:
    """`asynccoll run` in a rank that mpiexec has started reads torch elastic's error file."""
    environ |= {"ASYNCCOLL_JOB_DIRECTORY": str(tmp_path), "PMI_RANK": "0"}
    elastic._set_environment(Namespace(standalone=True, nnodes="1", nproc_per_node="1"), None, tmp_path)
    environ["TORCHELASTIC_ERROR_FILE"] = "inner.json"
    assert child._error_file() == "inner.json"


#: Prints its parent's pid, and the launcher that the environment names.
ORPHAN = "import os; print(os.getppid(), os.environ.get('ASYNCCOLL_LAUNCHER'))"


@pytest.fixture
def alone(tmp_path: Path) -> list[str]:
    """Return a command line that runs `ORPHAN` as a rank; it imports the standard library only."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    return [sys.executable, "-S", child.__file__, "script", str(script)]


def told(line: list[str], launcher: int) -> tuple[int, str]:
    """Run a program whose environment names ``launcher``; return its exit code and output."""
    environ = {**os.environ, "ASYNCCOLL_LAUNCHER": f"{launcher} {child._numbering()}"}
    done = subprocess.run(line, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


@pytest.fixture
def dead() -> int:
    """Return the pid of a process that has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        pass
    return process.pid


@on_linux
def test_a_rank_whose_launcher_died_before_it_began_ends(alone: list[str], dead: int) -> None:
    """So does the process that stands between rank and launcher in jobs whose survivors keep running."""
    assert told(alone, dead) == (128 + 9, "")
    assert told([sys.executable, "-S", str(Path(child.__file__).with_name("keeper.py"))], dead)[0] == 128 + 9


@on_linux
def test_a_rank_that_cannot_see_its_launcher_runs(
    alone: list[str], dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the case in a container, where processes have other numbers."""
    monkeypatch.setattr(child, "_numbering", lambda: "another")
    assert told(alone, dead)[0] == 0


@on_linux
def test_a_rank_with_a_program_between_it_and_its_launcher_runs(alone: list[str], tmp_path: Path) -> None:
    """Its own children do not inherit the name of that launcher."""
    assert told(alone, os.getpid()) == (0, f"{os.getpid()} None\n")
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE
    ) as other:  # as if a daemon had started the rank for that launcher
        assert told(alone, other.pid)[0] == 0
    between = ["sh", "-c", '"$@"; exit $?', "sh", *alone]
    code, said = told(between, os.getpid())
    assert code == 0
    assert not said.startswith(f"{os.getpid()} ")


def test_a_rank_that_goes_on_alone_is_told_who_has_started_it(
    alone: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launcher passes on its own pid."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    (tmp_path / "0").mkdir()
    keeper = str(Path(child.__file__).with_name("keeper.py"))
    code, said = told([sys.executable, "-S", keeper, alone[-1]], os.getpid())
    assert code == 0
    assert len(set(said.split()[:2])) == 1, "it does not say that of the one who has started it"


@on_linux
def test_what_waits_for_other_ranks_ends_when_the_job_is_stopped(tmp_path: Path) -> None:
    """For example, one of the ranks that it waits for was killed, and never reports its end."""
    program = tmp_path / "program.py"
    program.write_text("print('here', flush=True); import signal; signal.pause()")
    (tmp_path / "0").mkdir()
    told = {"TORCHELASTIC_ERROR_FILE": tmp_path / "0" / "error.json", "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    keeper = str(Path(child.__file__).with_name("keeper.py"))
    with subprocess.Popen(
        [sys.executable, "-S", keeper, str(program)],
        env={**os.environ, **{name: str(value) for name, value in told.items()}},
        stdout=subprocess.PIPE,
    ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"here\n"
        waiting.terminate()
        try:
            assert waiting.wait(patient(20)) == -signal.SIGTERM
        finally:
            waiting.kill()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PET_NNODES", "2", r"does not support --nnodes \(PET_NNODES\) 2"),
        ("PET_NPROC_PER_NODE", "many", "-n many: "),
    ],
)
def test_torchruns_variables_count_for_mpiexec_too(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ac.InvalidArgumentError, match=said):
        libraries.run(RunRequest("train.py"), "mpiexec")


def test_each_launcher_says_which_process_it_is(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number reaches what it starts: torch elastic's ranks, and another launcher."""
    elastic._set_environment(Namespace(standalone=True, nnodes="1", nproc_per_node="1"), None, tmp_path)
    said = [environ]
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: said.append(env))
    with passing.launched(["mpiexec"], {}, subprocess.DEVNULL):
        pass
    assert [one["ASYNCCOLL_LAUNCHER"] for one in said] == [f"{os.getpid()} {child._numbering()}"] * 2


@pytest.mark.parametrize("alive", [False, True])
def test_a_spawned_rank_whose_parent_died_before_it_began_ends(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *, alive: bool
) -> None:
    """The parent may be another process than the one that forked the rank."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(child, "die_with_launcher", lambda: None)
    monkeypatch.setattr(spawn, "parent_process", lambda: SimpleNamespace(is_alive=lambda: alive))
    task: Any = Task()
    ended = contextlib.nullcontext() if alive else pytest.raises(SystemExit, match="137")
    with ended:
        spawn._rank(0, 0, task, Nodes(1), {}, {})
    assert (task.place is not None) == alive


def test_nobody_watches_ranks_once_they_have_ended(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watching thread ends, whether the launch returned or raised."""
    environ["LOGLEVEL"] = "ERROR"
    seen: list[Witness] = []

    def launch(*told: Any) -> int:
        seen.extend(one for one in told if isinstance(one, Witness))
        assert seen[-1]._thread.is_alive()
        if len(seen) == 2:
            raise ac.InvalidArgumentError("no such host")
        return 7

    monkeypatch.setattr(elastic, "_configure", lambda given: (None, "", []))
    monkeypatch.setattr(elastic, "_launch", launch)
    assert elastic.run(RunRequest(__file__)) == 7
    with pytest.raises(ac.InvalidArgumentError, match="no such host"):
        elastic.run(RunRequest(__file__))
    assert [one._thread.is_alive() for one in seen] == [False, False]


def test_what_another_run_has_left_in_the_same_logs_is_none_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pid and crash stack of another run are ignored, be it an earlier run or a concurrent one."""
    ranks = {0: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}}

    def launch(config: Any, _command: str) -> Any:
        own, other = (Path(logs.reify(ranks).error_files[0]) for logs in (config.logs_specs, beside))
        for left, pid, words in ((own, wanted, "in this one"), (other, "1", "in another")):
            if pid:
                left.with_name(child.PID_FILE).write_text(pid)
                left.with_name(child.CRASH_FILE).write_text(words)
        raise ChildFailedError("", {0: ProcessFailure(0, 2, -11, str(own))})

    monkeypatch.setattr(elastic, "elastic_launch", launch)
    monkeypatch.setattr(elastic, "processes", Mock())
    witness: Any = Mock(flights=dict)
    for wanted in ("", "3"):
        config, beside = LaunchConfig(1, 1, 1), DefaultLogsSpecs(log_dir=str(tmp_path))
        config.logs_specs = DefaultLogsSpecs(log_dir=str(tmp_path))
        config.rdzv_backend = "c10d"
        assert elastic._launch(config, "", [], witness) == 128 + 11
        said = capsys.readouterr().err
        assert f"(pid {wanted or 2})" in said
        assert "in another" not in said
        assert ("in this one" in said) == bool(wanted)


@pytest.mark.parametrize(
    ("hosts", "waits", "said"),
    [
        ((2, 2), {}, "waited 600 s at n1:29400 for a job of 2 hosts "),
        ((2, 4), {"join_timeout": "30"}, "waited 30 s at n1:29400 for a job of 2 to 4 hosts "),
    ],
    ids=["exactly", "from-to"],
)
def test_hosts_that_do_not_come_are_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hosts: tuple[int, int],
    waits: dict[str, str],
    said: str,
) -> None:
    """The line says who waited, how long, where and for how many; the exit code is no usage error's."""
    config = LaunchConfig(*hosts, 1, rdzv_backend="c10d", rdzv_endpoint="n1:29400", rdzv_configs=waits)
    monkeypatch.setattr(elastic, "elastic_launch", Mock(side_effect=RendezvousTimeoutError))
    monkeypatch.setattr(elastic, "processes", Mock())
    assert elastic._launch(config, "", [], Mock()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"asynccoll run: {socket.gethostname()} {said}")
    assert "--rdzv-id" in line


def test_an_address_that_leads_nowhere_is_told_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error only refers the reader to an inner exception."""

    def launch(*_: object) -> None:
        try:
            raise DistNetworkError("no such host\nframe #0")
        except DistNetworkError as cause:
            raise RendezvousConnectionError("See inner exception for details.") from cause

    config = LaunchConfig(2, 2, 1, rdzv_backend="c10d", rdzv_endpoint="n1:29400")
    monkeypatch.setattr(elastic, "elastic_launch", lambda *_: launch)
    monkeypatch.setattr(elastic, "processes", Mock())
    with pytest.raises(ac.InvalidArgumentError, match=r"^the hosts cannot meet at n1:29400: no such host; "):
        elastic._launch(config, "", [], Mock())


@pytest.mark.parametrize(
    ("told", "kills"),
    [
        (["SIGTERM", "SIGHUP"], 0),
        (["SIGTERM", "SIGTERM"], 1),
        (["SIGHUP", "SIGHUP", "SIGTERM"], 0),
        (["SIGHUP", "SIGTERM", "SIGTERM"], 1),
    ],
)
def test_a_hangup_is_not_the_first_of_two_signals(
    monkeypatch: pytest.MonkeyPatch, told: list[str], kills: int
) -> None:
    """SIGTERM follows SIGHUP at a logout, and ranks may still be saving."""
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    monkeypatch.setattr(passing, "processes", Mock())
    first: list[signal.Signals] = []
    _on_stop_signals(first.append)
    for name in told:
        handlers[signal.Signals[name]](signal.Signals[name], None)
    assert first == [signal.Signals[told[0]]]
    assert passing.processes.signal_children.mock_calls == [call(signal.SIGKILL)] * kills


def test_a_signal_that_comes_after_a_failure_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, registered: Mock
) -> None:
    """The launcher first kills what ranks have left running, which may take seconds."""
    failed = {0: ProcessFailure(0, 2, 7, "no-such-file")}
    started: Any = Mock(**{"reify.return_value.error_files": {0: str(tmp_path / "error.json")}})

    def launch(*_: object) -> None:
        started.reify({})
        raise ChildFailedError("", failed)

    monkeypatch.setattr(elastic, "elastic_launch", lambda *_: launch)
    monkeypatch.setattr(elastic, "processes", Mock())
    elastic.processes.kill_children.side_effect = lambda: registered.call_args[0][0](signal.SIGTERM)
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", logs_specs=started)
    assert elastic._launch(config, "", [], Mock(flights=dict)) == 7
    assert "rank 0 failed" in capsys.readouterr().err


NESTED = """
import signal, threading
from asynccoll.launch import passing

class Slow(threading.Event):
    def set(self):
        with self._cond:
            signal.raise_signal(signal.SIGHUP)
        super().set()

threading.Event = Slow
told = []
passing.on_stop_signals(told.append)
signal.raise_signal(signal.SIGHUP)
print(len(told))
"""


@on_linux
def test_a_hangup_that_comes_twice_at_once_is_heard_once() -> None:
    """Shell and kernel both send one, and the handler may be interrupted where it holds a lock."""
    hears = ["env", "--default-signal"]  # tests may run under nohup
    line = [*hears, sys.executable, "-c", NESTED]
    done = subprocess.run(line, capture_output=True, text=True, timeout=patient(30), check=False)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(("how", "code"), [(None, 0), (RendezvousTimeoutError, 1)])
def test_a_signal_that_comes_after_the_end_of_a_job_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, how: type[Exception] | None, code: int, registered: Mock
) -> None:
    """Directories are removed then, and Python ends."""
    monkeypatch.setattr(elastic, "elastic_launch", lambda *_: Mock(side_effect=how))
    monkeypatch.setattr(elastic, "processes", Mock())
    config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", logs_specs=Mock())
    assert elastic._launch(config, "", [], Mock()) == code
    registered.call_args[0][0](signal.SIGTERM)


@pytest.mark.parametrize("code", [0, 3])
def test_a_signal_that_comes_after_the_end_of_mpiexec_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, registered: Mock
) -> None:
    """The failure is still told."""
    running = Mock(returncode=None)

    def wait() -> int:
        running.returncode = code
        registered.call_args[0][0](signal.SIGTERM)
        return code

    running.wait = wait
    monkeypatch.setattr(passing, "launched", lambda *_: contextlib.nullcontext(running))
    monkeypatch.setattr(libraries, "processes", Mock())
    engine = libraries._Engine("mpi", "mpiexec", lambda: Mpiexec("mpiexec", "other"), "")
    monkeypatch.setitem(libraries._ENGINES, "mpiexec", engine)
    assert libraries.run(RunRequest("train.py"), "mpiexec") == code
    assert ("mpiexec ended with code 3" in capsys.readouterr().err) == bool(code)
    assert not running.send_signal.called


def test_a_launcher_ends_although_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if its terminal hangs up while it waits for other hosts."""
    monkeypatch.setattr(sys, "stderr", Mock(**{"write.side_effect": OSError(errno.EIO, "hung up")}))
    assert passing.say_stopped(signal.SIGHUP) == 129
    monkeypatch.setattr(passing, "processes", Mock(**{"kill_children.side_effect": OSError}))
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        passing.give_up(signal.SIGHUP)
    assert os._exit.mock_calls == [call(129)]  # type: ignore[attr-defined]  # a mock


def test_a_launcher_has_no_session_of_its_own_where_it_could_not_be_found_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second Ctrl-C kills the processes found in /proc, which this platform lacks."""
    monkeypatch.setattr(sys, "platform", "darwin")
    popen = Mock()
    monkeypatch.setattr(subprocess, "Popen", popen)
    with passing.launched(["mpiexec"], {}):
        assert not popen.call_args.kwargs["start_new_session"]
        assert popen.call_args.kwargs["stdin"] is None


def test_ranks_do_not_hear_what_was_for_their_launcher(environ: dict[str, str]) -> None:
    """Ranks may start mpiexec themselves; variables that the user has set stay."""
    environ["OMPI_MCA_plm"] = "ssh"
    environ |= Mpiexec("mpiexec", "openmpi").environment(environ)
    assert environ["PRTE_MCA_plm"] == "^slurm"
    child.forget_launcher()
    assert environ["OMPI_MCA_plm"] == "ssh"
    assert not {"OMPI_MCA_ras", "PRTE_MCA_plm", "PRTE_MCA_ras", child.NOT_FOR_RANKS} & environ.keys()


@pytest.mark.parametrize("hosts", [None, "n1:2"])
def test_hosts_are_to_blame_only_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, hosts: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "horovod", Mock(**{"run.side_effect": ValueError("its own")}))
    said = "^its own$" if hosts is None else r"^hosts='n1:2' for 2 ranks: its own$"
    with pytest.raises(ValueError, match=said):
        spawn._spawn_horovod(Job("horovod", print), 2, {"hosts": hosts})


def stop(_local_rank: int, code: object) -> None:
    """End as the user's program may."""
    sys.exit(code)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "leaves", "aborts"),
    [(None, True, []), (0, True, []), (0, False, [1]), (3, True, [1]), ("why", True, [1])],
)
def test_a_rank_of_mpi_that_ends_in_order_aborts_no_job(
    code: object, leaves: bool, aborts: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Any other one has recorded its error, be it of leaving the world."""
    aborted: list[int] = []

    def leave(*, abort: bool = False) -> None:
        if not leaves and not abort:
            raise ac.CollectiveTimeoutError("still in flight")

    monkeypatch.setattr(child, "abort_mpi", aborted.append)
    monkeypatch.setattr(child, "die_with_launcher", lambda: None)
    monkeypatch.setattr(planned_rank.preparing, "prepare", lambda _said: None)
    monkeypatch.setattr(planned_rank, "_place", lambda: (0, 0))
    monkeypatch.setattr(process, "initialize", lambda _backend: None)
    monkeypatch.setattr(process, "finalize", leave)
    monkeypatch.setattr(job, "dies_of", lambda _error: None)
    task = Job("mpi", stop, (code,), directory=str(tmp_path))
    with pytest.raises(SystemExit, match="1") if aborts else contextlib.nullcontext():
        planned_rank.main(pickle.dumps({}) + pickle.dumps(task))
    assert aborted == aborts
    assert len(list(tmp_path.iterdir())) == len(aborts)


def test_ctrl_c_as_horovods_launcher_gets_its_environment_leaves_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything that the process does later would have none."""
    ours = {"PATH": "/bin", "RANK": "0"}
    monkeypatch.setattr(os, "environ", dict(ours))
    lent: Any = spawn._environment
    for left in (2, 3):
        strike = Strike(left, lent.__wrapped__.__code__)
        with pytest.raises(KeyboardInterrupt), strike, lent({"PATH": "/bin"}):
            raise AssertionError
        assert os.environ == ours
