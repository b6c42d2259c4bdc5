"""A backend that wraps another one, and moves CPU tensors between ranks of a host through shared memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from asynccoll.backends.api import Backend, Capabilities, Clients, Communicator, Opening, Training, host
from asynccoll.backends.memory.by_device import ByDevice
from asynccoll.backends.memory.communicator import MemoryCommunicator
from asynccoll.backends.memory.engine import Engine
from asynccoll.backends.memory.hub import Bells, Hub, said_at
from asynccoll.backends.memory.messages import Messages
from asynccoll.backends.memory.neighbours import Failed
from asynccoll.backends.memory.pair import Pair
from asynccoll.backends.memory.parking import supported
from asynccoll.backends.memory.region import Region
from asynccoll.backends.memory.tables import ALONE, MEMORY, NEAR
from asynccoll.errors import PeerLostError

_log = logging.getLogger("asynccoll")
#: The longest that the ranks of a host wait for each other: all of them have joined the world already.
_MEET_SECONDS = 30.0
_CPU = frozenset({"cpu"})


class Sharing(Backend):
    """A backend that behaves as ``inner``, but moves CPU tensors through shared memory.

    It does so in groups on one host and, if ``inner`` asks for it, in each host's part of a larger group.
    """

    def __init__(
        self, inner: Backend, hub: Hub | None, node_of: Sequence[int], apart: Mapping[int, str]
    ) -> None:
        """``hub`` connects the ranks of this node; None if there is only one, or if they cannot share memory.

        ``node_of`` is the node of each rank. ``apart`` maps each node whose ranks cannot share memory to the
        reason; other nodes are not in it.
        """
        self._inner = inner
        self._hub = hub
        self._node_of = node_of
        self._apart = apart
        self.name: str = inner.name
        self.device: torch.device = inner.device
        for attribute in _TAKEN_OVER:
            setattr(self, attribute, getattr(inner, attribute))

    training: Training

    def why_not(self, ranks: Sequence[int]) -> str | None:
        """Return why these ranks do not use shared memory, or None if they do."""
        nodes = {self._node_of[rank] for rank in ranks}
        if len(nodes) > 1:
            apart = next((f"; {self._apart[one]}" for one in sorted(nodes) if one in self._apart), "")
            return f"these ranks are on {len(nodes)} hosts{apart}"
        return self._apart.get(next(iter(nodes)))

    def _shares(self, ranks: Sequence[int]) -> bool:
        return len(ranks) > 1 and self.why_not(ranks) is None

    def _share_by_host(self, ranks: Sequence[int]) -> bool:
        """Whether the ranks are on several nodes, none of which has failed to set up shared memory."""
        nodes = {self._node_of[rank] for rank in ranks}
        return len(nodes) > 1 and not nodes & self._apart.keys()

    def capabilities_among(self, ranks: Sequence[int], device: str) -> Capabilities:
        if device in _CPU and self._shares(ranks):
            return MEMORY
        known = self._inner.capabilities_among(ranks, device)
        # Only a backend with ``hop_bytes`` asks for a host's part; others handle nodes, or have no such part.
        near = device in _CPU and known.hop_bytes > 0 and self._share_by_host(ranks)
        return replace(known, near=NEAR, hop_bytes=0) if near else known

    def way(self, ranks: Sequence[int], device: str) -> str:
        if device not in _CPU:
            return ""
        why_not = ALONE if len(ranks) == 1 else self.why_not(ranks)
        return f"{self.name}: {why_not}" if why_not else "through memory that ranks share"

    def open(self, opening: Opening) -> Communicator:
        if self._shares(opening.ranks):
            return self._open_near(opening)
        if opening.nodes > 1 and self._share_by_host(opening.ranks):
            opening = replace(opening, within=partial(self._open_within, opening))
        return self._inner.open(opening)

    def _open_near(self, opening: Opening) -> Communicator:
        """Open a communicator whose ranks are all on this host."""
        with self._noticing_ends(opening) as watching:
            near = self._in_memory(watching)
            if self.device.type in _CPU:
                return near
            try:
                return ByDevice(near, self._inner.open(replace(watching, carried=_CPU)))
            except BaseException:
                near.abort()
                raise

    @contextmanager
    def _noticing_ends(self, opening: Opening) -> Iterator[Opening]:
        """Yield ``opening``, changed so that waiting in it also ends when the process of a member ends.

        If the block raises while a member is gone, ``PeerLostError`` is raised instead.
        """
        assert self._hub is not None
        gone = self._hub.watcher.gone
        try:
            yield replace(opening, given_up=lambda: opening.given_up() or not gone.isdisjoint(opening.ranks))
        except Exception as error:
            ended = [rank for rank in opening.ranks if rank in gone]
            if not ended:
                raise
            who = ", ".join(map(str, ended))
            raise PeerLostError(f"rank {who} ended before it had opened lane {opening.lane!r}") from error

    def _open_within(self, opening: Opening) -> Communicator:
        """Open the communicator of those ranks of ``opening`` that are on this host."""
        node, index = opening.place
        mine = self._node_of[opening.ranks[opening.rank]]
        here = replace(
            opening,
            ranks=tuple(rank for rank in opening.ranks if self._node_of[rank] == mine),
            rank=index,
            is_world=False,
            group=f"{opening.group}/node/{node}",
            nodes=1,
            place=(0, index),
        )
        return self._in_memory(here)

    def _in_memory(self, opening: Opening) -> MemoryCommunicator:
        assert self._hub is not None
        where = f"lane {opening.lane!r} of " + (
            "the world" if opening.is_world else f"ranks {list(opening.ranks)}"
        )
        region, bells = self._region(opening)
        engine = Engine(region, bells, where, opening.ranks)
        messages = Messages(partial(self._open_pair, opening), self._hub.later, engine)
        return MemoryCommunicator(engine, messages, opening.disagreed)

    def _region(self, opening: Opening) -> tuple[Region, Bells]:
        assert self._hub is not None
        region, parking = self._hub.region(opening)
        return region, Bells(self._hub, parking, opening.ranks, opening.rank)

    def _open_pair(self, opening: Opening, peer: int, messages: Messages) -> Pair:
        """Open the messages between this rank and ``peer``, which may be in different epochs of the lane."""
        low, high = sorted((opening.rank, peer))
        ranks = opening.ranks[low], opening.ranks[high]
        between = replace(
            opening,
            ranks=ranks,
            rank=int(opening.rank == high),
            is_world=False,
            group=f"{opening.lasting}/p2p/{low}-{high}",
            epoch=0,
            meeting=math.inf,
            given_up=lambda: messages.ended() is not None,
        )
        with self._noticing_ends(between) as watching:
            region, bells = self._region(watching)
        where = f"lane {opening.lane!r} between ranks {ranks[0]} and {ranks[1]}"
        return Pair(region, bells, where, ranks, messages.died)

    def close(self, *, abort: bool) -> None:
        hub = [] if self._hub is None else [self._hub.close]
        host.call_each([partial(self._inner.close, abort=abort), *hub])

    def disown(self) -> None:
        if self._hub is not None:
            self._hub.disown()
        self._inner.disown()


#: The attributes and methods of ``Backend`` that ``Sharing`` takes over from its inner one.
_TAKEN_OVER = (
    "ad_hoc_groups",
    "capabilities",
    "ends_alone",
    "joins",
    "native_group",
    "on_host",
    "open_waits",
    "opens_early",
    "orders_lanes",
    "orphaned",
    "prepare_group",
    "serves_this_thread",
    "survives_fork",
    "training",
    "unprepared",
)


def share(inner: Backend, clients: Clients, node_of: Sequence[int], rank: int, seconds: float) -> Backend:
    """Return ``inner`` with shared memory for the nodes whose ranks have it.

    Every rank of the world calls this. ``node_of`` is the presumed node of each rank. The ranks of each node
    find out whether they really share memory, and tell all others.
    """
    ranks = [one for one, node in enumerate(node_of) if node == node_of[rank]]
    node = str(node_of[rank])
    hub, why = None, ""
    if not supported():
        why = "memory between processes is used on Linux and x86-64 only"
    elif len(ranks) > 1:
        try:
            hub = Hub.meet(clients, node, ranks, rank, min(seconds, _MEET_SECONDS))
        except Failed as failed:
            why = str(failed)
            _log.debug("the ranks of this host do not share memory: %s", why)
    try:
        if rank == ranks[0]:
            with clients.borrow() as store:
                store.set(f"memory/{node}/why", why)
        return Sharing(inner, hub, node_of, _reasons(clients, node_of, seconds))
    except BaseException:
        if hub is not None:
            hub.close()
        raise


def _reasons(clients: Clients, node_of: Sequence[int], seconds: float) -> dict[int, str]:
    """Return, for each node whose ranks do not share memory, why not."""
    nodes = sorted(set(node_of))
    keys = [f"memory/{node}/why" for node in nodes]
    said = said_at(clients, keys, seconds, "hosts had not said whether their ranks share memory")
    return {node: why for node, why in zip(nodes, said, strict=True) if why}
