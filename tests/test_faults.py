"""If a rank is killed, the survivors get an error that names it within seconds."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import asynccoll as ac
import worlds
from ranks import Rank


async def one_dies(me: Rank, victim: int, lane: str | None) -> tuple[str, tuple[int, ...], float]:
    await me.get(ac.all_reduce(1, lane=lane))
    if me.rank == victim:
        me.is_killed_once_all_wait()
    work = ac.all_reduce(torch.ones(1000), lane=lane)
    assert not work.done()
    me.show(f"{me.rank} waits")
    start = time.monotonic()
    try:
        await me.get(work)
    except ac.PeerLostError as error:
        return str(error), tuple(error.ranks), time.monotonic() - start
    raise AssertionError("gave a result without the dead rank")


@pytest.mark.processes
@pytest.mark.parametrize("backend", worlds.BACKENDS)
@pytest.mark.parametrize(
    ("size", "victim", "runner"),
    [
        (2, 1, "asyncio"),
        (2, 0, "blocking"),
        (4, 2, "trio"),
        pytest.param(4, 0, "asyncio", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_rank_is_named(backend: str, size: int, victim: int, runner: str) -> None:
    """After kill -9 in the middle of an operation, PeerLostError names the rank within seconds."""
    with worlds.fresh(backend, size) as world:
        results = world.run(one_dies, victim, None, runner=runner, dies=[victim], timeout=30)
        world.kill()
    assert results[victim] == worlds.Died(-signal.SIGKILL)
    for rank, result in enumerate(results):
        if rank != victim:
            text, lost, seconds = result
            assert lost == (victim,), f"rank {rank} was told {lost}: {text}"
            assert f"rank {victim}" in text
            assert seconds < 10, f"rank {rank} heard of it after {seconds} s"


async def afterwards(me: Rank) -> list[str]:
    heard = []
    await me.get(ac.all_reduce(1))
    if me.rank == 1:
        me.see("0 waits")
        os.kill(os.getpid(), signal.SIGKILL)
    work: Any = ac.all_reduce(1)
    me.show("0 waits")
    for _ in range(3):
        try:
            if work is None:
                work = ac.all_reduce(1)
            await me.get(work)
        except ac.AsyncCollError as error:
            heard.append(type(error).__name__)
        work = None
    start = time.monotonic()
    ac.finalize(abort=True)
    assert time.monotonic() - start < 10, "finalize waits for the dead"
    return heard


@pytest.mark.processes
@pytest.mark.parametrize("backend", worlds.BACKENDS)
def test_later_calls_fail_at_once_and_finalize_ends(backend: str) -> None:
    """After a loss each call raises a typed error, and finalize(abort=True) is quick."""
    with worlds.fresh(backend, 2) as world:
        results = world.run(afterwards, dies=[1], timeout=40)
        world.kill()
    assert len(results[0]) == 3
    assert results[0][0] == "PeerLostError"
