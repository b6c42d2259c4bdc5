"""An elementwise collective of many tensors, as few native calls.

A small amount of data of one kind is one bucket, which the caller packs. More data is sent by a program of
the lane: a thread packs the next bucket while the previous one is in flight, and the bucket size follows from
the group's measured cost (``costs``). Without ``out`` the results are views of the buckets (for tensors that
are not contiguous, copies with their strides), so no memory is held besides inputs and results; with ``out``,
at most one bucket more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from asynccoll.health.checks import checked
from asynccoll.order import costs
from asynccoll.order.lane import Lane
from asynccoll.plan.spec import ReduceOp, described
from asynccoll.tensors.bucketing import BUCKET_BYTES, Bucket, buckets, dense_bytes, fill, pack, repack, unpack
from asynccoll.tensors.common import Call, deliver, in_thread, kept
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import AllOf, Completion
from asynccoll.waiting.started import Started

#: Packing this much blocks the event loop for a millisecond or two; larger amounts are packed by a thread.
DIRECT_BYTES = 4 << 20

#: Makes the call that sends a tensor, with its result in the second tensor (or in new memory).
MakeCall = Callable[[torch.Tensor, torch.Tensor | None], Call]


_is_cpu = attrgetter("is_cpu")


class Fuse(NamedTuple):
    """A fused collective: its name, what makes a call, its detail in signatures, and ``op`` or ``src``."""

    name: str
    call: MakeCall
    detail: str
    op: ReduceOp | None = None
    src: int | None = None


class Parcel:
    """A bucket being sent: tensors packed into one, the call that sends it, and the results."""

    __slots__ = ("_of", "call", "indices", "like", "outs", "packed", "started", "views")

    def __init__(
        self, bucket: Bucket, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None
    ) -> None:
        self.indices: Bucket = bucket
        self.like: list[torch.Tensor] = [xs[i] for i in bucket]
        self.outs: list[torch.Tensor] | None = None if outs is None else [outs[i] for i in bucket]
        self.packed: bool = len(self.like) > 1
        #: which leaves these are, if not all: on another rank, the same shapes may be those of other leaves
        self._of: str = "" if len(self.like) == len(xs) else f" of leaves {list(bucket)}"
        self.call: Call | None = None
        self.views: list[torch.Tensor] = []
        self.started: Completion | None = None

    def pack(self, make: MakeCall) -> Call:
        """Pack the tensors into one, and return the call for it."""
        if self.packed:
            self.call = self._make(make, pack(self.like).detach())
        else:
            self.call = self._told(make(self.like[0], None if self.outs is None else self.outs[0]))
        return self.call

    def _make(self, make: MakeCall, flat: torch.Tensor) -> Call:
        """Return the call for all tensors packed, with their shapes: ranks must agree on these, too."""
        call = make(flat, flat)
        call.shape = tuple(x.shape for x in self.like)
        return self._told(call)

    def _told(self, call: Call) -> Call:
        """Return the call, with its leaves in the description, so that it matches no call of other leaves."""
        if self._of:
            call.detail = f"{call.detail_text()}{self._of}"
        return call

    def keep(self, make: MakeCall) -> Call:
        """Return a call that can be started repeatedly, each time with the tensors' current content."""
        if self.packed:
            flat = pack(self.like).detach()
            self.views = unpack(flat, self.like)
            self.call = self._make(make, flat)
            self.call.refill = _both(partial(repack, self.views, self.like), self.call.refill)
            return self.call
        x = self.like[0]
        self.call = self._told(make(x, torch.empty_like(x) if self.outs is None else self.outs[0]))
        return self.call

    def results(self) -> list[torch.Tensor]:
        """Return the results of a call that is kept, once it is over."""
        assert self.call is not None
        result = self.call.outcome()
        if not self.packed:
            return [result]
        if self.outs is None:
            return self.views
        fill(self.outs, self.views)
        return self.outs

    def hand_out(self) -> list[torch.Tensor]:
        """Return the results, once the call is over; the bucket is released if it does not hold them."""
        if self.call is not None:
            result = self.call.outcome()
            self.views = unpack(result, self.like) if self.packed else [result]
            if self.outs is not None:
                if self.packed:
                    fill(self.outs, self.views)
                self.views = self.outs
            elif self.packed:
                self.views = [deliver(y, kept(x, None)) for x, y in zip(self.like, self.views, strict=True)]
            self.call = None
        return self.views


