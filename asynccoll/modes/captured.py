"""The modes of autograd belong to a thread and a block; what is left of a call is done later, and elsewhere.

Whether the result of a call has a gradient is settled where the call is made, whatever the mode of whoever
waits for it. And memory that was made in ``torch.inference_mode()`` can be written to in that mode alone. So
what is left to do at the waiter, or on a thread of ours, is done in the modes in which the call was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple, ParamSpec, TypeVar

import torch

__all__ = ["Modes", "as_called", "uncast"]

P = ParamSpec("P")
T = TypeVar("T")
_inferring = torch.is_inference_mode_enabled
_recording = torch.is_grad_enabled
_C: ModuleType = torch._C
_autocasting = _C._is_any_autocast_enabled


class Modes(NamedTuple):
    """Whether autograd records, and whether tensors are made that it can never record."""

    recording: bool
    inferring: bool

    @staticmethod
    def now() -> Modes:
        """Those of the calling thread."""
        return _ALL[_recording(), _inferring()]

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``function``'s result, in these modes."""
        if _recording() is self.recording and _inferring() is self.inferring:
            return function(*args, **kwargs)
        with torch.inference_mode(self.inferring), torch.set_grad_enabled(self.recording):
            return function(*args, **kwargs)


_EITHER = (False, True)
#: A named tuple's own ``__new__`` is Python, and every call asks.
_ALL = {(recording, inferring): Modes(recording, inferring) for recording in _EITHER for inferring in _EITHER}


def uncast(function: Callable[..., torch.Tensor], xs: Sequence[torch.Tensor], *args: object) -> torch.Tensor:
    """``function(xs, *args)``, which puts tensors of one dtype together.

    ``torch.cat`` and ``torch.stack`` are among what autocast casts; where it casts to bfloat16 they raise for
    float16.
    """
    if not _autocasting():
        return function(xs, *args)
    with torch.autocast(xs[0].device.type, enabled=False):
        return function(xs, *args)


def as_called(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, to be called in the modes of now."""
    return partial(Modes.now().run, function)
