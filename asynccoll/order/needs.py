"""What a lane needs of what is around it; groups and the world implement it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerLostError
    from asynccoll.flight import Recorder
    from asynccoll.host.call_site import Spot
    from asynccoll.plan.cost import Cost
    from asynccoll.plan.spec import Policy, Topology
    from asynccoll.transport.backend import Backend
    from asynccoll.transport.communicator import Communicator
    from asynccoll.transport.completion import Completion, Promise

__all__ = ["Blame", "Compared", "Members", "Subject", "World"]


class Blame(Protocol):
    """Who keeps an operation from ending; ``str()`` says why."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks."""


class Compared(Protocol):
    """What compares a lane's calls with those of other ranks, before they are made."""

    def call(
        self, what: Hashable, spot: Spot, place: int, part: int
    ) -> CollectiveMismatchError | Promise | None:
        """The call that is about to be made. What to raise instead, or to wait for first; None: make it.

        None, too, where it was asked before. A promise ends with the error that is to be raised, or without.
        """

    def restart(self, epoch: int) -> None:
        """Ranks are in step again, whatever each has called before."""


class Subject(Protocol):
    """What an operation is of; it must not change."""

    plan: Any

    @property
    def shape(self) -> Hashable:
        """Of what is sent."""

    def described(self) -> str:
        """As ``float32[4, 8] sum``."""


class Members(Protocol):
    """The ranks that a lane is among."""

    ranks: tuple[int, ...]
    size: int
    rank: int
    is_world: bool
    nodes: int
    place: tuple[int, int]
    cost: Cost | None

    @property
    def key(self) -> str:
        """The name by which they meet, the same on each of them."""

    def place_of(self, index: int) -> tuple[int, int]:
        """Of several equal nodes: which of them that member is on, and its index there."""

    def topology(self, device: str) -> Topology:
        """What planning must know of them, for tensors on a device of this type."""

    def lane(self, name: str) -> Any:
        """The lane of that name among them, opened on first use."""

    def lanes(self) -> list[Any]:
        """Those that are open."""

    def index(self, rank: int, role: str) -> int:
        """The position among them of the global ``rank``, which a call names as its ``role``."""


class World(Protocol):
    """This rank's world, as its lanes see it; who is asked about a lane knows it better than ``Any``."""

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
        """Where its tensors are, and its numbers go."""

    @property
    def open_waits(self) -> bool:
        """Whether ``open`` waits for the other members."""

    async def computed(self, value: object) -> None:
        """Wait until ``value`` is computed, where a backend puts that off."""

    def open(self, lane: Any, epoch: int) -> Communicator:
        """A communicator of the lane's members, for one epoch."""

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

    def watch_over(self, operation: Any) -> None:
        """Somebody waits for it: look from time to time whether it can still end."""

    def watch_no_more(self, operation: Any) -> bool:
        """Nobody waits for it now."""

    def loss(self, lane: Any) -> PeerLostError | None:
        """The error that names the ranks that are gone and that the lane waits for, if any is."""

    def diagnose(self, lane: Any, error: CollectiveError) -> CollectiveError:
        """The same failure with its culprit named."""

    def find_out(self, lane: Any, error: CollectiveError) -> None:
        """Have the lane lost because of this failure, on another thread, once its culprit is known."""

    def blame(self, operation: Any) -> Blame:
        """Which ranks keep an operation from ending, and what they do instead; asks them, within a bound."""

    def dump(self) -> str:
        """Keep what ranks have recorded, for a failure whose text this ends."""

    def pass_on(self, lane: Any) -> None:
        """Let those who wait for this rank on the lane know that it has given up."""
