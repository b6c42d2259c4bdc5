"""Loops over layers to which this rank's backward never comes, while a peer waits for it in its own.

What autograd leaves out of a loop is sent as zeros once backward has come to one of its layers. Where it
comes to none (the loss does not depend on them; backward raised, or was skipped on this rank alone), there is
nothing that could send them. So each loop has a number, the same on all ranks, and a rank that has waited for
long in the backward of one says so (``health.waits``). A rank that can no longer come to it refuses:

- what autograd keeps of that loop is gone, or
- its backward has raised here: it had come to that loop, or to another one that the peer's has come to, or
- its thread is in a later loop that the peer cannot begin, since the peer's own thread is in that backward.

Where backward has raised on several ranks, at different places, nobody waits, and none of them knows how far
the others came: a rank cannot tell which loops it would have come to. So the next loop, which they begin
together, compares how many calls each has made (``Standing``), and those that are behind refuse the rest.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from asynccoll import host
from asynccoll.errors import InvalidArgumentError
from asynccoll.ops.scopes import new_lane
from asynccoll.runtime.process import current
from asynccoll.world.resolving import resolve_group

if TYPE_CHECKING:
    from asynccoll.order.lane import Lane
    from asynccoll.world.group import GroupLike

__all__ = ["Standing", "Turn", "Turns"]

#: A rank that waits for a peer is ahead of it by less than this many loops.
_REMEMBERED = 32


class Standing(NamedTuple):
    """How far backward has come on a rank when a loop begins."""

    #: whether a backward has raised since the ranks last compared this
    interrupted: int = 0
    #: calls made so far, where gradients go back and where layers are gathered again
    scattered: int = 0
    gathered: int = 0


class Turn:
    """One loop, as far as peers have to know of it."""

    def __init__(self, number: int, graph: object) -> None:
        """``graph`` lives as long as something may bring backward to this loop."""
        self.number = number
        self.thread: int = host.get_ident()
        #: backward has come to it and brought everything, or peers were told that it will not
        self.is_over: bool = False
        #: the calls that its backward has yet to make, by their lanes
        self.owes: Counter[str] = Counter()
        self._graph = weakref.ref(graph)
        self._backward: weakref.ref[object] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether no backward can come to it any more: what it would go through is gone, or it has raised."""
        return self._graph() is None or self.has_raised

    @property
    def has_raised(self) -> bool:
        """Whether a backward has come to it, and raised."""
        return self._backward is not None and self._backward() is None

    def reached(self, backward: object, owes: Counter[str]) -> None:
        """A backward has come to it, and has not raised as long as ``backward`` lives, or has ended.

        ``owes``: how many calls it makes on which lanes.
        """
        self._backward = weakref.ref(backward)
        self.owes = owes
        self.is_over = False

    def ended(self) -> None:
        """That backward has made all of its calls."""
        self._backward = None


