"""Calls on a native group that torch.profiler does not record.

gloo's thread records the end of a profiled call, after the call's future has completed. By then the profiler
may have been stopped and its memory freed, and torch writes to that memory all the same (2.13). So the
profiler sees only the range that the lane records for an operation, which ends in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._autograd import _enable_record_function

__all__ = ["Unprofiled"]


class Unprofiled:
    """A stand-in for a native group while a profiler is running."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._native, name)

        def call(*args: object) -> Any:
            _enable_record_function(False)
            try:
                return method(*args)
            finally:
                _enable_record_function(True)

        return call
