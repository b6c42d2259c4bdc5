"""Gradients reduced while backward still runs, for training loops of your own.

    gradients = ac.overlap_gradients(model)
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()    # buckets leave as they fill
        await gradients                    # or gradients.wait(): every .grad is now the average
        optimizer.step()

Parameters are put into buckets in reverse order, which is about the order in which backward reaches
them. A bucket is reduced in place as soon as its last gradient is there and the buckets before it have
left, so that all ranks send the same things in the same order. Each ``.grad`` becomes a view of its
bucket: nothing is copied back. The first bucket is small, to get the line going early.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
Built on the public operations alone.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch

from asynccoll.errors import CollectiveTimeoutError, InvalidArgumentError
from asynccoll.ops import all_reduce
from asynccoll.overlap.buckets import Bucket, FlaggedBucket, assign
from asynccoll.overlap.lanes import backward_lane
from asynccoll.overlap.window import InFlight
from asynccoll.runtime import get_rank, get_world_size
from asynccoll.work import Work, wait_all

__all__ = ["GradientReducer", "overlap_gradients"]

#: As DDP's: large enough to reach the bandwidth, small enough to overlap; the first one leaves early.
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20

#: Two reducers must not share a lane (their buckets could cross between ranks) or a parameter.
_live: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


class GradientReducer:
    """Reduces the gradients of a model bucket by bucket, as backward makes them.

    ``overlap_gradients`` makes one. Once a step it is awaited as a ``Work`` is: ``await gradients``, or
    ``gradients.wait()`` without a loop. What that promises: every ``.grad`` is the reduction of all
    ranks', ready on the current device stream.

    - **Unused parameters.** A rank that made no gradient for a parameter contributes zeros; where no
      rank made one, ``.grad`` stays None. A rank that has no data for a step awaits all the same.
    - **Accumulation.** Under ``with gradients.no_sync():`` backward only accumulates; what has gathered
      travels with the next backward outside of it.
    - **Errors.** If backward raises, awaiting completes the step with what there is, so that ranks stay
      in step: catch, await, ``zero_grad()``, go on. A second backward before the await raises
      ``InvalidArgumentError``. Await fails as collectives do; after a cancelled or timed-out await the
      next one goes on with the same step.
    - ``with`` (or ``async with``) closes it at the end; after ``close()`` backward is as it was.

    Buffers, such as running statistics, are left alone, and so is what the ranks start from
    (``ac.overlap.broadcast_parameters``). Reentrant checkpointing, which runs backward in pieces, is not
    supported.
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.Tensor],
        *,
        op: str = "avg",
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        group: Any = None,
        lane: str = "gradients",
        timeout: float | None = None,
        max_in_flight_bytes: int | None = None,
    ) -> None:
        check_not_ddp(model)
        found = model.parameters() if isinstance(model, torch.nn.Module) else model
        parameters = [parameter for parameter in found if parameter.requires_grad]
        _check_arguments(parameters, op, bucket_bytes, first_bucket_bytes)
        self._group = group
        self._lane = backward_lane(lane)
        self._window = InFlight(max_in_flight_bytes) if max_in_flight_bytes is not None else None
        self._timeout = timeout
        self._scale = 1.0 / _group_size(group) if op == "avg" else 1.0
        self._identity = (get_rank(), self._lane, {id(parameter) for parameter in parameters})
        _check_unshared(*self._identity)
        limits = (first_bucket_bytes, bucket_bytes)
        self._buckets = self._assigned(parameters[::-1], *limits)
        self._works: list[Work[torch.Tensor]] = []
        self._syncing = True
        self._lock = threading.Lock()  # with several devices, several threads run one backward
        hooks = [
            _register(parameter, _hook(weakref.ref(self), bucket, index))
            for bucket in self._buckets
            for index, parameter in enumerate(bucket.parameters)
        ]
        self._unhook = weakref.finalize(self, _remove, hooks)
        _live.add(self)

    def _assigned(self, parameters: list[torch.Tensor], first: int, limit: int) -> Sequence[Bucket]:
        return [FlaggedBucket(members) for members in assign(parameters, first, limit)]

    def __repr__(self) -> str:
        count = sum(len(bucket.parameters) for bucket in self._buckets)
        sent = f"{len(self._works)} of {len(self._buckets)} buckets sent"
        return f"<GradientReducer of {count} parameters on lane {self._lane!r}: {sent}>"

    # Once a step

    def __await__(self) -> Generator[Any, Any, None]:
        return self._reduced().__await__()

    async def _reduced(self) -> None:
        with self._step() as works:
            await wait_all(works)

    def wait(self, timeout: float | None = None) -> None:
        """Wait without an event loop until every ``.grad`` is the reduction of all ranks'.

        Past ``timeout`` seconds ``CollectiveTimeoutError`` is raised; the step goes on with the next wait.
        """
        with self._step() as works:
            _wait_each(works, timeout)

    @contextmanager
    def _step(self) -> Iterator[list[Work[torch.Tensor]]]:
        """Send what has not left, wait in the block, and be ready for the next step."""
        with self._lock:
            for bucket in self._buckets[len(self._works) :]:
                self._send(bucket)
            works = self._works
        try:
            yield works
        except CollectiveTimeoutError:
            raise  # the buckets are still out
        except Exception:
            self._begin(works)
            raise
        for bucket in self._buckets:
            bucket.adopt()
        self._begin(works)

    def _begin(self, ended: list[Work[torch.Tensor]]) -> None:
        """Expect the next step, unless somebody else who waited has done so."""
        with self._lock:
            if self._works is ended:
                self._works = []
                for bucket in self._buckets:
                    bucket.begin()

    # During backward

    def _arrived(self, bucket: Bucket, index: int) -> None:
        """A gradient is complete: on whichever thread runs backward."""
        if not self._syncing:
            return
        with self._lock:
            if bucket.has[index] or len(self._works) == len(self._buckets):
                raise InvalidArgumentError(
                    "backward ran a second time before the gradients of the first were awaited, and has "
                    "added to what is being sent: `await gradients` (or gradients.wait()) after each "
                    "backward, or accumulate under `with gradients.no_sync():`"
                )
            bucket.put(index, self._scale)
            while len(self._works) < len(self._buckets):
                if self._buckets[len(self._works)].waiting:
                    break
                self._send(self._buckets[len(self._works)])

    def _send(self, bucket: Bucket) -> None:
        bucket.fill(self._scale)
        if self._window is None:
            work = self._reduce(bucket.flat, bucket)
        else:
            work = self._window.start_blocking(self._reduce, bucket.flat, bucket=bucket)
        work.detach()  # a step that is not awaited is noticed by the next backward
        self._works.append(work)

    def _reduce(self, flat: torch.Tensor, bucket: Bucket) -> Work[torch.Tensor]:
        return all_reduce(flat, out=flat, group=self._group, lane=self._lane, timeout=self._timeout)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which backward accumulates gradients on this rank and sends nothing.

        The same on every rank. What has gathered is sent by the next backward outside of it, or by the
        next await.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    # Leaving

    def close(self) -> None:
        """Remove the hooks. What is in flight is not waited for; gradients stay where they are."""
        self._unhook()
        _live.discard(self)
        for work in self._works:
            work.detach()

    def __enter__(self) -> GradientReducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> GradientReducer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def overlap_gradients(
    model: torch.nn.Module | Iterable[torch.Tensor],
    *,
    op: str = "avg",
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    group: Any = None,
    lane: str = "gradients",
    timeout: float | None = None,
    max_in_flight_bytes: int | None = None,
) -> GradientReducer:
    """A ``GradientReducer`` for ``model``: backward sends its gradients, awaiting it ends the step.

    >>> gradients = ac.overlap_gradients(model)
    >>> loss.backward()                  # r0 has .grad 1.0, r1 has 3.0
    >>> await gradients                  # .grad is 2.0 on both, in the shape of its parameter

    On the CPU backward runs in the caller and holds the event loop; where other tasks are to go on
    meanwhile, run it in a thread: ``await asyncio.to_thread(loss.backward)``.

    Args:
        model: a module, or its parameters; those with ``requires_grad`` take part. The same on every
            rank, in the same order.
        op: ``"avg"``, or ``"sum"`` where the loss is already divided by the number of all samples.
        bucket_bytes, first_bucket_bytes: a bucket is closed once it has this size.
        group: whose gradients are reduced; as in every operation.
        lane: buckets travel on the lane ``<lane>/backward``. Models that train side by side need
            one each.
        timeout: seconds for each bucket's reduction.
        max_in_flight_bytes: backward waits for the oldest buckets while so many bytes are out.

    Raises:
        InvalidArgumentError: the model is in DDP; no parameter needs a gradient; an ``op`` or a size that
            cannot be; a living reducer has this lane or one of these parameters.
        PayloadTypeError: from backward, of a sparse gradient.

    Source: Li et al., VLDB 2020 (``torch.nn.parallel.DistributedDataParallel``).
    """
    return GradientReducer(
        model,
        op=op,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        group=group,
        lane=lane,
        timeout=timeout,
        max_in_flight_bytes=max_in_flight_bytes,
    )


