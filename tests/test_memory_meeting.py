"""How ranks of a host meet to share memory: if that fails, nothing stays open, and no memory stays lent."""

from __future__ import annotations

import errno
import mmap
import os
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

import asynccoll as ac
from asynccoll.backends.memory import arena
from asynccoll.backends.memory import hub as module
from asynccoll.backends.memory.arena import map_region
from asynccoll.backends.memory.engine import Engine
from asynccoll.backends.memory.hub import Bells, Hub
from asynccoll.backends.memory.layout import ABORTED, BLOCK_WORDS, CLOSED, LEFT, STATE
from asynccoll.backends.memory.neighbours import Descriptors, Failed
from asynccoll.backends.memory.sharing import share
from asynccoll.host.store import Clients
from asynccoll.transport.communicator import Opening
from patience import patient

SIZE = 3


@pytest.fixture
def clients() -> Iterator[list[Clients]]:
    """Connect some ranks, which are threads here, to one store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=patient(30)))
    connected = [Clients(store) for _ in range(SIZE)]
    for one in connected:
        with one.borrow() as client:
            client.set("warm", "")
    yield connected
    for one in connected:
        one.close()


def met(clients: list[Clients], size: int) -> list[Hub | Failed]:
    """Let all ranks meet; return the outcome on each."""

    def meet(rank: int) -> Hub | Failed:
        try:
            return Hub.meet(clients[rank], "0", range(size), rank, patient(30))
        except Failed as failed:
            return failed

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(meet, range(size)))


def test_a_hub_whose_rank_cannot_tell_of_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    hub = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(Hub, "meet", lambda *_: hub)

    def borrow() -> None:
        raise RuntimeError("the store is gone")

    clients: Any = SimpleNamespace(borrow=borrow)
    with pytest.raises(RuntimeError, match="store is gone"):
        share(cast("Any", None), clients, [0, 0], 0, 1.0)
    assert closed == [True]


def test_a_host_whose_ranks_do_not_say_whether_they_share_memory_is_waited_for_once(
    clients: list[Clients],
) -> None:
    with pytest.raises(ac.CollectiveTimeoutError, match=r"after 0\.1 s 1 hosts had not said"):
        share(cast("Any", None), clients[0], [0, 1], 0, 0.1)


def does_not_come(*arguments: Any) -> list[Descriptors]:
    raise Failed("it cannot come")


def comes_and_fails(*arguments: Any) -> list[Descriptors]:
    _, index, *_ = arguments
    for number, handed in enumerate(HAND_IN(*arguments)):
        if number != index:
            handed.close()
    raise Failed("it cannot go on")


def does_not_prove(*arguments: Any) -> None:
    raise Failed("it reads something else")


HAND_IN = module.hand_in


def _of_the_last(fails: Callable[..., list[Descriptors]]) -> Callable[..., list[Descriptors]]:
    return lambda *arguments: (fails if arguments[1] == SIZE - 1 else HAND_IN)(*arguments)


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("hand_in", _of_the_last(does_not_come)),
        ("hand_in", _of_the_last(comes_and_fails)),
        ("prove", does_not_prove),
    ],
    ids=["one does not come", "one fails when all have come", "they do not share memory"],
)
def test_a_meeting_that_fails_leaves_no_descriptor(
    clients: list[Clients], monkeypatch: pytest.MonkeyPatch, place: str, fault: Callable[..., Any]
) -> None:
    """No descriptor is closed twice either: its number may be another file's by then."""
    twice: list[int] = []
    close = os.close

    def closed(descriptor: int) -> None:
        try:
            close(descriptor)
        except OSError:
            twice.append(descriptor)
            raise

    monkeypatch.setattr(module, place, fault)
    monkeypatch.setattr(os, "close", closed)
    before = sorted(os.listdir("/proc/self/fd"))
    assert all(isinstance(one, Failed) for one in met(clients, SIZE))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not twice


