"""`Parallel` joins the world of a launcher, or spawns one; ignite's contract, argument by argument."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import asynccoll as ac
import spawned
from asynccoll.runtime.state import process
from patience import patient
from worlds import BACKENDS


@pytest.fixture(autouse=True)
def _as_new() -> Any:
    """Check that no world is left here afterwards."""
    yield
    assert process.context is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_spawns_where_no_launcher_did(backend: str, tmp_path: Path) -> None:
    """`run` starts the ranks and returns when they are done."""
    with ac.Parallel(backend=backend, nproc_per_node=2, timeout=patient(60)) as parallel:
        assert not ac.is_initialized(), "this process is no rank"
        parallel.run(spawned.tell, str(tmp_path), 3, a=1)
    ranks = spawned.told(tmp_path)
    assert [(one["rank"], one["size"], one["backend"]) for one in ranks] == [(0, 2, backend), (1, 2, backend)]
    assert {(one["args"], tuple(one["kwargs"].items())) for one in ranks} == {((3,), (("a", 1),))}


def test_a_failing_rank_is_raised_by_run() -> None:
    """The error has the rank and its traceback."""
    with (
        pytest.raises(ac.SpawnError, match="LookupError: of rank 1") as caught,
        ac.Parallel("gloo", nproc_per_node=2) as parallel,
    ):
        parallel.run(spawned.fail, 1)
    assert caught.value.rank == 1


def test_without_a_backend_it_just_calls() -> None:
    """There is no world, and local rank 0; the function's errors are raised as they are."""
    seen = []
    with ac.Parallel() as parallel:
        parallel.run(lambda local_rank, x, y=0: seen.append((local_rank, x, y)), 1, y=2)
        with pytest.raises(ZeroDivisionError):
            parallel.run(lambda local_rank: 1 / 0)
    assert seen == [(0, 1, 2)]
    assert not ac.is_initialized()


def test_an_async_function_is_run(tmp_path: Path) -> None:
    """It runs on spawned ranks, on a rank that has joined, and without ranks."""
    with ac.Parallel("gloo", nproc_per_node=2) as parallel:
        parallel.run(spawned.tell_awaited, str(tmp_path), a=1)
    assert spawned.told(tmp_path) == [(0, 0, 3, {"a": 1}), (1, 1, 3, {"a": 1})]
    with ac.Parallel("serial") as parallel:
        parallel.run(spawned.tell_awaited, str(tmp_path), b=2)
    assert spawned.told(tmp_path)[0] == (0, 0, 1, {"b": 2})
    seen = []

    async def see(local_rank: int) -> None:
        seen.append(local_rank)

    with ac.Parallel() as parallel:
        parallel.run(see)
    assert seen == [0]


def test_backends_that_torch_was_told_of_are_taken() -> None:
    """`initialize` accepts them, too; for a missing backend the error says how to get it."""
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg  # it has registered "fake"
    assert ac.Parallel("FAKE").backend == "fake"
    missing = {"mpi", "horovod", "xla-tpu"} - {*ac.available_backends()}
    for name in missing:
        with pytest.raises(ac.BackendNotFoundError, match=rf"'{name}' is not usable here; it needs"):
            ac.Parallel(name)


def test_serial_is_a_world_of_one() -> None:
    """The world exists inside the block and is gone after it."""
    with ac.Parallel("serial") as parallel:
        parallel.run(lambda local_rank: None)
        assert ac.backend() == "serial"
        assert ac.is_initialized()
    assert not ac.is_initialized()


SCRIPT = """
    import sys
    import asynccoll as ac

    def main(local_rank, a, b=0):
        place = local_rank, ac.get_rank(), ac.get_world_size(), ac.backend()
        sys.stdout.write(f"{place} {ac.all_reduce(1).wait()} {a} {b}\\n")
        sys.stdout.flush()

    if __name__ == "__main__":
        with ac.Parallel(BACKEND, **OPTIONS) as parallel:
            parallel.run(main, 5, b=6)
        assert not ac.is_initialized()
"""


