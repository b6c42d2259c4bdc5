"""What a world on mpi or horovod has besides its library: a store, and torch's default group over gloo.

The library moves the data. The store is for everything that must not block inside the library: refusals,
beacons, the opening of lanes. Rank 0 serves the store and broadcasts its address through the library, so
there is nothing to configure.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from asynccoll.backends.api.tcpstore import connect
from asynccoll.host.network import own_address
from asynccoll.world.context import Identity


def agree_on_store(
    rank: int, broadcast: Callable[[str | None], str], timeout: timedelta, *, one_host: bool
) -> dist.Store:
    """Return the store that rank 0 serves; ``broadcast`` returns rank 0's text on every rank."""
    if rank > 0:
        host, port = json.loads(broadcast(None))
        return connect(host, port, serve=False, timeout=timeout)
    where = os.environ.get("MASTER_ADDR") or socket.gethostname()
    host = "127.0.0.1" if one_host else own_address(where) or "127.0.0.1"
    store = connect(host, 0, serve=True, timeout=timeout)
    broadcast(json.dumps([host, store.port]))
    return store


def make_default_group(store: dist.Store | None, identity: Identity, timeout: timedelta) -> bool:
    """Make torch's default group over gloo, for DDP, meshes and ``dist.*``; return whether we made it."""
    if dist.is_initialized() or not dist.is_gloo_available():
        return False
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("default", dist.HashStore() if store is None else store),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timeout,
    )
    return True
