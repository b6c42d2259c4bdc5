"""Run the rest of a call, in its waiter or on another thread, in the autograd modes of the call.

torch's modes belong to a thread and a ``with`` block, and the rest of a call runs later. But whether the
result has a gradient depends on the mode at the call, not on the waiter's. And memory that was allocated in
``torch.inference_mode()`` can only be written to in that mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_inferring = torch.is_inference_mode_enabled
_recording = torch.is_grad_enabled
_C: ModuleType = torch._C
_autocasting = _C._is_any_autocast_enabled


class Modes(NamedTuple):
    """Whether autograd records, and whether inference mode is on (its tensors can never be recorded)."""

    recording: bool
    inferring: bool

    @staticmethod
    def now() -> Modes:
        """Return the modes of the calling thread."""
        return _ALL[_recording(), _inferring()]

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in these modes, and return its result."""
        if _recording() is self.recording and _inferring() is self.inferring:
            return function(*args, **kwargs)
        with torch.inference_mode(self.inferring), torch.set_grad_enabled(self.recording):
            return function(*args, **kwargs)


_EITHER = (False, True)
#: All modes, made once: ``__new__`` of a named tuple is slow Python code, and every call needs one.
_ALL = {(recording, inferring): Modes(recording, inferring) for recording in _EITHER for inferring in _EITHER}


def uncast(function: Callable[..., torch.Tensor], xs: Sequence[torch.Tensor], *args: object) -> torch.Tensor:
    """Return ``function(xs, *args)`` without autocast, for a ``function`` that joins tensors of one dtype.

    Autocast affects ``torch.cat`` and ``torch.stack``: if it casts to bfloat16, they raise for float16.
    """
    if not _autocasting():
        return function(xs, *args)
    with torch.autocast(xs[0].device.type, enabled=False):
        return function(xs, *args)


def as_called(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` bound to the current modes: later calls of it run in them."""
    return partial(Modes.now().run, function)
