"""``idist.Parallel`` and ``idist.spawn``: ignite's arguments, checks and messages, on our launchers."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

import asynccoll as ac
import asynccoll.sync as idist
import spawned
import worlds
from asynccoll.sync import logs
from patience import patient
from ports import free_port

PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def _as_ranks(size, **more):
    """Return what each rank of one node reports."""
    return [
        {
            "local": (rank, rank),
            "rank": rank,
            "size": size,
            "nodes": (size, 1, 0),
            "model": ("native-dist", "gloo"),
            "torch": (str(rank), str(size), str(rank)),
            "total": size * (size + 1) // 2,
            **more,
        }
        for rank in range(size)
    ]


def _without_port(ranks):
    return [{name: value for name, value in one.items() if name != "port"} for one in ranks]


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_spawn(tmp_path, start_method):
    if start_method == "fork" and multiprocessing.active_children():
        pytest.fail("children are left from another test")
    idist.spawn(
        "gloo", spawned.tell_sync, (str(tmp_path), 1), {"b": 2}, nproc_per_node=2, start_method=start_method
    )
    ranks = spawned.told(tmp_path)
    assert _without_port(ranks) == _as_ranks(2, args=(1,), kwargs={"b": 2})
    assert not idist.get_rank()


def _spawn(function, *args, **options):
    idist.spawn("gloo", function, args, **options)


def _parallel(function, *args, **options):
    with idist.Parallel("gloo", **options) as parallel:
        parallel.run(function, *args)


@pytest.mark.parametrize("start", [_spawn, _parallel])
def test_ranks_meet_where_they_are_told(start, tmp_path, monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    start(spawned.tell_sync, str(tmp_path), nproc_per_node=2, nnodes=1, timeout=timedelta(seconds=60))
    assert [one["port"] for one in spawned.told(tmp_path)] == [str(port)] * 2


@pytest.mark.parametrize("start", [_spawn, _parallel])
def test_spawned_ranks_begin_on_their_gpu(start, monkeypatch):
    """Even on gloo, where nothing else selects a GPU. Only torch reports these GPUs."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(ac, "spawn", lambda _, fn, args, *__, **___: [fn(rank, *args) for rank in range(2)])
    seen = []
    start(lambda rank, *args: seen.append((rank, args, str(current[-1]))), 7, nproc_per_node=2)
    assert seen == [(0, (7,), "cuda:0"), (1, (7,), "cuda:1")]


def test_two_jobs_beside_each_other_do_not_collide(tmp_path):
    """Jobs of ignite would both meet at port 2222."""
    directories = [tmp_path / "a", tmp_path / "b"]
    jobs = []
    for directory in directories:
        directory.mkdir()
        jobs.append(idist.spawn("gloo", spawned.tell_sync, (str(directory),), nproc_per_node=2, join=False))
    for job in jobs:
        while not job.join():
            pass
    for directory in directories:
        assert _without_port(spawned.told(directory)) == _as_ranks(2, args=(), kwargs={})


def test_parallel_spawns(tmp_path):
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        assert idist.model_name() == "serial"
        parallel.run(spawned.tell_sync, str(tmp_path), a=1)
    assert _without_port(spawned.told(tmp_path)) == _as_ranks(2, args=(), kwargs={"a": 1})


def test_parallel_runs_an_async_function(tmp_path, monkeypatch):
    """It runs on ranks that Parallel spawns, and on a rank that has joined."""
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(spawned.tell_awaited, str(tmp_path), a=1)
    assert spawned.told(tmp_path) == [(0, 0, 3, {"a": 1}), (1, 1, 3, {"a": 1})]
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(spawned.tell_awaited, str(tmp_path), b=2)
    assert spawned.told(tmp_path)[0] == (0, 0, 1, {"b": 2})


def test_a_failing_rank_is_raised():
    with (
        pytest.raises(ac.SpawnError, match="of rank 1"),
        idist.Parallel("gloo", nproc_per_node=2) as parallel,
    ):
        parallel.run(spawned.fail, 1)


def test_parallel_joins_what_a_launcher_started(tmp_path, monkeypatch):
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(spawned.tell_sync, str(tmp_path))
        assert os.environ["MASTER_PORT"] == "15000"
    assert _without_port(spawned.told(tmp_path)) == _as_ranks(1, args=(), kwargs={})
    assert dict(os.environ) == before
    with pytest.raises(LookupError), idist.Parallel(backend="gloo"):
        raise LookupError
    assert idist.model_name() == "serial"
    assert dict(os.environ) == before


