"""What a communicator is, and what a backend is told to open one.

A communicator has a start function for each operation. These work on contiguous tensors that the caller has
planned, encoded and allocated; they issue the native call and return at once. They never validate, convert or
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from asynccoll.plan.spec import ReduceOp
from asynccoll.transport.completion import Completion

if TYPE_CHECKING:
    from asynccoll.errors import CollectiveError
    from asynccoll.host.store import Clients

__all__ = ["Communicator", "Opening", "as_matrix"]


@dataclass(frozen=True, slots=True)
class Opening:
    """A communicator to be opened: its members, its name, and how long to wait for them."""

    ranks: tuple[int, ...]  # global ones, sorted
    rank: int  # this rank's index among them
    is_world: bool
    group: str  # the group's key, the same on each member
    lane: str
    epoch: int  # how often the lane's ranks have come in step again after a refusal
    #: None without a store: this rank is alone, or the native library connects the ranks by itself
    clients: Clients | None
    #: seconds that a request may take
    timeout: float
    #: seconds until all members must have joined
    meeting: float
    #: whether the communicator is no longer wanted
    given_up: Callable[[], bool]
    #: to be called, on a thread that may wait, with a place in the lane's order and an error, if ranks have
    #: called different operations at that place and several parts of one call share it
    disagreed: Callable[[int, CollectiveError], object]
    #: whether the rank that may serve the store is alive
    store_answers: Callable[[], bool]
    #: the number of equal nodes that the members are on
    nodes: int = 1
    #: this rank's node, and its index there
    place: tuple[int, int] = (0, 0)
    #: the types of devices whose tensors another communicator sends: this one needs no collectives for them
    carried: frozenset[str] = frozenset()
    #: opens the communicator of the ranks of this node, where that is not the backend's own
    within: Callable[[], Communicator] | None = None

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def lasting(self) -> str:
        """The communicator's name without the epoch."""
        return f"{self.group}/{self.lane}"

    @property
    def name(self) -> str:
        """The communicator's name in this epoch."""
        return f"{self.lasting}@{self.epoch}"


class Communicator(Protocol):
    """One native communicator: a group of ranks and one order of calls. Roots are indices in the group.

    Where the capabilities have ``hop_bytes``, there are also ``parts``: None, or two communicators, of this
    node's ranks and of the ranks with this one's index on every node. ``open_parts()`` opens them and waits
    for the other ranks. They are closed and aborted with this communicator.
    """

    # A communicator that itself detects ranks which call different operations also has ``announce(what, spot,
    # place, part, shares)``: the call about to be issued, the line that made it, its place in the lane's
    # order, which part of the call at that place it is, and whether other parts share the place.

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        """Reduce ``x`` in place.

        Where the capabilities' ``keeps_input`` lists it, there is also ``all_reduce_into(out, x, op)``,
        which leaves ``x`` unchanged.
        """
        ...

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        """Reduce ``x`` in place on ``dst``; elsewhere its content is undefined afterwards.

        Where the capabilities' ``keeps_input`` lists it, ``x`` is unchanged there instead.
        """
        ...

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        """Overwrite ``x`` with that of ``src``."""
        ...

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        """Fill the flat ``out`` with every rank's flat ``x`` in rank order."""
        ...

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        """Fill ``out`` (given on ``dst``) with every rank's ``x``."""
        ...

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        """Fill ``out`` with this rank's part of ``x`` (given on ``src``)."""
        ...

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        """Fill ``out`` with this rank's part of the reduction of the flat ``x``."""
        ...

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> Completion:
        """Exchange parts of dim 0; the splits count its rows."""
        ...

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion: ...

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion: ...

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """End the ``recv`` on ``dst`` although this rank does not ``send``, if the backend has a way."""
        ...

    def barrier(self) -> Completion: ...

    def retire(self) -> bool:
        """Close what carries collectives, some of which never end; returns whether nothing is left to close.

        On every rank the collectives that can end have ended. Messages go on, in the communicator that
        takes them over by ``inherit``.
        """
        ...

    def inherit(self, previous: Any) -> None:
        """Take over the messages of ``previous``, a communicator of this lane that was or will be retired."""
        ...

    def close(self) -> None:
        """Release the communicator; nothing is in flight."""
        ...

    def abort(self) -> None:
        """Make every operation in flight fail soon, here and on the peers it is connected to."""
        ...


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a matrix of its rows: for libraries that need the same number of dimensions on all ranks."""
    return x if x.dim() == 2 else x.view(x.shape[0], x.shape[1:].numel())
