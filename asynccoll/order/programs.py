"""Run a program's steps in the inference mode that was on when it was called, whichever thread runs them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

import torch

from asynccoll.order.job import Program
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion

__all__ = ["program_as_called"]


def program_as_called(program: Program) -> Program:
    """Return ``program`` with each of its steps run in the current inference mode."""
    if not torch.is_inference_mode_enabled():
        return program

    def inside(communicator: Communicator) -> Generator[Completion, None, Completion]:
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
