"""Protocols for what a lane needs from the packages above; groups and the world implement them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerLostError
from asynccoll.flight import Recorder
from asynccoll.host.call_site import Spot
from asynccoll.plan.spec import Cost, Policy, Topology
from asynccoll.transport.backend import Backend
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise


class Blame(Protocol):
    """Which ranks keep an operation from completing."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """Why, one sentence for each rank; or whatever else is known."""


class Compared(Protocol):
    """The comparison of a lane's calls with those of other ranks, before the calls are made."""

    def call(
        self, what: Hashable, spot: Spot, place: int, part: int
    ) -> CollectiveMismatchError | Promise | None:
        """Compare the call that is about to be made.

        Returns the error to raise instead; or a promise to wait for first, which ends with that error or with
        none; or None to make the call. Also None if the same call was compared before.
        """

    def restart(self, epoch: int) -> None:
        """Restart the comparison here: ranks are in step again, whatever they called before."""


class Subject(Protocol):
    """The data of an operation, for the flight recorder; it must not change."""

    plan: Any
    #: what the call does beyond its name: the reduction, the root
    detail: object

    @property
    def shape(self) -> Hashable:
        """The shape of the data that is sent."""

    def described(self) -> str:
        """Describe the data in words, as in ``float32[4, 8] sum``."""


class Members(Protocol):
    """The group of ranks that a lane belongs to."""

    ranks: tuple[int, ...]
    size: int
    rank: int
    is_world: bool
    nodes: int
    place: tuple[int, int]
    rounds: int
    cost: Cost | None

    @property
    def key(self) -> str:
        """The group's name in the store, the same on each of its ranks."""

    def place_of(self, index: int) -> tuple[int, int]:
        """Return the member's node, where all nodes have equally many members, and its index on that node."""

    def topology(self, device: str) -> Topology:
        """Return what planning must know about the group, for tensors on a device of this type."""

    def lane(self, name: str) -> Any:
        """Return the group's lane of that name, opened on first use."""

    def lanes(self) -> list[Any]:
        """Return the group's open lanes."""

    def next_round(self) -> None:
        """Start a new round of numbers for the calls of all its lanes: its ranks have joined."""

    def index(self, rank: int, role: str) -> int:
        """Return the index in the group of the global ``rank``, which a call uses as its ``role``."""


class World(Protocol):
    """This rank's world as its lanes see it; implementations use narrower types than ``Any`` for lanes."""

    rank: int
    timeout: float
    closed: bool
    checks_order: bool
    policy: Policy
    backend: Backend
    observers: tuple[Callable[[Any, int], object], ...]
    recorder: Recorder

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors, where numbers are put too."""

    def open(self, lane: Any, epoch: int) -> Communicator:
        """Open a communicator of the lane's members, for one epoch."""

    def refuse(
        self,
        lane: Any,
        reason: BaseException,
        place: int | None = None,
        *,
        spare: Completion | None = None,
        part: int | None = None,
        name: str = "",
        until: int = 0,
    ) -> None:
        """Tell the peers that this rank does not make a call (``health.refusals``)."""

    def watch_over(self, operation: Any, waiters: int = 1) -> None:
        """Check now and then whether the operation can still complete. ``waiters``: how many have begun."""

    def watch_no_more(self, operation: Any) -> bool:
        """Note that one waiter has stopped waiting; returns whether another one still waits."""

    def loss(self, lane: Any) -> PeerLostError | None:
        """Return the error that names the lost ranks the lane waits for, or None if there are none."""

    def diagnose(self, lane: Any, error: CollectiveError) -> CollectiveError:
        """Return the same failure, with its culprit named."""

    def find_out(self, lane: Any, error: CollectiveError) -> bool:
        """Make another thread find the culprit of this failure and then lose the lane.

        Returns False if no thread can start.
        """

    def blame(self, operation: Any) -> Blame:
        """Ask the ranks, within a bounded time, which of them keep an operation from completing, and why."""

    def dump(self) -> str:
        """Save the ranks' records; returns text to append to the message of a failure."""

    def pass_on(self, lane: Any) -> None:
        """Tell the ranks that wait on the lane for this rank that it has given the lane up."""