def test_parallel_without_a_backend_calls():
    seen = []
    with idist.Parallel(start_method="fork") as parallel:  # which is ignored, as in ignite
        parallel.run(lambda *args, **kwargs: seen.append((args, kwargs)), 1, b=2)
    assert seen == [((0, 1), {"b": 2})]


WRONG = {
    "unknown backend": {"backend": "abc"},
    **{
        f"{name} without a backend": {name: 1}
        for name in ("nproc_per_node", "nnodes", "node_rank", "master_port")
    },
    "an address without a backend": {"master_addr": "host"},
    "no ranks": {"backend": "gloo", "nproc_per_node": 0},
    "no nodes": {"backend": "gloo", "nproc_per_node": 1, "nnodes": 0},
    "no node rank": {"backend": "gloo", "nproc_per_node": 1, "nnodes": 2},
    "a node rank past the nodes": {"backend": "gloo", "nproc_per_node": 1, "nnodes": 2, "node_rank": 2},
    "a negative node rank": {"backend": "gloo", "nproc_per_node": 1, "nnodes": 2, "node_rank": -1},
    "no master": {"backend": "gloo", "nproc_per_node": 1, "nnodes": 2, "node_rank": 1},
    "no port": {"backend": "gloo", "nproc_per_node": 1, "nnodes": 2, "node_rank": 1, "master_addr": "h"},
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG.keys())
def test_parallel_refuses_as_ignite_does(arguments):
    theirs = importlib.import_module("ignite.distributed")
    texts = []
    for module in (theirs, idist):
        with pytest.raises(ValueError, match=r".") as caught:
            module.Parallel(**arguments)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["master_addr", "master_port"])
def test_spawn_refuses_as_ignite_does(name, tmp_path):
    theirs = importlib.import_module("ignite.distributed")
    texts = []
    for module in (theirs, idist):
        with pytest.raises(ValueError, match=r".") as caught:
            module.spawn("gloo", spawned.tell_sync, (), init_method=f"file://{tmp_path}/f", **{name: 1})
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def _lines(module):
    """Return what the module logs and prints, without times and its name."""
    script = f"import {module} as idist\nidist.show_config()\n"
    script += "with idist.Parallel() as p: p.run(print, 'called')\n"
    script += "with idist.Parallel('gloo') as p: idist.show_config()\n"
    environ = {**worlds.rank_environment(), "MASTER_PORT": str(free_port())}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=patient(100),
        check=True,
    )
    wanted = [line for line in done.stderr.splitlines() if "INFO" in line]
    return [line.partition("INFO: ")[2] for line in wanted], done.stdout


def test_it_prints_as_ignite_does():
    assert _lines("asynccoll.sync") == _lines("ignite.distributed")


@pytest.mark.parametrize("level", [None, logging.WARNING], ids=["not set up", "with a level"])
def test_a_logger_that_was_set_up_stays_as_it_is(level, request):
    theirs = importlib.import_module("ignite.utils")
    kept = []
    for setup_logger, rank in (
        (theirs.setup_logger, {"distributed_rank": 0}),
        (logs.setup_logger, {"rank": 0}),
    ):
        name = f"{setup_logger.__module__}.{request.node.name}"
        if level is not None:
            logging.getLogger(name).setLevel(level)
        logger = setup_logger(name, **rank)
        kept.append((logger.level, len(logger.handlers), logger.propagate))
    assert kept[0] == kept[1]


def test_it_tells_how_it_spawns_as_ignite_does(caplog, monkeypatch):
    said = []
    for module in (importlib.import_module("ignite.distributed"), idist):
        logger = logging.getLogger(f"{module.Parallel.__module__}.Parallel")
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
        monkeypatch.setattr(logger, "propagate", False)
        caplog.set_level(logging.INFO, logger.name)
        with module.Parallel("gloo", nproc_per_node=2, init_method="file:///tmp/x", daemon=True):
            said.append(caplog.messages[:])
        caplog.clear()
    assert said[0] == said[1]
    assert "nnodes: 1" in said[0][-1]