class Turns:
    """The loops over some layers on one rank: a ``Party`` of ``health.waits``."""

    def __init__(self, group: GroupLike, lane: str, of_backward: Sequence[str]) -> None:
        """``lane``: where loops gather. ``of_backward``: the lanes of backward, in ``Standing``'s order."""
        context = current()
        self._group = resolve_group(context, group)
        self._lane = lane
        self._of_backward = of_backward
        self._interrupted = False
        self._waits = context.waits
        self._refuse = context.refusals.refuse
        self._rank = context.rank
        self._count = 0
        self._turns: deque[Turn] = deque(maxlen=_REMEMBERED)
        self._awaited: dict[str, object] | None = None
        self.name: str = f"{self._group.key}/{new_lane(f'{lane} turns')}"
        self._waits.add(self)

    @property
    def ranks(self) -> Sequence[int]:
        """Those that have parts of the layers."""
        return self._group.ranks

    def begin(self, graph: object) -> Turn:
        """A loop gathers its first layer."""
        self.give_up_raised()
        self._count += 1
        turn = Turn(self._count, graph)
        self._turns.append(turn)
        return turn

    def give_up_raised(self) -> None:
        """Refuse what is left of backwards that have raised, before others begin."""
        for earlier in list(self._turns):
            if earlier.has_raised and not earlier.is_over:
                self._give_up(earlier)
                for lane, reason in self._rest(earlier):
                    self._refuse(lane, reason)

    def _give_up(self, turn: Turn) -> None:
        turn.is_over = True
        self._interrupted = self._interrupted or turn.has_raised

    def standing(self) -> Standing:
        """How far this rank has come."""
        opened = [self._group.opened.get(lane) for lane in self._of_backward]
        return Standing(self._interrupted, *(0 if lane is None else lane.sequence for lane in opened))

    def compare(self, standings: Sequence[Standing]) -> None:
        """Catch up with the rank that has come furthest, if backward was interrupted somewhere.

        Every rank refuses one call more. So each of them knows that there are refusals, before it makes calls
        which would be lost behind one.
        """
        if not any(one.interrupted for one in standings):
            return
        self._interrupted = False
        made = (max(one.scattered for one in standings), max(one.gathered for one in standings))
        for name, most in zip(self._of_backward, made, strict=True):
            lane = self._group.lane(name) if most else None
            while lane is not None and lane.sequence <= most:
                self._refuse(lane, self._unreached())

    @contextmanager
    def waiting(self, turn: Turn, lane: str, together: Sequence[Turn]) -> Iterator[None]:
        """In this block a backward waits on ``lane`` for what the peers' backward brings of that loop.

        ``together``: the loops that this backward has come to.
        """
        newest = self._turns[-1]
        self._awaited = {
            "loop": turn.number,
            "together": [one.number for one in together],
            "lane": lane,
            "reached": self._group.lane(lane).sequence,
            "newest": newest.number,
            "holds_up": newest.thread == host.get_ident(),
        }
        try:
            yield
        finally:
            self._awaited = None
            self._waits.withdraw(self)

    def waits_for(self) -> Mapping[str, object] | None:
        """The loop in whose backward this rank waits; the newest here, and whether that holds up the next."""
        return self._awaited

    def refuses(self, awaited: Mapping[str, Any]) -> list[tuple[Lane, int | None, Exception]]:
        """The call that a peer waits for, if this rank cannot make it, and the one it waits for itself."""
        turn = next((one for one in list(self._turns) if one.number == awaited["loop"]), None)
        if turn is None or turn.is_over:
            return []
        newest = self._turns[-1]
        both_wait = awaited["holds_up"] and newest.thread == turn.thread and newest.number > awaited["newest"]
        together = awaited["together"]
        # (What is ready to run when a backward raises torch keeps until the next one, and its graph with it.)
        is_lost = turn.is_lost or any(one.has_raised for one in list(self._turns) if one.number in together)
        if not (is_lost or both_wait):
            return []
        self._give_up(turn)
        waits_on = awaited["lane"]
        # All calls that the peer has made there: a rank that recovers from the error is in step again.
        behind = awaited["reached"] - self._group.lane(waits_on).sequence
        turn.owes[waits_on] = max(1, behind, turn.owes[waits_on])
        refused: list[tuple[Lane, int | None, Exception]]
        refused = [(lane, None, reason) for lane, reason in self._rest(turn)]
        gathers = self._group.lane(self._lane)
        if both_wait and (first := min((one.sequence for one in gathers.outstanding()), default=0)):
            refused.append((gathers, first, self._error(turn)))
        return refused

    def _rest(self, turn: Turn) -> Iterator[tuple[Lane, Exception]]:
        """Every call that backward of this loop makes on the other ranks, and will not make here."""
        for name, count in turn.owes.items():
            lane = self._group.lane(name)
            yield from ((lane, self._error(turn)) for _ in range(count))

    def _unreached(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"backward on rank {self._rank} has raised before it came to a layer whose gradient other ranks "
            "have sent"
        )

    def _error(self, turn: Turn) -> InvalidArgumentError:
        if turn.has_raised:
            return InvalidArgumentError(
                f"backward on rank {self._rank} has raised in its loop {turn.number} over the layers: catch "
                "that there, agree on all ranks that the step is left out, and go on"
            )
        return InvalidArgumentError(
            f"backward on rank {self._rank} has come to no layer of its loop {turn.number} over the layers, "
            "and other ranks wait in theirs: let the loss depend on one layer of each loop on every rank (on "
            "its output times 0, if it has no use for it; without data, on an empty batch); or, where no "
            "rank runs backward, loop under torch.no_grad()"
        )
