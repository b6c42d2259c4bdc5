"""``recv_any``: messages from several ranks, in the order in which they arrive.

It is composed of a ``recv`` from each rank, since not all libraries can receive from any source, and shared
memory cannot. This module must not know how a message is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from asynccoll import host
from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.host.misfits import check
from asynccoll.ops.collectives import recv, recv_object
from asynccoll.ops.scopes import current_lane
from asynccoll.ops.signatures import fitting
from asynccoll.payload.codecs import Codec
from asynccoll.runtime.process import current
from asynccoll.waiting.suspending import Signal, late
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike
from asynccoll.world.resolving import resolve_group

T = TypeVar("T")


class AnySource(Generic[T]):
    """Messages from several ranks as they arrive, each as ``(source, message)``: the result of ``recv_any``.

    Iterate with ``async for``, or with plain ``for`` if there is no event loop, in one task or thread at a
    time. The iteration ends when every requested message has been taken: one from each source, and one more
    for each ``again``.
    """

    __slots__ = ("_arrivals", "_post", "_works")

    def __init__(self, post: Callable[[int], Work[T]], sources: Iterable[int]) -> None:
        self._post = post
        self._works: dict[int, Work[T]] = {}
        self._arrivals = _Arrivals()
        for source in sources:
            self.again(source)

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks from which a message has yet to be taken."""
        return tuple(self._works)

    def again(self, source: int) -> None:
        """Request one more message from ``source``, whose last message has been taken."""
        if source in self._works:
            raise InvalidArgumentError(
                f"a message from rank {source} was already requested, and has not been taken yet"
            )
        work = self._works[source] = self._post(source)
        for operation in work.operations:  # no done-callback: that would count as a wait until it ends
            operation.add_waker(partial(self._arrivals.tell, source))

    def __aiter__(self) -> AnySource[T]:
        return self

    async def __anext__(self) -> tuple[int, T]:
        while self._works and not self._arrivals.sources:
            signal = Signal()
            with self._waiting(signal.set):
                if not self._arrivals.sources:
                    await signal.wait(self._seconds_left())
                self._check_deadlines()
        if not self._works:
            raise StopAsyncIteration
        with self._taken() as source:
            return source, await self._works[source]

    def __iter__(self) -> AnySource[T]:
        return self

    def __next__(self) -> tuple[int, T]:
        while self._works and not self._arrivals.sources:
            event = host.Event()
            with self._waiting(event.set):
                if not self._arrivals.sources:
                    event.wait(self._seconds_left())
                self._check_deadlines()
        if not self._works:
            raise StopIteration
        with self._taken() as source:
            return source, self._works[source].wait()

    @contextmanager
    def _waiting(self, wake: Callable[[], object]) -> Iterator[None]:
        """Wait for all receives in the block, which ``wake`` ends; afterwards those in flight have no waiter.

        The iteration may be stopped after any message: they then take messages for which nobody waits.
        """
        operations = [operation for work in self._works.values() for operation in work.operations]
        with self._arrivals.waking(wake):
            try:
                for operation in operations:
                    operation.attend()
                yield
            finally:
                host.call_each(one.leave if one.done() else one.give_up for one in operations)

    @contextmanager
    def _taken(self) -> Iterator[int]:
        """Yield the source of the message that arrived first, and remove it from the queue after the block.

        If the block is cancelled, the message stays first in the queue.
        """
        source = self._arrivals.sources[0]
        try:
            yield source
        except Exception:
            self._take_off()
            self._let_go()
            raise
        self._take_off()

    def _take_off(self) -> None:
        # In a single C call, so that a KeyboardInterrupt removes it from both or from neither.
        list(map(self._works.pop, map(deque.popleft, (self._arrivals.sources,))))

    def _seconds_left(self) -> float:
        deadlines = [operation.deadline for work in self._works.values() for operation in work.operations]
        return max(0.0, min(deadlines) - host.monotonic())

    def _check_deadlines(self) -> None:
        """Raise the timeout of a receive that is past its deadline; the next wait has the same time again."""
        if self._arrivals.sources:
            return
        now = host.monotonic()
        for source, work in self._works.items():
            past = [one for one in work.operations if one.deadline <= now]
            if past and work.done():  # Ctrl-C has kept ``again`` from having it told
                self._arrivals.tell(source)
                return
            if past:
                self._let_go()
                raise late(past[0])

    def _let_go(self) -> None:
        """Detach all works after an error, so that none of them warns that it was not awaited."""
        for work in self._works.values():
            work.detach()


