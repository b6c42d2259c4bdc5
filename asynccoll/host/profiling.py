"""Shows operations and spans by name in torch.profiler, while it is running.

An operation is shown from the call to its end, which another thread may notice: by the means with which torch
shows its own remote calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.autograd.profiler as torchs

__all__ = ["annotation", "begin"]


def annotation(name: str) -> AbstractContextManager[object]:
    """Show a block as ``name``, if a profiler is running."""
    return torchs.record_function(name) if torchs._is_profiler_enabled else nullcontext()


def begin(name: str) -> Callable[[], None]:
    """Show ``name`` from now until the returned function is called, by any thread."""
    shown = torchs.record_function(name)
    shown.__enter__()  # type: ignore[no-untyped-call]  # torch's, untyped
    over: torch.futures.Future[None] = torch.futures.Future()
    shown._call_end_callbacks_on_future(over)

    def end() -> None:
        if not over.done():
            over.set_result(None)

    return end
