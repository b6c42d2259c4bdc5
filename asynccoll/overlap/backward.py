"""Gradients that are reduced when ``backward`` returns, as under DDP: for loops that read them right then.

The buckets leave during backward, as in ``gradients``; a callback at its end waits for them. Clipping, a
gradient scaler, a step that is skipped and several backwards before a step then are as in one process.
Built on the public operations alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from asynccoll.errors import CollectiveMismatchError, InvalidArgumentError
from asynccoll.overlap.buckets import Bucket
from asynccoll.overlap.gradients import GradientReducer, living
from asynccoll.overlap.unawaited import BY_BACKWARD

__all__ = ["BackwardReducer"]

#: Steps are told apart by their number modulo three, as -1, 0 and 1, which small dtypes can sum exactly.
_EXACT_RANKS = 256

_BROKEN_BACKWARD = (
    "an earlier backward ended before all of its gradients were reduced (it raised, or timed out, or ran "
    "in pieces, which checkpoint(use_reentrant=True) does and is not supported), and the other ranks wait "
    "for the rest: `optimizer.synchronize()` after it sends what there is; then zero_grad() and go on"
)
_OUT_OF_STEP = (
    "this rank has made {steps} steps, and others, whose gradients were about to be averaged with its own, "
    "another number: every rank has to run as many backwards (outside of no_sync) for a step as the others. "
    "A rank without data for a step takes part by step() or `optimizer.synchronize()`; for one of several "
    "backwards of a step, by the backward of a loss that is zero"
)


class BackwardReducer(GradientReducer):
    """A ``GradientReducer`` that backward itself waits for; ``ac.auto_optim`` makes one where DDP cannot.

    Every backward outside of ``no_sync()`` is one *round*, in which all ranks take part: with the gradients
    that it made, or made under ``no_sync()`` before; zeros for others. A rank that has no data, or whose
    backward reaches no parameter, takes part by ``synchronize()``, which an optimizer's step calls.
    """

    #: After a backward that raised, before ``synchronize()``.
    _may_be_gone = True
    _calls = BY_BACKWARD

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]], **options: Any) -> None:
        _take_over(parameters())
        self._steps = 0
        super().__init__(parameters, **options)
        self._task = -1  # autograd's number of the backward whose end waits
        self._closed = False

    # During backward

    def _arrived(self, bucket: Bucket, index: int) -> None:
        if self._syncing:
            self._expect_end()
        super()._arrived(bucket, index)

    def _expect_end(self) -> None:
        """Have the backward that is running wait at its end."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task == self._task:
                return
            if self._sending:
                raise InvalidArgumentError(_BROKEN_BACKWARD)
            self._task = task
        at_end = partial(_end, weakref.ref(self), task)
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    # A round

    def synchronize(self) -> None:
        """Take part in this step's round, if no backward of this rank has done so.

        After a backward that reduced its gradients there is nothing to do.
        """
        # A step that was skipped is told by nobody; but then what it would have used is gone.
        forgotten = all(parameter.grad is None for parameter in self._source())
        if not self._closed and (self.touched or not self.rounds or forgotten):
            self.wait()

    def check_awaited(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to refuse: a step waits for what is under way."""

    def stepped(self) -> None:
        """The parameters have been updated with the gradients: what follows are those of the next step."""
        super().stepped()
        self._steps += 1

    # Ranks that have lost step

    def _marks(self) -> list[float]:
        return [float(self._steps % 3 - 1)]

    def _check_marks(self, sums: list[int]) -> None:
        if self._size <= _EXACT_RANKS and sums != [self._size * mark for mark in self._marks()]:
            raise CollectiveMismatchError(_OUT_OF_STEP.format(steps=self._steps))

    def close(self) -> None:
        """Remove the hooks; an optimizer that steps no longer takes part in a round."""
        self._closed = True
        super().close()


def _end(reducer: weakref.ref[BackwardReducer], task: int) -> None:
    """What autograd calls when the backward of that number is over."""
    own = reducer()
    if own is None or own._closed:
        return
    # Of several models in one backward each rank may come to wait for another first: all are sent before.
    for other in living():
        if isinstance(other, BackwardReducer) and other._task == task:
            other._send_all()
    own._task = -1
    own.wait()


def _take_over(parameters: Iterable[torch.Tensor]) -> None:
    """Close the reducers of parameters that another optimizer is made for now."""
    mine = {id(parameter) for parameter in parameters}
    for other in living():
        if isinstance(other, BackwardReducer) and other._identity[2] <= mine:
            other.close()
