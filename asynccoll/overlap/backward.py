"""Gradients that are reduced when ``backward`` returns, as with DDP: for loops that read them right after it.

The buckets are sent during backward, as in ``gradients``; a callback at the end of backward waits for them.
So clipping, a gradient scaler, a skipped step and several backwards before a step work as in one process.
Built on the public operations alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from asynccoll.errors import CollectiveMismatchError
from asynccoll.overlap.buckets import Gradients
from asynccoll.overlap.gradients import GradientReducer, living
from asynccoll.overlap.unawaited import BY_BACKWARD

__all__ = ["BackwardReducer", "earlier"]

#: Ranks compare their step numbers modulo three, sent as -1, 0 or 1. Low-precision dtypes sum these exactly
#: for up to this many ranks.
_EXACT_RANKS = 256

_BROKEN_BACKWARD = (
    "an earlier backward ended before all of its gradients were reduced (it raised, timed out, or ran in "
    "pieces, as with checkpoint(use_reentrant=True), which is not supported), and the other ranks wait for "
    "the rest: call `optimizer.synchronize()` after it to send what there is; then zero_grad() and go on"
)
_OUT_OF_STEP = (
    "this rank has made {steps} steps, but others, whose gradients were about to be averaged with its own, "
    "a different number: every rank has to run the same number of backwards (outside no_sync) per step. A "
    "rank without data for a step takes part by step() or `optimizer.synchronize()`; for one of several "
    "backwards of a step, by the backward of a loss that is zero"
)


class BackwardReducer(GradientReducer):
    """A ``GradientReducer`` that backward itself waits for; ``ac.auto_optim`` makes one if it cannot use DDP.

    Every backward outside of ``no_sync()`` is one *round*, in which all ranks take part: with the gradients
    of this backward, and of earlier ones under ``no_sync()``, and with zeros for other parameters. A rank
    that has no data, or whose backward reaches no parameter, takes part by ``synchronize()``, which an
    optimizer's step calls.
    """

    #: it may, between a backward that raised and ``synchronize()``
    _may_be_gone = True
    _calls = BY_BACKWARD

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]], **options: Any) -> None:
        self._steps = 0
        super().__init__(parameters, **options)
        self._task = -1  # autograd's number of the backward that will wait at its end, or -1
        self._closed = False

    def _earlier(self) -> list[GradientReducer]:
        return earlier(self._source())

    # During backward

    def _arrived(self, bucket: Gradients, index: int) -> None:
        if self._syncing:
            self._expect_end()
        super()._arrived(bucket, index)

    def _refused(self, bucket: Gradients, index: int) -> str:
        # Read in this order, as the lock is not held: another thread of this backward sets ``_task`` before
        # ``_sending``.
        if self._syncing and self._sending and self._task != torch._C._current_graph_task_id():
            return _BROKEN_BACKWARD
        return super()._refused(bucket, index)

    def _expect_end(self) -> None:
        """Have the running backward wait at its end (``_end``)."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task == self._task or self._sending:
                return
            self._task = task
        at_end = partial(_end, weakref.ref(self), task)
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    # A round

    def synchronize(self) -> None:
        """Take part in this step's round, if no backward of this rank has done so.

        After a backward that reduced its gradients there is nothing to do.
        """
        # Nothing reports a skipped step, after which ``rounds`` is stale; but the gradients are None then.
        forgotten = all(parameter.grad is None for parameter in self._source())
        if not self._closed and (self.touched or not self.rounds or forgotten):
            self.wait()

    def check_awaited(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse nothing: the step itself waits for the gradients being sent."""

    def stepped(self) -> None:
        """Note that the parameters were updated: gradients from now on are of the next step."""
        super().stepped()
        self._steps += 1

    # Ranks that are out of step

    def _marks(self) -> list[float]:
        return [float(self._steps % 3 - 1)]

    def _check_marks(self, sums: list[int]) -> None:
        if self._size <= _EXACT_RANKS and sums != [self._size * mark for mark in self._marks()]:
            raise CollectiveMismatchError(_OUT_OF_STEP.format(steps=self._steps))

    def close(self) -> None:
        """Remove the hooks; the optimizer's steps take part in no round from now on."""
        self._closed = True
        super().close()


def _end(reducer: weakref.ref[BackwardReducer], task: int) -> None:
    """Wait for the reducer's round. Autograd calls this at the end of the backward with number ``task``."""
    own = reducer()
    if own is None or own._closed:
        return
    # If several models are in one backward, ranks may wait for them in different orders. So the buckets of
    # all of them are sent before this one is waited for.
    for other in living():
        if isinstance(other, BackwardReducer) and other._task == task:
            other._send_all()
    own._task = -1
    own.wait()


def earlier(parameters: Iterable[torch.Tensor]) -> list[GradientReducer]:
    """Return the reducers that have no parameters but these, for which a new optimizer is being made.

    They may be of an earlier world, whose parameters train on in a world of one, say.
    """
    mine = {id(parameter) for parameter in parameters}
    return [x for x in living() if isinstance(x, BackwardReducer) and x._identity[2] <= mine]
