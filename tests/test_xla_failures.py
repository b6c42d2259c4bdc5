"""Failures on XLA's replicas, which share one process: whose error it is, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

import asynccoll as ac
import needs
import worlds
from asynccoll.runtime.process import current
from patience import patient
from ranks import Rank, raising
from worlds import World

pytestmark = pytest.mark.skipif(
    not needs.has_package("torch_xla", "xla-tpu"),
    reason="torch_xla is not here; `make xla` runs this file in an environment that has it",
)


def replicas() -> World:
    """The world of the tests here; each test breaks only its own lane."""
    return worlds.world("xla-tpu", 3)


#: Through which ranks show each other objects, as they are threads of one process.
shared: dict[Any, Any] = {}


@contextmanager
def instead(of: Any, name: str, function: Callable[..., object]) -> Iterator[None]:
    """Within the block, the attribute ``name`` of the instance ``of`` is ``function``."""
    setattr(of, name, function)
    try:
        yield
    finally:
        delattr(of, name)


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("this device is broken")


def heard(call: Callable[[], ac.Work[Any]]) -> BaseException | None:
    """Return the error of the call, whether the call or the wait raises it."""
    try:
        call().wait(patient(20))
    except ac.AsyncCollError as error:
        return error
    return None


def errors_of_their_own(me: Rank) -> None:
    backend: Any = current().backend
    ac.barrier().wait()
    if me.rank == 1:
        with instead(backend.xla, "settle", broken):
            shared[me.rank] = heard(lambda: ac.all_reduce(torch.ones(2)))
    else:
        shared[me.rank] = heard(lambda: ac.all_reduce(torch.ones(2)))
    shared[me.rank].add_note(f"of rank {me.rank}")
    ac.barrier().wait()
    for rank in range(me.size):
        error = shared[rank]
        assert "rank 1 has no input: this device is broken" in str(error)
        assert error.__notes__ == [f"of rank {rank}"]
    assert len({id(shared[rank]) for rank in range(me.size)}) == me.size


def test_each_rank_gets_an_error_of_its_own() -> None:
    """A launch has failed for all of them: each error has its own traceback, notes and attributes."""
    replicas().run(errors_of_their_own)


def cannot_go_on(me: Rank) -> str:
    backend: Any = current().backend
    ac.barrier().wait()
    wait = backend.xla.wait

    def fails_to_end() -> None:
        if sys._getframe(1).f_code.co_name == "end":
            broken()
        wait()

    if me.rank == 1:
        with instead(backend.xla, "wait", fails_to_end):
            return str(heard(lambda: ac.all_gather(me.rank, lane="given up")))
    while (told := heard(lambda: ac.all_gather(me.rank, lane="given up"))) is None:
        me.at("a call that rank 1 has joined")
    assert isinstance(told, ac.PeerLostError), repr(told)
    assert told.ranks == (1,)
    return str(told)


def test_a_rank_whose_own_failure_ends_a_lane_is_named() -> None:
    """The error says what went wrong there, since its process lives and it has not left."""
    texts = replicas().run(cannot_go_on)
    assert "this device is broken" in texts[1]
    for text in (texts[0], texts[2]):
        assert "rank 1 has given up" in text
        assert "this device is broken" in text


def opens_and_closes(me: Rank) -> int:
    backend: Any = current().backend
    ac.barrier().wait()
    rooms = backend._replicas._rooms
    before = len(rooms)
    ac.barrier(lane="between").wait()
    for k in range(50):
        ac.barrier(lane=f"lane {k}").wait()
        ac.close_lane(f"lane {k}")
    ac.barrier(lane="between").wait()
    return len(rooms) - before


def test_lanes_that_were_closed_leave_nothing_behind() -> None:
    assert max(replicas().run(opens_and_closes)) <= 1


def writes_late(me: Rank) -> None:
    context = current()
    backend: Any = context.backend
    out, held = torch.zeros(2), threading.Event()
    ac.barrier().wait()
    lane = context.world.lane("late")
    if me.rank == 0:
        wait = backend.xla.wait

        def waits_to_end() -> None:
            if sys._getframe(1).f_code.co_name == "end":
                me.show("0 is about to write")
                held.wait(patient(20))
            wait()

        with instead(backend.xla, "wait", waits_to_end):
            work = ac.all_reduce(torch.ones(2), out=out, lane="late")
            me.see("0 is about to write")
            lane.lose(ac.PeerLostError("lost for a test"))
            assert isinstance(heard(lambda: work), ac.PeerLostError)
            with raising(ac.InvalidArgumentError, "may still write to it"):
                ac.all_reduce(torch.ones(2), out=out, lane="other")
            held.set()
            me.look_until_done(work._operations[0].completion, "it was never over")
        assert out.tolist() == [me.size] * 2
        total = ac.all_reduce(torch.ones(2), out=out, lane="other")
    else:
        assert ac.all_reduce(torch.ones(2), lane="late").wait().tolist() == [me.size] * 2
        with raising(ac.PeerRefusedError, "may still write to it"):
            ac.all_reduce(torch.ones(2), lane="other").wait()
        total = ac.all_reduce(torch.ones(2), lane="other")
    assert total.wait().tolist() == [me.size] * 2


def test_memory_that_a_failed_call_may_still_write_is_not_given_to_another() -> None:
    """The device still has the launch, whatever becomes of the lane."""
    replicas().run(writes_late)


async def calls_in_a_graph(me: Rank, kwargs: dict[str, Any], *, fullgraph: bool, alone: bool) -> None:
    torch._dynamo.reset()
    await me.get(ac.barrier())
    call = torch.compile(
        lambda x: ac.all_reduce(x, **kwargs).wait() + 1, backend="eager", fullgraph=fullgraph
    )
    if me.rank == 0 or not alone:
        with raising(ac.UnsupportedOpError, "outside the compiled code", "torch.compiler.disable"):
            call(torch.ones(2))
    else:
        with raising(ac.PeerRefusedError, "rank 0 refused", "outside the compiled code"):
            await me.get(ac.all_reduce(torch.ones(2), **kwargs))
    assert await me.get(ac.all_reduce(1, **kwargs)) == me.size


async def compiled(me: Rank) -> None:
    ranks = list(range(me.size))
    whole: list[dict[str, Any]] = [{}, {"lane": "other"}, {"group": ranks}, {"group": ac.new_group(ranks)}]
    for number, kwargs in enumerate(whole):
        with me.case(f"{kwargs}"):
            await calls_in_a_graph(me, kwargs, fullgraph=number % 2 == 0, alone=number > 0)
    await me.get(ac.barrier())
    total = torch.compiler.disable(lambda x: ac.all_reduce(x).wait())
    step = torch.compile(lambda x: total(x * 2) + 1, backend="eager")
    assert step(torch.ones(2)).tolist() == [2 * me.size + 1] * 2


def test_a_call_in_a_graph_is_refused_with_our_error_and_the_others_are_told() -> None:
    """Ranks that are threads have no torch process group; outside the graph the call works."""
    replicas().run(compiled, runner="blocking", timeout=60)


def in_a_forked_child(function: Callable[[], object]) -> str:
    """Return what ``function`` returns in a forked child, or "" if it takes longer than a test may."""
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            os.write(there, str(function()).encode())
        os._exit(0)
    os.close(there)
    ready, _, _ = select.select([here], [], [], patient(10))
    text = os.read(here, 1000).decode() if ready else ""
    os.close(here)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return text


async def on_host(work: ac.Work[Any]) -> object:
    return (await work.on_host()).device.type


def forks(me: Rank) -> None:
    done = ac.all_reduce(torch.ones(3, device=ac.device()))
    assert done.wait().cpu().tolist() == [me.size] * 3
    if me.rank == 0:
        flying = ac.all_reduce(torch.ones(4))
        refused = in_a_forked_child(lambda: repr(heard(lambda: flying)))
        assert "was forked from rank 0" in refused
        assert in_a_forked_child(lambda: asyncio.run(on_host(done))) == "xla"
        me.show("0 has forked")
    else:
        me.see("0 has forked")
        flying = ac.all_reduce(torch.ones(4))
    assert flying.wait().tolist() == [me.size] * 4


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    """The fork happens with a call in flight, which continues in the parent."""
    replicas().run(forks)
