"""Messages between ranks of one host through memory: right values, whatever their size, tags and order."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asynccoll as ac
import worlds
from asynccoll.backends.api import READY, Completion
from asynccoll.backends.memory.messages import Messages
from asynccoll.backends.memory.pair import Pair
from letters import Letter, begun, check, drawn
from ranks import Rank

#: How many random rounds of messages, and the first seed.
TURNS = int(os.environ.get("ASYNCCOLL_TEST_TURNS", "12"))
SEED = int(os.environ.get("ASYNCCOLL_TEST_SEED", "1"))
#: Element counts: none, within one slot, just above one slot, several MiB.
SIZES = (0, 1, 3, 1000, 40_000, 131_072, 131_073, 700_001)


async def exchanged(me: Rank, turns: int, seed: int) -> None:
    for turn in range(seed, seed + turns):
        letters = drawn(turn, me.size, 20, SIZES)
        works = begun(letters, me.rank, turn)
        random.Random(f"{me.rank} {turn}").shuffle(works)
        for letter, work in works:
            with me.case(f"turn {turn}, {letter}"):
                check(letter, me.rank, await me.get(work))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("runner", ["asyncio", "trio", "blocking"])
def test_messages_of_any_size_in_any_order(size: int, runner: str) -> None:
    worlds.world("memory", size).run(exchanged, TURNS, SEED, runner=runner, timeout=60 + TURNS)


async def unasked(me: Rank) -> int:
    """Send many messages before they are received; return by how many KiB the receiver grew meanwhile."""
    peer, before, works = 1 - me.rank, resident_kib(), []
    if me.rank == 0:
        works = [ac.send(torch.ones(100_000), dst=peer, tag=1) for _ in range(300)]
        await me.get(ac.send(torch.ones(1), dst=peer, tag=2))
    else:
        await me.get(ac.recv(torch.empty(1), src=peer, tag=2))
    more = resident_kib() - before
    for _ in range(300 if me.rank else 0):
        got = await me.get(ac.recv(torch.empty(100_000), src=peer, tag=1))
        assert torch.equal(got, torch.ones(100_000))
    for work in works:
        await me.get(work)
    return more


def resident_kib() -> int:
    with open(f"/proc/{os.getpid()}/status") as status:
        said: dict[str, Any] = dict(line.split(":", 1) for line in status)
    return int(said["RssAnon"].split()[0])


def test_what_nobody_asks_for_takes_bounded_memory() -> None:
    """Of 120 MB sent, sixteen messages of 400 kB lie with the receiver; one of another tag passes them."""
    _, received = worlds.world("memory", 2).run(unasked, runner="asyncio", timeout=60)
    assert received < 20_000


async def in_turn(me: Rank) -> None:
    """A rank sends a message of many parts, and waits for another message before it awaits the send."""
    letter = Letter(5, 0, 1, 0, 300_001)
    if me.rank == 0:
        work = ac.send(letter.value(), dst=1)
        await me.get(ac.recv(torch.empty(1), src=1, tag=9))
        check(letter, 0, await me.get(work))
    else:
        check(letter, 1, await me.get(ac.recv(torch.empty(letter.count), src=0)))
        await me.get(ac.send(torch.ones(1), dst=0, tag=9))


def test_a_message_that_its_sender_does_not_await(runner: str) -> None:
    """The message has many parts, and the sender has to put each one."""
    worlds.world("memory", 2).run(in_turn, runner=runner)


class Gone:
    """A lane one of whose ranks has died."""

    def died(self) -> list[int]:
        return [1]


def test_each_message_to_a_rank_that_has_ended_fails() -> None:
    """So do those after the first, however soon the opening of their region fails."""

    def fails(peer: int, messages: Messages) -> Pair:
        raise OSError("nobody is there")

    messages = Messages(fails, lambda job: job(), Gone())
    for _ in range(3):
        sent = messages.send(torch.ones(1), 1, 0)
        assert sent.done()
        assert isinstance(sent.error(), ac.PeerLostError)


def test_a_message_that_cannot_begin_fails_alone() -> None:
    """An error raised on the thread that has opened the region belongs to the message's waiter."""

    class Opened:
        def send(self, x: torch.Tensor, tag: int) -> Completion:
            if tag:
                raise MemoryError("no room")
            return READY

    jobs: list[Callable[[], object]] = []
    opened: Any = Opened()
    messages = Messages(lambda peer, messages: opened, jobs.append, Gone())
    sent = [messages.send(torch.ones(1), 1, tag) for tag in (0, 1, 0)]
    jobs.pop()()
    assert [type(one.error()) for one in sent if one.done()] == [type(None), MemoryError, type(None)]
    assert messages.send(torch.ones(1), 1, 0) is READY
