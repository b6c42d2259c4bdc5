"""Which actor (task, else thread) may issue on a lane: the last one that did, or one ordered after it.

Two concurrent tasks may be scheduled in different orders on different ranks. Their calls on one lane would
then be matched with the wrong calls, even if one task ends before the other calls. So the next actor must
have been started after its predecessor's last call on the lane: by the predecessor, or by another actor once
the predecessor had ended. (Or the next actor started the predecessor and waited for it. If it did not wait,
then on ranks where the predecessor is late, the predecessor would call after it, which is refused there.)
Messages have a separate order for each peer and tag: a *stream*.

This module must not know what is issued.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from asynccoll import host
from asynccoll.errors import LaneOrderError
from asynccoll.host import actors, bystanders
from asynccoll.host.call_site import NOWHERE, Spot, site

#: An order of messages: ("send" or "recv", the peer's index in the group, the tag).
Stream = tuple[str, int, int]

_OWN_LANES = (
    "Give each task its own lane: start the tasks in `ac.create_task_group()`, pass lane='name' to the call, "
    "or write `with ac.lane('name'):` around it (and start the task with `ac.isolated` if it uses no_grad "
    "or autocast, which leak at an await)"
)
_OF_ONE_LINE = (
    "This line runs in several tasks at a time: issue its calls in one task, or wait for each task before "
    "you start the next; or give each its own lane: start the tasks in `ac.create_task_group()`, or pass "
    "another lane= in each"
)
#: The owners of at most this many streams are kept.
_MOST_STREAMS = 4096


class Owner:
    """The last actor that issued in one order, with the source line and the number of its last call."""

    __slots__ = ("actor", "beside", "call", "name", "spot", "thread")

    def __init__(self) -> None:
        self.actor: Callable[[], actors.Actor] = _nobody  # a weak reference
        self.name: str = ""
        self.spot: Spot = NOWHERE
        self.call: int = 0
        self.thread: host.Thread | None = None
        #: the tasks or threads that existed when it became the owner
        self.beside: AbstractSet[object] = frozenset()

    def becomes(self, node: actors.Descent) -> None:
        """Make the actor of ``node`` the owner."""
        self.actor = weakref.ref(node.actor)
        self.name = actors.label(node.actor)
        self.thread = actors.thread_of(node.actor)
        self.beside = bystanders.beside(node)

    def ran_beside(self, node: actors.Descent) -> bool:
        """Whether the actor of ``node`` already existed while this owner did, with no order between them.

        False if this owner's thread is alive: a pool keeps its threads, and when a job began is unknown.
        """
        if self.thread is not None and self.thread.is_alive():
            return False
        return bystanders.ran_beside(node, self.beside)


def _nobody() -> None:
    """Stand in for the weak reference to an owner in an order in which nothing was issued: return None."""


class Owners:
    """The owner of a lane's collectives, and the owners of its streams."""

    def __init__(self, *, checked: bool) -> None:
        """``checked``: whether an unordered actor is refused; else owners only record where they issued."""
        self._checked = checked
        self._collectives = Owner()
        self._streams: dict[Stream, Owner] = {}

    def admit(self, stream: Stream | None, lane: object) -> Owner:
        """Check that the caller may issue on ``lane`` now, and make it the owner of that order.

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
                self._streams.clear()  # a new tag for each message: the owners of old streams do not matter
            owner = self._streams[stream] = Owner()
        return owner


def _check_handover(node: actors.Descent, held: actors.Actor, owner: Owner, lane: object) -> None:
    """Check that ``node``'s actor may follow ``owner``: that it was started after the owner's last call.

    ``held`` is the owner's actor; None if nothing was issued yet or that actor is gone. If it is gone, actors
    that ran concurrently with it may still exist.
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
        how = "issued there at {} while this one was already running, and has ended since"
    else:
        return
    mine, other, here, there = actors.label(node.actor), owner.name, site().place, owner.spot.place
    raise LaneOrderError(
        f"{mine} issued a collective on {lane} at {here}, but that lane "
        f"belongs to {'another ' * (mine == other)}{other}, which {how.format(there)}. "
        "Two concurrent tasks on one lane can be scheduled in a different order on different "
        f"ranks, which gives wrong numbers. {_OF_ONE_LINE if here == there else _OWN_LANES}"
    )
