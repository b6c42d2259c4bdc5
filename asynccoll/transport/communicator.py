"""What a communicator is: start functions, and what is to be known to open one.

Start functions work on contiguous tensors that the caller has planned, encoded and allocated; they
issue and return at once. They never validate, convert or wait.
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
    """A communicator that is to be opened: among whom, under which name, and for how long one waits."""

    ranks: tuple[int, ...]  # global ones, sorted
    rank: int  # this rank's index among them
    is_world: bool
    group: str  # by which its members know the group, the same on each
    lane: str
    epoch: int
    #: None where ranks have no store: then nobody else is there, or the library meets by itself
    clients: Clients | None
    #: seconds: of a request, and until all members have come
    timeout: float
    meeting: float
    #: whether it is wanted no more
    given_up: Callable[[], bool]
    #: told, on a thread that may wait, that ranks have called different things at a place that parts of a
    #: call share
    disagreed: Callable[[int, CollectiveError], object]
    #: whether the rank that may serve the store is there
    store_answers: Callable[[], bool]
    #: of how many equal nodes the members are, and this one's node and index there
    nodes: int = 1
    place: tuple[int, int] = (0, 0)
    #: the types of devices whose tensors somebody else carries: what is opened has collectives for the others
    carried: frozenset[str] = frozenset()
    #: opens the communicator of the ranks of this node, where that is not the backend's own
    within: Callable[[], Communicator] | None = None

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    @property
    def lasting(self) -> str:
        """The name that it has in every epoch."""
        return f"{self.group}/{self.lane}"

    @property
    def name(self) -> str:
        """The name that it has in this one."""
        return f"{self.lasting}@{self.epoch}"


class Communicator(Protocol):
    """One native communicator: a group of ranks and one order. Roots are indices in the group.

    Where the capabilities have ``hop_bytes``, there are also ``parts``, None or two communicators, of the
    ranks of this node and of those in the same place of every node; and ``open_parts()``, which opens them,
    waiting for the others. They are closed and aborted with it.
    """

    # One that finds out by itself where ranks call different things has ``announce(what, spot, place, part,
    # shares)``: the call that is about to be issued, the line that made it, its place in the lane's order,
    # which part of the call there it is, and whether others share that place.

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        """Reduce ``x`` in place.

        Where the capabilities' ``keeps_input`` has it, there is also ``all_reduce_into(out, x, op)``,
        which leaves ``x`` as it is.
        """
        ...

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        """Reduce ``x`` in place on ``dst``; elsewhere its content is undefined afterwards.

        It is what it was where the capabilities' ``keeps_input`` has it.
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
        """In place of a ``send``: let the ``recv`` of ``dst`` end, if there is a way."""
        ...

    def barrier(self) -> Completion: ...

    def retire(self) -> bool:
        """Close what carries collectives: some of them never end. Whether nothing is left to ``close``.

        Every rank has ended those that do end. Messages go on, in what ``inherit`` takes over.
        """
        ...

    def inherit(self, previous: Any) -> None:
        """Take over the messages of ``previous``, a communicator of this lane that was or will be retired."""
        ...

    def close(self) -> None:
        """Release it; nothing is in flight."""
        ...

    def abort(self) -> None:
        """Make every operation in flight fail soon, here and on the peers it is connected to."""
        ...


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """The rows of ``x`` as such: for libraries in which all ranks must pass as many dimensions."""
    return x if x.dim() == 2 else x.view(x.shape[0], x.shape[1:].numel())