def launch(directory: Path, backend: str, *launcher: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the script under a launcher, or without one."""
    script = directory / "script.py"
    source = SCRIPT.replace("BACKEND", repr(backend)).replace("OPTIONS", repr(options))
    script.write_text(textwrap.dedent(source))
    paths = [str(Path(ac.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    line = [sys.executable, *launcher, str(script)]
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=patient(60), check=False)


def wanted(backend: str, ranks: int) -> list[str]:
    return [f"{(rank, rank, ranks, backend)} {ranks} 5 6" for rank in range(ranks)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [{}, {"nproc_per_node": 2, "start_method": "fork", "daemon": True}])
def test_it_joins_what_asynccoll_run_started(backend: str, given: dict[str, Any], tmp_path: Path) -> None:
    """The same script spawns alone and joins under a launcher; it never spawns twice."""
    launcher = ("-m", "asynccoll", "run", "-n", "2", "--backend", backend)
    ended = launch(tmp_path, backend, *launcher, **given)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")[:-1]) == wanted(backend, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_script_without_a_launcher(backend: str, tmp_path: Path) -> None:
    """In this case nproc_per_node sets the number of ranks."""
    ended = launch(tmp_path, backend, nproc_per_node=2)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")[:-1]) == wanted(backend, 2)


def test_it_joins_what_torchrun_started(tmp_path: Path) -> None:
    """It joins by the variables that torchrun sets."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = launch(tmp_path, "gloo", *launcher)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")[:-1]) == wanted("gloo", 2)


def test_a_launcher_that_started_another_number_is_an_error(tmp_path: Path) -> None:
    """It does not spawn ranks within ranks instead."""
    ended = launch(tmp_path, "gloo", "-m", "asynccoll", "run", "-n", "2", nproc_per_node=3)
    assert ended.returncode != 0
    assert "nproc_per_node=3, but torchrun has started 2 ranks" in ended.stderr


def test_a_tpu_host_has_started_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TPU host's variables are set in any process: as many ranks can be spawned as it has chips."""
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert ac.Parallel("gloo", nproc_per_node=4).backend == "gloo"
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert ac.Parallel("gloo", nproc_per_node=4).backend == "gloo"


def test_leaving_by_an_error_aborts() -> None:
    """The world is left at once, whatever is in flight."""
    with pytest.raises(KeyError), ac.Parallel("serial"):
        raise KeyError("of the user's")
    assert not ac.is_initialized()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"backend": "smoke-signals"}, "smoke-signals"),
    "ranks without a backend": ({"nproc_per_node": 2}, "nproc_per_node"),
    "nodes without a backend": ({"nnodes": 2}, "nnodes"),
    "node rank without a backend": ({"node_rank": 0}, "node_rank"),
    "address without a backend": ({"master_addr": "host"}, "master_addr"),
    "port without a backend": ({"master_port": 1}, "master_port"),
    "options without a backend": ({"start_method": "fork"}, "start_method"),
    "a short name": ({"backend": "gloo", "nproc": 2}, "'nproc'; did you mean nproc_per_node=?"),
    "an option of another backend": (
        {"backend": "cpu:gloo", "nproc_per_node": 1, "torch_group": False},
        "'torch_group'; it takes interface, by_node",
    ),
    "no ranks": ({"backend": "gloo", "nproc_per_node": 0}, "nproc_per_node must be a positive number, got 0"),
    "no nodes": ({"backend": "gloo", "nproc_per_node": 1, "nnodes": -1}, "nnodes must be a positive number"),
    "node rank missing": ({"backend": "gloo", "nproc_per_node": 1, "nnodes": 2}, "needs node_rank="),
    "node rank too big": (
        {"backend": "gloo", "nproc_per_node": 1, "nnodes": 2, "node_rank": 3},
        "from 0 to 1, got 3",
    ),
    "nowhere to meet": (
        {"backend": "gloo", "nproc_per_node": 1, "nnodes": 2, "node_rank": 0},
        "master_addr= and master_port=",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_cannot_be_are_refused(name: str) -> None:
    """They are refused when the object is made, as in ignite, with a typed error that has their values."""
    options, said = BAD[name]
    with pytest.raises(ac.AsyncCollError) as caught:
        ac.Parallel(**options)
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError) or name == "backend"
