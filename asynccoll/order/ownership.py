"""Who may issue on a lane: the task, else thread, that did so last, and whom the program orders after it.

Two tasks that run at a time may be scheduled in different order on different ranks, and their calls on one
lane would then meet the wrong ones, also where one has ended before the other calls. So who follows was
started when its predecessor had made its last call here: by it, or by somebody else when it had ended. (Or
it started the predecessor, and waited for it; where it did not wait, that one cannot follow on the ranks on
which it is late.) Messages have an order of their own for each peer and tag: a stream.

It must not know what is issued.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from asynccoll import host
from asynccoll.errors import LaneOrderError
from asynccoll.host import actors, bystanders
from asynccoll.host.call_site import NOWHERE, Spot, caller

__all__ = ["Owner", "Owners", "Stream"]

#: Of messages: ("send" or "recv", the peer's index in the group, the tag).
Stream = tuple[str, int, int]

#: Of how many streams the owners are kept.
_MOST_STREAMS = 4096


class Owner:
    """Who issued last on an order, where, and in which call of the process."""

    __slots__ = ("actor", "beside", "call", "name", "spot", "thread")

    def __init__(self) -> None:
        self.actor: Callable[[], actors.Actor] = _nobody  # a weak reference
        self.name: str = ""
        self.spot: Spot = NOWHERE
        self.call: int = 0
        self.thread: host.Thread | None = None
        #: The tasks or threads that were there when it came.
        self.beside: AbstractSet[object] = frozenset()

    def becomes(self, node: actors.Descent) -> None:
        """Another actor has this order from now on."""
        self.actor = weakref.ref(node.actor)
        self.name = actors.label(node.actor)
        self.thread = actors.thread_of(node.actor)
        self.beside = bystanders.beside(node)

    def ran_beside(self, node: actors.Descent) -> bool:
        """Whether that of ``node`` was there already, in no order with this one.

        A pool's threads live on: of their jobs nobody knows when they came.
        """
        if self.thread is not None and self.thread.is_alive():
            return False
        return bystanders.ran_beside(node, self.beside)


def _nobody() -> None:
    """The owner of an order on which nothing was issued."""


class Owners:
    """The owner of a lane's collectives, and those of its streams."""

    def __init__(self, *, checked: bool) -> None:
        """``checked``: whether another actor is refused; else owners only say where they have issued."""
        self._checked = checked
        self._collectives = Owner()
        self._streams: dict[Stream, Owner] = {}

    def admit(self, stream: Stream | None, lane: object) -> Owner:
        """Check that the caller may issue on ``lane`` now; from now on it owns this order.

        Raises:
            LaneOrderError: nothing in the program orders the caller after its owner.
        """
        owner = self._collectives if stream is None else self._of(stream)
        if self._checked:
            node = actors.current()
            held = owner.actor()
            if held is not node.actor:
                _check_handover(node, held, owner, lane)
                owner.becomes(node)
            owner.call = actors.called()
        return owner

    def _of(self, stream: Stream) -> Owner:
        owner = self._streams.get(stream)
        if owner is None:
            if len(self._streams) >= _MOST_STREAMS:
                self._streams.clear()  # a tag for each message: the owners of old ones do not matter
            owner = self._streams[stream] = Owner()
        return owner


def _check_handover(node: actors.Descent, held: actors.Actor, owner: Owner, lane: object) -> None:
    """Another actor follows on this order: as one that was started after the last call of its owner.

    ``held`` is None where nobody has issued yet, or where the owner is gone: those who ran beside it are not.
    """
    started = None if held is None else actors.started_after(node, held)
    over = held is None or actors.ended(held) or actors.left(held, owner.spot.file)
    if started is not None:
        if owner.call <= started:
            return
        how = "issued there at {} after it had started this one"
    elif not over:
        how = "issued there at {} and is still running"
    elif owner.ran_beside(node):
        how = "issued there at {} when this one was running already, and has ended since"
    else:
        return
    mine, other = actors.label(node.actor), owner.name
    raise LaneOrderError(
        f"{mine} issued a collective on {lane} at {caller().place}, but that lane "
        f"belongs to {'another ' * (mine == other)}{other}, which {how.format(owner.spot.place)}. "
        "Two concurrent tasks on one lane can be scheduled in different order on different "
        "ranks, which gives wrong numbers. Give each task its own lane: start the tasks in "
        "`ac.create_task_group()`, pass lane='name' to the call, or write `with ac.lane('name'):` around it "
        "(and start the task by `ac.isolated(...)` if it uses no_grad or autocast, which leak at an await)"
    )
