"""Gradients of which ranks may have more after a reduction: they ask each other, on the lane of the buckets.

For optimizers whose step is awaited, and whose gradients may be reduced before it (``ac.async_optim``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asynccoll.errors import CollectiveMismatchError
from asynccoll.ops.collectives import all_reduce
from asynccoll.overlap.gradients import GradientReducer
from asynccoll.overlap.steps import Steps
from asynccoll.overlap.unawaited import BY_OPTIMIZER
from asynccoll.waiting.work import Work

__all__ = ["AskingReducer"]

_OUT_OF_STEP = (
    "the ranks are at different steps: some have gradients that are reduced already, and others send those "
    "of another step. `await optimizer.reduced()` as often on every rank before a step, and step on all of "
    "them or on none"
)


class AskingReducer(GradientReducer):
    """A ``GradientReducer`` whose ranks ask each other, after a reduction, whether there is another one.

    They ask where the buckets are sent, so that the question of one rank meets the first bucket of another
    that is a step ahead, which is an error on both; on a lane of its own, each would wait for the other. The
    buckets of a second reduction therefore leave when it is awaited: during backward they would come before
    the question.
    """

    _calls = BY_OPTIMIZER

    @property
    def _sends_at_await(self) -> bool:
        return self._size > 1 and self.rounds > 0

    def needed(self) -> Steps[bool]:
        """Whether a step has to await the gradients: unless they are reduced, and no rank has added more."""
        if not self._sends_at_await:
            return self.touched or not self.rounds
        question: Work[Any] = all_reduce(self.touched, op="or", **self._tail())
        try:
            return (yield question)  # type: ignore[no-any-return]
        except CollectiveMismatchError:
            self._works.append(question)  # in place of the first bucket, which it has met
        yield self  # others wait for the rest
        raise AssertionError("a question that failed fails again")

    @contextmanager
    def _step(self) -> Iterator[list[Work[torch.Tensor]]]:
        with super()._step() as works:
            try:
                yield works
            except CollectiveMismatchError as error:
                self.rounds = 0
                raise CollectiveMismatchError(f"{_OUT_OF_STEP}. {error}") from error
