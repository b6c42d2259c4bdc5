"""What ``asynccoll info`` shows: versions, what started this process, devices.

Each line is collected separately, so that one broken package does not hide the others. ``trials`` tries
whether backends work.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket

from asynccoll.environment.detection import detect
from asynccoll.environment.slurm import expand_with_scontrol
from asynccoll.errors import LaunchEnvironmentError

__all__ = ["collect"]

_PACKAGES = ("torch", "anyio", "trio", "numpy", "mpi4py", "horovod", "torch_xla")


def collect(own_version: str) -> dict[str, str]:
    """Return everything, as short texts by name."""
    found = {"python": f"{platform.python_version()} on {platform.platform(terse=True)}"}
    found |= {"asynccoll": own_version} | {name: _version(name) for name in _PACKAGES}
    found |= {
        "launcher": _launcher(),
        "host": f"{socket.gethostname()}, {os.cpu_count()} CPUs",
        "memory": _memory(),
        "devices": _devices(),
    }
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _launcher() -> str:
    try:
        info = detect(os.environ, expand_hosts=expand_with_scontrol)
    except LaunchEnvironmentError as error:
        return f"error: {error}"
    place = f"rank {info.rank} of {info.world_size}, node {info.node_rank} of {info.nnodes}"
    meets = f", meets at {info.master_addr}:{info.master_port}" if info.master_addr else ""
    return f"{info.launcher}: {place}{meets}"


def _memory() -> str:
    """Say whether ranks of this host would use shared memory."""
    from asynccoll.backends.memory.parking import supported

    if not supported():
        return "not shared by ranks of a host: only on Linux and x86-64"
    if os.environ.get("ASYNCCOLL_MEMORY", "1") == "0":
        return "not shared by ranks of a host: ASYNCCOLL_MEMORY=0"
    return "shared by ranks of a host, for tensors on the CPU (with gloo and nccl)"


def _devices() -> str:
    try:
        import torch

        names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
        return ", ".join(names) or "cpu"
    except Exception as error:  # a broken driver is worth showing, not a reason to stop
        return f"unknown ({type(error).__name__}: {error})"
