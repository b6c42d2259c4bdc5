"""The interface of a communicator, and the description from which a backend opens one.

A communicator has a start function for each operation. These functions work on contiguous tensors that the
caller has planned, encoded and allocated. They issue the native call and return immediately; they never
validate, convert or wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from asynccoll.errors import CollectiveError
from asynccoll.host.store import Clients
from asynccoll.plan.spec import ReduceOp
from asynccoll.transport.completion import Completion


@dataclass(frozen=True, slots=True)
class Opening:
    """A communicator to be opened: its members, its name, and how long to wait for them."""

    ranks: tuple[int, ...]  # global ranks, sorted
    rank: int  # this rank's index among them
    is_world: bool
    group: str  # the group's key, the same on each member
    lane: str
    epoch: int  # how often the lane's ranks have been brought back in step after a refusal
    #: None without a store: this rank is alone, or the native library connects the ranks by itself
    clients: Clients | None
    #: how many seconds a request may take
    timeout: float
    #: within how many seconds all members must have joined
    meeting: float
    #: whether the communicator is no longer wanted
    given_up: Callable[[], bool]
    #: called with a place in the lane's order and an error if ranks have called different operations at that
    #: place and several parts of one call share it; must be called on a thread that may block
    disagreed: Callable[[int, CollectiveError], object]
    #: whether the rank that may serve the store is alive
    store_answers: Callable[[], bool]
    #: the number of nodes that the members are on, with the same number of members on each
    nodes: int = 1
    #: the index of this rank's node, and this rank's index on that node
    place: tuple[int, int] = (0, 0)
    #: device types whose tensors another communicator sends, so this one needs no collectives for them
    carried: frozenset[str] = frozenset()
    #: opens the communicator of this node's ranks, where the backend does not use one of its own
    within: Callable[[], Communicator] | None = None

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def lasting(self) -> str:
        """The communicator's name without the epoch: it stays the same across epochs."""
        return f"{self.group}/{self.lane}"

    @property
    def name(self) -> str:
        """The communicator's name in this epoch."""
        return f"{self.lasting}@{self.epoch}"


class Communicator(Protocol):
    """One native communicator: a group of ranks and one order of calls. Roots are indices in the group.

    Where the capabilities have ``hop_bytes``, there are also ``parts``: None, or two communicators. One has
    this node's ranks, the other has the ranks with this rank's index on every node. ``open_parts()`` opens
    both and waits for the other ranks. They are closed and aborted together with this communicator.
    """

    # A communicator that detects by itself that ranks call different operations also has ``announce(what,
    # spot, place, part, shares)``. The arguments are the call about to be issued, the line that made it, its
    # place in the lane's order, which part of the call at that place it is, and whether other parts share the
    # place. One whose messages could reach a later communicator after it is closed has ``half_matched()``:
    # called before ``close`` if some ranks may have made a call that others have refused.

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        """Reduce ``x`` in place.

        Where the capabilities' ``keeps_input`` lists it, there is also ``all_reduce_into(out, x, op)``,
        which leaves ``x`` unchanged.
        """

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        """Reduce ``x`` in place on ``dst``; elsewhere its content is undefined afterwards.

        Where the capabilities' ``keeps_input`` lists it, ``x`` is unchanged there instead.
        """

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        """Overwrite ``x`` with the ``x`` of ``src``."""

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        """Fill the flat ``out`` with every rank's flat ``x`` in rank order."""

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        """Fill ``out`` (given on ``dst``) with every rank's ``x``."""

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        """Fill ``out`` with this rank's part of ``x`` (given on ``src``)."""

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        """Fill ``out`` with this rank's part of the reduction of the flat ``x``."""

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> Completion:
        """Exchange parts of dim 0; the splits count its rows."""

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion: ...

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion: ...

    def refuse(self, dst: int, tag: int, why: str) -> None:
        """End the ``recv`` on ``dst`` although this rank does not ``send``, if the backend can."""

    def barrier(self) -> Completion: ...

    def retire(self) -> bool:
        """Close the part that carries collectives, some of which never end. Returns whether all is closed.

        By now, every collective that can end has ended on every rank. Messages stay in flight: the next
        communicator takes them over by ``inherit``.
        """

    def inherit(self, previous: Any) -> None:
        """Take over the messages of ``previous``, a communicator of this lane that was or will be retired."""

    def close(self) -> None:
        """Release the communicator. No operations are in flight."""

    def abort(self) -> None:
        """Make every operation in flight fail soon, on this rank and on the peers that it is connected to."""


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """View ``x`` as a matrix of its rows, for libraries that need equally many dimensions on all ranks."""
    return x if x.dim() == 2 else x.view(x.shape[0], x.shape[1:].numel())
