"""`spawn`: run a function on new ranks, on every backend that can start them, and report their failures."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import asynccoll as ac
import spawned
from asynccoll.runtime.state import process
from patience import patient
from ports import free_port
from worlds import BACKENDS


@pytest.fixture(autouse=True)
def _as_new() -> Any:
    """Check that no world is left behind here."""
    yield
    assert process.context is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_runs_the_function_in_a_world(backend: str, ranks: int, tmp_path: Path) -> None:
    """It gets its local rank first, then args and kwargs_dict."""
    ac.spawn(
        backend,
        spawned.tell,
        (str(tmp_path), 7, "é"),
        {"key": [1]},
        nproc_per_node=ranks,
        timeout=patient(60),
    )
    total = ranks * (ranks + 1) // 2
    wanted = [
        {
            "local": rank,
            "rank": rank,
            "size": ranks,
            "per node": ranks,
            "backend": backend,
            "total": total,
            "args": (7, "é"),
            "kwargs": {"key": [1]},
        }
        for rank in range(ranks)
    ]
    assert spawned.told(tmp_path) == wanted
    assert not ac.is_initialized()


def test_serial_runs_it_here(tmp_path: Path) -> None:
    """It runs in this process, in a world of one, and its error is simply raised."""
    seen = []
    ac.spawn("serial", lambda local_rank, x: seen.append((local_rank, x, ac.backend(), os.getpid())), (5,))
    assert seen == [(0, 5, "serial", os.getpid())]
    with pytest.raises(ZeroDivisionError):
        ac.spawn("serial", lambda local_rank: 1 / 0)
    assert not ac.is_initialized()
    with pytest.raises(ac.InvalidArgumentError, match="world of one"):
        ac.spawn("serial", spawned.tell, (str(tmp_path),), nproc_per_node=2)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_start_methods(method: str, tmp_path: Path) -> None:
    """fork and forkserver work too; `spawn` is the default."""
    code = f"""
        import sys, torch, asynccoll as ac, spawned

        def compute():
            return float((torch.ones(3_000_000) + 1).sum())  # on several threads, which a fork leaves behind

        def main(local_rank, directory):
            assert compute() == 6_000_000
            spawned.tell(local_rank, directory)

        if __name__ == "__main__":
            torch.set_num_threads(2)
            compute()
            ac.spawn("gloo", main, (sys.argv[1],), nproc_per_node=2, start_method={method!r})
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    said = tmp_path / "said"
    said.mkdir()
    _run([sys.executable, str(script), str(said)])
    assert [one["rank"] for one in spawned.told(said)] == [0, 1]


