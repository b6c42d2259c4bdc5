"""``ac.coalescing``: calls that are made one by one and sent together.

A tree fuses tensors that are available at the same time; a block does this for code that makes one call
after another. ``all_reduce`` and ``broadcast`` of tensors are deferred until the block ends. Then all calls
with the same lane, operation and timeout (a *kind*) are fused, like the leaves of a tree, and kinds are sent
in the order of their first calls. All ranks make the same calls, so they send the same. Any other call
inside, and any await, first sends the calls that were deferred on its lane, which keeps the lane's order.
Calls that are sent together cannot depend on each other: a call that depends on an earlier one is refused.
Whether autograd records a call depends on the mode in which it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch

from asynccoll import host, payload, tensors
from asynccoll.errors import (
    CollectiveError,
    CollectiveMismatchError,
    InvalidArgumentError,
    PeerRefusedError,
)
from asynccoll.host import actors
from asynccoll.host.blocks import Block, Entries, innermost
from asynccoll.host.call_site import Spot, called_at, site
from asynccoll.host.endings import in_a_line
from asynccoll.host.misfits import check_function
from asynccoll.memory.aliasing import Claims
from asynccoll.memory.plain import plain_tensor, writable
from asynccoll.memory.unwritten import Read
from asynccoll.modes.captured import Modes, as_called
from asynccoll.modes.unseen import with_data
from asynccoll.order.lane import Lane
from asynccoll.plan.spec import Op, reduce_op
from asynccoll.plan.trees import flatten
from asynccoll.tensors import autograd
from asynccoll.tensors.fusing import Fuse
from asynccoll.waiting.started import Started
from asynccoll.waiting.work import Work, handed_out, noted

T = TypeVar("T")
U = TypeVar("U")


class Deferred(Work[T]):
    """The work of a deferred call. Waiting for it sends all calls that the block has deferred on its lane."""

    __slots__ = ("_batch", "_callbacks", "_derived", "_lane", "spot")

    def __init__(self, batch: _Batch, lane: Lane, spot: Spot) -> None:
        super().__init__((), None)
        self._batch: _Batch | None = batch
        self._lane = lane
        self.spot: Spot = spot  # where the call was made
        self._derived: list[Deferred[Any]] = []
        self._callbacks: list[Callable[[Work[Any]], object]] = []

    def __repr__(self) -> str:
        if self._batch is None:
            return super().__repr__()
        return f"<Work of a coalescing block from {self.spot.place}: not sent yet>"

    @property
    def put_off(self) -> bool:
        """Whether the call has been neither sent nor given up yet."""
        return self._batch is not None

    def sent(self, origin: Work[Any], finish: Callable[[], T] | None) -> None:
        """Take over the operations of ``origin``, from whose result ``finish`` makes that of this work."""
        self._operations, self._finish, self._origin = origin.operations, finish, origin
        self._batch = None  # only now: another thread may be waiting for this
        for derived in self._derived:
            derived.sent(self, derived._finish)
        for callback in self._callbacks:
            self.add_done_callback(callback)

    def abandoned(self, error: BaseException) -> None:
        """Fail with ``error``: the call was not sent."""
        self._fail(error)
        self._batch = None  # as in ``sent``
        for derived in self._derived:
            derived.abandoned(error)
        for callback in self._callbacks:
            self.add_done_callback(callback)

    def _send(self) -> None:
        """Send what the block has deferred on the lane, unless this call was sent already."""
        if self._batch is not None:
            self._batch.flush(self._lane)

    def __await__(self) -> Generator[Any, object, T]:
        self._send()
        return super().__await__()

    def wait(self, timeout: float | None = None) -> T:
        """As ``Work.wait``."""
        self._send()
        return super().wait(timeout)

    def done(self) -> bool:
        """As ``Work.done``; False before the call is sent."""
        return self._batch is None and super().done()

    def map(self, function: Callable[[T], U]) -> Work[U]:
        """As ``Work.map``."""
        check_function("what work.map() calls", function)
        with self._unsent() as batch:
            if batch is not None:
                self._heard = True
                derived: Deferred[U] = Deferred(batch, self._lane, self.spot)
                derived._finish = as_called(lambda: function(self._outcome()))
                derived._origin = self
                self._derived.append(derived)
                return noted(derived)
        return super().map(function)

    def add_done_callback(self, callback: Callable[[Work[T]], object]) -> None:
        """As ``Work.add_done_callback``."""
        check_function("what work.add_done_callback() calls", callback)
        with self._unsent() as batch:
            if batch is not None:
                self._callbacks.append(callback)
                return
        super().add_done_callback(callback)

    @contextmanager
    def _unsent(self) -> Iterator[_Batch | None]:
        """Keep other threads from sending the call in the block; yields None if it was sent already."""
        batch = self._batch
        with nullcontext() if batch is None else batch.lock:
            yield self._batch


class _Call(NamedTuple):
    """A deferred call, with the torch modes in which it was made."""

    x: torch.Tensor
    out: torch.Tensor | None
    modes: Modes
    work: Deferred[object]


#: The modes for a set of calls if autograd records only some of them; the others' tensors are detached.
_MIXED = Modes(recording=True, inferring=False)
#: The errors of a call whose place (its number in the lane's order) is lost already, because of a peer.
_PLACE_LOST = (PeerRefusedError, CollectiveMismatchError)


class _Parts:
    """Deferred calls of one kind, which will be fused.

    A kind is only lane, operation and timeout, which are the same on every rank. Autograd's modes and ``out``
    may differ between ranks, so neither the grouping nor the order may depend on them.
    """

    __slots__ = ("calls", "fuse", "lane", "timeout")

    def __init__(self, lane: Lane, fuse: Fuse, timeout: float | None) -> None:
        self.lane = lane
        self.fuse = fuse
        self.timeout = timeout
        self.calls: list[_Call] = []

    def __str__(self) -> str:
        return f"{self.fuse.name} {self.fuse.detail}"

    def send(self, batch: _Batch, together: str | None) -> None:
        """Send the calls. ``together`` names all kinds that are sent now, for ranks to compare."""
        modes = {call.modes for call in self.calls}
        before = called_at.set(self.calls[0].work.spot)
        try:
            with batch.place_on(self.lane, self.fuse.name, together):
                if len(modes) == 1:
                    modes.pop().run(self._send, all(call.out is not None for call in self.calls))
                else:
                    _MIXED.run(self._send, False)
        except _PLACE_LOST as error:  # raised by the works, as when the place is lost later
            for call in self.calls:
                call.work.abandoned(error)
        except Exception as error:
            self.abandon(batch, error)
            raise
        finally:
            called_at.reset(before)

    def _send(self, fills: bool) -> None:
        """Start the calls as one. ``fills``: all of them have ``out``, which is then filled directly."""
        recording = torch.is_grad_enabled()
        xs = [call.x.detach() if recording and not call.modes.recording else call.x for call in self.calls]
        outs = [call.out for call in self.calls if call.out is not None] if fills else None
        started = with_data(autograd.fused, self.lane, self.fuse, xs, outs, self.timeout)
        # The work of each call takes its result from this one, which finishes once. No user ever gets it, so
        # it is detached, and does not warn.
        shared = Work(started.operations, started.finish, started.value)
        shared.detach()
        if outs is not None:
            shared.fills(outs)  # all of them are filled when the first of the calls is waited for
        for index, call in enumerate(self.calls):
            call.work.sent(shared, partial(with_data, _result_of, call.modes, call.out, shared, index))

    def abandon(self, batch: _Batch, error: Exception) -> None:
        """Notify the peers, which may be sending their calls, and fail the works that were not sent here."""
        left = [call.work for call in self.calls if call.work.put_off]
        if left:
            batch.refuse(self.lane, error, self.fuse.name)
        for work in left:
            work.abandoned(error)


def _result_of(
    modes: Modes, out: torch.Tensor | None, shared: Work[list[torch.Tensor]], index: int
) -> object:
    """Return the result of one call, in its ``out`` if it has one.

    This runs in the modes of the call: an ``out`` made in inference mode can only be written to in that mode.
    """
    return modes.run(tensors.deliver, shared.result()[index], out)


class _Read:
    """A claim on the input of a pending deferred call, which no later call of the block may fill."""

    __slots__ = ("__weakref__", "out", "work")

    def __init__(self, x: torch.Tensor, work: Deferred[object]) -> None:
        self.out = x
        self.work = work

    @property
    def claims(self) -> bool:
        return self.work.pending


class _Batch:
    """The deferred calls of a block by kind, in the order of the first call of each kind.

    All calls of a block on one lane share one place (number) in the lane's order. So a rank that refuses one
    of them refuses as many places as its peers take, although it cannot know whether they send that call
    alone or with others.
    """

    __slots__ = ("_actor", "_parts", "_places", "_read", "_reads", "lock")

    def __init__(self) -> None:
        #: held while calls are deferred or sent: another thread may wait for a work, which sends them
        self.lock: host.RLock = host.RLock()
        self._actor = actors.current().actor
        self._parts: dict[object, _Parts] = {}
        self._places: dict[Lane, int] = {}
        self._reads: list[_Read] = []
        self._read = Claims()

    @property
    def is_mine(self) -> bool:
        """Whether the caller opened the block. Tasks that the caller has started are not part of it."""
        return actors.current().actor is self._actor

    @contextmanager
    def place_on(self, lane: Lane, name: str, what: str | None = None) -> Iterator[None]:
        """Let the calls started inside share the place of the coalescing block on ``lane``.

        ``name`` is their collective; ``what`` describes everything that is sent together.
        """
        with lane.together(self._places.get(lane), what, name) as place:
            self._places[lane] = place
            yield

    def refuse(self, lane: Lane, error: BaseException, name: str) -> None:
        """Refuse the block's place on ``lane``, for a call of ``name``."""
        before = lane.sequence
        place = self._places.get(lane)
        lane.world.refuse(lane, error, place if place == before else None, name=name)
        if lane.sequence != before:
            self._places[lane] = lane.sequence

    def start(
        self,
        lane: Lane,
        start: Callable[..., Started[object]],
        args: tuple[object, ...],
        timeout: float | None,
        read_by: Callable[[Sequence[object]], Read | None],
        **filled: Any,
    ) -> Work[object]:
        """Defer the call, or start it. ``filled`` is ``out=``, for calls that have it.

        ``read_by`` returns what the call reads, given the leaves of its tree, if it has one.
        """
        put_off = self._take(lane, start, args, timeout, **filled)
        if put_off is not None:
            if (read := read_by(())) is not None:
                put_off.reads(read)
            return put_off

        def begin() -> Work[object]:
            started = with_data(start, lane, *args, timeout=timeout, **filled)
            return handed_out(started, read=read_by(started.leaves), **filled)

        return self.behind(lane, name_of(start), begin)

    def behind(self, lane: Lane, name: str, begin: Callable[[], Work[T]]) -> Work[T]:
        """Return what ``begin`` does, which starts a call of ``name`` behind those deferred on ``lane``.

        These are sent only once it is certain that this call is made: if it is refused here, the peers' call
        at this point may be one that they defer.
        """
        try:
            with self.place_on(lane, name), lane.after(partial(self.flush, lane)):
                return begin()
        except _PLACE_LOST as error:  # as in ``_Parts.send``
            lost: Deferred[T] = Deferred(self, lane, site())
            lost.abandoned(error)
            return noted(lost)

    def _take(
        self,
        lane: Lane,
        start: Callable[..., object],
        args: tuple[Any, ...],
        timeout: float | None,
        out: Any = None,
    ) -> Work[object] | None:
        """Defer the call and return its work; return None for a call that cannot be deferred."""
        x = args[0] if args else None
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            name = f"{start.__name__} in a coalescing block"
            x = plain_tensor(name, x)
            if isinstance(out, torch.Tensor):
                writable(name, out if out is x else plain_tensor(f"{name}: out=", out))
            if start is payload.all_reduce:
                op = reduce_op(args[1])
                tensors.plan_for(lane, Op.ALL_REDUCE, x, op)
                return self._put_off(lane, tensors.all_reduce_fuse(lane, op), x, out, timeout)
            if start is payload.broadcast and not args[2]:
                index = lane.group.index(args[1], "src")
                tensors.plan_for(lane, Op.BROADCAST, x)
                return self._put_off(lane, tensors.broadcast_fuse(lane, index), x, out, timeout)
        return None

    def _put_off(
        self, lane: Lane, fuse: Fuse, x: torch.Tensor, out: torch.Tensor | None, timeout: float | None
    ) -> Work[object]:
        if out is not None:
            tensors.check_out(out, x, x.shape)
            autograd.records(fuse.name, (x,), (out,))
        key = (lane, fuse.name, fuse.detail, timeout)
        work: Deferred[object] = Deferred(self, lane, site())
        with self.lock:
            parts = self._parts.get(key)
            if parts is None:
                parts = self._parts[key] = _Parts(lane, fuse, timeout)
            parts.calls.append(_Call(x, out, Modes.now(), work))
        self._reads.append(read := _Read(x, work))
        self._read.add(read)
        if out is not None:
            work.fills(out)
        return noted(work)

    def check_unread(self, name: str, out: object) -> None:
        """Refuse an ``out`` that overlaps the input of an earlier call of the block that is still pending.

        Sending that call first would not help: only this rank knows of the overlap, so the ranks would send
        different calls.
        """
        filled = [leaf for leaf in flatten(out)[0] if isinstance(leaf, torch.Tensor)]
        read = self._read.find(filled)
        if read is not None:
            raise InvalidArgumentError(
                f"{name} in a coalescing block fills memory (out=) that the block's call at "
                f"{cast('_Read', read).work.spot.place} reads, which has not been waited for; await it first "
                "(which sends the deferred calls), or make this one after the block"
            )

    def flush(self, lane: Lane | None = None) -> None:
        """Send the calls deferred on ``lane``, or on all lanes, even if one kind of them is refused.

        Another call inside the block sends only those on its own lane. Once a rank has refused a call on a
        lane, ranks may differ in which calls are made and deferred there; what is sent together on other
        lanes must not depend on these differences.
        """
        self._settle(lane, self._send_each)

    def _send_each(self, waiting: list[_Parts]) -> None:
        first: Exception | None = None
        for parts in waiting:
            try:
                parts.send(self, _said_together(waiting, parts.lane))
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _settle(self, lane: Lane | None, settle: Callable[[list[_Parts]], object]) -> None:
        """Take the calls deferred on ``lane``, or on all lanes, and ``settle`` them; give up those left."""
        with self.lock:  # not a context manager of ours: Ctrl-C within it would leave them to nobody
            waiting: list[_Parts] = []
            try:
                waiting = [parts for parts in self._parts.values() if lane is None or parts.lane is lane]
                self._remove(waiting)
                settle(waiting)
            except BaseException as interrupt:  # nobody would send the rest
                self._remove(waiting)
                self._give_up(waiting, interrupt)
                raise

    def _remove(self, waiting: list[_Parts]) -> None:
        self._parts = {key: parts for key, parts in self._parts.items() if parts not in waiting}

    def end(self) -> None:
        """Send the remaining calls, and tell the lanes that no more calls will share the block's places."""
        self.flush()
        for lane, place in self._places.items():
            lane.end_of_parts(place)

    def abandon(self, why: BaseException) -> None:
        """Fail all calls that are still deferred: the block ended with ``why``, and they are not sent."""
        self._settle(None, partial(self._give_up, why=why))

    def _give_up(self, waiting: list[_Parts], why: BaseException) -> None:
        for parts in waiting:
            error = CollectiveError(
                f"not sent: the coalescing block that deferred it ended with {in_a_line(why)}"
            )
            error.__cause__ = why
            parts.abandon(self, error)


