"""One rank's world: its backend, its groups and lanes, and the objects that watch over them.

A context is a value that is looked up (``runtime``), never a set of module globals, since ranks may be
threads of one process, each with a context of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from asynccoll import host
from asynccoll.environment import node_name
from asynccoll.errors import CollectiveError, PeerLostError
from asynccoll.flight import Recorder, joined
from asynccoll.health.accounts import SECRET_VARIABLE, Accounts
from asynccoll.health.blame import Blame
from asynccoll.health.compared import Compared
from asynccoll.health.confirming import Confirmations, Confirming
from asynccoll.health.liveness import Liveness
from asynccoll.health.refusals import Refusals
from asynccoll.health.shifts import Shifts
from asynccoll.health.stalls import stall_seconds
from asynccoll.health.waits import Waits
from asynccoll.health.watchdog import Watch
from asynccoll.host.call_site import site
from asynccoll.host.endings import in_a_line, in_full
from asynccoll.host.helpers import Helpers
from asynccoll.host.store import Clients, is_of_store
from asynccoll.order.lane import BACKWARD, Lane
from asynccoll.order.operation import Operation
from asynccoll.plan.spec import Policy
from asynccoll.transport.backend import Backend
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion
from asynccoll.waiting.children import Children
from asynccoll.world.failures import Failures
from asynccoll.world.farewells import Farewells
from asynccoll.world.group import Group

_log = logging.getLogger("asynccoll.watch")

#: How long rank 0, which may serve the store, waits at the end for the ranks that have not left yet.
LEAVE_SECONDS = 30.0
#: The same after an error, since other ranks may be stuck. Also how long to wait for helper threads.
ABORT_SECONDS = 2.0
#: How long a leaving rank waits until other ranks have been told of its calls (``confirming``).
TELL_SECONDS = 2.0
#: The polling interval while waiting for the device, for a refusal to settle, or for peers to be told.
LAND_POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Identity:
    """Which rank of the job this is, and on which node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    nproc_per_node: int = 1
    node_rank: int = 0
    nnodes: int = 1


