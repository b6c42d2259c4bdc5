"""A reducer for gradients that may be reduced before the step: ranks ask each other whether one has new ones.

For optimizers whose step is awaited (``ac.async_optim``). The question is sent on the lane of the buckets.
"""

from __future__ import annotations

from typing import Any

import torch

from asynccoll.errors import CollectiveMismatchError
from asynccoll.ops.collectives import all_reduce
from asynccoll.overlap.gradients import GradientReducer
from asynccoll.overlap.parameters import is_of_told
from asynccoll.overlap.steps import Steps
from asynccoll.overlap.unawaited import BY_OPTIMIZER
from asynccoll.waiting.work import Work

__all__ = ["AskingReducer"]

_OUT_OF_STEP = (
    "the ranks are at different steps: some have gradients that are already reduced, and others send those "
    "of another step. Call `await optimizer.reduced()` equally often on every rank before a step, and step "
    "on all ranks or on none"
)


class AskingReducer(GradientReducer):
    """A ``GradientReducer`` whose ranks ask each other after a reduction whether they need another one.

    They ask on the buckets' lane. If one rank is a step ahead, its first bucket is then matched with another
    rank's question, which is an error on both; on two lanes each would wait for the other. Therefore the
    buckets of a second reduction are sent only when it is awaited: during backward they would precede the
    question.
    """

    _calls = BY_OPTIMIZER

    @property
    def _sends_at_await(self) -> bool:
        return self._size > 1 and self.rounds > 0

    def needed(self) -> Steps[bool]:
        """Return whether a step has to await the gradients: not if they are reduced and no rank has new ones.

        Yields the question to the other ranks, if one is needed.
        """
        if not self._sends_at_await:
            return self.touched or not self.rounds
        question: Work[Any] = all_reduce(self.touched, op="or", **self._tail())
        try:
            return (yield question)  # type: ignore[no-any-return]
        except CollectiveMismatchError:
            self._works.append(question)  # stands for the first bucket: it was matched with another rank's
        yield self  # sends the other buckets, for which the other ranks wait, and raises the error again
        raise AssertionError("a question that failed fails again")

    def _all_in_flight(self, works: list[Work[torch.Tensor]]) -> Steps[None]:
        try:
            yield from super()._all_in_flight(works)
        except CollectiveMismatchError as error:
            if is_of_told(error) or any(error is one.exception() for one in self._compared):
                raise  # it says which parameters differ
            self.rounds = 0
            raise CollectiveMismatchError(f"{_OUT_OF_STEP}. {error}") from error