def _said_together(waiting: list[_Parts], lane: Lane) -> str | None:
    """Return a text that names all kinds that are sent together on ``lane``, or None if there is only one.

    The ranks compare it along with the first kind. So they also detect a kind that only some of them have,
    although the others make no call to compare it with.
    """
    kinds = [str(parts) for parts in waiting if parts.lane is lane]
    return f"coalescing({', '.join(kinds)}):" if len(kinds) > 1 else None


_batches: Entries[_Batch] = ContextVar("asynccoll_coalescing", default=())


def name_of(start: Callable[..., object]) -> str:
    """Return the public name of the operation that ``start`` starts: ``barrier`` for ``start_barrier``."""
    return start.__name__.removeprefix("start_").removesuffix("_scaled")


def own_block() -> _Batch | None:
    """Return the open block if the caller opened it. Tasks that were started inside a block have none."""
    batch = innermost(_batches)
    return batch if batch is not None and batch.is_mine else None


class coalescing(Block[_Batch]):  # noqa: N801  # read as a statement: `with ac.coalescing():`
    """A block whose calls are sent together when it ends: ``with ac.coalescing():`` (or ``async with``).

    >>> with ac.coalescing():
    ...     works = [ac.all_reduce(layer.weight.grad) for layer in layers]
    >>> gradients = await ac.wait_all(works)      # a few large messages instead of one for each layer

    ``all_reduce`` and ``broadcast`` of tensors are deferred, in any mixture of lanes, reductions, dtypes and
    devices; every rank has to make the same calls. Other operations inside, and awaiting a work of the block,
    first send the calls deferred on their lane; ``send`` and ``recv``, which only some ranks call, do not.
    Tasks that are started inside are not part of the block: their calls are sent at once.

    The calls are sent together, so none may depend on another. A call that reads memory which an earlier one
    fills (``out=``), or that fills memory which an earlier one reads or fills, raises
    ``InvalidArgumentError`` until the earlier one has been awaited.

    If one rank refuses a call inside, all calls of the block on that lane that have not been sent yet fail
    with it, on every rank, even if the error is caught inside: the other ranks have fused them. Calls that
    were sent before remain valid.

    If the block ends with an exception, the deferred calls are not sent: their works raise
    ``CollectiveError``, and peers whose block succeeded get ``PeerRefusedError`` on each lane on which a call
    was deferred here. Calls that this rank would have made on other lanes are unknown: there its peers wait,
    as they do for any rank that raises before it makes a call.
    """

    _entries = _batches

    def _begin(self) -> _Batch:
        if (outer := own_block()) is not None:
            outer.flush()  # its calls were made earlier
        return _Batch()

    def _end(self, value: _Batch, error: BaseException | None) -> None:
        if error is None:
            value.end()
        else:
            value.abandon(error)

    def _cut_off(self, value: _Batch, why: BaseException) -> None:
        value.abandon(why)
