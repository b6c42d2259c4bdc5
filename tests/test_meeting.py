"""How processes meet: ranks that were not told of nodes, and a name server that is gone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import jobs
import needs
from asynccoll.backends.api import agent, resolver, tcpstore
from jobs import on_linux
from patience import patient
from ports import free_port
from worlds import rank_environment

#: `make nightly` sets 40.
RANKS = int(os.environ.get("ASYNCCOLL_TEST_MEETING_RANKS", "2"))

NODES = """
    import json
    import asynccoll as ac
    ac.initialize("gloo")
    print(json.dumps([ac.get_local_rank(), ac.get_nproc_per_node(), ac.get_node_rank(), ac.get_nnodes()]))
    ac.finalize()
"""


@pytest.mark.slow
def test_ranks_that_nobody_told_of_nodes_compare_them(tmp_path: Path) -> None:
    """The ranks compare themselves, as pods of a Kubernetes job do: two of these three are on one node."""
    assert told(tmp_path, NODES, "aba") == [[0, 2, 0, 2], [0, 1, 1, 2], [1, 2, 0, 2]]


ADOPTED = """
    import json, warnings
    import torch.distributed as dist
    import asynccoll.sync as idist
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")  # ignite's, about guessing
    place = [idist.get_local_rank(), idist.get_nproc_per_node(), idist.get_node_rank(), idist.get_nnodes()]
    print(json.dumps(place))
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ignites_guess_of_local_ranks_takes_no_two_nodes_for_one(tmp_path: Path) -> None:
    """They stay two even if their hosts have the same name, like clones of one image."""
    assert told(tmp_path, ADOPTED, "ab") == [[0, 1, 0, 2], [0, 1, 1, 2]]


def told(directory: Path, source: str, nodes: str) -> list[list[int]]:
    """Return what each rank prints; the ranks are on ``nodes`` and have no more than ``env://`` needs."""
    program = directory / "program.py"
    program.write_text(textwrap.dedent(source))
    environ = {k: v for k, v in rank_environment().items() if not k.startswith("LOCAL_")}
    environ |= {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**environ, "RANK": str(rank), "ASYNCCOLL_NODE": node},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    return [json.loads(one.communicate(timeout=patient(60))[0]) for one in running]


TIMED = """
    import os, sys, time
    import asynccoll as ac
    import asynccoll.backends.c10d.backend
    here, size = sys.argv[1], int(os.environ["WORLD_SIZE"])
    open(f"{here}/{os.environ['RANK']}", "w").close()
    while len(os.listdir(here)) < size:  # what imports take is not counted
        time.sleep(0.01)
    start = time.monotonic()
    ac.initialize("gloo")
    seconds = time.monotonic() - start
    os.write(1, f"seconds {ac.all_reduce(seconds, op='max').wait()}\\n".encode())  # in one piece
    ac.finalize()
"""


@on_linux
@pytest.mark.slow
def test_a_name_server_that_is_gone_delays_nobody(tmp_path: Path) -> None:
    """torchrun's agent listens on all addresses, and looks up the name of each peer that connects."""
    needs.need_root("a resolv.conf of one's own")
    needs.need("util-linux")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TIMED))
    (tmp_path / "here").mkdir()
    mount = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    line = (program, tmp_path / "here")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as black_hole:
        try:
            black_hole.bind(("127.0.0.59", 53))
        except OSError as error:
            needs.absent(f"port 53 of 127.0.0.59: {error}", "free it")
        (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.59\n")
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, *map(str, (tmp_path / "resolv.conf", *launch, *line))],
            env=rank_environment(),
            capture_output=True,
            text=True,
            timeout=patient(120),
            check=False,
        )
    if "mount" in done.stderr and done.returncode:
        needs.absent(done.stderr.splitlines()[0], "leave to mount: docker run --privileged")
    assert done.returncode == 0, done.stderr
    # Several ranks write to one pipe: a line of one may begin within a line of another.
    seconds = [float(said) for said in re.findall(r"seconds (\d+\.\d+)", done.stdout)]
    assert len(seconds) == RANKS
    assert max(seconds) < patient(0.5), "a look-up that nobody answers takes ten"


@pytest.mark.parametrize("quick", [True, False])
def test_one_rank_of_an_agent_finds_out_whether_names_are_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    """The others use its finding: where no name server answers, each look-up would delay the job."""
    looked_up = []

    def look_up(address: str) -> bool:
        looked_up.append(address)
        return quick

    monkeypatch.setattr(resolver, "names_are_quick", look_up)
    monkeypatch.setattr(agent, "names_are_quick", look_up)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_PORT", "1")

    def come(rank: int) -> dist.Store | None:
        return agent.meet_under_one_agent(rank, 3, timedelta(seconds=patient(20)))

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(come, rank) for rank in (1, 2)]
        served = come(0)
        by_rank_0 = len(looked_up)
        stores = [served, *(one.result() for one in waiting)]
    assert len(looked_up) == by_rank_0
    assert set(looked_up) == {"127.0.0.1"}
    assert None not in stores
    stores[0].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * 3
    (note,) = tmp_path.glob("asynccoll-1")
    assert json.loads(note.read_text())["quick"] is quick


