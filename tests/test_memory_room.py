"""How much memory the lanes of a host take: it is bounded, and is released with them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import asynccoll as ac
import oracle
import worlds
from asynccoll.backends.memory.arena import Arena
from asynccoll.backends.memory.engine import Engine
from asynccoll.backends.memory.layout import ABORTED, CLOSED, Layout
from asynccoll.backends.memory.region import Region
from patience import patient
from ranks import Rank
from worlds import World

#: What all lanes of a rank's arena may take together, as docs/memory.md says.
MOST_BYTES = 1 << 30


@pytest.mark.parametrize("size", [2, 8, 64])
def test_32_lanes_stay_under_a_gibibyte(size: int) -> None:
    """The group has ``size`` ranks, all on one host; no two lanes overlap."""
    arena = Arena()
    try:
        lent = sorted(
            (offset, layout.total_bytes) for offset, layout in (arena.lend(size) for _ in range(32))
        )
        assert sum(length for _, length in lent) <= MOST_BYTES
        assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(lent))
    finally:
        arena.close()


async def many_lanes(me: Rank) -> list[int]:
    """Return this process's shared memory in KiB: at first, and after each turn."""
    x = torch.full((1 << 18,), float(me.rank + 1))  # fills two slots
    found = [shared_kib()]
    names = [f"room {number}" for number in range(24)]
    for _ in range(2):
        for name in names * 4:  # all eight slots of each lane
            got = await me.get(ac.all_reduce(x, lane=name))
            oracle.same(got, torch.full_like(x, me.size * (me.size + 1) / 2))
        found.append(shared_kib())
    return found


def shared_kib() -> int:
    with open(f"/proc/{os.getpid()}/status") as status:  # a file in /proc, which does not block
        said: dict[str, Any] = dict(line.split(":", 1) for line in status)
    return int(said["RssShmem"].split()[0])


@pytest.fixture(scope="module")
def world() -> World:
    return worlds.world("memory", 4)


def test_many_lanes(world: World) -> None:
    """Only pages in use count, and using them again takes no more."""
    for first, used, again in world.run(many_lanes, timeout=60):
        assert 0 < used - first < 24 * 34 << 10
        assert again - used < 1 << 10


#: When the parent forks, a lane's memory is garbage in it that has not been collected yet.
FORKED = """
import gc, mmap, os
from asynccoll.backends.memory.arena import Arena, map_region
gc.disable()
arena = Arena()
offset, layout = arena.lend(2)
circle = [map_region(arena.descriptor, offset, layout.total_bytes)]
circle.append(circle)
del circle
child = os.fork()
if child == 0:
    own = [mmap.mmap(-1, 1 << 20) for _ in range(200)]
    for one in own:
        one[:8] = b"12345678"
    gc.collect()
    os._exit(any(one[:8] != b"12345678" for one in own))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.processes
def test_a_child_keeps_what_it_maps_where_its_parent_has_a_lane() -> None:
    """The kernel gives it the same addresses; collecting the parent's garbage must not unmap them."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=patient(20), check=True
    )
    assert ended.stdout.split() == ["0"], ended.stderr


class NoBells:
    """The bells of a rank without peers."""

    crowded = False

    def wake(self, index: int) -> None: ...

    def ring(self, index: int) -> None: ...


def test_who_has_left_writes_nothing_more() -> None:
    """An aborted lane is closed later, when its memory may already be another lane's."""
    layout = Layout(2, 4096)
    buffer = bytearray(layout.total_bytes)
    engine = Engine(Region(buffer, layout, 0), NoBells(), "a lane", [0, 1])
    engine.stop(ABORTED, ac.PeerLostError("given up"))
    assert any(buffer)
    buffer[:] = bytes(len(buffer))
    engine.stop(CLOSED, ac.AbortedError("closed"))
    assert not any(buffer)
