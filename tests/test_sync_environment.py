"""The environment variables that ``asynccoll.sync`` reads, sets and restores, compared with ignite's."""

from __future__ import annotations

import os
import warnings

import ignite.distributed as theirs
import pytest
from ignite.distributed.comp_models.native import _NativeDistModel

import asynccoll.sync as ours
import worlds
from asynccoll.errors import LaunchEnvironmentError
from asynccoll.sync.environment import Environment
from ports import free_port
from ranks import raising

TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "c[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
}
ONE_NODE = {
    **SLURM,
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
AGREEING = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}


def _without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


ENVIRONMENTS = {
    "nothing": {},
    "torchrun": {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    "no master": {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    "only a master": {"MASTER_ADDR": "a", "MASTER_PORT": "99"},
    "no local rank": {"RANK": "1", "WORLD_SIZE": "2"},
    "only a rank": {"RANK": "0"},
    "slurm": SLURM,
    "slurm, one node": ONE_NODE,
    **{f"slurm without {name}": _without(SLURM, name) for name in SLURM if name != "SLURM_JOB_ID"},
    "slurm and all of torch": {**SLURM, **AGREEING},
    "slurm and another rank": {**SLURM, **AGREEING, "RANK": "0"},
    "slurm and another world": {**SLURM, **AGREEING, "WORLD_SIZE": "8"},
    "one node, more by torch": {**ONE_NODE, **AGREEING},
    "one node, less by torch": {**ONE_NODE, "SLURM_NTASKS": "8", **AGREEING},
    "slurm and MASTER_ADDR alone": {**SLURM, "MASTER_ADDR": "elsewhere"},
    "slurm and half of torch": {**SLURM, "RANK": "3", "WORLD_SIZE": "9"},
    "slurm, a short job number": {**SLURM, "SLURM_JOB_ID": "7"},
    "slurm, several lists": {**SLURM, "SLURM_JOB_NODELIST": "gpu-[007-010,12],login"},
}


def _theirs(rank, world_size):
    _NativeDistModel.setup_env_vars(_NativeDistModel.__new__(_NativeDistModel), rank, world_size)
    return {name: os.environ[name] for name in TORCH}


def _ours(rank, world_size):
    return Environment(rank, world_size).values


def _outcome(read, environ, place, monkeypatch):
    """Return the result of ``read``, or its error, and its warnings."""
    with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for name in (*TORCH, *SLURM, "LOCAL_WORLD_SIZE"):
            patched.setenv(name, "")  # so that whatever is set below is undone
            patched.delenv(name)
        patched.setenv("PATH", "")  # no scontrol: a SLURM installed here would not know these jobs
        for name, value in environ.items():
            patched.setenv(name, value)
        try:
            result = read(*place)
        except Exception as error:
            result = error
    return result, [str(one.message) for one in heard if one.category is UserWarning]


@pytest.mark.parametrize("place", [(None, None), (0, 1)], ids=["by environment", "by arguments"])
@pytest.mark.parametrize("environ", ENVIRONMENTS.values(), ids=ENVIRONMENTS.keys())
def test_read_as_ignite_does(environ, place, monkeypatch):
    expected, warned = _outcome(_theirs, environ, place, monkeypatch)
    got, warned_too = _outcome(_ours, environ, place, monkeypatch)
    if isinstance(expected, Exception):
        assert isinstance(got, type(expected)), f"{got!r}, ignite: {expected!r}"
        assert str(got).replace("\n", " ") == str(expected).replace("\n", " ")
    else:
        assert got == expected
    assert warned_too == warned


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**ENVIRONMENTS["torchrun"], "RANK": "first"}, "RANK='first'"),
        ({**ENVIRONMENTS["torchrun"], "WORLD_SIZE": ""}, "should define env variables"),
        ({**SLURM, **AGREEING, "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
        ({**SLURM, **AGREEING, "SLURM_NTASKS": "4x"}, "SLURM_NTASKS='4x'"),
    ],
    ids=str,
)
def test_a_variable_that_is_empty_or_no_number_is_refused(environ, named, monkeypatch):
    def read(*place):
        found = Environment(*place)
        return found.rank, found.world_size

    got, _ = _outcome(read, environ, (None, None), monkeypatch)
    assert isinstance(got, LaunchEnvironmentError), repr(got)
    assert named in str(got)


def _all_of(idist, environ):
    os.environ.update(environ)
    before = dict(os.environ)
    idist.initialize("gloo")
    during = {name: os.environ.get(name) for name in TORCH}
    where = [
        getattr(idist, name)()
        for name in ("get_rank", "get_world_size", "get_local_rank", "get_nproc_per_node", "get_nnodes")
    ]
    idist.finalize()
    assert dict(os.environ) == before
    return during, where, idist.model_name()


def alone(me, port):
    for environ in ({"MASTER_PORT": str(port)}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}):
        with me.case(str(environ)):
            assert _all_of(ours, environ) == _all_of(theirs, environ)


def test_what_a_program_finds_in_between():
    with worlds.fresh("gloo", 1, bare=True) as world:
        world.run(alone, free_port())


def twice(me):
    before = dict(os.environ)
    ours.initialize("gloo")
    during = dict(os.environ)
    with raising(ValueError, "already initialized"):
        ours.initialize("gloo")
    assert dict(os.environ) == during != before
    ours.finalize()
    assert dict(os.environ) == before


def test_a_second_initialize_that_is_refused_changes_nothing():
    with worlds.fresh("gloo", 1, bare=True) as world:
        world.run(twice)


def launched(me, port, other, local_rank, local_world_size):
    environ = {"RANK": str(me.rank), "WORLD_SIZE": str(me.size), "LOCAL_RANK": str(local_rank)}
    environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if local_world_size:
        environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    got = _all_of(ours, environ)
    theirs.barrier()
    os.environ["MASTER_PORT"] = str(other)
    expected = _all_of(theirs, {**environ, "MASTER_PORT": str(other)})
    assert got[1:] == expected[1:]
    assert {**got[0], "MASTER_PORT": ""} == {**expected[0], "MASTER_PORT": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local_ranks", "told"), [([0, 1, 0, 1], True), ([0, 1, 0, 1], False), ([0, 0], False)], ids=str
)
def test_where_a_launcher_put_us(local_ranks, told):
    """Nodes are counted as in ignite, even where no launcher says how many ranks a node has."""
    port, other = free_port(), free_port()
    per_node = max(local_ranks) + 1 if told else None
    with worlds.fresh("gloo", len(local_ranks), bare=True) as world:
        world.run(launched, port, other, per_rank=[(local, per_node) for local in local_ranks], timeout=60.0)


def adopted(me, port, hint):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=me.rank, world_size=me.size)
    found = []
    for idist in (theirs, ours):
        if hint is not None:
            idist.set_local_rank(hint)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            where = [
                getattr(idist, name)()
                for name in ("get_local_rank", "get_nproc_per_node", "get_nnodes", "get_node_rank")
            ]
        found.append((where, [str(one.message) for one in heard if one.category is UserWarning]))
    assert found[0] == found[1]
    assert bool(found[1][1]) == (hint is None)
    theirs.barrier()
    ours.finalize()


@pytest.mark.slow
@pytest.mark.parametrize("hints", [[0, 1], [0, 0], [None, None]], ids=str)
def test_where_a_group_of_the_user_is(hints):
    with worlds.fresh("gloo", 2, bare=True) as world:
        world.run(adopted, free_port(), per_rank=[(hint,) for hint in hints])
