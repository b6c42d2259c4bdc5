"""Tensor operations of the library that the user's torch modes and transformations do not see.

A transport's operations on its own buffers are internal: a mode would count or change them (``unseen``). And
a call has to compute on tensors that have data. ``FakeTensorMode`` and ``torch.func`` create tensors without
data, and ``torch.func`` also forbids writing to memory from outside a transformation (``with_data``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_C: ModuleType = torch._C
_KEYS = _C.DispatchKeySet(_C.DispatchKey.Python)
for _key in ("PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"):
    _KEYS = _KEYS | _C.DispatchKeySet(getattr(_C.DispatchKey, _key))
#: How many modes of either kind this thread has, and the innermost transformation of torch.func.
_dispatching = _C._len_torch_dispatch_stack
_overriding = _C._len_torch_function_stack
_transforming = _C._functorch.peek_interpreter_stack


_FAKE = _C._TorchDispatchModeKey.FAKE


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``function`` to run outside the modes and transformations of the thread that calls it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _dispatching() or _overriding() or _transforming():
            return _outside(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def with_data(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``function(*args)``, called outside any mode or transformation whose tensors have no data."""
    if _transforming() or (_dispatching() and _C._get_dispatch_mode(_FAKE) is not None):
        return _outside(function, *args, **kwargs)
    return function(*args, **kwargs)


def _outside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with _C.DisableTorchFunction(), _C._ExcludeDispatchKeyGuard(_KEYS):
        return function(*args, **kwargs)
