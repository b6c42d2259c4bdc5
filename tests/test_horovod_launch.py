"""Ranks under horovodrun: started by hand, by `asynccoll run`, by `spawn`, joined, lost in elastic jobs."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import asynccoll as ac
import needs
import spawned
from asynccoll.launch import horovodrun
from asynccoll.launch.ranks import without_place
from patience import outlive, patient
from worlds import rank_environment

needs.need_package("horovod", "horovod", "the environment horovod has it: make horovod")

LIMIT_S = patient(90)


class Ended:
    """How a command ended and what it printed, without horovodrun's rank prefixes."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        said = (
            line.partition("<stdout>:") for line in done.stdout.splitlines() if "with status code" not in line
        )
        self.lines = sorted(text or before for before, _, text in said)
        self.out = done.stdout
        self.err = done.stderr
        self.said = f"code {self.code}\n{done.stdout}\n{done.stderr}"


def write(directory: Path, source: str) -> str:
    script = directory / "script.py"
    script.write_text(textwrap.dedent(source))
    return str(script)


def call(line: list[str], **variables: str) -> Ended:
    """Run a command line; it must end in time."""
    done = subprocess.run(
        line,
        env=rank_environment() | {"PYTHONUNBUFFERED": "1"} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(done)


def by_hand(directory: Path, source: str, ranks: int = 2) -> Ended:
    """Run `horovodrun -np RANKS python script.py`."""
    return call([horovodrun.find().path, "-np", str(ranks), sys.executable, write(directory, source)])


def run(directory: Path, source: str, ranks: int = 2) -> Ended:
    """Run `asynccoll run --backend horovod -n RANKS script.py`."""
    line = [sys.executable, "-m", "asynccoll", "run", "--backend", "horovod", "-n", str(ranks)]
    return call([*line, write(directory, source)])


WHO = """
    import asynccoll as ac
    ac.initialize()
    total = ac.all_reduce(ac.get_rank() + 1).wait()
    place = ac.get_rank(), ac.get_world_size(), ac.get_local_rank(), ac.get_nproc_per_node(), ac.get_nnodes()
    print(ac.backend(), *place, total)
"""


def wanted(ranks: int) -> list[str]:
    return [f"horovod {rank} {ranks} {rank} {ranks} 1 {ranks * (ranks + 1) // 2}" for rank in range(ranks)]


def test_initialize_without_arguments_under_horovodrun_is_horovod(tmp_path: Path) -> None:
    """`horovodrun -np 2 python script.py` is enough: the launcher sets the rest."""
    ended = by_hand(tmp_path, WHO)
    assert ended.code == 0, ended.said
    assert ended.lines == wanted(2)


def test_asynccoll_run_starts_ranks_with_horovodrun(tmp_path: Path) -> None:
    """It uses the environment's own horovodrun, on this host."""
    ended = run(tmp_path, WHO, ranks=3)
    assert ended.code == 0, ended.said
    assert ended.lines == wanted(3)


UNEVEN = """
    import os
    os.environ["ASYNCCOLL_NODE"] = "node " + os.environ["HOROVOD_RANK"]
    import asynccoll as ac, torch
    ac.initialize()
    sums = [ac.all_reduce(1 + ac.get_rank()).wait() for _ in range(2)]
    if ac.get_rank():  # calls that nobody expects, and that rank 0 never makes
        sums += [ac.all_reduce(torch.full((n,), 2.0)).wait()[0].item() for n in (3, 4)]
    print(ac.get_rank(), sums, "last", ac.join().wait(), "then", ac.all_gather(ac.get_rank()).wait())
"""


def test_join_on_two_nodes(tmp_path: Path) -> None:
    """A rank that has joined confirms no call of the other node, which continues without it."""
    ended = run(tmp_path, UNEVEN)
    assert ended.lines == ["0 [3, 3] last 1 then [0, 1]", "1 [3, 3, 2.0, 2.0] last 1 then [0, 1]"], ended.said


def test_without_horovodrun_it_is_a_world_of_one(tmp_path: Path) -> None:
    """A script started by plain python may name horovod as its backend."""
    ended = call([sys.executable, write(tmp_path, WHO.replace("initialize()", "initialize('horovod')"))])
    assert ended.code == 0, ended.said
    assert ended.lines == wanted(1)


def test_spawn_on_hosts(tmp_path: Path) -> None:
    """Two names of this host stand for two hosts with one rank each."""
    ac.spawn("horovod", spawned.tell, (str(tmp_path),), nproc_per_node=2, hosts="localhost:1,127.0.0.1:1")
    told = [(one["rank"], one["local"], one["per node"]) for one in spawned.told(tmp_path)]
    assert told == [(0, 0, 1), (1, 0, 1)]


def test_another_launchers_ranks_are_refused(tmp_path: Path) -> None:
    """Under torchrun Horovod would see a world of one, and every rank would compute alone."""
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    ended = call(
        [sys.executable, write(tmp_path, WHO.replace("initialize()", "initialize('horovod')"))], **place
    )
    assert ended.code != 0
    assert "LaunchEnvironmentError" in ended.err, ended.said
    assert "horovodrun" in ended.err


JOINS = """
    import horovod.torch as hvd
    hvd.init()
    import torch, asynccoll as ac
    ac.initialize("horovod")
    assert (ac.get_rank(), ac.get_world_size()) == (hvd.rank(), hvd.size())
    print(ac.all_reduce(1).wait())
    ac.finalize()
    print(int(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
"""


def test_a_job_that_has_initialized_horovod_is_joined(tmp_path: Path) -> None:
    """The user's Horovod is used, and left as it was."""
    ended = by_hand(tmp_path, JOINS)
    assert ended.code == 0, ended.said
    assert ended.lines == ["2"] * 4


RAISES = """
    import asynccoll as ac
    ac.initialize()
    ac.all_reduce(1).wait()
    if ac.get_rank() == 1:
        raise LookupError("of my own")
    ac.all_reduce(1, lane="never").wait()
"""


def test_the_first_failure_is_told(tmp_path: Path) -> None:
    """`asynccoll run` shows the traceback of the first failed rank, once."""
    ended = run(tmp_path, RAISES)
    assert ended.code != 0
    assert "asynccoll run: rank 1 failed" in ended.err, ended.said
    assert ended.err.count("\nLookupError: of my own") == 1, ended.said
    assert ended.err.count("Traceback") == 1, "horovodrun has none of its own to show"


STUCK = """
    import os, asynccoll as ac
    ac.initialize()
    ac.barrier().wait()
    print("pid", os.getpid())
    if ac.get_rank() == 0:
        ac.all_reduce(1).wait()
    ac.all_reduce(1, lane="never").wait()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
def test_a_stop_signal_ends_ranks_that_wait_in_horovod(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C at `asynccoll run` prints one line, exits with the usual code, and leaves no process."""
    line = [sys.executable, "-m", "asynccoll", "run", "--backend", "horovod", "-n", "2"]
    with subprocess.Popen(
        ["env", "--default-signal", *line, write(tmp_path, STUCK)],  # these tests may run under nohup
        env=rank_environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        ranks = [int(job.stdout.readline().split()[-1]) for _ in range(2)]
        job.send_signal(number)
        _, said = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + number, said
    assert "asynccoll run: " in said
    assert "Traceback" not in said, said
    assert not outlive(ranks), "a rank lives on"


# ---------------------------------------------------------------- spawn


def test_spawn_runs_a_function_on_ranks_of_horovod(tmp_path: Path) -> None:
    """`horovod.run` passes its local rank first, then args and kwargs_dict. Our Ctrl-C handler stays."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    ac.spawn(
        "horovod", spawned.tell, (str(tmp_path), 7, "é"), {"key": [1]}, nproc_per_node=2, timeout=patient(60)
    )
    told = spawned.told(tmp_path)
    assert [(one["rank"], one["local"], one["size"], one["backend"], one["total"]) for one in told] == [
        (0, 0, 2, "horovod", 3),
        (1, 1, 2, "horovod", 3),
    ]
    assert told[0]["args"] == (7, "é")
    assert not ac.is_initialized()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


@pytest.mark.parametrize("hosts", ["localhost", "localhost:1", ["localhost:2"]])
def test_hosts_that_cannot_be_are_refused(hosts: Any) -> None:
    with pytest.raises(ac.InvalidArgumentError, match="hosts"):
        ac.spawn("horovod", spawned.tell, ("",), nproc_per_node=2, hosts=hosts)


def test_parallel_reports_the_rank_that_failed() -> None:
    """The error has the rank and its traceback."""
    with ac.Parallel("horovod", nproc_per_node=2) as parallel, pytest.raises(ac.SpawnError) as caught:
        parallel.run(spawned.fail, 1)
    assert caught.value.rank == 1
    assert "LookupError: of rank 1" in str(caught.value)


def test_spawn_from_another_thread_is_refused() -> None:
    """That is Horovod's own rule; the error comes before anything is started."""
    caught: list[BaseException] = []

    def spawn() -> None:
        try:
            ac.spawn("horovod", spawned.tell, ("",), nproc_per_node=2)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=spawn)
    thread.start()
    thread.join(patient(10))
    assert isinstance(caught[0], ac.InvalidArgumentError)
    assert "main thread" in str(caught[0])


# ---------------------------------------------------------------- elastic jobs

ELASTIC = """
    import os, pathlib, signal, torch, asynccoll as ac
    killed = pathlib.Path(__file__).with_name("killed")
    model = torch.nn.Linear(2, 1)
    state = ac.elastic.state(model=model, batch=0)

    @ac.elastic.run
    def train(state):
        size = ac.get_world_size()
        print("world of", size, "from", state.batch)
        while state.batch < 12:
            assert ac.all_reduce(torch.ones(1)).wait().item() == size
            # Horovod gives up a worker's host with it: the one that has no other worker.
            if state.batch == 7 and size == 3 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.batch += 1
            with torch.no_grad():
                model.weight += 1
            if state.batch % 5 == 0:
                state.commit()
        return state.batch

    weight = model.weight.detach().clone()
    print("done", train(state), "in", "two worlds" if killed.exists() else "one")
"""
HOSTS = "#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n"


def test_an_elastic_job_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    """The survivors form a smaller world, and continue from the last commit."""
    hosts = tmp_path / "hosts.sh"
    hosts.write_text(HOSTS)
    hosts.chmod(0o755)
    elastic = ["--min-np", "2", "--max-np", "3", "--host-discovery-script", str(hosts)]
    line = [horovodrun.find().path, "--gloo", "-np", "3", *elastic]
    ended = call([*line, sys.executable, write(tmp_path, ELASTIC)])
    assert ended.code == 0, ended.said
    first, second, done = ["world of 3 from 0"] * 3, ["world of 2 from 5"] * 2, ["done 12 in two worlds"] * 2
    assert ended.lines == sorted([*first, *second, *done]), ended.said


MISTAKE = """
    import torch, asynccoll as ac
    import horovod.torch as hvd
    state = ac.elastic.state(tries=0)

    @ac.elastic.run
    def train(state):
        state.tries += 1
        print("try", state.tries)
        ac.all_reduce(torch.ones(2 + ac.get_rank())).wait()

    try:
        train(state)
    except ac.CollectiveMismatchError as error:
        print("told")
"""


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    """A mismatch would only recur in the next world."""
    ended = by_hand(tmp_path, MISTAKE)
    assert ended.code == 0, ended.said
    assert ended.lines == ["told", "told", "try 1", "try 1"]


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        (["PeerLostError"], "HorovodInternalError"),
        (["PeerLostError", "PeerRefusedError"], "HorovodInternalError"),
        (["HostsUpdatedInterrupt"], "HostsUpdatedInterrupt"),
        (["PeerRefusedError", "HostsUpdatedInterrupt"], "HostsUpdatedInterrupt"),
        (["PeerRefusedError"], "ExceptionGroup"),
        (
            ["PeerRefusedError: its child task was cancelled after PeerLostError: gone"],
            "HorovodInternalError",
        ),
        (["PeerLostError", "ValueError"], "ExceptionGroup"),
    ],
)
def test_an_elastic_job_recovers_from_errors_in_its_task_groups(
    monkeypatch: pytest.MonkeyPatch, errors: list[str], raised: str
) -> None:
    """Horovod gets the error that it knows; a group with an error of the program stays as it is."""
    from horovod.common import exceptions

    left: list[bool] = []
    horovod = SimpleNamespace(elastic=SimpleNamespace(run=lambda life: life))
    monkeypatch.setattr(ac.elastic, "load", lambda: horovod)
    monkeypatch.setattr(ac.elastic, "start", lambda *_: None)
    monkeypatch.setattr(ac.elastic, "initialize", lambda _backend: None)
    monkeypatch.setattr(ac.elastic, "finalize", lambda *, abort: left.append(abort))

    async def fail(said: str) -> None:
        name, _, why = said.partition(": ")
        kind: Any = next(vars(one)[name] for one in (ac, exceptions, builtins) if name in vars(one))
        try:
            if said != errors[0]:
                await anyio.sleep_forever()  # until the first one fails
        finally:
            raise kind(f"why: {why}")

    @ac.elastic.run
    async def train(_state: object) -> None:
        async with ac.create_task_group() as group:
            for name in reversed(errors):
                group.start_soon(fail, name, name=name)

    with pytest.raises(Exception, match=r"why|unhandled errors") as caught:
        train(None)
    assert type(caught.value).__name__ == raised
    assert not getattr(caught.value, "skip_sync", False), "samplers have to share anew"
    assert left == [errors != ["PeerRefusedError"]]


def test_the_environment_of_another_job_is_not_passed_on() -> None:
    """Ranks that a rank starts get their own places."""
    given = {"HOROVOD_RANK": "1", "HOROVOD_CYCLE_TIME": "2", "WORLD_SIZE": "3", "PATH": os.environ["PATH"]}
    kept = without_place(given)
    assert kept == {"HOROVOD_CYCLE_TIME": "2", "PATH": os.environ["PATH"]}
