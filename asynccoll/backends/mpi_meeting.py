"""The store of an mpi world: MPI carries the data, a store what must not wait inside MPI.

Refusals, beacons and the opening of lanes go through it. Rank 0 serves it, at an address that it
tells the others by MPI; so nothing has to be configured.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from asynccoll.backends.tcpstore import connect

__all__ = ["agree_on_store"]


def agree_on_store(
    rank: int, broadcast: Callable[[str | None], str], timeout: timedelta, *, one_host: bool
) -> dist.Store:
    """The store that rank 0 serves; ``broadcast`` gives every rank the text of rank 0."""
    if rank > 0:
        host, port = json.loads(broadcast(None))
        return connect(host, port, serve=False, timeout=timeout)
    host = "127.0.0.1" if one_host else _own_address()
    store = connect(host, 0, serve=True, timeout=timeout)
    broadcast(json.dumps([host, store.port]))
    return store


def _own_address() -> str:
    """The address under which other nodes reach this one."""
    return os.environ.get("MASTER_ADDR") or socket.gethostbyname(socket.gethostname())
