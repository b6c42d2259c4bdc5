"""Starting replicas: spawn and Parallel, what initialize refuses, and what a failure looks like."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import asynccoll as ac
import needs
import spawned
from asynccoll.launch.engines import run
from asynccoll.launch.request import RunRequest
from patience import patient
from worlds import rank_environment

HAS_XLA = needs.has_package("torch_xla", "xla-tpu")
needs_xla = pytest.mark.skipif(
    not HAS_XLA, reason="torch_xla is not here; `make xla` runs this in an environment that has it"
)


@needs_xla
@pytest.mark.parametrize("ranks", [1, 3])
def test_spawn_runs_the_function_on_every_replica(ranks: int, tmp_path: Path) -> None:
    """The function gets its rank, then args and kwargs_dict, in a world of that size."""
    ac.spawn(
        "xla-tpu", spawned.tell, (str(tmp_path), 7), {"key": [1]}, nproc_per_node=ranks, timeout=patient(60)
    )
    total = ranks * (ranks + 1) // 2
    assert spawned.told(tmp_path) == [
        {
            "local": rank,
            "rank": rank,
            "size": ranks,
            "per node": ranks,
            "backend": "xla-tpu",
            "total": total,
            "args": (7,),
            "kwargs": {"key": [1]},
        }
        for rank in range(ranks)
    ]
    assert not ac.is_initialized()


@needs_xla
def test_parallel_starts_replicas(tmp_path: Path) -> None:
    """It does so as on any backend."""
    with ac.Parallel("xla-tpu", nproc_per_node=2) as parallel:
        parallel.run(spawned.tell, str(tmp_path))
    assert [(one["rank"], one["total"]) for one in spawned.told(tmp_path)] == [(0, 3), (1, 3)]


@needs_xla
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_first_failure_is_raised_with_its_rank(culprit: int) -> None:
    """The other replica, which waits for it, is released."""
    with pytest.raises(ac.SpawnError) as caught:
        ac.spawn("xla-tpu", spawned.fail, (culprit,), nproc_per_node=2)
    assert caught.value.rank == culprit
    assert f"LookupError: of rank {culprit}" in str(caught.value)
    assert "in fail" in str(caught.value)


@needs_xla
@pytest.mark.parametrize("do", ["exit", pytest.param("wait", marks=pytest.mark.slow)])
def test_a_failure_is_told_whatever_other_replicas_do(do: str, tmp_path: Path) -> None:
    """They may have ended long before; one that waits for something else is ended with the process."""
    with pytest.raises(ac.SpawnError, match="LookupError: of rank 1") as caught:
        ac.spawn("xla-tpu", spawned.fail_while_others, (1, do, str(tmp_path)), nproc_per_node=2)
    assert caught.value.rank == 1
    assert not list(tmp_path.iterdir()), "it was waited for"


def said_by(code: str, **variables: str) -> str:
    """Return what a script prints; the script must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**rank_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


REFUSED = """
    import asynccoll as ac
    try:
        ac.initialize("xla-tpu"{arguments})
    except ac.{error} as error:
        print(error)
"""


@needs_xla
@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        (", rank=1, world_size=2", {}, "several processes do not form a world"),
        (
            "",
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
            },
            "rank 0 of 1",
        ),
        ("", {"XLA_USE_SPMD": "1"}, "SPMD"),
    ],
)
def test_a_world_that_is_not_the_one_asked_for_is_refused(
    arguments: str, variables: dict[str, str], says: str
) -> None:
    """Each CPU process would be a world of one, and its collectives would return their input."""
    code = REFUSED.format(arguments=arguments, error="LaunchEnvironmentError")
    assert says in said_by(code, PJRT_DEVICE="CPU", **variables)


@needs_xla
def test_a_store_is_refused() -> None:
    """The ranks meet in the runtime instead."""
    code = REFUSED.format(
        arguments=", init_method='tcp://h:1', rank=0, world_size=1", error="InvalidArgumentError"
    )
    assert "finds its ranks through torch_xla's runtime" in said_by(code, PJRT_DEVICE="CPU")


@needs_xla
def test_too_few_threads_of_the_runtime_are_refused() -> None:
    """Three replicas on two threads would wait for each other forever."""
    code = """
        import asynccoll as ac
        from asynccoll.backends.xla.threads import run_replicas

        def one(rank):
            try:
                ac.initialize("xla-tpu")
            except ac.LaunchEnvironmentError as error:
                return str(error)

        print(run_replicas(one)[2])
    """
    said = said_by(code, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="3", XLA_THREAD_POOL_SIZE="2")
    assert "XLA_THREAD_POOL_SIZE=7 (it is 2)" in said


@needs_xla
def test_some_of_the_devices_in_a_process_are_refused() -> None:
    """TPU v3 has them so: neither do all ranks meet here, nor has each process one device."""
    code = """
        import asynccoll as ac
        import torch_xla.runtime as xr
        xr.world_size, xr.addressable_device_count, xr.global_ordinal = lambda: 8, lambda: 2, lambda: 0
        try:
            ac.initialize("xla-tpu", timeout=5)
        except ac.LaunchEnvironmentError as error:
            print(error)
    """
    assert "this process has 2 of 8 devices" in said_by(code, PJRT_DEVICE="CPU")


@needs_xla
def test_a_plain_script_is_a_world_of_one() -> None:
    """In the main thread, without a launcher; its collectives run on the device."""
    code = """
        import asynccoll as ac
        import torch
        ac.initialize("xla-tpu")
        x = torch.ones(2, device=ac.device())
        print(ac.get_world_size(), ac.all_reduce(x).wait().cpu().tolist(), ac.device().type)
        ac.finalize()
    """
    assert said_by(code, PJRT_DEVICE="CPU").strip() == "1 [1.0, 1.0] xla"


def test_run_says_what_to_use_instead() -> None:
    """`asynccoll run` starts processes; replicas are threads."""
    with pytest.raises(ac.UnsupportedOpError, match=r"ac\.Parallel\('xla-tpu', nproc_per_node=n\)"):
        run(RunRequest("train.py", backend="XLA-TPU"))


@pytest.mark.skipif(HAS_XLA, reason="where torch_xla is, it is not missing")
def test_without_torch_xla_the_error_says_what_to_install() -> None:
    """It has the exact command."""
    with pytest.raises(ac.BackendNotFoundError, match="pip install torch_xla"):
        ac.initialize("xla-tpu")
