"""One XLA device as its replica uses it: the few native calls, and the discipline that makes them sound.

Every replica must launch the same graph, or each compiles a module of its own and they wait for each
other until the runtime ends the process. So a collective is traced on inputs that are already on the
device, alone in its graph, with no token left of the one before. Between tracing and launching, nobody
else may launch what is pending on the device: ``torch_xla.sync()``, which takes all of it, waits.

Source: torch_xla's ``core/xla_model.py`` and ``csrc/xla_graph_executor.cpp``, 2.9.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch_xla

__all__ = ["Device"]

_native: Any = torch_xla._XLAC

#: Per device: held while something on it is traced but not launched.
_tracing: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
_nobody = nullcontext()


class Device:
    """The device of the replica that runs in the calling thread."""

    def __init__(self) -> None:
        self.name: str = _native._xla_get_default_device()  # "xla:1", as torch spells it
        self.torch_device = torch.device(self.name)
        (self._real,) = _native._xla_real_devices([self.name])  # "CPU:1", as the runtime does
        self._tracing = _tracing[self.name]
        _guard_sync()

    def adopt(self) -> None:
        """Make it the calling thread's own; what that traces is never recorded by autograd."""
        _native._xla_set_default_device(self.name)
        torch.set_grad_enabled(False)

    def is_of_this_thread(self) -> bool:
        """Whether the calling thread's device is this one."""
        return bool(_native._xla_get_default_device() == self.name)

    def settle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launch what ``tensors`` still wait for, so that graphs built on them start from data."""
        _native._xla_sync_multi(list(tensors), [], wait=False, sync_xla_data=True)

    def wait(self) -> None:
        """Return when the device has done everything it was given; without the GIL."""
        _native._xla_wait_device_ops(devices=[self._real])

    def launch(self, trace: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Trace one collective and launch it; ``trace`` is given the token that native calls take."""
        with self._tracing:
            result = trace(_native._get_all_reduce_token(self.name))
            # The next graph must not depend on this one's token: it would hold another module.
            _native._set_all_reduce_token(self.name, None)
            self.settle([result])
        return result


def _guard_sync() -> None:
    """Let ``torch_xla.sync()`` wait while a collective is traced on its device but not launched.

    It launches every pending tensor of the device, and would take ours into the user's graph.
    """
    native = _native._xla_step_marker
    if getattr(native, "asynccoll", False):
        return

    def step_marker(device: Any, *args: Any, **kwargs: Any) -> Any:
        with _tracing.get(str(device), _nobody):
            return native(device, *args, **kwargs)

    step_marker.asynccoll = True  # type: ignore[attr-defined]  # so that it is wrapped once
    _native._xla_step_marker = step_marker
