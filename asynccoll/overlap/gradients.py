"""Gradients reduced while backward still runs, for training loops of your own.

    gradients = ac.overlap_gradients(model)
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()    # buckets are sent as they fill
        await gradients                    # or gradients.wait(): every .grad is now the average
        optimizer.step()

Parameters are put into buckets in reverse order, which is roughly the order in which backward reaches
them. A bucket is reduced in place once it has all of its gradients and the buckets before it have been
sent, so all ranks send the same buckets in the same order. Each ``.grad`` becomes a view of its bucket, so
nothing is copied back. The first bucket is small, so that sending begins early.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
Built on the public operations alone.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asynccoll import host
from asynccoll.errors import (
    AsyncCollError,
    CollectiveError,
    CollectiveMismatchError,
    InvalidArgumentError,
    PeerLostError,
    still_pending,
)
from asynccoll.host.call_site import caller, on_behalf_of
from asynccoll.host.misfits import fitting
from asynccoll.ops.collectives import all_reduce
from asynccoll.ops.scopes import backward_lane
from asynccoll.overlap.accepted import (
    check_arguments,
    check_initialized,
    check_not_ddp,
    check_place,
    check_whole,
    failed,
    ids_in,
    module_with_buffers,
    named_in,
    place_in,
    refused,
    replaced_in,
    source_of,
    told_to_peers,
)
from asynccoll.overlap.buckets import FlaggedBucket, Gradients, assign
from asynccoll.overlap.companion import EachStep
from asynccoll.overlap.divergence import checksum_text
from asynccoll.overlap.forwards import Forwards, forwards_seen, left_out
from asynccoll.overlap.hooks import after_accumulation, before_accumulation, is_returned, remove_all
from asynccoll.overlap.parameters import broadcast_buffers as send_buffers
from asynccoll.overlap.parameters import first_rank, start_alike, tell_apart, told_alike
from asynccoll.overlap.pending import Forgotten
from asynccoll.overlap.rows import SparseGradient, sparse_of
from asynccoll.overlap.scaling import before_scaling
from asynccoll.overlap.steps import Steps
from asynccoll.overlap.unawaited import BY_REDUCER, Calls
from asynccoll.overlap.window import InFlight
from asynccoll.runtime.process import get_rank
from asynccoll.waiting.together import wait_all
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike

__all__ = ["OPTIONS", "GradientReducer", "check_unreduced", "overlap_gradients"]

#: As in DDP: large enough to saturate the bandwidth, small enough to overlap; the first one is sent early.
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20

_OUT_OF_STEP = (
    "an optimizer has stepped since the last `await gradients` on the ranks {stepped} (of the group), but "
    "not on {others}: gradients of different steps were reduced together. Every rank has to await its "
    "gradients equally often between two steps (once, unless all accumulate), and step when the others do"
)

_REPLACED = (
    "the parameter {name!r} of the model was replaced after these gradients were first reduced (by "
    "load_state_dict(assign=True), say, or model.to() another kind of device), and an optimizer that has "
    "the old one trains nothing: do that first, or close() this one, and make both again"
)

_CUT_OFF = (
    "Ctrl-C came while a bucket of gradients was being sent, so it is unknown whether the other ranks have "
    "it, and sending it again could pair different buckets: close() this one on every rank, and make another "
    "on another lane"
)

_log = logging.getLogger("asynccoll.shift")

#: The reducers in use. Two must not share a lane (their buckets could cross between ranks) or a parameter.
_live: weakref.WeakKeyDictionary[GradientReducer, None] = host.per_process(weakref.WeakKeyDictionary)


class GradientReducer(EachStep):
    """Reduces the gradients of a model bucket by bucket, as backward computes them.

    ``overlap_gradients`` makes one. Await it once per step, like a ``Work``: ``await gradients``, or
    ``gradients.wait()`` without an event loop. After that every ``.grad`` is the reduction over all ranks,
    ready on the current device stream.

    - **Unused parameters.** A rank without a gradient for a parameter contributes zeros; if no rank has
      one, ``.grad`` stays None. A rank without data for a step has to await as well.
    - **Sparse gradients**, of an ``Embedding`` or ``EmbeddingBag`` with ``sparse=True``, stay sparse: the
      result has the rows of all ranks. They are sent after the others. This requires a module as ``model``.
    - **Accumulation.** Under ``with gradients.no_sync():`` backward only accumulates, and the sum is sent
      with the next backward outside of it. Without ``zero_grad`` the next gradients are added to the reduced
      ones, as with DDP, also for ``op="sum"``.
    - **Start.** When the reducer is made, all ranks get the parameters of the first rank (and buffers, of a
      module). This waits for all ranks, as in DDP; ``init_sync=False`` leaves it to you.
    - **Later parameters**, added or unfrozen on every rank, take part from the next await on; with
      ``ac.async_optim`` so do those that the optimizer gets by ``add_param_group``. The ranks compare them
      (unless ``init_sync=False``, also their values, which are not sent). If they differ, that await and all
      later ones raise ``CollectiveMismatchError``, which names the first that differs.
    - **Errors.** If backward raises, awaiting completes the step with the gradients that exist, so that the
      ranks stay in step: catch the error, await, ``zero_grad()``, and go on. A second backward before the
      await raises ``InvalidArgumentError``, and adds nothing to the gradients of the first; an optimizer's
      step before the await raises it, too. The await raises the errors of the collectives. After a cancelled
      or timed-out await the next one continues the same step.
    - ``with`` (or ``async with``) closes the reducer at the end; ``close()`` removes its hooks from backward.

    After the start each rank keeps its own buffers, such as running statistics, unless ``broadcast_buffers``
    is set. Reentrant checkpointing, which runs backward in pieces, is not supported. Neither is
    ``backward(create_graph=True)``, which is refused.
    """

    _name = "overlap_gradients"
    _use = "`await gradients` (or gradients.wait()) between backward and the optimizer's step"
    #: whether ``.grad`` may be set to None while it is being sent; else that is an error
    _may_be_gone = False
    #: the calls that errors name: the user of an optimizer does not know about its reducer
    _calls: Calls = BY_REDUCER

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.Tensor] | Callable[[], Iterable[torch.Tensor]],
        *,
        op: str = "avg",
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        group: GroupLike = None,
        lane: str = "gradients",
        timeout: float | None = None,
        max_in_flight_bytes: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        init_sync: bool = True,
        broadcast_buffers: bool | torch.nn.Module = False,
    ) -> None:
        self._source, self._named = source_of(model), named_in(model)
        self._sparse, self._replaced_in = partial(sparse_of, model), partial(replaced_in, model)
        parameters = [parameter for parameter in self._source() if parameter.requires_grad]
        self._group = group
        self._lane = backward_lane(lane)
        self._timeout = timeout
        self._spot = caller(1)
        self._place = _, self._size = place_in(group, "gradients to reduce")
        # No other reducer of this rank may have this lane, or one of these parameters.
        self._identity = (get_rank(), self._lane, {id(parameter) for parameter in parameters})
        with told_to_peers(self._name, group, self._lane):
            check_initialized(parameters)
            check_whole(parameters)
            check_not_ddp(model, parameters)
            check_arguments(parameters, op, bucket_bytes, first_bucket_bytes, reduce_dtype, timeout)
            self._window = InFlight(max_in_flight_bytes) if max_in_flight_bytes is not None else None
            if (conflict := _conflict(*self._identity, but=self._earlier())) is not None:
                raise conflict
        self._reduce_dtype = reduce_dtype
        self._scale = 1.0 / self._size if op == "avg" else 1.0
        self._summed_over = self._size if op == "sum" else 1
        self._buffers = module_with_buffers(model, broadcast_buffers)
        self._first_rank = first_rank(**self._tail()) if self._buffers is not None else 0
        if init_sync:
            start_alike(model if isinstance(model, torch.nn.Module) else self._source(), **self._tail())
        self._limits = (first_bucket_bytes, bucket_bytes)
        self._buckets: list[Gradients] = []
        # The works of the buckets sent in this step, in order. Each step has a new list, so that a waiter can
        # tell whether the step that it waited for is still the current one.
        self._works: list[Work[torch.Tensor]] = []
        self._buffer_works: list[Work[None]] = []  # of this step's buffers, awaited after the buckets
        self._compares_values = init_sync
        self._compared: list[Work[None]] = []  # comparisons of later parameters, until they have succeeded
        self._later: list[str] = []  # the parameters last compared, as errors name them
        self._syncing = True
        #: counts changes of gradients, by backward or by ``zero_grad`` of our optimizers
        #: (``steps.Resumable``)
        self.news: int = 0
        #: whether a bucket's reduction has begun, which Ctrl-C may keep from becoming one of ``_works``
        self._beginning = False
        self._sending = False  # whether a gradient was put into its bucket, or sent, since the last reduction
        self._accumulated = False  # whether backward has run under no_sync since then
        self._has_stepped = False  # whether an optimizer has stepped since then
        self._reductions = 0  # completed; optimizer steps before the first are not compared between ranks
        #: calls of its optimizer's methods that were never awaited
        self.forgotten: Forgotten = Forgotten()
        #: reductions since the last ``stepped()``, which our optimizers call; the same on every rank
        self.rounds: int = 0
        # With several devices, several threads run one backward. A thread holds this lock until it has issued
        # a bucket, so that buckets are sent in order. It may hold it while the window waits for older
        # buckets, since those complete without the lock.
        self._lock = host.Lock()
        self._hooks: list[object] = []
        self._forwards = Forwards(model) if forwards_seen(model) else None
        if self._forwards is not None:
            self._hooks.append(self._forwards.handle)
        self._tells = True  # whether to warn of a skipped step, which is done only once
        self._unhook = weakref.finalize(self, remove_all, self._hooks)
        self._add_parameters(parameters)
        _live[self] = None
        _hook_optimizers()

    def _earlier(self) -> list[GradientReducer]:
        """Return the reducers in whose place this one is made; its maker closes them afterwards."""
        return []

    def _tail(self) -> dict[str, Any]:
        """Return group, lane and timeout, as keyword arguments for an operation."""
        return {"group": self._group, "lane": self._lane, "timeout": self._timeout}

    def _assigned(self, parameters: list[torch.Tensor], first: int, limit: int) -> Sequence[Gradients]:
        """Return buckets for ``parameters``; the very first one also compares steps, by its ``marks``."""
        rows = {id(x) for x in self._sparse()}
        members = list(assign([x for x in parameters if id(x) not in rows], first, limit))
        marks = [0 if self._buckets or index else len(self._marks()) for index in range(len(members))]
        dense = [FlaggedBucket(x, self._reduce_dtype, marks=n) for x, n in zip(members, marks, strict=True)]
        return [*dense, *(SparseGradient(x, self._reduce_dtype) for x in parameters if id(x) in rows)]

    def _add_parameters(self, parameters: list[torch.Tensor]) -> None:
        """Make buckets for these parameters, and hook them."""
        for bucket in self._assigned(parameters[::-1], *self._limits):
            bucket.summed_over, bucket.named = self._summed_over, self._named
            self._buckets.append(bucket)
            for index, parameter in enumerate(bucket.parameters):
                coming, arrived = (
                    _hook(weakref.ref(self), x, bucket, index) for x in ("_coming", "_arrived")
                )
                self._hooks.append(before_accumulation(parameter, coming))
                self._hooks.append(after_accumulation(parameter, arrived))
        self._replaced = self._replaced_in(self._source())

    def _add_new_parameters(self) -> None:
        """Make buckets for parameters added or unfrozen since, which take part from this step on."""
        known = self._identity[2]
        new = [x for x in self._source() if x.requires_grad and id(x) not in known]
        if new:
            with told_to_peers(self._name, self._group, self._lane):
                if name := self._replaced():
                    raise InvalidArgumentError(_REPLACED.format(name=name))
                check_whole(new)
                conflict = _conflict(self._identity[0], self._lane, {id(x) for x in new}, but=[self])
                if conflict is not None:
                    raise conflict
            if self._size > 1:
                self._later = [self._named(x) for x in new]
                with on_behalf_of(self._spot):
                    self._compared.append(told_alike([self._told_of(x) for x in new], **self._tail()))
                self._compared[-1].detach()  # for the same reason as the works of buckets (``_send``)
            self._add_parameters(new)
            known.update(id(x) for x in new)

    def _told_of(self, parameter: torch.Tensor) -> str:
        """Return the description of a later parameter, which must be the same on all ranks."""
        strides = ", ".join(map(str, parameter.stride()))
        told = f"{self._named(parameter)}, {parameter.dtype}, strides ({strides})"
        if self._compares_values:
            told += f" and values of the checksum {checksum_text(parameter)}"
        return told

    def __repr__(self) -> str:
        count = sum(len(bucket.parameters) for bucket in self._buckets)
        sent = f"{len(self._works)} of {len(self._buckets)} buckets sent"
        return f"<GradientReducer of {count} parameters on lane {self._lane!r}: {sent}>"

    # Once per step

    def _all_in_flight(self, works: list[Work[torch.Tensor]]) -> Steps[None]:
        """Wait for all works of a step; if several fail, the error of the first is raised."""
        every: list[Work[Any]] = [*self._compared, *works, *self._buffer_works]
        yield wait_all(every)

    def _step(self) -> Steps[None]:
        """Send the remaining buckets, wait for all of them, and prepare for the next step."""
        works = self._send_all()
        try:
            yield from self._all_in_flight(works)
        except Exception as error:
            if still_pending(error):
                raise
            self._end_step(works)
            if isinstance(error, PeerLostError):
                self._calls.add_cure(error)
            elif isinstance(error, CollectiveMismatchError):
                tell_apart(error, self._later if self._compared else [])
            raise
        if self._works is not works:
            return  # another waiter has ended the step: the gradients may be zeroed by now
        self.rounds += 1  # on every rank, even if the result is refused below
        try:
            self._adopt()
        except Exception:
            self._end_step(works)
            raise
        self._end_step(works)

    def _send_all(self) -> list[Work[torch.Tensor]]:
        """Send the remaining buckets, and the buffers; returns the works of all buckets of this step."""
        with self._lock:
            self._send_rest()
            # Only after the buckets: some ranks have sent these during backward, and others send them now.
            self._add_new_parameters()
            self._send_rest()
            if self._buffers is not None and not self._buffer_works:
                self._buffer_works = [send_buffers(self._buffers, src=self._first_rank, **self._tail())]
            return self._works

    def _send_rest(self) -> None:
        """Send the buckets that were not sent in this step. Called with the lock held."""
        for bucket in self._buckets[len(self._works) :]:
            self._send(bucket)

    def _adopt(self) -> None:
        """Check the reduced gradients, and make them each parameter's ``.grad``."""
        self._compared.clear()
        first = self._buckets[0]
        # Only on the CPU: reading the marks from a device would wait for it.
        if isinstance(first, FlaggedBucket) and first.flat.device.type == "cpu":
            self._check_marks([int(x) for x in first.marks.real.tolist()])
        for bucket in self._buckets:
            bucket.check_unwritten(self._may_be_gone)
        for bucket in self._buckets:
            bucket.adopt()

    def _marks(self) -> list[float]:
        """Return one mark for each rank: this rank's own, and zeros. Their sum gives every rank all marks.

        The mark is 1 if an optimizer has stepped since the last reduction, plus 2 if a forward had no
        backward. The latter is reported from the second reduction on, since some ranks may have tried the
        model out before the first.
        """
        forwards = self._forwards if self._reductions else None
        own, rank = (
            self._has_stepped + 2 * (forwards is not None and forwards.unanswered),
            get_rank(self._group),
        )
        return [float(own if index == rank else 0) for index in range(self._size)]

    def _check_marks(self, sums: list[int]) -> None:
        """Refuse gradients of different steps: only some ranks have stepped since the last reduction.

        If only some ranks skipped a step (``forwards``), warn once, on the group's first rank.
        """
        stepped = [rank for rank, told in enumerate(sums) if told % 2]
        if 0 < len(stepped) < self._size:
            others = [rank for rank, told in enumerate(sums) if not told % 2]
            raise CollectiveMismatchError(_OUT_OF_STEP.format(stepped=stepped, others=others))
        if not self._tells:
            return
        with on_behalf_of(self._spot):  # the place to name if no line of the user's awaits the gradients
            place = caller(1).place
        if told := left_out([mark > 1 for mark in sums], self._reductions + 1, self._lane, place):
            self._tells = False
            if get_rank(self._group) == 0:
                _log.warning(told)

    def _end_step(self, ended: list[Work[torch.Tensor]]) -> None:
        """Get ready for the next step, unless another waiter of the same step has done so."""
        with self._lock:
            if self._works is ended:
                if self._forwards is not None:
                    self._forwards.begin()
                for bucket in self._buckets:
                    bucket.begin()
                # The works last: if Ctrl-C comes before, the next wait does all this again.
                self._sending = self._accumulated = self._has_stepped = False
                self._reductions += 1
                self._works, self._buffer_works = [], []

    # For an optimizer

    @property
    def touched(self) -> bool:
        """Whether backward has produced gradients on this rank since the last reduction."""
        return self._sending or self._accumulated

    def check_awaited(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer, or a scaler for it, is about to use gradients that are being reduced."""
        told = f"{self!r}: {self._calls.stepped_too_early}" if self._sending else ""
        told = told or self.forgotten.unfinished("a step of the wrapped optimizer")
        if told and self._has_parameters_of(optimizer):
            raise InvalidArgumentError(told)

    def _has_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return not self._identity[2].isdisjoint(ids_in(optimizer))

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of ``optimizer`` if it has our parameters; only the last of each group is looked up."""
        if self._reductions:
            last = (given["params"][-1] for given in optimizer.param_groups if given["params"])
            self._has_stepped = self._has_stepped or any(id(x) in self._identity[2] for x in last)

    def stepped(self) -> None:
        """Note that the parameters were updated: gradients from now on are of the next step."""
        self.rounds = 0

    # During backward

    def _coming(self, bucket: Gradients, index: int) -> None:
        """Check a gradient, and divide one that was summed, before backward adds to it.

        Called on a thread of backward.
        """
        reason = self._refused(bucket, index)
        if (reason or bucket.was_summed(index)) and not is_returned(bucket.parameters[index]):
            if reason:
                raise self._refusal(reason)
            bucket.divide(index)

    def _arrived(self, bucket: Gradients, index: int) -> None:
        """Take a gradient that backward has accumulated, and send the buckets that are complete.

        Called on a thread of backward, also for a parameter that was frozen since the forward.
        """
        if not bucket.parameters[index].requires_grad:
            return
        with self._lock:
            if self._forwards is not None:
                self._forwards.answered()
            if reason := self._refused(bucket, index):  # again, now with the lock held
                bucket.reported(index)
                raise self._refusal(reason)
            self.news += 1
            if not self._syncing:
                bucket.check(index)
                self._accumulated = True
                return
            bucket.put(index, self._scale)
            self._sending = True
            while len(self._works) < len(self._buckets) and not self._sends_at_await:
                if self._buckets[len(self._works)].waiting:
                    break
                self._send(self._buckets[len(self._works)])

    def _refused(self, bucket: Gradients, index: int) -> str:
        """Return the error text for a gradient that arrives before earlier ones were used; else ""."""
        if self._sending:  # is this a second backward, whose gradients would be added to those being sent?
            again = bucket.has[index] or len(self._works) == len(self._buckets)
            if again or not self._syncing:
                return f"{self!r}: {self._calls.second_backward}"
        return self.forgotten.unfinished("backward") if self.forgotten.left else ""

    def _refusal(self, reason: str) -> InvalidArgumentError:
        """Return the error of a refused backward: that of a call forgotten before it, if there is one."""
        return InvalidArgumentError(self.forgotten.last() or reason)

    @property
    def _sends_at_await(self) -> bool:
        """Whether only the await sends buckets, not backward."""
        return False

    def _send(self, bucket: Gradients) -> None:
        """Start the reduction of the next bucket. Called with the lock held."""
        check_place(self._place, self._group, "the reducer of these gradients")
        self._sending = True
        with on_behalf_of(self._spot):
            if self._beginning:
                self._works.append(self._refuse(InvalidArgumentError(_CUT_OFF)))
                return
            work = self._started(bucket)
        work.detach()  # the next backward reports a step that was never awaited, not each work
        self._works.append(work)
        self._beginning = False

    def _started(self, bucket: Gradients) -> Work[torch.Tensor]:
        """Start the reduction of a bucket.

        If this rank refuses it, the others hear of that, and the work has the error: so the await ends the
        step here as on the other ranks, once the buckets that were sent have arrived.
        """
        try:
            if isinstance(bucket, FlaggedBucket) and bucket.own_marks:
                bucket.own_marks = self._marks()
            bucket.fill(self._scale)
        except AsyncCollError as error:
            return self._refuse(error)
        try:
            if self._window is None:
                return self._begin(bucket.flat, bucket)
            return self._window.start_by_anyone(self._begin, bucket.flat, bucket=bucket)
        except CollectiveError:
            raise  # the lane is lost, or the wait of the window timed out
        except AsyncCollError as error:
            return failed(error)

    def _refuse(self, error: AsyncCollError) -> Work[torch.Tensor]:
        return refused(error, self._name, self._group, self._lane)

    def refuse_rest(self, error: AsyncCollError) -> bool:
        """Refuse the buckets that this rank has not sent, for which the others wait; the await raises it.

        Returns whether there were any.
        """
        with self._lock, on_behalf_of(self._spot):
            self._sending = True
            rest = self._buckets[len(self._works) :]
            self._works.extend(self._refuse(error) for _ in rest)
            return bool(rest)

    def _begin(self, flat: torch.Tensor, bucket: Gradients) -> Work[torch.Tensor]:
        self._beginning = True
        try:
            return self._reduce(flat, bucket)
        except Exception:
            self._beginning = False
            raise

    def _reduce(self, flat: torch.Tensor, bucket: Gradients) -> Work[torch.Tensor]:
        if isinstance(bucket, SparseGradient):
            return bucket.reduce(all_reduce, **self._tail())
        return all_reduce(flat, out=flat, **self._tail())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward accumulate gradients on this rank in the block, and send nothing.

        Use it in the same way on every rank. The next backward outside of the block, or the next await, sends
        the accumulated gradients. While gradients of a backward outside of the block are being sent, that is
        until they are awaited, a backward in the block is refused.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    # Leaving

    def close(self) -> None:
        """Remove the hooks, without waiting for buckets in flight; gradients stay where they are."""
        self._unhook()
        _live.pop(self, None)
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


@fitting
def overlap_gradients(
    model: torch.nn.Module | Iterable[torch.Tensor],
    *,
    op: str = "avg",
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    group: GroupLike = None,
    lane: str = "gradients",
    timeout: float | None = None,
    max_in_flight_bytes: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    init_sync: bool = True,
    broadcast_buffers: bool | torch.nn.Module = False,
) -> GradientReducer:
    """Return a ``GradientReducer`` for ``model``. Backward sends gradients; awaiting it ends the step.

    >>> gradients = ac.overlap_gradients(model)
    >>> loss.backward()                  # r0 has .grad 1.0, r1 has 3.0
    >>> await gradients                  # .grad is 2.0 on both, in the shape of its parameter
    >>> optimizer.step()

    Without an event loop ``gradients.wait()`` ends the step. The order is ``zero_grad``, backward, ``await
    gradients``, clipping, ``optimizer.step()``. If a step has several backwards, run all but the last under
    ``with gradients.no_sync():``. Every rank awaits once per step, even one without data. See
    ``help(ac.overlap.GradientReducer)`` for unused parameters, accumulation and errors.

    On the CPU backward runs in the calling thread and blocks the event loop; if other tasks have to run
    meanwhile, run it in a thread: ``await asyncio.to_thread(loss.backward)``.

    Args:
        model: a module, or its parameters; those with ``requires_grad`` take part. The same on every
            rank, in the same order.
        op: ``"avg"``, or ``"sum"`` if the loss is already divided by the number of all samples.
        bucket_bytes, first_bucket_bytes: a bucket is closed once it has this size.
        group: the ranks whose gradients are reduced; as in every operation.
        lane: buckets are sent on the lane ``<lane>/backward``. Models that train concurrently need one each.
        timeout: seconds for each bucket's reduction.
        max_in_flight_bytes: backward waits for the oldest buckets if more bytes would be in flight.
        reduce_dtype: the dtype in which gradients are summed, if not their own: with ``torch.float32`` the
            sum of bfloat16 gradients loses no precision to the number of ranks, but twice the bytes are sent.
            Complex gradients are summed in its complex counterpart.
        init_sync: broadcast the parameters and buffers of the group's first rank now, and check that all
            ranks have the same ones; this waits for the other ranks. Pass ``False`` if that is done already,
            or if tasks make reducers in a different order on each rank.
        broadcast_buffers: each await also broadcasts the buffers of the first rank (running statistics), as
            DDP does before each forward. Pass the module that has them if ``model`` is only parameters.

    Raises:
        InvalidArgumentError: ``model`` is neither a module nor parameters (an optimizer, say); the
            model is in DDP; no parameter needs a gradient; an ``op``, a dtype or a size is invalid; a reducer
            that is not closed has this lane or one of these parameters. From backward: ``create_graph=True``.
        CollectiveMismatchError: the ranks do not have the same parameters.
        PayloadTypeError: from backward, for a sparse gradient of a parameter that does not belong to an
            ``Embedding`` or ``EmbeddingBag`` in ``model``.

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
        reduce_dtype=reduce_dtype,
        init_sync=init_sync,
        broadcast_buffers=broadcast_buffers,
    )


#: The names of the options; optimizers that make a reducer take them, too.
OPTIONS: tuple[str, ...] = tuple(inspect.signature(overlap_gradients).parameters)[1:]


@functools.cache
def _hook_optimizers() -> None:
    """Have each optimizer that steps from now on raise if an await was forgotten. Once per process."""
    register_optimizer_step_pre_hook(_check_step)
    # Scalers as well: they write to gradients without a new version, so the await could not tell.
    before_scaling(lambda _, optimizer, __: _check_awaited(optimizer))


def _check_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _check_awaited(optimizer)
    for reducer in living():
        reducer.note_step(optimizer)


def _check_awaited(optimizer: torch.optim.Optimizer) -> None:
    for reducer in living():
        reducer.check_awaited(optimizer)


def living() -> list[GradientReducer]:
    """Return the reducers of this process that were neither closed nor collected."""
    return list(_live)


def check_unreduced(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parameters whose gradients a reducer of this rank sends: another one would send them, too."""
    conflict = _conflict(get_rank(), "", {id(x) for x in parameters})
    if conflict is not None:
        raise conflict


def _conflict(
    rank: int, lane: str, ids: set[int], but: Sequence[GradientReducer] = ()
) -> InvalidArgumentError | None:
    """Return the error if another reducer of this rank has this lane, or one of these parameters; or None."""
    if _shared(rank, lane, ids, but) is None:
        return None
    gc.collect()  # one that was dropped may still be in a reference cycle, on some ranks and not on others
    return _shared(rank, lane, ids, but)


def _shared(
    rank: int, lane: str, ids: set[int], but: Sequence[GradientReducer]
) -> InvalidArgumentError | None:
    for other in living():
        if other in but:
            continue
        its_rank, its_lane, its_ids = other._identity
        if its_rank == rank and its_lane == lane:
            return InvalidArgumentError(
                f"{other!r} is alive on this lane, where the buckets of two could cross between ranks: "
                "close() it first, or pass another lane= here"
            )
        if its_ids & ids:
            return InvalidArgumentError(
                f"{other!r} already reduces the gradients of some of these parameters: close() it first"
            )
    return None


def _hook(
    reducer: weakref.ref[GradientReducer], method: str, bucket: Gradients, index: int
) -> Callable[..., None]:
    """Return the hook that backward calls. It refers weakly to the reducer, which may be dropped."""

    def hook(*_: object) -> None:
        alive = reducer()
        if alive is not None:
            getattr(alive, method)(bucket, index)

    return hook
