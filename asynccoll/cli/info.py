"""``asynccoll info``: versions, launcher and devices; and for each backend whether it works here.

Each line is collected separately, so that one broken package does not hide the others. ``trials`` tries
whether backends work.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import socket
from dataclasses import asdict

from asynccoll import __version__
from asynccoll.cli.common import Commands
from asynccoll.cli.output import Table, add_json, print_json, show
from asynccoll.environment.detection import detect_here
from asynccoll.errors import LaunchEnvironmentError

_PACKAGES = ("torch", "anyio", "trio", "numpy", "mpi4py", "horovod", "torch_xla")


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "info",
        help="versions, launcher, devices, and which backends work here",
        example="asynccoll info --no-try",
        description="Each backend whose packages are installed is tried: a world of one, in a process of "
        "its own.",
    )
    parser.add_argument("--no-try", action="store_true", help="only check which packages are installed")
    add_json(parser)
    parser.set_defaults(carry_out=_info)


def _info(given: argparse.Namespace) -> int:
    from asynccoll.cli.trials import look, try_all

    found = _collect()
    if not given.json:
        show(Table(("", " "), list(found.items()), left=frozenset({"", " "})))
        print(flush=True)
    trials = look() if given.no_try else try_all()
    if given.json:
        print_json({**found, "backends": {name: asdict(trial) for name, trial in trials.items()}})
        return 0
    columns = ("backend", "works", "why not", "what to type")
    table = Table(columns, left=frozenset(columns))
    for name, trial in trials.items():
        table.good |= {len(table.rows)} if trial.works else set()
        table.rows.append((name, "yes" if trial.works else "no", trial.why, trial.do))
    show(table)
    return 0


def _collect() -> dict[str, str]:
    """Return what is known without trying anything, as short texts by name."""
    found = {"python": f"{platform.python_version()} on {platform.platform(terse=True)}"}
    found |= {"asynccoll": __version__} | {name: _version(name) for name in _PACKAGES}
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
        info = detect_here()
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
