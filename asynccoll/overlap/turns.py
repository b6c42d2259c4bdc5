"""Refuses the calls of a backward that will never run here, while a peer waits for them in its own backward.

This is about loops over sharded layers (``gathering``); a *turn* is what peers need to know of one such loop.
Once backward has reached one layer of a loop, zeros are sent for the layers that autograd does not reach. If
it reaches none (the loss does not depend on them, or backward raised or was skipped on this rank alone),
nothing sends them. So loops are numbered, identically on all ranks, and a rank that has waited in the
backward of one for more than a second publishes that (``health.waits``). A rank whose backward can no longer
reach that loop refuses its calls. It knows this if

- autograd's graph of that loop is gone, or
- backward has raised here, after reaching that loop, or another one that the peer's backward has reached, or
- its thread is in a later loop here, which the peer cannot begin: the peer's thread is in that backward.

If backward has raised on several ranks, at different places, no rank waits, and none knows how far the others
got, nor which loops it would have reached itself. So in the next loop, which they begin together, they
compare how many calls each has made (``Standing``), and the ranks that are behind refuse the rest. There they
also compare what the optimizer's steps since the last loop followed from: parts that ranks have updated with
different learning rates would be put together in silence.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from asynccoll import host
from asynccoll.errors import CollectiveMismatchError, InvalidArgumentError
from asynccoll.host.words import by_text
from asynccoll.ops.scopes import new_lane
from asynccoll.runtime.process import current
from asynccoll.world.resolving import resolve_group

if TYPE_CHECKING:
    from asynccoll.order.lane import Lane
    from asynccoll.world.group import GroupLike

    #: Calls that are refused: lane, place (None: the next calls of that lane), count, reason.
    Refused: TypeAlias = tuple[Lane, int | None, int, Exception]

__all__ = ["SAME_STEPS", "Standing", "Turn", "Turns"]

SAME_STEPS = (
    "Each rank updates its own parts of the layers: have the same hyperparameters on every rank (step "
    "schedulers everywhere), make the same steps, and load the same checkpoint of layers and optimizer"
)

#: How many loops that no backward can reach here are remembered, in case a peer waits in the backward of one:
#: the latest that owe calls, and the latest that ran without gradients.
_REMEMBERED = 32


class Standing(NamedTuple):
    """How far backwards have got on a rank when a loop begins."""

    #: whether a backward has raised since the ranks last compared this
    interrupted: int = 0
    #: a checksum of what the optimizer's steps since the last loop followed from; 0 if there was none
    followed: int = 0
    #: the calls made so far on the lane of gradients, and on the lane on which layers are gathered again
    scattered: int = 0
    gathered: int = 0


class Turn:
    """One loop over the layers: whether backward may still reach it, and the calls that backward owes."""

    def __init__(self, number: int, graph: object) -> None:
        """``graph``: an object that lives as long as backward may reach this loop. Referenced weakly."""
        self.number = number
        self.thread: int = host.get_ident()
        #: whether backward has reached it and made all calls, or peers were told that it will not
        self.is_over: bool = False
        #: the number of calls that its backward has yet to make, by lane
        self.owes: Counter[str] = Counter()
        self._graph = weakref.ref(graph)
        self._backward: weakref.ref[object] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether its graph is gone, so that no backward will reach it from now on."""
        return self._graph() is None

    @property
    def is_lost(self) -> bool:
        """Whether no backward can reach it any more: its graph is gone, or a backward has raised."""
        return self.is_gone or self.has_raised

    @property
    def has_raised(self) -> bool:
        """Whether a backward has reached it and raised: the object that stands for that backward is gone."""
        return self._backward is not None and self._backward() is None

    def reached(self, backward: object, owes: Counter[str]) -> None:
        """Note that a backward has reached it. If ``backward`` is dropped before ``ended``, it has raised.

        ``owes``: by lane, how many calls that backward makes.
        """
        self._backward = weakref.ref(backward)
        self.owes = owes
        self.is_over = False

    def ended(self) -> None:
        """Note that the backward has made all of its calls."""
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
        self._steps: list[str] = []  # since the last loop began
        self._compared: list[str] = []  # what was sent last
        self._waits = context.waits
        self._refuse = context.refusals.refuse
        self._rank = context.rank
        self._count = 0
        self._turns: list[Turn] = []
        self._awaited: dict[str, object] | None = None
        self.name: str = f"{self._group.key}/{new_lane(f'{lane} turns')}"
        self._waits.add(self)

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks that have parts of the layers."""
        return self._group.ranks

    def begin(self, graph: object) -> Turn:
        """Begin a turn: a loop gathers its first layer. Refuses what backwards that raised still owe."""
        self.give_up_raised()
        self._count += 1
        turn = Turn(self._count, graph)
        self._turns = [*self._remembered(), turn]
        return turn

    def _remembered(self) -> list[Turn]:
        """Return the turns in whose backward a peer may wait for this rank, in order."""
        kept: list[Turn] = []
        found: Counter[bool] = Counter()
        for turn in reversed(self._turns):
            if turn.is_gone:
                owes = any(turn.owes.values())
                if found[owes] == _REMEMBERED or (turn.is_over and not turn.has_raised):
                    continue
                found[owes] += 1
            kept.append(turn)
        return kept[::-1]

    def give_up_raised(self) -> None:
        """Refuse the remaining calls of backwards that have raised, before others begin."""
        for earlier in list(self._turns):
            if earlier.has_raised and not earlier.is_over:
                self._give_up(earlier)
                for lane, place, count, reason in self._rest(earlier):
                    self._refuse(lane, reason, place, count=count)

    def _give_up(self, turn: Turn) -> None:
        turn.is_over = True
        self._interrupted = self._interrupted or turn.has_raised

    def stepped(self, parts: Sequence[int], followed: Sequence[str]) -> None:
        """Note a step of an optimizer on these ``parts``, by number, and what it ``followed`` from.

        Ranks may step different parts in different orders.
        """
        self._steps.append(f"parts {list(parts)}: {', '.join(followed)}")
        self._steps.sort(key=lambda step: step.partition(":")[0])

    def standing(self) -> Standing:
        """Return how far backwards have got on this rank, and what its steps since the last loop followed."""
        opened = [self._group.opened.get(lane) for lane in self._of_backward]
        followed = zlib.crc32("\n".join(self._steps).encode()) if self._steps else 0
        made = (0 if lane is None else lane.sequence for lane in opened)
        return Standing(self._interrupted, followed, *made)

    def sent(self) -> None:
        """Note that ``standing`` was sent: from here on, steps are for the next loop to compare."""
        self._compared, self._steps = self._steps, []

    def compare(self, standings: Sequence[Standing]) -> None:
        """Catch up if a backward raised on any rank; refuse a loop after steps that were not alike."""
        if any(one.interrupted for one in standings):
            self._catch_up(standings)
        sides = by_text(range(len(standings)), (f"{one.followed:x}" for one in standings))
        if len(sides) > 1:
            told = "; ".join(f"{who}: " + ("none" if it == "0" else f"checksum {it}") for who, it in sides)
            own = "\n".join(self._compared) or "none"
            raise CollectiveMismatchError(
                "the ranks (of the group) have not made the same optimizer steps since their last loop "
                f"({told}). This rank's: {own}. {SAME_STEPS}"
            )

    def _catch_up(self, standings: Sequence[Standing]) -> None:
        """Refuse calls up to those of the rank that got furthest.

        Every rank refuses one call more than that. So each knows of the refusals before it makes further
        calls, which would be lost behind a refusal.
        """
        self._interrupted = False
        made = (max(one.scattered for one in standings), max(one.gathered for one in standings))
        for name, most in zip(self._of_backward, made, strict=True):
            if most:
                lane = self._group.lane(name)
                if (behind := most + 1 - lane.sequence) > 0:
                    self._refuse(lane, self._unreached(), count=behind)

    @contextmanager
    def waiting(self, turn: Turn, lane: str, together: Sequence[Turn]) -> Iterator[None]:
        """Note, for the block, that backward waits on ``lane`` for calls of the peers' backward of ``turn``.

        ``together``: the turns of all loops that this backward has reached.
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
        """Return what ``waiting`` has set: the loop in whose backward this rank waits, and the newest one.

        ``holds_up``: this thread has begun the newest loop, so it begins no other while it waits.
        """
        return self._awaited

    def refuses(self, awaited: Mapping[str, Any]) -> list[Refused]:
        """Return the calls that a peer waits for, if this rank can no longer make them.

        If both ranks wait for each other, also the first call that this one waits for in its later loop.
        """
        turn = next((one for one in list(self._turns) if one.number == awaited["loop"]), None)
        if turn is None or turn.is_over:
            return []
        newest = self._turns[-1]
        both_wait = awaited["holds_up"] and newest.thread == turn.thread and newest.number > awaited["newest"]
        together = awaited["together"]
        # (When a backward raises, torch keeps functions that were ready to run until the next backward, and
        # with them their graph. So ``is_lost`` alone would not be enough.)
        is_lost = turn.is_lost or any(one.has_raised for one in list(self._turns) if one.number in together)
        if not (is_lost or both_wait):
            return []
        self._give_up(turn)
        waits_on = awaited["lane"]
        # At least as many as the peer has made there, so that a rank that recovers from the error is in step.
        behind = awaited["reached"] - self._group.lane(waits_on).sequence
        turn.owes[waits_on] = max(1, behind, turn.owes[waits_on])
        refused = list(self._rest(turn))
        gathers = self._group.lane(self._lane)
        if both_wait and (first := min((one.sequence for one in gathers.outstanding()), default=0)):
            refused.append((gathers, first, 1, self._error(turn)))
        return refused

    def _rest(self, turn: Turn) -> Iterator[Refused]:
        """Yield the calls that backward of this loop still owes.

        Those of a lane are refused together: a peer that has heard of only some of them would make calls that
        are lost behind the rest.
        """
        for name, count in turn.owes.items():
            if count > 0:
                yield self._group.lane(name), None, count, self._error(turn)

    def _unreached(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"backward on rank {self._rank} raised before it reached a layer whose gradient other ranks "
            "have sent"
        )

    def _error(self, turn: Turn) -> InvalidArgumentError:
        if turn.has_raised:
            return InvalidArgumentError(
                f"backward on rank {self._rank} raised in its loop {turn.number} over the layers: catch "
                "that there, agree on all ranks to skip the step, and go on"
            )
        return InvalidArgumentError(
            f"backward on rank {self._rank} has reached no layer of its loop {turn.number} over the layers, "
            "and other ranks wait in theirs: let the loss depend on one layer of each loop on every rank (on "
            "its output times 0, if it has no use for it; without data, on an empty batch); or, where no "
            "rank runs backward, loop under torch.no_grad()"
        )