def _both(first: Callable[[], object], second: Callable[[], object] | None) -> Callable[[], object]:
    if second is None:
        return first

    def both() -> None:
        first()
        second()

    return both


def fused(
    lane: Lane,
    fuse: Fuse,
    xs: list[torch.Tensor],
    outs: list[torch.Tensor] | None,
    timeout: float | None,
) -> Started[list[torch.Tensor]]:
    """Start the collective for all of ``xs``; the results are in their order, and in ``outs`` if given."""
    if not xs:
        return Started((), list)
    direct = direct_buckets(lane, xs)
    if direct is not None:
        parcels = [Parcel(bucket, xs, outs) for bucket in direct]
        started = [parcel.pack(fuse.call).begin(lane, timeout) for parcel in parcels]
        operations = tuple(operation for one in started for operation in one.operations)
        return Started(operations, lambda: _collected(len(xs), parcels))
    parcels = []
    total_bytes = sum(map(dense_bytes, xs))
    program = lambda communicator: _sent(lane, communicator, fuse, xs, outs, parcels, total_bytes)  # noqa: E731
    what = fuse.name, fuse.detail, tuple(map(described, xs))
    if lane.compares_calls:
        program = checked(lane, what, program=program)
    sent = lambda: [parcel.started for parcel in parcels if parcel.started is not None]  # noqa: E731
    operation = lane.run(fuse.name, program, total_bytes, timeout, what=what, sent=sent)
    return Started((operation,), lambda: _collected(len(xs), parcels))


def direct_buckets(lane: Lane, xs: list[torch.Tensor]) -> list[Bucket] | None:
    """Return the buckets that the caller packs, or None if a program has to pack them.

    On the CPU a program does so if a kind takes more than one bucket. On a device packing does not block, and
    staging has to happen in the user's thread.
    """
    if lane.world.device.type != "cpu" or not all(map(_is_cpu, xs)):
        return buckets(xs)
    made = buckets(xs, DIRECT_BYTES)
    firsts = [xs[bucket[0]] for bucket in made]
    kinds = [x.dtype for x in firsts if x.layout is torch.strided]
    return made if len(kinds) == len(set(kinds)) else None


def _collected(count: int, parcels: list[Parcel]) -> list[torch.Tensor]:
    results: list[Any] = [None] * count
    for parcel in parcels:
        for i, result in zip(parcel.indices, parcel.hand_out(), strict=True):
            results[i] = result
    return results


def _sent(
    lane: Lane,
    communicator: Communicator,
    fuse: Fuse,
    xs: list[torch.Tensor],
    outs: list[torch.Tensor] | None,
    parcels: list[Parcel],
    total_bytes: int,
) -> Generator[Completion, None, Completion]:
    """Run as the lane's program: pack each bucket while the previous one is in flight.

    With ``outs`` there are never more than two buckets in memory. A bucket is freed once its results have
    been copied to ``outs``.
    """
    cost = yield from costs.agreed(lane, communicator)
    limit = BUCKET_BYTES if cost is None else cost.bucket_bytes(total_bytes)
    staged: deque[Parcel] = deque()
    for bucket in buckets(xs, limit):  # the same on every rank, also if only some have ``outs``
        parcel = Parcel(bucket, xs, outs)
        parcels.append(parcel)
        if parcel.packed and outs is not None:
            if len(staged) == 2:
                first = staged.popleft()
                assert first.started is not None
                yield first.started
                yield in_thread(first.hand_out)
            staged.append(parcel)
        yield from _filled(parcel, fuse)
        assert parcel.call is not None
        parcel.started = yield from parcel.call.steps(communicator)
    return AllOf([parcel.started for parcel in parcels if parcel.started is not None and parcel.call])


def _filled(parcel: Parcel, fuse: Fuse) -> Generator[Completion, None, None]:
    if parcel.packed:
        yield in_thread(lambda: _fill(parcel.pack(fuse.call)))
    elif parcel.pack(fuse.call).fill is not None:
        yield in_thread(lambda: _fill(parcel.call))


def _fill(call: Call | None) -> None:
    if call is not None and call.fill is not None:
        call.fill()
