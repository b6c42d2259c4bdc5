"""Replica threads of this process: one for each device of torch_xla's CPU client."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping


def environment(replicas: int, environ: MutableMapping[str, str]) -> None:
    """Set the variables that make the runtime, once it starts, have ``replicas`` replicas on the CPU."""
    environ["PJRT_DEVICE"] = "CPU"
    environ["CPU_NUM_DEVICES"] = str(replicas)
    # A collective holds one of these threads for each replica until all have arrived.
    pool = environ.get("XLA_THREAD_POOL_SIZE", "")
    if not (pool.isdigit() and int(pool) > replicas):
        environ["XLA_THREAD_POOL_SIZE"] = str(replicas + 4)


def run_replicas(function: Callable[[int], object]) -> dict[int, object]:
    """Call ``function(rank)`` in a thread for each device; return the results once all have returned."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla.runtime as xr
    from torch_xla._internal import pjrt

    results: dict[int, object] = pjrt._run_thread_per_device(
        0, 1, lambda: function(xr.global_ordinal()), pjrt.initialize_multiprocess
    )
    return results
