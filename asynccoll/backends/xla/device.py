"""One XLA device as its replica uses it: the few native calls, and the rules that make them safe.

Every replica must launch the same graph. Otherwise each compiles a different module, and they wait for each
other until the runtime ends the process. So a collective is traced on inputs that are already on the device,
alone in its graph, with no token left from the one before.

A lazy tensor may be launched by one thread at a time. The user's tensors are computed in the user's thread.
Ours are touched only by progress threads, under a lock of the device. ``torch_xla.sync()``, which launches
everything that is pending on the device, waits for that lock, too.

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

_native: Any = torch_xla._XLAC

#: By device: held while tensors that are not the user's are traced or launched.
_locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
_nobody = nullcontext()


class Device:
    """The device of the replica that runs in the calling thread."""

    def __init__(self) -> None:
        self.name: str = _native._xla_get_default_device()  # "xla:1", as torch spells it
        self.torch_device: torch.device = torch.device(self.name)
        (self._real,) = _native._xla_real_devices([self.name])  # "CPU:1", as the runtime does
        self.lock: threading.RLock = _locks[self.name]
        _guard_sync()

    def adopt(self) -> None:
        """Make this the calling thread's device; autograd never records what that thread traces."""
        _native._xla_set_default_device(self.name)
        torch.set_grad_enabled(False)

    def is_of_this_thread(self) -> bool:
        """Whether the calling thread's device is this one."""
        return bool(_native._xla_get_default_device() == self.name)

    def settle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launch what ``tensors`` still wait for, so that graphs built on them start from data.

        Called with the lock held, unless they are the user's and this is the user's thread.
        """
        _compute(tensors)

    def wait(self) -> None:
        """Wait, with the GIL released, until the device has done everything it was given."""
        _native._xla_wait_device_ops(devices=[self._real])

    def launch(self, trace: Callable[[object], torch.Tensor]) -> torch.Tensor:
        """Trace one collective and launch it, with the lock held.

        ``trace`` is given the token that native calls take.
        """
        result = trace(_native._get_all_reduce_token(self.name))
        # The next graph must not depend on this one's token, which would make it a different module.
        _native._set_all_reduce_token(self.name, None)
        self.settle([result])
        return result


def _compute(tensors: Sequence[torch.Tensor]) -> None:
    tensors = list(tensors)
    # This check takes a tenth of the time of an empty launch, and keeps the GIL.
    if any(_native._check_tensor_need_materialization(tensors)):
        # sync_xla_data would let the program overwrite the memory that a tensor had before it was modified in
        # place. Other tensors may be copies or functions of that memory, and still have to be computed.
        _native._xla_sync_multi(tensors, [], wait=False, sync_xla_data=False)


def compute(x: torch.Tensor) -> None:
    """Launch what ``x`` still waits for. Called in the thread that made it, before others build on it."""
    _compute([x])


def settled(x: torch.Tensor) -> torch.Tensor:
    """Mark ``x``, a tensor of our own, as computed, and return it."""
    x.asynccoll_settled = True  # type: ignore[attr-defined]  # for take_settled
    return x


def take_settled(x: torch.Tensor) -> bool:
    """Whether ``x`` is marked: data on the device, with no graph behind it.

    True only once, since the caller then writes the result into ``x`` and gives it to the user.
    """
    return bool(x.__dict__.pop("asynccoll_settled", False))


def _guard_sync() -> None:
    """Make ``torch_xla.sync()`` wait for the lock of its device.

    It launches every pending tensor there, and would take half of a collective into the user's graph.
    """
    native = _native._xla_step_marker
    if getattr(native, "asynccoll", False):
        return

    def step_marker(device: object, *args: object, **kwargs: object) -> object:
        with _locks.get(str(device), _nobody):
            return native(device, *args, **kwargs)

    step_marker.asynccoll = True  # type: ignore[attr-defined]  # so that it is wrapped once
    _native._xla_step_marker = step_marker
