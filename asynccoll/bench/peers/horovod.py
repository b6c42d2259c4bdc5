"""Horovod's own calls, in the same processes; its ranks meet through its own rendezvous server."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable

import asynccoll as ac
from asynccoll.bench.operations import Case
from asynccoll.bench.peers.api import IN, OUT, Library, Way, Ways, blocking

__all__ = ["LIBRARY", "join"]


def _missing() -> str:
    if importlib.util.find_spec("horovod") is None:
        return "not installed: it has to be built, see docs/backends/horovod.md"
    return ""


def join() -> Callable[[], object]:
    """Start Horovod on the ranks of this world; returns what ends it again. All ranks call it.

    Raises:
        ImportError: Horovod is not installed.
    """
    import horovod.torch as hvd

    if hvd.is_initialized():
        return lambda: None
    server = _serve()
    address = (socket.gethostname(), server.start_server()) if server else ("", 0)
    host, port = ac.broadcast_object(address).wait()
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


class _Server:
    """Horovod's rendezvous server, told how many ranks each host has."""

    def __init__(self, hosts: list[str]) -> None:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        slots = ",".join(f"{host}:{hosts.count(host)}" for host in dict.fromkeys(hosts))
        self._assignments = get_host_assignments(parse_hosts(slots), len(hosts))
        self._server = RendezvousServer()

    def start_server(self) -> int:
        """Start to listen; returns the port."""
        port = int(self._server.start())
        self._server.init(self._assignments)
        return port

    def stop(self) -> None:
        self._server.stop()


def _serve() -> _Server | None:
    """Return the rendezvous server on rank 0, None on the others."""
    hosts = ac.all_gather(ac.hostname()).wait()
    return _Server(hosts) if ac.get_rank() == 0 else None


def _leave(server: _Server | None) -> None:
    import horovod.torch as hvd

    hvd.shutdown()
    if server is not None:
        server.stop()


def _op(case: Case) -> object:
    import horovod.torch as hvd

    names = {"sum": "Sum", "avg": "Average", "min": "Min", "max": "Max", "prod": "Product"}
    return getattr(hvd, names[case.reduction])


def _all_reduce(case: Case) -> dict[str, Way]:
    import horovod.torch as hvd

    x, again, op = case.input(), case.input(), _op(case)
    return {
        OUT: blocking(lambda: hvd.allreduce(x, op=op, name="bench")),
        IN: blocking(lambda: hvd.allreduce_(again, op=op, name="bench in place")),
    }


def _all_gather(case: Case) -> dict[str, Way]:
    import horovod.torch as hvd

    x = case.input()
    return {OUT: blocking(lambda: hvd.allgather(x, name="bench"))}


def _reduce_scatter(case: Case) -> dict[str, Way]:
    import horovod.torch as hvd

    if case.reduction not in ("sum", "avg"):
        return {}
    x, op = case.input(), _op(case)
    return {OUT: blocking(lambda: hvd.reducescatter(x, op=op, name="bench"))}


def _all_to_all(case: Case) -> dict[str, Way]:
    import horovod.torch as hvd

    x = case.input()
    return {OUT: blocking(lambda: hvd.alltoall(x, name="bench"))}


def _broadcast(case: Case) -> dict[str, Way]:
    import horovod.torch as hvd

    x, again = case.input(), case.input()
    return {
        OUT: blocking(lambda: hvd.broadcast(x, case.root, name="bench")),
        IN: blocking(lambda: hvd.broadcast_(again, case.root, name="bench in place")),
    }


WAYS: Ways = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}

LIBRARY = Library("horovod", _missing, WAYS, join)
