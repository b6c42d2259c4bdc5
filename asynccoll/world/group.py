"""Groups of ranks, and the lanes in them.

A ``Group`` is a value-like view: which ranks, where am I in it, which lanes are open. It opens no
communicator of its own; its lanes do, by name, when first used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch.distributed as dist

from asynccoll import host
from asynccoll.errors import (
    AbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    LaneLimitError,
    PayloadTypeError,
    UnsupportedOpError,
)
from asynccoll.order.lane import BACKWARD, DEFAULT, Lane
from asynccoll.order.needs import World
from asynccoll.order.start_order import StartOrder
from asynccoll.plan.spec import Topology, equal_nodes, place_of
from asynccoll.transport.communicator import Opening

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from asynccoll.errors import CollectiveError
    from asynccoll.host.store import Clients
    from asynccoll.order.queue import Queue
    from asynccoll.plan.cost import Cost
    from asynccoll.transport.backend import Backend
    from asynccoll.transport.completion import Completion
    from asynccoll.waiting.children import Children

__all__ = ["MAX_LANES", "Group", "GroupLike"]

#: What a user may write as ``group=``: None is the world, ranks are global, a mesh has one dimension.
GroupLike: TypeAlias = "Group | dist.ProcessGroup | DeviceMesh | Iterable[int] | None"
#: Lanes cost threads and descriptors; a program that needs more has a leak of names.
MAX_LANES = 32
#: How soon it is noticed that a lane which is to be closed is over.
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.02
#: How much later other ranks may close a lane whose child task was cancelled, before they hear of that.
_CLOSES_ALONE_SECONDS = 1.0
#: How long at most those threads are waited for that close lanes: nobody may end while one is in native code.
_CLOSE_SECONDS = 10.0


class Surroundings(World, Protocol):
    """The context that a group is of."""

    backend: Backend
    world_size: int
    nodes: tuple[int, ...]
    thread_rank: bool
    clients: Clients | None
    children: Children

    @property
    def meeting_seconds(self) -> float:
        """How long the members of a lane that is being opened are waited for."""

    def store_answers(self) -> bool:
        """Whether the rank that may serve the store is there."""


class Group:
    """A sorted set of global ranks that communicate. Made by ``ac.new_group``; never by hand.

    ``group.ranks`` are the global ranks, ``group.rank`` is this rank's index (-1 if outside),
    ``group.size`` the number of members.
    """

    def __init__(self, context: Surroundings, ranks: tuple[int, ...]) -> None:
        self.context = context
        self.ranks = ranks
        self.size: int = len(ranks)
        self._indices = {rank: index for index, rank in enumerate(ranks)}
        self.rank: int = self._indices.get(context.rank, -1)
        self.is_world: bool = self.size == context.world_size
        node_of = [context.nodes[rank] for rank in ranks] if context.nodes else []
        #: How many equal nodes it is made of; 1 where that is not so, or not known to all ranks.
        self.nodes: int = equal_nodes(node_of)
        #: This member's node, and its index there.
        self.place: tuple[int, int] = (
            place_of(self.rank, node_of) if self.nodes > 1 and self.rank >= 0 else (0, self.rank)
        )
        self._node_of = node_of
        self.cost: Cost | None = None  # of its collectives, once measured
        self._topologies: dict[str, Topology] = {}
        self.opened: dict[str, Lane] = {}
        self._closing: dict[Lane, host.Thread] = {}
        self._closed: dict[str, int] = {}  # how often: ranks that open a name again meet by another key
        self._start_order: StartOrder | None = None
        self._lock = host.Lock()

    def __repr__(self) -> str:
        return f"<asynccoll.Group {list(self.ranks)} on {self.context.backend.name}>"

    def __len__(self) -> int:
        return self.size

    def __contains__(self, rank: object) -> bool:
        return rank in self._indices

    @property
    def key(self) -> str:
        """The name by which members meet, the same on each of them."""
        return "world" if self.is_world else "-".join(map(str, self.ranks))

    def place_of(self, index: int) -> tuple[int, int]:
        """Of a group of several equal nodes: which of them that member is on, and its index there."""
        return place_of(index, self._node_of)

    def topology(self, device: str) -> Topology:
        """What planning must know of this group, for tensors on a device of this type."""
        found = self._topologies.get(device)
        if found is None:
            known = self.context.backend.capabilities_among(self.ranks, device)
            way = self.context.backend.way(self.ranks, device)
            found = self._topologies[device] = Topology(known, self.size, self.nodes, way)
        return found

    def opening(
        self,
        lane: str,
        epoch: int,
        given_up: Callable[[], bool],
        disagreed: Callable[[int, CollectiveError], object] = lambda place, error: None,
    ) -> Opening:
        """What a backend is told to open a communicator of these ranks."""
        context = self.context
        return Opening(
            self.ranks,
            self.rank,
            self.is_world,
            self.key,
            lane,
            epoch,
            context.clients,
            context.timeout,
            context.meeting_seconds,
            given_up,
            disagreed,
            context.store_answers,
            self.nodes,
            self.place,
        )

    def start_order(self, lane: str) -> StartOrder | None:
        """What decides when ``lane`` may start an operation; None where any order will do."""
        context = self.context
        if lane == DEFAULT or not context.backend.orders_lanes or context.clients is None or self.size == 1:
            return None
        if self._start_order is None:
            self._start_order = StartOrder(self, context.clients)
        return self._start_order

    def lane(self, name: str = DEFAULT) -> Lane:
        """The lane called ``name``, opened on first use. Only members may ask."""
        found = self.opened.get(name)
        return found if found is not None else self._new_lane(name)

    def _new_lane(self, name: str) -> Lane:
        if self.rank < 0:
            raise self._not_a_member()
        with self._lock:
            if name in self.opened:
                return self.opened[name]
            named = [lane for lane in self.opened if not lane.endswith(BACKWARD)]
            if len(named) >= MAX_LANES and not name.endswith(BACKWARD):
                raise LaneLimitError(
                    f"group of ranks {list(self.ranks)} has {len(named)} lanes, the most it may have, "
                    f"and was asked for {name!r}; reuse names, or close those that are over with "
                    f"ac.close_lane(name) (they are: {', '.join(sorted(named))})"
                )
            of = name.removesuffix(BACKWARD)
            child, unmade = self.context.children.ended_on(of), self.context.children.unmade(of)
            lane = self.opened[name] = Lane(
                self, self.context, name, self._next_key(name), self.start_order(name), child
            )
            if unmade is not None:
                self.context.refuse(lane, AbortedError(unmade.why), unmade.place, until=unmade.until)
            return lane

    def _next_key(self, name: str) -> str:
        """By which the ranks of a lane meet that is opened under this name now."""
        times = [f"~{number}" for number in (self._closed.get(name, 0), self._times(name)) if number]
        return "".join((name, *times))

    def _times(self, name: str) -> str:
        return self.context.children.times(name.removesuffix(BACKWARD))

    def close_lane(self, name: str) -> None:
        """Close the lane called ``name`` once all members have, and what is in flight on it is over."""
        with self._lock:
            for each in (name, name + BACKWARD):
                self._closed[each] = self._closed.get(each, 0) + 1
            self._begin_to_close(name, "")

    def close_child(self, name: str, why: str) -> None:
        """The same of a child task's lane, of which ``Children`` counts how often it was closed.

        ``why`` this rank does so before it has made all of its calls, for members that wait for one.
        """
        with self._lock:
            self._begin_to_close(name, why)

    def _begin_to_close(self, name: str, why: str) -> None:
        for each in (name, name + BACKWARD):
            lane = self.opened.pop(each, None)
            if lane is not None:
                closer = self._closing[lane] = host.Thread(
                    target=self._close, args=(lane, why), name=f"asynccoll-close-{each}", daemon=True
                )
                closer.start()

    def _close(self, lane: Lane, why: str) -> None:
        context = self.context
        for operation in lane.outstanding():
            context.watch_over(operation)  # a peer may be gone, or have refused its side
        pause = _FIRST_PAUSE_SECONDS
        while lane.outstanding() and lane.broken is None and not context.closed:
            host.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        if context.clients is not None and self.size > 1 and lane.broken is None:
            # A peer may still be in a call in which this rank has done its part.
            with contextlib.suppress(RuntimeError, CollectiveError):
                self._meet_to_close(lane, context.clients, why)
        if not context.closed:  # else that closes it
            lane.close()
            with self._lock:
                self._closing.pop(lane, None)

    def _meet_to_close(self, lane: Lane, clients: Clients, why: str) -> None:
        """Wait until all members close it; those that do not soon may wait for a call of this rank's."""
        context = self.context
        meet = partial(clients.meet, f"closed/{self.key}/{lane.key}", self.rank, self.size)
        if why:
            with contextlib.suppress(CollectiveTimeoutError):
                meet(_CLOSES_ALONE_SECONDS, lambda: context.closed)
                return
            lane.next_child(AbortedError(why))
        meet(context.timeout, lambda: context.closed)

    def _not_a_member(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"rank {self.context.rank} is not in the group of ranks {list(self.ranks)}; only "
            "members may communicate in it (guard the call with `ac.get_rank(group) >= 0`)"
        )

    def disown(self, error: CollectiveError) -> list[Completion]:
        """In a forked child: the lanes are the parent's; what of them must not be destroyed."""
        self._lock = host.Lock()
        return [completion for lane in self.opened.values() for completion in lane.disown(error)]

    def close(self, *, abort: bool) -> None:
        """Close the lanes and what orders them. The context says that it is closed, which closers look at."""
        if self._start_order is not None:
            self._start_order.close()
        with self._lock:
            closers = list(self._closing.values())
        for closer in closers:
            closer.join(_CLOSE_SECONDS)
        for lane in self.lanes():
            lane.close(abort=abort)

    def process_group(self) -> dist.ProcessGroup:
        """The same ranks as a ``torch.distributed.ProcessGroup``, for DDP, FSDP and the like.

        ``DistributedDataParallel(model, process_group=ac.new_group([0, 1]).process_group())``.
        It has connections of its own, so that torch's collectives never interleave with those of a lane.
        Made on the first call, which waits for all members; gone after ``ac.finalize()``.

        Raises:
            UnsupportedOpError: the backend is none of torch's, or ranks are threads of one process.
            InvalidArgumentError: this rank is not a member.
        """
        if self.rank < 0:
            raise self._not_a_member()
        if self.context.thread_rank:
            raise UnsupportedOpError(
                "torch knows one process group per name and process; here ranks are threads"
            )
        context = self.context
        opening = self.opening(DEFAULT, 0, lambda: context.closed)
        native = context.backend.native_group(opening, self.lane().communicator)
        if not isinstance(native, dist.ProcessGroup):
            raise UnsupportedOpError(
                f"{context.backend.name} has no torch process group; gloo and nccl have one"
            )
        return native

    def known_by(self, key: str) -> Lane:
        """The lane whose ranks meet by ``key``."""
        with self._lock:
            return next(lane for lane in (*self.opened.values(), *self._closing) if lane.key == key)

    def find_queue(self, name: str, key: str) -> Queue | None:
        """The queue of the lane whose ranks meet by ``key``, which is opened if it is the next of its name.

        One that is closing has calls in flight while its name is free, or another's. None where this rank has
        yet to close the one that had the name before.
        """
        with contextlib.suppress(StopIteration):
            return self.known_by(key).queue
        if name in self.opened or self._next_key(name) != key:
            return None
        lane = self.lane(name)
        return lane.queue if lane.key == key else None

    def lanes(self) -> list[Lane]:
        """The open lanes, by name: the same order on every rank."""
        with self._lock:
            opened = [self.opened[name] for name in sorted(self.opened)]
            return [*opened, *sorted(self._closing, key=lambda lane: lane.key)]

    def rank_at(self, index: int, role: str) -> int:
        """The global rank at ``index`` of the group, which the call names as its ``role``."""
        if isinstance(index, bool) or not isinstance(index, int):
            raise PayloadTypeError(f"{role} must be an index in the group (int), got {index!r}")
        if not 0 <= index < self.size:
            raise InvalidArgumentError(f"{role}={index} is not in {self!r}; expected 0 to {self.size - 1}")
        return self.ranks[index]

    def index(self, rank: int, role: str) -> int:
        """The position in the group of the global ``rank``, which the call names as its ``role``."""
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise PayloadTypeError(f"{role} must be a global rank (int), got {rank!r}")
        index = self._indices.get(rank)
        if index is None:
            allowed = (
                f"0 to {self.size - 1}" if self.is_world else f"one of {list(self.ranks)} (global ranks)"
            )
            raise InvalidArgumentError(f"{role}={rank} is not in the group; expected {allowed}")
        return index
