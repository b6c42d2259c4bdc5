"""Groups of ranks, and the lanes in them.

A ``Group`` says which ranks are in it, which of them this one is, and which lanes are open. It has no
communicator of its own: each of its lanes opens one when it is first used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NoReturn, Protocol, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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
from asynccoll.host.looks import looks
from asynccoll.host.misfits import integer
from asynccoll.host.store import Clients
from asynccoll.order.lane import BACKWARD, DEFAULT, Lane
from asynccoll.order.needs import World
from asynccoll.order.start_order import OrderedLane, StartOrder
from asynccoll.plan.spec import Cost, Topology, equal_nodes, place_of
from asynccoll.transport.backend import Backend
from asynccoll.transport.communicator import Opening
from asynccoll.transport.completion import Completion, Promise
from asynccoll.waiting.children import Children

#: What a user may write as ``group=``: None is the world, ranks are global, a mesh has one dimension.
GroupLike: TypeAlias = "Group | dist.ProcessGroup | DeviceMesh | Iterable[int] | None"
#: Lanes cost threads and file descriptors; a program that needs more is leaking names.
MAX_LANES = 32
#: After a child task was cancelled, other ranks have this long to close its lane too. Then they are told that
#: this rank makes no more calls on it (a refusal).
_CLOSES_ALONE_SECONDS = 1.0
#: How long to wait for each thread that closes a lane: the process must not end while it is in native code.
_CLOSE_SECONDS = 10.0


class Surroundings(World, Protocol):
    """What a group needs of its context."""

    backend: Backend
    world_size: int
    nodes: tuple[int, ...]
    thread_rank: bool
    clients: Clients | None
    children: Children

    @property
    def meeting_seconds(self) -> float:
        """How many seconds to wait for the other members of a lane that is being opened."""

    def store_answers(self) -> bool:
        """Whether the rank that may serve the store answers."""


class _Closed:
    """A closed lane's stand-in in the start order: it gives back each turn without starting anything.

    It replaces the lane's queue, which would keep everything that the lane had alive.
    """

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.key = key

    def next_epoch_to_start(self) -> int | None:
        return None

    def admit(self, epoch: int, turn: Promise) -> None:
        turn.settle()


def ranks_of(size: int) -> str:
    """Say which ranks a world of this size has."""
    if size > 1:
        return f"0 to {size - 1}"
    return "0, as this is a world of one; a launcher starts more ranks (`asynccoll run -n 4 program.py`)"


class Group:
    """A sorted set of global ranks that communicate. Made by ``ac.new_group``, not by calling the class.

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
        #: The number of nodes if all have the same number of members, at least two. Otherwise, or if not all
        #: ranks know their nodes, 1.
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
        self.rounds: int = 0  # how often its ranks have joined
        self._closed: dict[str, int] = {}  # how often each name was closed: part of the next key
        self._start_order: StartOrder | None = None
        # The keys of lanes that this rank closed without the others, because they broke here: rank 0 may
        # still announce starts on them.
        self._closed_alone: set[str] = set()
        self._lock, self._joining = host.Lock(), host.Lock()

    def __repr__(self) -> str:
        return f"<asynccoll.Group {list(self.ranks)} on {self.context.backend.name}>"

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: object) -> Group:
        """Return the group itself: a module that holds one can be copied; the copy uses the same lanes."""
        return self

    def __reduce__(self) -> NoReturn:
        raise PayloadTypeError(
            f"{self!r} belongs to its process and cannot be pickled: pass group.ranks, and make one there "
            "with ac.new_group(ranks)"
        )

    def __len__(self) -> int:
        return self.size

    def __contains__(self, rank: object) -> bool:
        return rank in self._indices

    @property
    def key(self) -> str:
        """The name under which members meet in the store, the same on every member."""
        return "world" if self.is_world else "-".join(map(str, self.ranks))

    def place_of(self, index: int) -> tuple[int, int]:
        """Return the node of the member at ``index``, if there are several, and its index on that node."""
        return place_of(index, self._node_of)

    def topology(self, device: str) -> Topology:
        """Return what planning needs to know about this group, for tensors on a device of this type."""
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
        """Return everything a backend needs to open a communicator of these ranks."""
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

    def prepare(self) -> None:
        """Register the group with the backend, if it requires that of every rank."""
        context = self.context
        context.backend.prepare_group(self.opening(DEFAULT, 0, lambda: context.closed))

    def start_order(self, lane: str) -> StartOrder | None:
        """Return the object that decides when ``lane`` may start an operation; None if any order will do."""
        context = self.context
        if lane == DEFAULT or not context.backend.orders_lanes or context.clients is None or self.size == 1:
            return None
        if self._start_order is None:
            self._start_order = StartOrder(self, context.clients)
        return self._start_order

    def lane(self, name: str = DEFAULT) -> Lane:
        """Return the lane called ``name``, opened on first use. Raises on a rank that is not a member."""
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
                    f"and was asked for {name!r}; reuse names, or close unused lanes with "
                    f"ac.close_lane(name) (they are: {', '.join(sorted(named))})"
                )
            of = name.removesuffix(BACKWARD)
            child, unmade = self.context.children.ended_on(of), self.context.children.unmade(of)
            lane = self.opened[name] = Lane(
                self, self.context, name, self._next_key(name), self.start_order(name), child, self.rounds
            )
            if unmade is not None:
                self.context.refuse(lane, AbortedError(unmade.why), unmade.place, until=unmade.until)
            return lane

    def _next_key(self, name: str) -> str:
        """Return the key under which the ranks meet for a lane opened under this name now."""
        times = [f"~{number}" for number in (self._closed.get(name, 0), self._times(name)) if number]
        return "".join((name, *times))

    def _times(self, name: str) -> str:
        return self.context.children.times(name.removesuffix(BACKWARD))

    def close_lane(self, name: str) -> None:
        """Start closing the lane ``name``: its operations complete first, and all members must close it.

        Returns immediately; the name can be reused. The lane for its gradients is closed too.
        """
        with self._lock:
            for each in (name, name + BACKWARD):
                self._closed[each] = self._closed.get(each, 0) + 1
            self._begin_to_close(name, "")

    def close_child(self, name: str, why: str) -> None:
        """Start closing a child task's lane; ``Children``, not this group, counts how often it was closed.

        ``why``: the reason that this rank makes no more calls on it, for members that wait for one; "" if it
        has made all of its calls.
        """
        with self._lock:
            self._begin_to_close(name, why)

    def _begin_to_close(self, name: str, why: str) -> None:
        for each in (name, name + BACKWARD):
            lane = self.opened.get(each)
            if lane is not None:
                closer = host.Thread(
                    target=self._close, args=(lane, why), name=f"asynccoll-close-{each}", daemon=True
                )
                # In this order, Ctrl-C leaves no lane that ``lanes`` does not return. The closer removes it
                # from there, and needs the lock for that.
                self._closing[lane] = closer
                del self.opened[each]
                closer.start()

    def _close(self, lane: Lane, why: str) -> None:
        context = self.context
        for operation in lane.outstanding():
            context.watch_over(operation)  # so that it fails if a peer is gone or has refused its side
        for _ in looks():
            if not lane.outstanding() or lane.broken is not None or context.closed:
                break
        broken = lane.broken is not None
        if context.clients is not None and self.size > 1 and not broken:
            # A peer may still be in a call that is done here, and need this rank's connections.
            with contextlib.suppress(RuntimeError, CollectiveError):
                self._meet_to_close(lane, context.clients, why)
        if not context.closed:  # else ``close`` closes the lane
            try:
                lane.close()
            finally:
                with self._lock:
                    self._closing.pop(lane, None)
                    if broken and self._start_order is not None:
                        self._closed_alone.add(lane.key)

    def _meet_to_close(self, lane: Lane, clients: Clients, why: str) -> None:
        """Wait until all members close the lane.

        With ``why``, a member that does not close it soon may be waiting for a call that this rank never
        makes, so that call is then refused.
        """
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
        """In a forked child, fail the parent's operations; returns completions that must not be destroyed."""
        self._lock, self._joining = host.Lock(), host.Lock()
        return [completion for lane in self.lanes() for completion in lane.disown(error)]

    def close(self, *, abort: bool) -> None:
        """Close the lanes and their start order. The context is already marked closed, which ends closers."""
        steps: list[Callable[[], object]] = [
            *([self._start_order.close] if self._start_order is not None else ()),
            self._join_closers,
            lambda: host.call_each(partial(lane.close, abort=abort) for lane in self.lanes()),
        ]
        host.call_each(steps)

    def _join_closers(self) -> None:
        with self._lock:
            closers = list(self._closing.values())
        for closer in closers:
            if closer.is_alive():  # else Ctrl-C kept it from starting
                closer.join(_CLOSE_SECONDS)

    def process_group(self) -> dist.ProcessGroup:
        """Return the same ranks as a ``torch.distributed.ProcessGroup``, for DDP, FSDP and the like.

        ``DistributedDataParallel(model, process_group=ac.new_group([0, 1]).process_group())``.
        It has its own connections, so torch's collectives never interleave with those of a lane.
        The first call creates it and waits for all members; ``ac.finalize()`` destroys it.

        Raises:
            UnsupportedOpError: the backend is not one of torch's, or ranks are threads of one process.
            InvalidArgumentError: this rank is not a member.
            CollectiveTimeoutError: a member has not called it within the timeout of ``ac.initialize``.
        """
        if self.rank < 0:
            raise self._not_a_member()
        if self.context.thread_rank:
            raise UnsupportedOpError(
                "torch knows one process group per name and process; here ranks are threads"
            )
        context = self.context
        opening = self.opening(DEFAULT, 0, lambda: context.closed)
        # No operation waits for this, so nothing else would end a wait for a member that never calls it.
        opening = replace(opening, meeting=context.timeout)
        communicator = self.lane().communicator
        with self._joining:  # else each of two threads would make one, under the same name
            native = context.backend.native_group(opening, communicator)
        if not isinstance(native, dist.ProcessGroup):
            raise UnsupportedOpError(
                f"{context.backend.name} has no torch process group; gloo and nccl have one"
            )
        return native

    def known_by(self, key: str) -> Lane:
        """Return the lane with this ``key``, open or closing; raises ``StopIteration`` if there is none."""
        with self._lock:
            return next(lane for lane in (*self.opened.values(), *self._closing) if lane.key == key)

    def find_queue(self, name: str, key: str) -> OrderedLane | None:
        """Return the queue of the lane with this ``key``, which is opened if it is the next lane of ``name``.

        A closing lane is found too: it may have calls in flight, even if a new lane already has its name. For
        a lane that broke and is closed, a stand-in is returned that gives back its turns. None if this rank
        has yet to close the lane that had the name before, or has as many lanes as it may have.
        """
        with contextlib.suppress(StopIteration):
            return self.known_by(key).queue
        if key in self._closed_alone:
            return _Closed(name, key)
        if name in self.opened or self._next_key(name) != key:
            return None
        try:
            lane = self.lane(name)
        except LaneLimitError:
            return None
        return lane.queue if lane.key == key else None

    def next_round(self) -> None:
        """Start a new round of call numbers in all lanes, also in those only some ranks have (``join``)."""
        with self._lock:
            self.rounds += 1
            lanes = [*self.opened.values(), *self._closing]
        for lane in lanes:
            lane.next_round()

    def lanes(self) -> list[Lane]:
        """Return the open lanes by name, then the closing ones by key: the same order on every rank."""
        with self._lock:
            opened = [self.opened[name] for name in sorted(self.opened)]
            return [*opened, *sorted(self._closing, key=lambda lane: lane.key)]

    def rank_at(self, index: int, role: str) -> int:
        """Return the global rank at ``index`` of the group; ``role`` names the argument of the call."""
        position = integer(index)
        if position is None:
            raise PayloadTypeError(f"{role} must be an index in the group (int), got {index!r}")
        if not 0 <= position < self.size:
            raise InvalidArgumentError(f"{role}={index} is not in {self!r}; expected 0 to {self.size - 1}")
        return self.ranks[position]

    def index(self, rank: int, role: str) -> int:
        """Return the index in the group of the global ``rank``; ``role`` names the argument of the call."""
        if integer(rank) is None:
            raise PayloadTypeError(f"{role} must be a global rank (int), got {rank!r}")
        index = self._indices.get(rank)
        if index is None:
            raise InvalidArgumentError(f"{role}={rank} is not in the group; expected {self._members()}")
        return index

    def _members(self) -> str:
        return ranks_of(self.size) if self.is_world else f"one of {list(self.ranks)} (global ranks)"