def test_ranks_are_of_one_user_whose_effective_ids_are_one(
    clients: list[Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a peer's effective ids; in a set-uid program the real ids differ."""
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    for hub in met(clients, 2):
        assert isinstance(hub, Hub)
        hub.close()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert all(isinstance(one, Failed) for one in met(clients, SIZE))


@pytest.fixture
def hubs(clients: list[Clients]) -> Iterator[list[Any]]:
    """Make the hubs of two ranks."""
    made: list[Any] = met(clients, 2)
    yield made
    for one in made:
        if one._handed:
            one.close()


def test_a_closed_hub_rings_no_bell(hubs: list[Any], tmp_path: Path) -> None:
    """The bell's number may be another file's by then; a thread that still waits would write to that file."""
    bell = hubs[0]._handed[1].bell
    hubs[0].close()
    with open(tmp_path / "other", "wb") as other:
        os.dup2(other.fileno(), bell)
        with suppress(OSError):
            hubs[0].ring(1)
        os.close(bell)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_closed_hub_lends_no_memory(hubs: list[Any]) -> None:
    """The descriptor may be another file's by then, and giving the memory back would punch holes in it."""
    hubs[0].close()
    with pytest.raises(OSError, match="left its world"):
        hubs[0]._arena.lend(2)


def test_programs_that_a_rank_executes_inherit_none_of_its_descriptors(hubs: list[Any]) -> None:
    """Otherwise those programs would keep the memory alive as long as they run."""
    held = [descriptor for hub in hubs for one in hub._handed.values() for descriptor in one.all()]
    assert not any(map(os.get_inheritable, held))


def opening(clients: list[Clients], rank: int, *, meeting: float) -> Opening:
    """Make the opening of a lane of both ranks."""
    return Opening(
        ranks=(0, 1),
        rank=rank,
        is_world=True,
        group="world",
        lane="default",
        epoch=0,
        clients=clients[rank],
        timeout=patient(30),
        meeting=meeting,
        given_up=lambda: False,
        disagreed=lambda place, error: None,
        store_answers=lambda: True,
    )


@pytest.mark.parametrize("early", [0, 1])
def test_a_lane_that_one_does_not_come_to_takes_no_memory(
    hubs: list[Any], clients: list[Clients], early: int
) -> None:
    """If one rank has given up when the other joins, the other is told, and does not wait for data."""
    with pytest.raises(ac.CollectiveTimeoutError):
        hubs[early].region(opening(clients, early, meeting=0.0))
    with pytest.raises(ac.PeerLostError, match="given up"):
        hubs[1 - early].region(opening(clients, 1 - early, meeting=patient(30)))
    assert not hubs[0]._arena._lent


@pytest.mark.parametrize("failing", [0, 1])
def test_who_cannot_map_a_lane_has_left_it(
    hubs: list[Any], clients: list[Clients], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have agreed to use it by then: the others learn of it at once, and the memory is given back."""
    other = 1 - failing

    def unmapped(descriptor: int, offset: int, length: int) -> mmap.mmap:
        if descriptor == hubs[failing]._handed[0].arena:
            raise OSError(errno.ENOMEM, "no address space")
        return map_region(descriptor, offset, length)

    monkeypatch.setattr(module, "map_region", unmapped)
    with ThreadPoolExecutor(2) as pool:
        opened = [
            pool.submit(hubs[rank].region, opening(clients, rank, meeting=patient(30))) for rank in (0, 1)
        ]
    with pytest.raises(OSError, match="no address space"):
        opened[failing].result()
    region, parking = opened[other].result()
    engine = Engine(region, Bells(hubs[other], parking, (0, 1), other), "the lane", (0, 1))
    assert engine._gone() == [failing]
    assert len(hubs[0]._arena._lent) == 1
    engine.stop(CLOSED, ac.AbortedError("closed"))
    hubs[0]._arena.lend(2)
    assert len(hubs[0]._arena._lent) == 1, "the memory that all have left is still lent"


def test_memory_that_cannot_be_mapped_is_lent_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmapped(descriptor: int, offset: int, length: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "no address space")

    with closing(arena.Arena()) as memory:
        with monkeypatch.context() as patched:
            patched.setattr(arena, "map_region", unmapped)
            with pytest.raises(OSError, match="no address space"):
                memory.lend(2)
        assert memory.lend(2)[0] == arena.PAGE
        assert memory.lend(2)[0] > arena.PAGE


def test_a_lender_that_is_closed_while_it_waits_raises_what_ended_the_wait(
    hubs: list[Any], clients: list[Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(opening: Opening, key: str) -> None:
        hubs[0].close()
        raise RuntimeError("the store does not answer")

    monkeypatch.setattr(module, "_meet", meet)
    with pytest.raises(RuntimeError, match="does not answer"):
        hubs[0].region(opening(clients, 0, meeting=patient(30)))


def test_a_lender_that_cannot_ask_what_was_agreed_on_has_left(
    hubs: list[Any], clients: list[Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may have agreed to use the memory: it stays theirs, and they learn that this rank left."""

    def meet(opening: Opening, key: str) -> None:
        raise RuntimeError("the store does not answer")

    monkeypatch.setattr(module, "_meet", meet)
    with pytest.raises(RuntimeError, match="does not answer"):
        hubs[0].region(opening(clients, 0, meeting=patient(30)))
    (lent,) = hubs[0]._arena._lent
    words = array("Q", lent.mapping[: BLOCK_WORDS * 8])
    assert (words[STATE], words[LEFT]) == (ABORTED, 1)
