"""Shows operations and spans by name in torch.profiler, while it is running.

An operation is shown from the call to its end, which another thread may notice, and a span until its block is
left, which another task may do. torch writes the time of an end into the memory of the profiler, even if that
has been stopped since and its memory belongs to somebody else: the program then crashes anywhere, or computes
with a wrong number (torch 2.13). So all that is shown ends at the latest when a profiler stops. torch has no
hook for that, so ``_stop`` takes the place of its function that stops one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from threading import RLock
from typing import Any

import torch.autograd.profiler as torchs

from asynccoll.host.forks import renew
from asynccoll.host.state import per_process

__all__ = ["annotation", "begin"]

#: Held while something begins or ends. A finalizer may complete an operation in the midst of that.
_lock = RLock()
renew(_lock)


class _Shown:
    """What has begun, and has not ended."""

    def __init__(self) -> None:
        self.records: dict[torchs.record_function, None] = {}
        self.stopping = 0  # threads that stop a profiler now: nothing may begin meanwhile

    def end(self, record: torchs.record_function) -> None:
        # Looked up without the lock first: what is over does not wait for others.
        if record in self.records:
            with _lock:
                if record in self.records:
                    del self.records[record]
                    record.__exit__(None, None, None)


_shown = per_process(_Shown)


def annotation(name: str) -> AbstractContextManager[object]:
    """Show a block as ``name``, if a profiler is running."""
    return _block(name) if torchs._is_profiler_enabled else nullcontext()


@contextmanager
def _block(name: str) -> Iterator[None]:
    end = begin(name)
    try:
        yield
    finally:
        end()


def begin(name: str) -> Callable[[], None]:
    """Show ``name`` from now until the returned function is called, by any thread, or a profiler stops."""
    _take_place()
    record = torchs.record_function(name)
    with _lock:
        if not _shown.stopping:
            record.__enter__()  # type: ignore[no-untyped-call]  # torch's, untyped
            _shown.records[record] = None
    return lambda: _shown.end(record)


@cache
def _take_place() -> None:
    stop: Callable[..., Any] = torchs._disable_profiler

    @wraps(stop)
    def _stop(*args: object, **kwargs: object) -> Any:
        with _lock:
            _shown.stopping += 1
            for record in list(_shown.records):
                _shown.end(record)
        try:
            return stop(*args, **kwargs)
        finally:
            with _lock:
                _shown.stopping -= 1

    torchs._disable_profiler = _stop
