"""Automatic marks for forward, backward and optimizer steps, while something is recorded.

torch's global hooks report every module's call and every optimizer's step. The call of a module that no other
module calls is "forward"; when its outputs' gradients arrive, "backward" begins, and autograd says when it is
over. Inside what the program marks itself, nothing is marked automatically.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from asynccoll import host
from asynccoll.trace.recorder import Recorder


@contextlib.contextmanager
def marking(recorder: Recorder) -> Iterator[None]:
    """Mark what modules and optimizers do in ``recorder`` while the block runs."""
    marks = _Marks(recorder)
    handles = [
        modules.register_module_forward_pre_hook(marks.forward_begins),
        modules.register_module_forward_hook(marks.forward_ends, always_call=True),
        optimizers.register_optimizer_step_pre_hook(marks.step_begins),
        optimizers.register_optimizer_step_post_hook(marks.step_ends),
    ]
    try:
        yield
    finally:
        marks.over = True
        for handle in handles:
            handle.remove()


class _Marks:
    """The marks that are open in each thread."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.over = False
        #: by thread: the modules being called, the outermost first; the frame of the outermost call; its span
        self._calls: dict[int, tuple[list[int], FrameType, Any]] = {}
        #: by thread: the frame of the outermost optimizer's step, and its span
        self._optimizing: dict[int, tuple[FrameType, Any]] = {}
        #: backward passes that have begun, by autograd's number for them
        self._backward: set[int] = set()

    def forward_begins(self, module: torch.nn.Module, _inputs: object) -> None:
        if torch.compiler.is_compiling() or _in_backward():
            return
        thread, call = host.get_ident(), sys._getframe(1)
        found = self._calls.get(thread)
        if found is not None and not _is_below(call, found[1]):
            self._end_raised_forward(thread)
            found = None
        if found is None:
            self._end_raised_step(call)
            span = None
            if not self.recorder.is_marked():
                span = self.recorder.begin("forward", place=type(module).__name__)
            self._calls[thread] = ([id(module)], call, span)
        else:
            found[0].append(id(module))

    def forward_ends(self, module: torch.nn.Module, _inputs: object, outputs: object) -> None:
        if torch.compiler.is_compiling() or _in_backward():
            return
        thread = host.get_ident()
        found = self._calls.get(thread)
        if found is None:  # it was called before the recording began
            return
        calls, _, span = found
        while calls and calls.pop() != id(module):  # skip those that raised without their hook being called
            pass
        if calls:
            return
        del self._calls[thread]
        if span is not None:
            span.finish()
        self._await_backward(outputs, type(module).__name__)

    def _end_raised_forward(self, thread: int) -> None:
        """End a call that no hook has ended: it raised something that is no Exception, as Ctrl-C does."""
        _, _, span = self._calls.pop(thread)
        if span is not None:
            span.finish()

    def _await_backward(self, outputs: object, name: str) -> None:
        row = host.current_thread().name
        for node in _graph_nodes(outputs):
            node.register_prehook(lambda _gradients: self._backward_begins(row, name))

    def _backward_begins(self, row: str, name: str) -> None:
        number = torch._C._current_graph_task_id()
        if self.over or number == -1 or number in self._backward or self.recorder.is_marked():
            return
        self._backward.add(number)
        span = self.recorder.begin("backward", row, name)
        when_over = partial(span.finish)
        let_go = weakref.finalize(when_over, span.finish)  # if the pass raises: freed without being called
        let_go.atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(when_over)

    def step_begins(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        step = sys._getframe(1)
        self._end_raised_step(step)
        if host.get_ident() in self._optimizing:  # called by another optimizer
            return
        span = None
        if not self.recorder.is_marked():
            span = self.recorder.begin("optimizer", place=type(optimizer).__name__)
        self._optimizing[host.get_ident()] = (step, span)

    def step_ends(self, _optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        step, span = self._optimizing.get(host.get_ident(), (None, None))
        if step is not None and step is not sys._getframe(1):
            return
        self._optimizing.pop(host.get_ident(), None)
        if span is not None:
            span.finish()
        self.recorder.step(marked=False)

    def _end_raised_step(self, frame: FrameType | None) -> None:
        """End the thread's step unless it has called ``frame``: it has raised, which no hook reports."""
        step, span = self._optimizing.get(host.get_ident(), (None, None))
        if step is not None and not _is_below(frame, step):
            del self._optimizing[host.get_ident()]
            if span is not None:
                span.finish()


def _is_below(frame: FrameType | None, outer: FrameType) -> bool:
    """Whether ``outer`` is ``frame``, or has called it."""
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


def _in_backward() -> bool:
    """Whether autograd runs in this thread, as it does when checkpointed activations are recomputed."""
    return torch._C._current_graph_task_id() != -1


def _graph_nodes(outputs: object) -> Iterator[Any]:
    """Yield the graph nodes at which the gradients of ``outputs`` will arrive."""
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is not None:
            yield outputs.grad_fn
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from _graph_nodes(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _graph_nodes(value)
