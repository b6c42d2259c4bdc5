"""Horovod's own calls, in the same processes; its ranks meet through its own rendezvous server."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import asynccoll as ac
from asynccoll.bench.operations import Case
from asynccoll.bench.peers.api import IN, OUT, Library, Way, Ways, blocking, not_installed


def _missing() -> str:
    return not_installed("horovod", "it has to be built, see docs/backends/horovod.md")


def join() -> Callable[[], object]:
    """Start Horovod on the ranks of this world; returns what ends it again. All ranks call it.

    Raises:
        ImportError: Horovod is not installed.
    """
    import horovod.torch as hvd

    if hvd.is_initialized():
        return lambda: None
    server, port = _serve()
    host, port = ac.broadcast_object((socket.gethostname(), port)).wait()
    nodes = ac.get_nnodes()
    os.environ |= {
        "HOROVOD_RANK": str(ac.get_rank()),
        "HOROVOD_SIZE": str(ac.get_world_size()),
        "HOROVOD_LOCAL_RANK": str(ac.get_local_rank()),
        "HOROVOD_LOCAL_SIZE": str(ac.get_nproc_per_node()),
        "HOROVOD_CROSS_RANK": str(ac.get_node_rank()),
        "HOROVOD_CROSS_SIZE": str(nodes),
        "HOROVOD_HOSTNAME": ac.hostname(),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1" if nodes == 1 else host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    hvd.init()
    return lambda: _leave(server)


def _serve() -> tuple[Any, int]:
    """Start Horovod's rendezvous server, told how many ranks each host has, on rank 0; return its port."""
    hosts = ac.all_gather(ac.hostname()).wait()
    if ac.get_rank() > 0:
        return None, 0
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    slots = ",".join(f"{host}:{hosts.count(host)}" for host in dict.fromkeys(hosts))
    server = RendezvousServer()
    port = int(server.start())
    server.init(get_host_assignments(parse_hosts(slots), len(hosts)))
    return server, port


def _leave(server: Any) -> None:
    import horovod.torch as hvd

    hvd.shutdown()
    if server is not None:
        server.stop()


def _op(case: Case) -> object:
    import horovod.torch as hvd

    names = {"sum": "Sum", "avg": "Average", "min": "Min", "max": "Max", "prod": "Product"}
    return getattr(hvd, names[case.reduction])


def _fresh(name: str, case: Case, **options: object) -> dict[str, Way]:
    import horovod.torch as hvd

    call, x = getattr(hvd, name), case.input()
    return {OUT: blocking(lambda: call(x, name="bench", **options))}


def _and_in_place(name: str, case: Case, **options: object) -> dict[str, Way]:
    import horovod.torch as hvd

    call, x = getattr(hvd, f"{name}_"), case.input()
    filled = blocking(lambda: call(x, name="bench in place", **options))
    return {**_fresh(name, case, **options), IN: filled}


def _reduce_scatter(case: Case) -> dict[str, Way]:
    return _fresh("reducescatter", case, op=_op(case)) if case.reduction in ("sum", "avg") else {}


WAYS: Ways = {
    "all_reduce": lambda case: _and_in_place("allreduce", case, op=_op(case)),
    "all_gather": partial(_fresh, "allgather"),
    "reduce_scatter": _reduce_scatter,
    "all_to_all": partial(_fresh, "alltoall"),
    "broadcast": lambda case: _and_in_place("broadcast", case, root_rank=case.root),
}

LIBRARY = Library("horovod", _missing, WAYS, join)