class _Arrivals:
    """The sources whose messages have arrived. Works in flight refer to this, but this refers to no work."""

    __slots__ = ("_wake", "sources")

    def __init__(self) -> None:
        self.sources: deque[int] = deque()
        self._wake: Callable[[], object] | None = None

    def tell(self, source: int) -> None:
        """Record that a message from ``source`` has arrived. Called on the thread that completes it."""
        if source not in self.sources:
            self.sources.append(source)
        wake = self._wake
        if wake is not None:
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Call ``wake`` if a message arrives during the block. There, check ``sources`` before sleeping."""
        if self._wake is not None:
            raise InvalidArgumentError("another task or thread is already waiting for these messages")
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None


@fitting
def recv_any(
    like: torch.Tensor,
    /,
    *,
    sources: Iterable[int] | None = None,
    tag: int = 0,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> AnySource[torch.Tensor]:
    """Receive a tensor shaped like ``like`` from each of ``sources`` (None: all other ranks of the group).

    Iteration yields them in order of arrival, each with the global rank that sent it. ``again(source)``
    requests one more from that rank: a server calls it for each client that has more to send.

    >>> async for source, x in ac.recv_any(torch.empty(2)):   # r0; r1: ac.send(torch.ones(2), dst=0)
    ...     print(source, x)
    1 tensor([1., 1.])

    Each requested message is a ``recv`` that is posted immediately. So each source must send as many messages
    with this tag as are requested from it. If you stop early, the remaining receives still get the next
    messages of their sources, and warn like any ``Work`` that is dropped (``UnawaitedWorkWarning``). On nccl
    a ``recv`` into a GPU is ready once it is issued, so there the order is that of ``sources``.

    Raises:
        CollectiveTimeoutError: a message has not arrived ``timeout`` seconds after it was requested; the
            error names its source. Continue to iterate to wait for the same time again.

    Source: ``torch.distributed.recv`` without ``src``, ``MPI_Recv`` with ``MPI_ANY_SOURCE``.
    """

    def post(source: int) -> Work[torch.Tensor]:
        return recv(like, src=source, tag=tag, group=group, lane=name, timeout=timeout)

    name = current_lane() if lane is None else lane
    return AnySource(post, _checked(sources, group))


@fitting
def recv_any_object(
    *,
    sources: Iterable[int] | None = None,
    tag: int = 0,
    codec: Codec | str | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> AnySource[Any]:
    """Receive objects from several ranks: as ``recv_any``, for objects sent by ``send_object``.

    >>> async for source, request in ac.recv_any_object():    # r0; r1: ac.send_object("ready", dst=0)
    ...     print(source, request)
    1 ready

    Source: ``torch.distributed.recv_object_list`` without ``src``.
    """

    def post(source: int) -> Work[Any]:
        return recv_object(src=source, tag=tag, codec=codec, group=group, lane=name, timeout=timeout)

    name = current_lane() if lane is None else lane
    return AnySource(post, _checked(sources, group))


def _checked(sources: Iterable[int] | None, group: GroupLike) -> list[int]:
    """Return the ranks that ``sources`` stands for; refuse invalid ones before any receive is posted."""
    context = current()
    resolved = resolve_group(context, group)
    others = [rank for rank in resolved.ranks if rank != context.rank]
    if sources is None:
        return others
    if isinstance(sources, (str, bytes)) or not isinstance(sources, Iterable):
        raise PayloadTypeError(f"sources must be a list of ranks, got {sources!r}")
    listed = list(sources)
    for source in listed:
        check("each of sources", source, int, "a rank")
    if len(set(listed)) < len(listed) or not set(listed) <= set(others):
        raise InvalidArgumentError(f"sources must be different ranks among {others}, got {listed}")
    return listed