def _run(line: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run another program, with the package and these helpers on its path."""
    paths = [
        str(Path(ac.__file__).parent.parent),
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH", ""),
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo", **variables}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_of_a_script(backend: str, tmp_path: Path) -> None:
    """A function of `__main__` is found by its name, as in multiprocessing."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import asynccoll as ac

            class Config:
                def __init__(self, x):
                    self.x = x

            def main(local_rank, config):
                sys.stdout.write(f"rank {ac.get_rank()} got {config.x} total {ac.all_reduce(1).wait()}\\n")
                sys.stdout.flush()

            if __name__ == "__main__":
                ac.spawn(sys.argv[1], main, (Config(5),), nproc_per_node=2)
            """
        )
    )
    done = _run([sys.executable, str(script), backend])
    assert sorted(done.stdout.split("\n")[:-1]) == ["rank 0 got 5 total 2", "rank 1 got 5 total 2"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_without_a_name(backend: str, tmp_path: Path) -> None:
    """Closures are pickled by value if cloudpickle is installed; otherwise the error says to install it."""
    directory = str(tmp_path)

    def closure(local_rank: int) -> None:
        Path(directory, str(local_rank)).write_text(repr({"total": ac.all_reduce(1).wait()}))

    if importlib.util.find_spec("cloudpickle") is None:
        with pytest.raises(ac.InvalidArgumentError, match="pip install cloudpickle"):
            ac.spawn(backend, closure, nproc_per_node=2)
        return
    ac.spawn(backend, closure, nproc_per_node=2)
    assert spawned.told(tmp_path) == [{"total": 2}, {"total": 2}]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_first_failure_is_raised_with_its_rank(
    backend: str, culprit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not that of a peer that lost its connection as a consequence; the traceback starts in user code.

    The error leaves no file behind.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ac.SpawnError) as caught:
        ac.spawn(backend, spawned.fail, (culprit,), nproc_per_node=2)
    assert caught.value.rank == culprit
    text = str(caught.value)
    assert f"rank {culprit} failed" in text
    assert f"LookupError: of rank {culprit}" in text
    assert "in fail" in text
    assert "in carry_out" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_is_an_error(backend: str) -> None:
    """The error names the rank's last call where only the rank's own recorder can tell it."""
    with pytest.raises(ac.SpawnError) as caught:
        ac.spawn(backend, spawned.die, nproc_per_node=2)
    assert (
        "SIGKILL" in str(caught.value) or "gone" in str(caught.value) or "mpiexec ended" in str(caught.value)
    )
    if "killed by SIGKILL" in str(caught.value):
        assert "its last call was all_reduce #1 on lane 'default' at " in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_before_the_function_is_told_too(backend: str) -> None:
    """What `initialize` refuses on the ranks is raised in the caller, with the same message."""
    with pytest.raises(ac.SpawnError, match="got 'now and then'"):
        ac.spawn(backend, spawned.fail, (9,), nproc_per_node=2, check="now and then")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_leaving_is_told_too(backend: str) -> None:
    """The error lists the calls as they were in flight then, though all are over when it is reported."""
    with pytest.raises(ac.SpawnError) as caught:
        ac.spawn(backend, spawned.leave_in_flight, nproc_per_node=2, timeout=patient(2))
    said = r"CollectiveTimeoutError: finalize aborted what was still in flight: \[all_reduce #1 .*\((.*)\)\]"
    found = re.search(said, str(caught.value))
    assert found is not None, caught.value
    assert found[1] != "done"


def test_without_join_it_comes_back_at_once(tmp_path: Path) -> None:
    """It returns torch's process context, which can be joined later."""
    context = ac.spawn("gloo", spawned.linger, (str(tmp_path),), nproc_per_node=2, join=False)
    try:
        deadline = time.monotonic() + patient(60)
        while len(list(tmp_path.glob("here-*"))) < 2:
            assert time.monotonic() < deadline, "the ranks do not start"
            time.sleep(0.01)
        assert not context.join(0.01)
    finally:
        tmp_path.joinpath("go").touch()
        while not context.join():
            pass
    assert [process.exitcode for process in context.processes] == [0, 0]
    assert len(list(tmp_path.glob("stayed-*"))) == 2


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_outlive_the_thread_that_spawned_them(method: str, tmp_path: Path) -> None:
    """To the kernel their parent is a thread, but the ranks belong to the process."""
    code = """
        import sys, threading
        from pathlib import Path
        import asynccoll as ac, spawned

        def start():
            contexts.append(ac.spawn("gloo", spawned.linger, (sys.argv[1],), nproc_per_node=2, join=False,
                                     start_method=sys.argv[2]))
            while len(list(Path(sys.argv[1]).glob("here-*"))) < 2:  # an exit shows in join
                contexts[0].join(0.01)

        if __name__ == "__main__":
            contexts = []
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()
            Path(sys.argv[1], "go").touch()
            while not contexts[0].join():
                pass
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    said = tmp_path / "said"
    said.mkdir()
    paths = [str(Path(ac.__file__).parent.parent), str(Path(__file__).parent)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(script), str(said), method],
        env=environ,
        timeout=patient(60),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(said.glob("stayed-*"))) == 2, "a rank ended early"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_no_rank_outlives_the_one_that_spawned_it(number: signal.Signals, tmp_path: Path) -> None:
    """A killed parent takes its ranks with it, and so does one that alone receives Ctrl-C."""
    code = (
        "import sys, asynccoll as ac, spawned\n"
        "if __name__ == '__main__':\n"
        "    ac.spawn('gloo', spawned.linger, (sys.argv[1],), nproc_per_node=2)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    said = tmp_path / "said"
    said.mkdir()
    paths = [
        str(Path(ac.__file__).parent.parent),
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH", ""),
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen([sys.executable, str(script), str(said)], env=environ) as parent:
        deadline = time.monotonic() + patient(60)
        while len(pids := [int(path.read_text() or 0) for path in said.glob("here-*")]) < 2 or 0 in pids:
            assert time.monotonic() < deadline, "the ranks do not start"
            time.sleep(0.01)
        parent.send_signal(number)
        try:
            assert parent.wait(patient(20)) == -number
        finally:
            parent.kill()
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} outlive their parent"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no ranks": ({"nproc_per_node": 0}, "nproc_per_node must be a positive number, got 0"),
    "ranks of a type": ({"nproc_per_node": "2"}, "got '2'"),
    "no nodes": ({"nnodes": 0}, "nnodes must be a positive number"),
    "node rank missing": ({"nnodes": 2}, "needs node_rank="),
    "node rank too big": ({"nnodes": 2, "node_rank": 2}, "from 0 to 1, got 2"),
    "a port that there is not": ({"master_port": 70_000}, "master_port must be at most 65535, got 70000"),
    "nowhere to meet": ({"nnodes": 2, "node_rank": 0}, "master_addr= and master_port="),
    "two places to meet": (
        {"init_method": "file:///tmp/x", "master_addr": "host"},
        "says where the ranks meet",
    ),
    "start method": ({"start_method": "teleport"}, "'spawn', 'fork', 'forkserver', got 'teleport'"),
    "a short name": ({"nproc": 3}, "backend 'gloo' has no option 'nproc'; did you mean nproc_per_node=?"),
    "torch's name": ({"nprocs": 3}, "did you mean nproc_per_node=?; it takes interface, by_node"),
    "a misspelled argument": ({"timeot": 3}, "'timeot'; did you mean timeout=?"),
    "an unknown argument": ({"xyzzy": 3}, "no option 'xyzzy'; it takes interface, by_node"),
    "hosts, which only Horovod takes": ({"hosts": "a:1"}, "gloo ranks without hosts="),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_cannot_be_are_refused(name: str) -> None:
    """The error is raised here, before anything is started, is typed, and quotes what was given."""
    options, said = BAD[name]
    with pytest.raises(ac.InvalidArgumentError) as caught:
        ac.spawn("gloo", spawned.tell, ("",), **{"nproc_per_node": 1, **options})
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["join", "start_method", "daemon", "hosts"])
def test_what_a_launcher_has_not_is_refused_before_it_starts_ranks(name: str) -> None:
    """The launchers of mpi refuse them too; else each rank would say that initialize has no such option."""
    with pytest.raises(ac.InvalidArgumentError, match=f"without {name}=, which is for"):
        ac.spawn("serial", spawned.tell, ("",), **{name: None})


def test_unknown_backends_are_refused() -> None:
    """A backend is refused if its name is unknown or is not a string."""
    with pytest.raises(ac.BackendNotFoundError, match="gloo"):
        ac.spawn("smoke-signals", spawned.tell)
    with pytest.raises(ac.InvalidArgumentError, match="name"):
        ac.spawn(None, spawned.tell)  # type: ignore[arg-type]


def test_two_nodes(tmp_path: Path) -> None:
    """Each node spawns its own ranks, which meet at the given address and port."""
    code = f"""
        import sys, asynccoll as ac, spawned
        if __name__ == "__main__":
            ac.spawn("gloo", spawned.tell, (sys.argv[1],), nproc_per_node=2, nnodes=2,
                     node_rank=int(sys.argv[2]), master_addr="127.0.0.1", master_port={free_port()})
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    said = tmp_path / "said"
    said.mkdir()
    paths = [
        str(Path(ac.__file__).parent.parent),
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH", ""),
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [subprocess.Popen([sys.executable, str(script), str(said), str(n)], env=environ) for n in (0, 1)]
    try:
        assert [node.wait(patient(60)) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    assert [(one["rank"], one["local"], one["size"]) for one in spawned.told(said)] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 0, 4),
        (3, 1, 4),
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_async_function_is_run(backend: str, tmp_path: Path) -> None:
    """Each rank runs it in an event loop, which ends before the rank leaves the world."""
    ac.spawn(backend, spawned.tell_awaited, (str(tmp_path),), {"a": 1}, nproc_per_node=2, timeout=patient(60))
    assert spawned.told(tmp_path) == [(0, 0, 3, {"a": 1}), (1, 1, 3, {"a": 1})]


def test_an_async_function_that_fails_is_raised() -> None:
    """Its traceback shows nothing of how the event loop was created."""
    with pytest.raises(ac.SpawnError, match="LookupError: of rank 1") as told:
        ac.spawn("gloo", spawned.fail_awaited, (1,), nproc_per_node=2)
    assert "in fail_awaited" in str(told.value)
    assert "During handling" not in str(told.value)
    assert "no running event loop" not in str(told.value)


def test_an_async_function_is_run_here_by_a_world_of_one(tmp_path: Path) -> None:
    ac.spawn("serial", spawned.tell_awaited, (str(tmp_path),))
    assert spawned.told(tmp_path) == [(0, 0, 1, {})]


def test_an_async_function_under_an_event_loop() -> None:
    """A forked rank has its own loop; a function that would have to run in this loop is refused."""

    async def started() -> None:
        with pytest.raises(ac.SpawnError, match="LookupError: of rank 1"):
            ac.spawn("gloo", spawned.fail_awaited, (1,), nproc_per_node=2, start_method="fork")
        with pytest.raises(
            ac.InvalidArgumentError, match=r"fail_awaited is async.*event loop is already running here"
        ):
            ac.spawn("serial", spawned.fail_awaited, (1,))

    asyncio.run(started())