STORELESS = """
    import os, signal
    import torch, torch.distributed as dist
    import asynccoll as ac
    rank, size, server, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "SERVER", "PORT"))
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    memory = os.environ["MEMORY"] == "1"
    ac.initialize("gloo", store=store, rank=rank, world_size=size, timeout=10, memory=memory)
    ac.barrier().wait()
    if rank == 0:
        os.kill(server, signal.SIGKILL)
    ac.barrier().wait()
    say = lambda text: os.write(1, f"{rank} {text}\\n".encode())
    say(ac.all_reduce(torch.ones(2)).wait().tolist())
    try:
        ac.all_reduce(1, lane="new").wait()
    except ac.PeerLostError as error:
        say("said" if "the store that they need for it" in str(error) else error)
    say(ac.all_reduce(2).wait())
    try:
        ac.all_reduce(object() if rank == 1 else 1).wait()
    except (ac.PeerLostError, ac.PayloadTypeError) as error:
        say(type(error).__name__)
    ac.finalize()
"""
SERVES = """
    import signal
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    print(store.port, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("memory", ["0", "1"])
def test_open_lanes_go_on_without_a_store(tmp_path: Path, memory: str) -> None:
    """A new lane fails at once; a call also fails if its peer cannot report that it has refused."""
    command = [sys.executable, "-c", textwrap.dedent(SERVES)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        jobs.starting(tmp_path) as start,
    ):
        assert server.stdout is not None
        where = {"SERVER": str(server.pid), "PORT": server.stdout.readline().strip(), "MEMORY": memory}
        try:
            code, said, errors = start("run", "-n", 2, jobs.writing(tmp_path)(STORELESS), **where).wait()
        finally:
            server.kill()
    assert code == 0, errors
    assert [sorted(line for line in said.splitlines() if line[0] == rank) for rank in "01"] == [
        ["0 4", "0 PeerLostError", "0 [2.0, 2.0]", "0 said"],
        ["1 4", "1 PayloadTypeError", "1 [2.0, 2.0]", "1 said"],
    ]


@pytest.fixture
def derived() -> int:
    """A port that is free, like those where a job's ranks would look next."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError):
            for later in (10_000, 20_000):
                socket.create_server(("127.0.0.1", port + later)).close()
            return port


def find(job: str, port: int, seconds: float = 30.0) -> dist.Store:
    """Return the store of ``job`` as its later ranks find it."""
    return tcpstore.connect_as(
        job, "127.0.0.1", port, serve=False, timeout=timedelta(seconds=patient(seconds))
    )


def serve(job: str, port: int) -> dist.Store:
    """Return the store of ``job`` as its rank 0 serves it."""
    return tcpstore.connect_as(job, "127.0.0.1", port, serve=True, timeout=timedelta(seconds=patient(30)))


def test_a_job_meets_beside_who_has_its_port(derived: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first port, a program never answers; at the second is another job's store, left as it is."""
    monkeypatch.setattr(tcpstore, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", derived)), ThreadPoolExecutor(2) as threads:
        other = dist.TCPStore("127.0.0.1", derived + 10_000, is_master=True, wait_for_workers=False)
        keys = other.num_keys()
        found = [threads.submit(find, "b", derived) for _ in range(2)]
        serve("b", derived).set("place", "b")
        assert [one.result().get("place") for one in found] == [b"b", b"b"]
        assert other.num_keys() == keys


def test_a_job_does_not_take_another_ones_store(derived: int) -> None:
    """Another job derived the same port, and was first."""
    serve("a", derived)
    with pytest.raises(TimeoutError, match=f"no store of job b was served at port {derived}, "):
        find("b", derived, seconds=0.2)


def test_where_all_ports_of_a_job_are_taken_rank_0_says_so(derived: int) -> None:
    """It does not wait."""
    with contextlib.ExitStack() as stack:
        for later in (0, 10_000, 20_000):
            stack.enter_context(socket.create_server(("127.0.0.1", derived + later)))
        with pytest.raises(dist.DistNetworkError, match=f"{derived + 20_000}"):
            serve("a", derived)


def test_a_program_that_never_answers_is_no_store(derived: int) -> None:
    """torch itself would wait for its answer for ever, and handle no Ctrl-C."""
    with (
        socket.create_server(("127.0.0.1", derived)),
        pytest.raises(TimeoutError, match=f"127.0.0.1:{derived} did"),
    ):
        tcpstore.connect("127.0.0.1", derived, serve=False, timeout=timedelta(seconds=0.1))
