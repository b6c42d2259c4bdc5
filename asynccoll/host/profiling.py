"""Show operations and spans by name in torch.profiler, while it is running.

An operation is shown from the call to its end, which another thread may notice, and a span until its block is
left, possibly by another task. torch writes the time of an end into the profiler's memory, even if the
profiler has been stopped since and its memory has been reused: the program then crashes at some random place,
or computes with a wrong number (torch 2.13). So everything shown ends at the latest when a profiler stops.
torch has no hook for that, so ``_stop`` replaces its function that stops a profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch.autograd.profiler as torchs

from asynccoll.host.forks import renew
from asynccoll.host.locks import RLock
from asynccoll.host.state import per_process

#: Held while a record begins or ends. Reentrant: a finalizer may complete an operation while it is held.
_lock = RLock()
renew(_lock)


class _Shown:
    """The records that have begun but not ended."""

    def __init__(self) -> None:
        self.records: dict[torchs.record_function, None] = {}
        self.stopping = 0  # how many threads are stopping a profiler: no record may begin meanwhile

    def end(self, record: torchs.record_function) -> None:
        # First checked without the lock: a record that has ended need not wait for others.
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
    """Show ``name`` from now until any thread calls the returned function, or a profiler stops."""
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
