"""Inference mode belongs to a thread and a block; what is left of a call is done later, and elsewhere.

Memory that was made in ``torch.inference_mode()`` can be written to in that mode alone. So what writes to it
afterwards, at the waiter or on a thread of ours, does so in the mode in which the call was made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from asynccoll.completion import Completion

if TYPE_CHECKING:
    from asynccoll.lane import Program

__all__ = ["as_called", "program_as_called"]

P = ParamSpec("P")
T = TypeVar("T")
_inferring = torch.is_inference_mode_enabled


def as_called(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, to be called in the mode of now."""
    if not _inferring():
        return function

    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode():
            return function(*args, **kwargs)

    return inside


def program_as_called(program: Program) -> Program:
    """``program``, each step of which is taken in the mode of now."""
    if not _inferring():
        return program

    def inside(communicator: Any) -> Generator[Completion, None, Completion]:
        steps = program(communicator)
        step: Callable[[], Completion] = partial(next, steps)
        while True:
            with torch.inference_mode():
                try:
                    completion = step()
                except StopIteration as stop:
                    last: Completion = stop.value
                    return last
            try:
                yield completion
            except Exception as error:
                step = partial(steps.throw, error)
            else:
                step = partial(next, steps)

    return inside
