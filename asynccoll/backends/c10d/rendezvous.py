"""Where the ranks of a c10d world meet, and where each of them is.

Turns what the user or the launcher said (``env://``, ``tcp://``, ``file://``, a store) into a store, a
rank and a world size; and tells which ranks share a node.
"""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from asynccoll.backends.api import LOOPBACK, Identity, LaunchInfo, Request, connect, detect, node_name
from asynccoll.backends.c10d.agent import is_agents, meet_under_one_agent
from asynccoll.backends.c10d.assembly import Member, assemble
from asynccoll.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    LaunchEnvironmentError,
    PeerLostError,
)

__all__ = [
    "LOOPBACK",
    "come_together",
    "locate",
    "matching_launch",
    "nodes_of",
    "not_met",
    "own_part",
    "rendezvous",
]


def rendezvous(request: Request) -> tuple[dist.Store, int, int]:
    """(store, rank, world size) for a request; waits for the master, not for the other ranks."""
    timeout = timedelta(seconds=request.timeout)
    if request.store is not None:
        assert request.rank is not None and request.world_size is not None
        return request.store, request.rank, request.world_size
    method = request.init_method or "env://"
    if method.startswith("env://"):
        return _from_environment(request, timeout)
    rank, world_size = _place(request)
    url = urlsplit(method)
    if url.scheme == "tcp" and url.hostname and not url.query:
        return _meet_at(url.hostname, url.port or 0, rank, world_size, timeout)
    try:
        store, rank, world_size = next(dist.rendezvous(method, rank, world_size, timeout=timeout))
    except dist.DistStoreError as error:
        raise CollectiveTimeoutError(
            f"rank {rank} of {world_size} found nobody at {method} within {request.timeout} s: {error}"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"init_method {method!r} does not work: {error}") from error
    return store, rank, world_size


def own_part(store: dist.Store, rank: int) -> dist.Store:
    """The part of the user's group's ``store`` for this life of ours beside it.

    Nobody is waited for: the ranks of one group go through the same lives.
    """
    life = store.add(f"asynccoll/lives/{rank}", 1)
    return dist.PrefixStore(f"asynccoll/{life}", store)


def _place(request: Request) -> tuple[int, int]:
    """Rank and world size: as given, else the launcher's."""
    if request.rank is not None and request.world_size is not None:
        return request.rank, request.world_size
    launch = request.launch or detect(os.environ)
    if launch.launcher == "serial" and request.init_method:
        raise InvalidArgumentError(
            f"init_method={request.init_method!r} needs rank= and world_size=: no launcher says them"
        )
    return launch.rank, launch.world_size


def _from_environment(request: Request, timeout: timedelta) -> tuple[dist.Store, int, int]:
    rank, world_size = _place(request)
    launch = request.launch
    host = (launch.master_addr if launch else None) or os.environ.get("MASTER_ADDR")
    port = (launch.master_port if launch else None) or int(os.environ.get("MASTER_PORT", "0"))
    if world_size == 1 and not host:
        return dist.HashStore(), 0, 1
    if not host or not port:
        raise LaunchEnvironmentError(
            f"rank {rank} of {world_size} does not know where the ranks meet: MASTER_ADDR="
            f"{host or 'unset'}, MASTER_PORT={port or 'unset'}; set both, start the script with `asynccoll "
            "run`, or pass init_method='tcp://host:port'"
        )
    return _meet_at(host, port, rank, world_size, timeout)


def _meet_at(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta
) -> tuple[dist.Store, int, int]:
    # torchrun's agent already serves a store at its address. Where it has all the ranks they meet at one of
    # rank 0's, and the agent's only says where that is; else all of them are clients of the agent's.
    agent = is_agents(host, port)
    try:
        own = meet_under_one_agent(rank, world_size, timeout) if agent else None
        if own is not None:
            return own, rank, world_size
        store = connect(host, port, serve=rank == 0 and not agent, timeout=timeout, knock=not agent)
    except (dist.DistStoreError, dist.DistNetworkError, OSError) as error:
        raise CollectiveTimeoutError(
            f"rank {rank} of {world_size} found no store at {host}:{port} within "
            f"{timeout.total_seconds():g} s: {error}"
        ) from error
    if agent:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"attempt_{attempt}", store), rank, world_size
    return store, rank, world_size


def come_together(
    store: dist.Store, rank: int, world_size: int, request: Request, by_node: bool | None
) -> tuple[dist.Store, list[Member]]:
    """This world's part of ``store``, and what each of its ranks says of itself; waits for all of them."""
    launch = request.launch
    told = launch is not None and launch.placed and _speaks_of(launch, rank, world_size)
    me = Member(node_name(), launch.node_rank if told and launch is not None else None, by_node)
    return assemble(store, rank, world_size, me, request.timeout)


def nodes_of(members: list[Member]) -> tuple[int, ...]:
    """The node of each rank: one and the same by its name and, where there is one, by the launcher.

    What a launcher does not say is guessed from the local ranks.
    """
    numbers: dict[tuple[str, int | None], int] = {}
    return tuple(numbers.setdefault((one.host, one.node), len(numbers)) for one in members)


def _speaks_of(launch: LaunchInfo, rank: int, world_size: int) -> bool:
    return (launch.rank, launch.world_size) == (rank, world_size)


def not_met(error: BaseException, rank: int, world_size: int) -> PeerLostError:
    """The error for ranks that have all come, and cannot connect to each other."""
    return PeerLostError(f"rank {rank} of {world_size} cannot connect to the others: {error}")


def locate(launch: LaunchInfo | None, rank: int, world_size: int, members: list[Member]) -> Identity:
    """Which node this rank is on: the launcher's word, else the names of the members' nodes compared."""
    if launch is not None and launch.placed and _speaks_of(launch, rank, world_size):
        return Identity(
            rank,
            world_size,
            launch.local_rank,
            launch.local_world_size,
            launch.node_rank,
            launch.nnodes,
        )
    if len(members) != world_size or world_size == 1:
        return Identity(rank, world_size, rank, world_size)
    hosts = [one.host for one in members]
    nodes = list(dict.fromkeys(hosts))
    mine = [index for index in range(world_size) if hosts[index] == hosts[rank]]
    return Identity(rank, world_size, mine.index(rank), len(mine), nodes.index(hosts[rank]), len(nodes))


def matching_launch(rank: int, world_size: int) -> LaunchInfo | None:
    """What the launcher says, if it speaks of the same place; a group made by hand may not."""
    try:
        launch = detect(os.environ)
    except LaunchEnvironmentError:
        return None
    return launch if _speaks_of(launch, rank, world_size) else None
