"""Announce a lane's collectives to other ranks before they are made, and find out whether those object.

Each call is passed to the communicator, if it has an ``announce`` method, and to the comparison of calls
(``health.compared``), if there is one. This module must not know when calls are made.
"""

from __future__ import annotations

from asynccoll.errors import CollectiveMismatchError
from asynccoll.host.call_site import Spot
from asynccoll.order.connection import Connection
from asynccoll.order.job import UNCOMPARED, Job, What
from asynccoll.order.needs import Compared
from asynccoll.transport.completion import Promise

#: Why a call is not made now: other ranks make a different call (the error), or the comparison with them is
#: still in progress (a promise that ends with that error or with none). None: make the call.
Objection = CollectiveMismatchError | Promise | None


class Announcing:
    """The announcements of one lane.

    Called with the lane's lock held, except ``objection``, which the thread that drives the queue calls.
    """

    __slots__ = ("_checked", "_connection", "_in_step", "_since", "compared")

    def __init__(self, connection: Connection, since: int, *, checked: bool) -> None:
        """``checked``: a separate collective compares each call first (``check="full"``), so not this one."""
        self._connection = connection
        self._checked = checked
        self.compared: Compared | None = None  # compares calls with other ranks'; None: no comparison here
        self._since = since  # the number passed to the last ``restart``, the same on all ranks
        self._in_step: Compared | None = None  # the ``compared`` that was restarted with that number

    def call(self, spot: Spot, what: What, place: int, part: int, shares: bool) -> Objection:
        """Announce the call that is about to be made. Returns the objection to it, if any.

        ``shares``: the call is one of several native calls at its place.
        """
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
        """Announce a queued call, or the next step of a program. Returns the objection to it, if any.

        A promise becomes the job's ``gate``, and also its ``step``, so that the queue continues once the
        promise is settled.
        """
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
        """Restart the comparison at number ``since``: ranks are in step again, whatever they have called."""
        self._since, self._in_step = since, self.compared
        if self.compared is not None:
            self.compared.restart(since)