# Making one


def check_not_ddp(model: object) -> None:
    """DDP's own reduction and ours would write the same gradients at once."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise InvalidArgumentError(
            "DistributedDataParallel reduces the gradients of its model itself: pass the model without it, "
            "or have its buckets travel on a lane of ours (ac.overlap.ddp_hook)"
        )


def _check_arguments(parameters: list[torch.Tensor], op: str, *sizes: int) -> None:
    if not parameters:
        raise InvalidArgumentError("there is no parameter with requires_grad=True, so nothing to reduce")
    if op not in {"avg", "sum"}:
        raise InvalidArgumentError(f"op must be 'avg' or 'sum' for gradients, got {op!r}")
    if any(not isinstance(size, int) or size <= 0 for size in sizes):
        raise InvalidArgumentError(
            f"bucket_bytes and first_bucket_bytes must be positive ints, got {sizes[0]!r} and {sizes[1]!r}"
        )


def _group_size(group: Any) -> int:
    size = get_world_size(group)
    if size < 1:
        raise InvalidArgumentError(
            f"rank {get_rank()} is not in {group!r}, so it has no gradients to reduce there; guard the call "
            "with `ac.get_rank(group) >= 0`"
        )
    return size


def _check_unshared(rank: int, lane: str, ids: set[int]) -> None:
    for other in list(_live):
        its_rank, its_lane, its_ids = other._identity
        if its_rank == rank and its_lane == lane:
            raise InvalidArgumentError(
                f"{other!r} is alive on this lane, where the buckets of two could cross between ranks: "
                "close() it first, or pass another lane= here"
            )
        if its_ids & ids:
            raise InvalidArgumentError(
                f"{other!r} already reduces the gradients of some of these parameters: close() it first"
            )


def _register(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _hook(
    reducer: weakref.ref[GradientReducer], bucket: Bucket, index: int
) -> Callable[[torch.Tensor], None]:
    """What backward calls; a weak reference, so that a reducer that is dropped takes its hooks along."""

    def arrived(_: torch.Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive._arrived(bucket, index)

    return arrived


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _wait_each(works: list[Work[Any]], timeout: float | None) -> None:
    """Wait for every one, then raise the first error in order."""
    deadline = monotonic() + (math.inf if timeout is None else timeout)
    first: Exception | None = None
    for work in works:
        left = deadline - monotonic()
        try:
            work.wait(max(0.0, left) if left < math.inf else None)
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
