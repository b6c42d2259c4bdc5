"""Communicators of lanes that cannot be opened or closed, and helper threads with unexpected errors."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

import asynccoll as ac
from asynccoll import flight, host
from asynccoll.backends.c10d import communicator as native
from asynccoll.backends.c10d.channels import Channels
from asynccoll.backends.c10d.communicator import C10dCommunicator
from asynccoll.backends.memory.communicator import MemoryCommunicator
from asynccoll.backends.memory.layout import ABORTED, CLOSED
from asynccoll.backends.memory.messages import Messages
from asynccoll.backends.serial.backend import SerialBackend
from asynccoll.health.confirming import Confirmations
from asynccoll.host.call_site import Spot
from asynccoll.order import job
from asynccoll.order.connection import Connection
from asynccoll.order.cut import Verdict
from asynccoll.order.operation import Estimate
from asynccoll.runtime.process import current
from asynccoll.testing import simulate
from asynccoll.transport.completion import READY, Completion, Promise
from asynccoll.world.context import Context, Identity
from patience import patient


class Ending:
    """A communicator, or a message region, that notes how it ends; Ctrl-C strikes where ``struck`` says."""

    region: Any

    def __init__(self, name: str, ended: list[str], struck: str) -> None:
        self._name = name
        self._ended = ended
        self._struck = struck

    def __getattr__(self, how: str) -> Any:
        if how not in ("abort", "close", "flush", "stop"):
            raise AttributeError(how)
        return lambda *_: self._end(f"{how} {self._name}")

    def _end(self, how: str) -> None:
        self._ended.append(how)
        if how == self._struck:
            raise KeyboardInterrupt


def test_a_lane_whose_communicator_could_not_be_made_makes_it_for_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next call used to be queued forever."""
    context = Context(SerialBackend(), Identity(), check="off")
    lane = context.world.lane("again")

    def fails(*_: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as failing:
        failing.setattr(SerialBackend, "open", fails)
        with pytest.raises(OSError, match="no room"):
            lane.issue(Estimate("first"), lambda _: READY)
    assert lane.issue(Estimate("second"), lambda _: READY).done()
    recorded = flight.read(context.recorder.buffer)
    assert recorded is not None
    assert [(one.operation, one.sequence) for one in recorded.calls] == [("second", 1)]


def test_a_call_is_recorded_before_native_code_gets_it() -> None:
    """Native code may block in it or end the process, and a launcher could not tell what was called."""
    context = Context(SerialBackend(), Identity(), check="off")
    lane, seen = context.world.lane("recorded"), []

    def recorded() -> list[tuple[str, int, int, str]]:
        found = flight.read(context.recorder.buffer)
        assert found is not None
        return [
            (one.operation, one.sequence, found.reached("world", lane.key), one.state) for one in found.calls
        ]

    def start(_: object) -> Completion:
        seen.append(recorded()[-1])
        if len(seen) == 2:
            raise OSError("no room")
        return READY

    lane.issue(Estimate("first"), start)
    with pytest.raises(OSError, match="no room"):
        lane.issue(Estimate("fails"), start)
    assert recorded() == [("first", 1, 1, "in flight")]  # a call that was not accepted is not recorded
    lane.issue(Estimate("second"), start)
    assert seen == [(name, n, n, "in flight") for name, n in (("first", 1), ("fails", 2), ("second", 2))]


@pytest.mark.parametrize("starts", [False, True])
def test_a_lane_is_closed_though_ctrl_c_strikes_as_its_closer_starts(
    starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``finalize`` closes it, and fails what is in flight."""
    context = Context(SerialBackend(), Identity(), check="off")
    lane = context.world.lane("closed")
    operation = lane.issue(Estimate("in flight"), lambda _: Promise())
    start = host.Thread.start

    def struck(thread: host.Thread) -> NoReturn:
        if starts:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as striking:
        striking.setattr(host.Thread, "start", struck)
        with pytest.raises(KeyboardInterrupt):
            context.world.close_lane("closed")
    context.close(abort=True)
    assert isinstance(operation.failure, ac.AbortedError)


class Stuck:
    """A native group whose destructor waits."""

    def __init__(self, end: threading.Event) -> None:
        self._end = end

    def __del__(self) -> None:
        self._end.wait(patient(10.0))


def test_groups_that_are_being_destroyed_when_ctrl_c_strikes_are_awaited_at_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a thread of gloo ended while the interpreter does, the process would be aborted."""
    end = threading.Event()

    def struck(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as striking:
        striking.setattr(threading.Thread, "join", struck)
        with pytest.raises(KeyboardInterrupt):
            native._destroy([Stuck(end)])  # type: ignore[list-item]
    (thread,) = native._destroying._running
    assert thread.is_alive()
    end.set()
    native._destroying.join(patient(10.0))
    assert not thread.is_alive()


@pytest.mark.parametrize("struck", ["abort first", "close first", "close last"])
def test_whatever_one_communicator_raises_the_others_are_ended(struck: str) -> None:
    ended: list[str] = []
    made = iter([Ending("first", ended, struck), Ending("last", ended, struck)])
    connection = Connection("a lane", host.Lock(), lambda epoch: next(made), list, print)  # type: ignore[arg-type,return-value]
    connection.open(waits=False)
    replaced = connection.replace(1, waits=False)
    assert replaced is not None
    connection.retire(replaced)
    with pytest.raises(KeyboardInterrupt):
        connection.close(abort=False, in_step=True)
    assert ended == ["abort first", "close first", "close last"]


def test_messages_that_ctrl_c_strikes_as_they_end_leave_all_ranks() -> None:
    """They would otherwise wait for this rank's messages until its process ends."""
    ended: list[str] = []
    messages = Messages(lambda *_: None, lambda job: None, None)  # type: ignore[arg-type,return-value]
    messages._pairs = {peer: Ending(str(peer), ended, "flush 2") for peer in (1, 2, 3)}  # type: ignore[misc]
    with pytest.raises(KeyboardInterrupt):
        messages.stop(CLOSED, ac.AbortedError("its lane was closed"))
    assert sorted(ended) == [f"{how} {peer}" for how in ("flush", "stop") for peer in (1, 2, 3)]


def test_a_communicator_whose_collectives_ctrl_c_strikes_ends_its_messages_too() -> None:
    ended: list[str] = []
    engine = Ending("collectives", ended, "stop collectives")
    engine.region = SimpleNamespace(size=2)
    communicator = MemoryCommunicator(engine, Ending("messages", ended, ""), print)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        communicator.abort()
    assert ended == ["stop collectives", "stop messages"]


@pytest.mark.parametrize("struck", ["", "abort within", "abort across"])
def test_the_parts_of_a_communicator_by_node_are_aborted_all(struck: str) -> None:
    """Also parts that are opened after the abort: other ranks wait in each of them."""
    ended: list[str] = []
    parts = Ending("within", ended, struck), Ending("across", ended, struck)
    for late in (False, True):
        ended.clear()
        communicator = C10dCommunicator({}, Channels(print, 0, print), 4, print, on_cpu=True)
        communicator.open_parts_with(lambda: parts)  # type: ignore[arg-type,return-value]
        first, then = communicator.open_parts, communicator.abort
        communicator._transports = {"cpu": Ending("itself", ended, "")}  # type: ignore[dict-item]
        communicator._abort_collectives = lambda: ended.append("abort itself")  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt) if struck else nullcontext():
            for step in (then, first) if late else (first, then):
                step()
        assert {"abort within", "abort across", "abort itself"} <= {*ended}, (late, ended)


def test_a_message_after_the_end_of_its_lane_opens_nothing() -> None:
    opened: list[int] = []
    messages = Messages(lambda peer, _: opened.append(peer), lambda job: job(), None)  # type: ignore[arg-type,return-value]
    messages.stop(ABORTED, ac.PeerLostError("its lane was given up"))
    for begun in (messages.send(torch.ones(2), 1, 0), messages.recv(torch.ones(2), 1, 0)):
        assert begun.done()
        assert isinstance(begun.error(), ac.PeerLostError)
    assert not opened
    assert not messages._waiting


def test_a_line_of_code_that_is_gone_gives_its_place_to_no_other() -> None:
    """Lines of calls are keyed by the address of their code."""
    engine = Ending("collectives", [], "")
    engine.region = SimpleNamespace(size=2)
    communicator = MemoryCommunicator(engine, Ending("messages", [], ""), print)  # type: ignore[arg-type]
    code = compile("pass", "gone", "exec")
    address = id(code)
    communicator.announce(("barrier",), Spot(code, 0), 1, 1, False)
    assert b"gone" in communicator._call("barrier")[1]
    communicator.announce(None, None, 2, 1, False)
    del code
    others = [compile("pass", f"other {number}", "exec") for number in range(100)]
    assert address not in map(id, others)


def test_a_mistake_while_a_refusal_is_settled_ends_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends immediately with its own error; calls on the lane used to wait for their timeout."""

    def wrong(_: object) -> Verdict:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(Verdict, "of", wrong)

    async def main(rank: int) -> str:
        with pytest.raises(ac.InvalidArgumentError if rank == 0 else ac.PeerRefusedError):
            await ac.broadcast(torch.ones(2), src=0 if rank else 7)
        before = host.monotonic()
        with pytest.raises(ac.CollectiveError) as raised:
            await ac.all_reduce(torch.ones(2))
        assert host.monotonic() - before < 5
        return str(raised.value)

    report = simulate(main, world_size=2, timeout=100)
    report.check()
    assert any("a mistake of ours" in str(said) for said in report.results.values()), report.results


def test_a_mistake_while_calls_are_compared_ends_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """The held call and all later held calls of the world used to wait for their timeouts."""

    def wrong(*_: object) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(Confirmations, "_tell", wrong)

    async def main(rank: int) -> list[str]:
        said: list[str] = []
        for lane in ("one", "two"):
            before = host.monotonic()
            with pytest.raises(ac.CollectiveError) as raised:
                await ac.all_reduce(torch.ones(2), lane=lane)
            assert host.monotonic() - before < 5
            said.append(str(raised.value))
        return said

    report = simulate(main, world_size=2, nodes=2, timeout=100)
    report.check()
    assert any("a mistake of ours" in one for said in report.results.values() for one in said), report.results  # type: ignore[attr-defined]


class Retired:
    """A communicator with half-matched calls, which cannot be closed before the lane is."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def retire(self) -> bool:
        return False

    def inherit(self, previous: object) -> None:
        pass

    def abort(self) -> None:
        self._said.append("abort")

    def close(self) -> None:
        self._said.append("close")


def test_a_retired_communicator_without_a_successor_is_aborted_and_closed_once() -> None:
    """It was taken for the lane's latest one as well."""
    said: list[str] = []
    closing = threading.Event()

    def make(epoch: int) -> Any:
        if not epoch:
            return Retired(said)
        assert closing.wait(patient(30))
        raise RuntimeError("given up")

    connection = Connection("a lane", threading.Lock(), make, lambda: None, lambda error: None)
    connection.open(waits=False)
    replaced = connection.replace(1, waits=True)
    assert replaced is not None
    connection.retire(replaced)
    closing.set()
    connection.close(abort=False, in_step=True)
    assert said == ["abort", "close"]


def test_what_a_lane_still_does_as_it_is_lost_belongs_to_the_call() -> None:
    """Its memory may be written to until then; and nothing else keeps it alive."""
    lane, last = current().world.lane("lost as it is driven"), Promise()

    def program(communicator: object) -> Generator[Completion, None, Completion]:
        lost = threading.Thread(target=lane.break_off, args=(ac.CollectiveError("lost"),))
        lost.start()
        lost.join()
        return last
        yield

    operation = lane.run("a call", program, awaited_soon=True)
    assert isinstance(operation.completion, Promise)
    assert operation.completion.source is last
    assert job._SETTLED.source is None
    ac.close_lane("lost as it is driven")
