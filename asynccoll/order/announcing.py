"""What other ranks hear of a lane's collectives before they are made, and what speaks against making one.

A communicator is told that wants to know (``announce``), and so is the comparison of calls, if there is one.
It must not know when calls are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynccoll.errors import CollectiveMismatchError
from asynccoll.order.job import UNCOMPARED
from asynccoll.transport.completion import Promise

if TYPE_CHECKING:
    from asynccoll.host.call_site import Spot
    from asynccoll.order.connection import Connection
    from asynccoll.order.job import Job, What
    from asynccoll.order.needs import Compared

__all__ = ["Announcing", "Objection"]

#: What speaks against making a call: others make another one; or it is to be known first whether they do.
Objection = CollectiveMismatchError | Promise | None


class Announcing:
    """Of one lane. Used with its lock held, but for ``objection``, which the thread calls that drives it."""

    __slots__ = ("_checked", "_connection", "_in_step", "_since", "compared")

    def __init__(self, connection: Connection, *, checked: bool) -> None:
        """``checked``: each call is compared with the others' before, so that all find alike what differs."""
        self._connection = connection
        self._checked = checked
        self.compared: Compared | None = None  # with what others call; None where that is done elsewhere
        self._since = 0  # when ranks were in step: the same number on all, whenever each has connected
        self._in_step: Compared | None = None  # it knows that

    def call(self, spot: Spot, what: What, place: int, part: int, shares: bool) -> Objection:
        """Announce the call that is about to be made, which may share its place."""
        announce = getattr(self._connection.communicator, "announce", None)
        if announce is not None:
            announce(None if self._checked else what, spot, place, part, shares and not self._checked)
        compared = self.compared
        if self._checked or compared is None or what is UNCOMPARED:
            return None
        if compared is not self._in_step:
            self.restart(self._since)
        return compared.call(what, spot, place, part)

    def objection(self, job: Job) -> Objection:
        """The same of a queued call, or of the next step of a program."""
        if job.gate is None:
            shares = job.shares or job.program is not None
            found = self.call(job.called, job.what, job.place, job.part, shares) if job.place else None
            if not isinstance(found, Promise):
                return found
            job.gate = found
        if not job.gate.done():
            job.step = job.gate
            return job.gate
        error, job.gate, job.step = job.gate.error(), None, None
        assert error is None or isinstance(error, CollectiveMismatchError)
        return error

    def restart(self, since: int) -> None:
        """Ranks are in step again, whatever each has called before."""
        self._since, self._in_step = since, self.compared
        if self.compared is not None:
            self.compared.restart(since)
