"""An operation's timeout alone limits how long it may take, not the context's or the library's timeout.

A rank is late on purpose: it calls only when another one has timed out.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import asynccoll as ac
import worlds
from asynccoll.backends.horovod import library as horovod_library
from patience import patient
from ranks import Rank, raising

#: The timeout passed to `initialize`.
CONTEXT_SECONDS = patient(2)
SIZES = [size for size in worlds.WORLD_SIZES if size in (2, 3, 5)]


def calls(me: Rank, timeout: float) -> list[Any]:
    """Return one call of each kind: on an open lane, on a new one, of several native calls, a message."""
    works = [
        ac.all_reduce(torch.tensor([10.0**me.rank]), timeout=timeout),
        ac.all_reduce(torch.tensor([10.0**me.rank]), lane="fresh", timeout=timeout),
        ac.all_gather_object(f"from {me.rank}", lane="objects", timeout=timeout),
    ]
    if not me.lacks("send"):
        last = me.size - 1
        if me.rank == last:
            works.append(ac.send(torch.tensor([7.0]), dst=0, timeout=timeout))
        elif me.rank == 0:
            works.append(ac.recv(torch.empty(1), src=last, timeout=timeout))
    return works


def results(me: Rank, got: list[Any]) -> None:
    total = float(sum(10**rank for rank in range(me.size)))
    assert [got[0].tolist(), got[1].tolist()] == [[total], [total]]
    assert got[2] == [f"from {rank}" for rank in range(me.size)]
    if me.rank == 0 and len(got) > 3:
        assert got[3].tolist() == [7.0]


async def longer(me: Rank) -> None:
    if not me.lacks("send"):  # so that the messages below wait in an open channel, not for its opening
        if me.rank == 0:
            await me.get(ac.recv(torch.empty(1), src=me.size - 1))
        elif me.rank == me.size - 1:
            await me.get(ac.send(torch.ones(1), dst=0))
    if me.rank == me.size - 1:
        me.see("past the limit of the context")
    works = calls(me, patient(60))
    if me.rank == 0:
        with raising(ac.CollectiveTimeoutError, "await the same work again"):
            works[0].wait(timeout=1.3 * CONTEXT_SECONDS)
        assert not any(work.done() for work in works)
        me.show("past the limit of the context")
    results(me, [await me.get(work) for work in works])
    assert await me.get(ac.all_reduce(1)) == me.size


async def shorter(me: Rank) -> None:
    if me.rank == me.size - 1:
        me.see("past the limit of the call")
        works = calls(me, patient(60))
    else:
        works = calls(me, 0.05)
    if me.rank == 0:
        for work in (*works, works[0]):
            with raising(ac.CollectiveTimeoutError, "await the same work again"):
                await me.get(work)
        me.show("past the limit of the call")
    results(me, [await me.until_ready(work) for work in works])


@pytest.mark.parametrize("size", SIZES[-1:])  # each takes long
@pytest.mark.parametrize(
    "backend", [pytest.param(one, marks=[pytest.mark.nightly] * (one != "gloo")) for one in worlds.BACKENDS]
)
def test_a_call_may_take_longer_than_the_context_says(backend: str, size: int) -> None:
    """The peer calls after `initialize(timeout=)` has passed: awaited again, every kind of call is right."""
    with worlds.fresh(backend, size, timeout=CONTEXT_SECONDS) as world:
        world.run(longer, timeout=60)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", worlds.BACKENDS)
def test_a_call_may_take_less_and_be_awaited_again(backend: str, size: int) -> None:
    """It fails at its own timeout, each time it is awaited, and gives its result once the peer has called."""
    worlds.world(backend, size).run(shorter, timeout=60)


class Horovod:
    """The part of Horovod that starting it uses."""

    def __init__(self, init: Any) -> None:
        self.init = init

    def is_initialized(self) -> bool:
        return False


def test_horovods_own_limit_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has set it. Its rendezvous, which uses the same limit, is bounded by ours."""
    monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS", raising=False)
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    limits: list[str | None] = []

    def init(comm: Any) -> None:
        limits.append(horovod_library.os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS"))

    horovod_library.start(Horovod(init), None, None, 10.0)
    assert int(limits[0] or 0) > 365 * 86_400
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "40")
    horovod_library.start(Horovod(init), None, None, 10.0)
    assert limits[1] == "40"
    never = threading.Event()
    with pytest.raises(ac.CollectiveTimeoutError, match=r"within 0\.1 s"):
        horovod_library.start(Horovod(lambda comm: never.wait()), None, None, 0.1)
    never.set()


def fails(comm: Any) -> None:
    raise ac.LaunchEnvironmentError("of Horovod")


def test_what_horovods_init_raises_is_raised() -> None:
    """That holds although it is called in another thread."""
    with pytest.raises(ac.LaunchEnvironmentError, match="of Horovod"):
        horovod_library.start(Horovod(fails), None, None, 10.0)