class Context:
    """One rank's world, made by ``initialize`` or around an adopted process group or job."""

    def __init__(
        self,
        backend: Backend,
        identity: Identity,
        *,
        store: dist.Store | None = None,
        timeout: float = 1800.0,
        check: str = "local",
        thread_rank: bool = False,
        nodes: tuple[int, ...] = (),
        by_node: bool | None = None,
    ) -> None:
        """``nodes``: each rank's node, or () if not all ranks know them; ``by_node``: see ``Policy``."""
        self.backend = backend
        self.identity = identity
        self.rank: int = identity.rank
        self.world_size: int = identity.world_size
        self.timeout = timeout
        self.checks_order: bool = check != "off" and identity.world_size > 1
        self.policy: Policy = Policy(check == "full" and identity.world_size > 1, by_node)
        self.nodes = nodes
        self.thread_rank = thread_rank
        self.closed: bool = False
        #: whether ``initialize`` has finished
        self.joined: bool = False
        #: the advice for a second ``initialize``
        self.instead: str = (
            "omit this call where Parallel, spawn or session has already made it, or call ac.finalize() first"
        )
        #: called with each accepted operation and its size in bytes, without the lane's lock (``trace``)
        self.observers: tuple[Callable[[Operation, int], object], ...] = ()
        self.store: dist.Store | None = store if identity.world_size > 1 else None
        self.clients: Clients | None = Clients(store) if store is not None else None
        self.groups: dict[tuple[int, ...], Group] = {}
        #: how many names ``new_lane`` has given out, by kind: all ranks ask for them in the same order
        self.named: Counter[str] = Counter()
        shared = self.clients if self.world_size > 1 else None
        self.refusals: Refusals = Refusals(shared, self.rank)
        self.children: Children = Children(self._lanes_named, self._close_lanes, self.refusals.note)
        self.recorder: Recorder = Recorder(self.rank, self.world_size)
        self._lock = host.Lock()
        self._closing = host.RLock()
        self._helpers = Helpers()
        self.world: Group = self.add_group(tuple(range(self.world_size)))
        self.stall_seconds: float = stall_seconds()
        self.watch: Watch = Watch(self)
        self.waits: Waits = Waits(shared, self.rank, self.refusals)
        accounts = Accounts(self.rank, self.recorder, os.environ.get(SECRET_VARIABLE, ""), node_name())
        one_host = bool(nodes) and len(set(nodes)) == 1
        try:
            self.liveness: Liveness = Liveness(shared, self.rank, accounts, one_host=one_host)
        except BaseException:  # the caller never gets this context, so it cannot close it
            host.call_each([partial(backend.close, abort=True), self.recorder.close])
            raise
        self._shifts = Shifts(self.rank, self.recorder, self.liveness.seen)
        self.confirmations: Confirmations = Confirmations(self.rank, self.liveness.tell)
        self.liveness.hear_by(self.confirmations.hear)
        self.farewells: Farewells = Farewells(
            self.rank, self.world_size, self.clients, self.liveness, self.lanes
        )
        self.failures: Failures = Failures(self)

    def observe(self, accepted: Callable[[Operation, int], object]) -> Callable[[], None]:
        """Call ``accepted`` with each operation and its size, until the returned function is called.

        It is called from the threads that accept operations.
        """
        with self._lock:
            self.observers = (*self.observers, accepted)

        def end() -> None:
            with self._lock:
                self.observers = tuple(one for one in self.observers if one is not accepted)

        return end

    def __repr__(self) -> str:
        return f"<asynccoll context: {self.backend.name}, rank {self.rank} of {self.world_size}>"

    @property
    def meeting_seconds(self) -> float:
        """How many seconds to wait for the other members of a lane that is being opened.

        During ``initialize`` it is the timeout. Later there is no limit: an operation on the lane has its own
        deadline, after which it can be awaited again.
        """
        return math.inf if self.joined else self.timeout

    def begin(self) -> None:
        """Note that all ranks have joined and ``initialize`` is over, and start the watchdog."""
        self.joined = True
        self.watch.begin()

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors, to which numbers are sent."""
        return self.backend.device

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks, and a store to learn of them."""
        return self.store is not None

    def open(self, lane: Lane, epoch: int) -> Communicator:
        """Open a communicator of the lane's members, for one epoch (``order.cut``)."""
        given_up = lambda: self.closed or lane.broken is not None  # noqa: E731  # the name says what it is
        group = lane.group
        assert isinstance(group, Group)
        # Refused from the first part on: all parts of that call are lost, including those in flight.
        disagreed = lambda place, error: self.refuse(lane, error, place, part=1)  # noqa: E731  # as given_up
        if self.backend.open_waits:
            self.refusals.before_open(lane)
        try:
            opened = self.backend.open(group.opening(lane.key, epoch, given_up, disagreed))
        except Exception as error:
            if not is_of_store(error):
                raise
            raise self.failures.without_store(lane, error) from None
        # If opening has waited for all members, the addresses of all beacons are in the store by now. Read
        # them here, so that a lost rank can be named even when the store is gone with it.
        self.liveness.learn(group.ranks)
        if self.backend.open_waits:
            self.refusals.after_open(lane)
        if lane.announcing.compared is None:
            lane.announcing.compared = self._compared(lane, by_itself=hasattr(opened, "announce"))
        return opened

    def _compared(self, lane: Lane, *, by_itself: bool) -> Compared | None:
        """Return the object that compares the lane's calls with those of other ranks; None if none is needed.

        ``by_itself``: the lane's communicator compares the calls of ranks on this node.
        """
        ranks = lane.group.ranks
        # An adopted torch group has no list of nodes, but its members have published where they are.
        nodes = {rank: self.nodes[rank] for rank in ranks} if self.nodes else self.liveness.nodes(ranks)
        # After Horovod's ``join`` a rank makes no calls that it could confirm; and Horovod compares calls
        # itself.
        compares = lane.compares_calls or self.backend.joins
        confirms = len(set(nodes.values())) > 1 and self.checks_order and not compares
        seen = self.liveness.seen(ranks)
        if not confirms and (by_itself or not seen):
            return None
        far = Confirming(lane, self.confirmations, nodes) if confirms else None
        near = {rank: memory for rank, memory in seen.items() if not nodes or nodes[rank] == nodes[self.rank]}
        return Compared(lane, self.rank, self.recorder, near, far)

    def watch_over(self, operation: Operation, waiters: int = 1) -> None:
        """Add ``waiters`` of ``operation``: check from time to time whether it can still complete."""
        self.watch.add(operation, waiters)

    def watch_no_more(self, operation: Operation) -> bool:
        """Remove a waiter of ``operation``; returns whether another one still waits."""
        return self.watch.discard(operation)

    def refuse(
        self,
        lane: Lane,
        reason: BaseException,
        place: int | None = None,
        *,
        spare: Completion | None = None,
        part: int | None = None,
        name: str = "",
        until: int = 0,
    ) -> None:
        """Tell the peers that this rank will not make a call (``Refusals.refuse``)."""
        self.refusals.refuse(lane, reason, place, spare=spare, part=part, name=name, until=until)

    def note_refused(self, name: str, error: BaseException) -> None:
        """Record the refusal of a call whose lane is not known."""
        now = host.monotonic()
        said = joined(("", "", "", name, "", str(site().place)))
        ticket = self.recorder.note(self.recorder.write(said, None), -1, 0, 1, -1, 0, now, now)
        self.recorder.refused(ticket, in_full(error), now)

    def look_for_refusals(self) -> None:
        """Refuse calls that peers wait for and will never get; halt the lanes on which a peer refused one."""
        self.waits.look()
        self.refusals.look(self.lanes())

    def add_group(self, ranks: tuple[int, ...]) -> Group:
        """Return the group of ``ranks``; the first call with these ranks creates it."""
        with self._lock:
            group = self.groups.get(ranks)
            if group is None:
                group = self.groups[ranks] = Group(self, ranks)
            return group

    def _lanes_named(self, name: str) -> list[Lane]:
        """Return the open lanes of this name, and those of its gradients, in all groups."""
        groups, names = self._sorted_groups(), (name, name + BACKWARD)
        return [lane for group in groups for each in names if (lane := group.opened.get(each)) is not None]

    def _close_lanes(self, name: str, why: str) -> None:
        """Close the lanes of this name in all groups; ``why``: see ``Group.close_child``."""
        for group in self._sorted_groups():
            group.close_child(name, why)

    def lanes(self) -> list[Lane]:
        """Return every open lane, in an order that is the same on all members."""
        return [lane for group in self._sorted_groups() for lane in group.lanes()]

    def _sorted_groups(self) -> list[Group]:
        with self._lock:
            return [self.groups[ranks] for ranks in sorted(self.groups)]

    def outstanding(self) -> list[Operation]:
        """Return every operation that is not done."""
        return [operation for lane in self.lanes() for operation in lane.outstanding()]

    def drain(self, seconds: float) -> list[Operation]:
        """Wait up to ``seconds`` for all operations, on the device too; returns those still in flight."""
        deadline = host.monotonic() + seconds
        operations = self.outstanding()
        for operation in operations:
            operation.attend()  # so that it fails if a peer is gone or has refused its side
            while not operation.landed() and (left := deadline - host.monotonic()) > 0:
                if operation.completion.wait(min(left, 0.1)) and not operation.landed():
                    host.sleep(LAND_POLL_SECONDS)
        # Peers that have yet to settle a refusal with this rank must not find it gone.
        lanes = [lane for lane in self.lanes() if lane.has_opened]
        while any(lane.halting.is_settling for lane in lanes) and host.monotonic() < deadline:
            host.sleep(LAND_POLL_SECONDS)
        # Nor must peers that hold a call until they hear that this rank's, which may be done, was the same.
        deadline = min(deadline, host.monotonic() + TELL_SECONDS)
        while self.confirmations.is_telling and host.monotonic() < deadline:
            host.sleep(LAND_POLL_SECONDS)
        for operation in operations:
            if operation.done():
                operation.error()  # now, while peers can be asked why: closing the lanes would hide the cause
        return self.outstanding()

    def close(
        self, *, abort: bool, patience: float = LEAVE_SECONDS, error: BaseException | None = None
    ) -> None:
        """Close lanes, then the backend, then leave. Nothing may be in flight unless ``abort``.

        ``error``: the reason that this rank leaves, which its peers can read.

        The order matters. Threads that may be in native code end first, since the interpreter must not exit
        while they run. The store is left last; rank 0, which may serve it, first waits for the other ranks to
        leave. If a step raises (Ctrl-C, say), the remaining steps still run. A second call only waits for the
        first, for a bounded time (a signal handler, within the first, does not): the end of the program may
        come while a thread is in ``finalize``.
        """
        leaving = min(patience, ABORT_SECONDS) if abort else patience
        if self._closing.acquire(timeout=leaving + 2 * ABORT_SECONDS):
            try:
                if not self.closed:
                    self.closed = True
                    self._close(abort=abort, leaving=leaving, error=error)
            finally:
                self._closing.release()

    def _close(self, *, abort: bool, leaving: float, error: BaseException | None) -> None:
        steps: list[Callable[[], object]] = [
            partial(self.say_ended, "finalized", in_a_line(error) if error is not None else ""),
            self.watch.stop,
            *([partial(self.look_for_shifts, at_all=True)] if self.stall_seconds else ()),
            self.refusals.close,
            self.confirmations.close,
            *(() if abort else [self.farewells.say]),
            partial(self._helpers.join, ABORT_SECONDS),
            lambda: host.call_each(partial(group.close, abort=abort) for group in self._sorted_groups()),
            partial(self.backend.close, abort=abort),
            *([] if self.thread_rank else [partial(self.farewells.leave, leaving)]),
            self.liveness.close,
            *([self.clients.close] if self.clients is not None else ()),
            self.recorder.close,
        ]
        host.call_each(steps)

    def say_ended(self, how: str, why: str = "", code: int | None = None) -> None:
        """Record how this rank leaves (``layout.ENDINGS``), in memory that peers on its node can read."""
        self.recorder.end(how, why, code)

    def store_answers(self) -> bool:
        """Whether rank 0, which may serve the store, answers: over a cut link a request never returns."""
        if self.rank == 0 or self.thread_rank:  # the store of thread ranks is in this process
            return True
        return not (self.liveness.lost((0,), routine=True) or self.liveness.in_doubt((0,)))

    def disown(self, error: CollectiveError) -> list[Completion]:
        """In a forked child, keep only the rank's identity: operations and lanes are the parent's.

        Returns the completions that the child must not destroy.
        """
        self._lock = host.Lock()
        self._helpers = Helpers()
        self.liveness.disown()
        self.recorder.disown()
        self.backend.disown()
        return [completion for group in self.groups.values() for completion in group.disown(error)]

    # Failures

    def diagnose(self, lane: Lane, error: CollectiveError) -> CollectiveError:
        """Return the same failure with its culprit named: a dead rank, or a refusal that a peer published."""
        return self.failures.diagnose(lane, error)

    def loss(self, lane: Lane) -> PeerLostError | None:
        """Return the error that names the ranks that the lane still needs and that are gone, or None."""
        return self.failures.loss(lane)

    def blame(self, operation: Operation) -> Blame:
        """Ask the ranks, within a bounded time, which of them keep ``operation`` from completing, and why."""
        return self.failures.blame(operation)

    def look_for_ends(self, parts: Sequence[Operation]) -> None:
        """Refuse those ``parts`` of calls that another rank's call does not have and so will never make."""
        self.failures.look_for_ends(parts)

    def tell_of_stall(self, operation: Operation) -> None:
        """Warn that a wait for ``operation`` has reached ``stall_seconds``, and name the ranks at fault."""
        self.failures.tell_of_stall(operation)

    def dump(self) -> str:
        """Save what the ranks have recorded. Returns text to append to an error; "" if nothing was saved."""
        return self.failures.dump()

    def look_for_shifts(self, *, at_all: bool = False) -> None:
        """Warn of lanes on which this rank and the next one are a call apart (``Shifts.look``)."""
        self._shifts.look(self._sorted_groups(), at_all=at_all)

    def pass_on(self, lane: Lane) -> None:
        """Tear down the lane's connections, so that ranks that wait for this one learn of the loss too.

        Waits for the lost ranks on other lanes end as well.
        """
        if lane.broken is not None:
            self.watch.lost(lane.broken.ranks)
        communicator = lane.communicator
        if communicator is None:
            return

        def abort() -> None:
            with contextlib.suppress(Exception):
                communicator.abort()

        if self._helpers.start("asynccoll-abort", abort) is None:
            abort()

    def find_out(self, lane: Lane, error: CollectiveError) -> bool:
        """Have another thread find the culprit of ``error`` and lose the lane with an error that names it.

        Returns False if no thread can start.
        """

        def look() -> None:
            found = error
            try:
                found = self.diagnose(lane, error)
            except Exception:  # no file descriptors, no store: the lane is lost anyway
                _log.debug("could not find which rank caused %r", error, exc_info=True)
            with contextlib.suppress(Exception):
                lane.lose(found)

        # If no thread can start, waits for operations end by their deadlines: the caller may hold the lane's
        # lock.
        return self.closed or self._helpers.start("asynccoll-find-out", look) is not None
