"""Messages between arbitrary ranks, started in a different order on each, and the expected results."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

import asynccoll as ac

__all__ = ["SMALL", "Letter", "begun", "check", "drawn", "started"]

#: Elements: none, as many as fit into a slot, and many parts where slots are small.
SMALL = (0, 1, 3, 16, 40, 300, 1500)


class Letter(NamedTuple):
    """A message, with its number among all messages."""

    number: int
    src: int
    dst: int
    tag: int
    count: int

    def value(self) -> torch.Tensor:
        return torch.arange(self.count).remainder(7).float() + 1000 * self.number


def drawn(seed: int, size: int, most: int = 14, counts: Sequence[int] = SMALL) -> list[Letter]:
    """Draw messages between any two ranks, with few tags and any of these sizes."""
    chance = random.Random(seed)
    letters = []
    for number in range(chance.randint(1, most)):
        src, dst = chance.sample(range(size), 2)
        letters.append(Letter(number, src, dst, chance.choice((0, 0, 1, 7)), chance.choice(counts)))
    return letters


def begun(letters: Iterable[Letter], rank: int, seed: int) -> list[tuple[Letter, Any]]:
    """Start all messages that this rank sends or receives, in a random order. Returns their works.

    Messages of the same pair and tag keep their order, since the order is what identifies them.
    """
    chance = random.Random(f"{seed} {rank}")
    streams: dict[tuple[bool, int, int], list[Letter]] = {}
    for letter in letters:
        if rank in (letter.src, letter.dst):
            sends = rank == letter.src
            peer = letter.dst if sends else letter.src
            streams.setdefault((sends, peer, letter.tag), []).append(letter)
    works = []
    while streams:
        key = chance.choice(sorted(streams))
        letter = streams[key].pop(0)
        if not streams[key]:
            del streams[key]
        works.append((letter, started(letter, rank)))
    return works


def started(letter: Letter, rank: int) -> Any:
    if rank == letter.src:
        return ac.send(letter.value(), dst=letter.dst, tag=letter.tag)
    return ac.recv(torch.full((letter.count,), -1.0), src=letter.src, tag=letter.tag)


def check(letter: Letter, rank: int, got: Any) -> None:
    if rank == letter.src:
        assert got is None
    else:
        assert torch.equal(got, letter.value()), f"rank {rank}, {letter}: {got[:4]}"
