"""Tensor operations of the library that no mode of the user's sees: they are part of a transfer.

A dispatch or function mode would count or change what a transport does to its buffers, ``FakeTensorMode``
refuses tensors with data, and a transformation of ``torch.func`` forbids to fill memory from outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch

__all__ = ["unseen"]

P = ParamSpec("P")
T = TypeVar("T")
_C: ModuleType = torch._C
_KEYS = _C.DispatchKeySet(_C.DispatchKey.Python)
for _key in ("PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"):
    _KEYS = _KEYS | _C.DispatchKeySet(getattr(_C.DispatchKey, _key))
#: How many modes there are in this thread, of either kind, and the innermost transformation of torch.func.
_dispatching = _C._len_torch_dispatch_stack
_overriding = _C._len_torch_function_stack
_transforming = _C._functorch.peek_interpreter_stack


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """Have ``function`` run outside of the modes and transformations of the thread that calls it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not (_dispatching() or _overriding() or _transforming()):
            return function(*args, **kwargs)
        with _C.DisableTorchFunction(), _C._ExcludeDispatchKeyGuard(_KEYS):
            return function(*args, **kwargs)

    return call
