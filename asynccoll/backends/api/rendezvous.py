"""How the ranks of a world meet where the user or the launcher says, and learn their places.

Turns that meeting point (``env://``, ``tcp://``, ``file://``, a store) into a store, a rank and a world size,
waits for the other ranks, and finds out which ranks share a node.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import torch.distributed as dist

from asynccoll.backends.api.agent import is_agents, meet_under_one_agent
from asynccoll.backends.api.assembly import Member, assemble, own_version, refuse_differences
from asynccoll.backends.api.request import Request
from asynccoll.backends.api.tcpstore import connect, connect_as
from asynccoll.environment.detection import LaunchInfo, detect
from asynccoll.environment.info import Variables
from asynccoll.environment.nodes import node_name
from asynccoll.errors import CollectiveTimeoutError, InvalidArgumentError, LaunchEnvironmentError
from asynccoll.host.looks import looks
from asynccoll.host.store import host_of
from asynccoll.world.context import Identity

#: How long another rank may take to make the directory of a file to meet at.
_MAKING_SECONDS = 10.0


class Meeting(NamedTuple):
    """A world whose ranks have all joined."""

    #: the part of the store that only this world uses
    store: dist.Store
    #: this rank's place
    identity: Identity
    #: the node of each rank
    nodes: tuple[int, ...]
    #: the ``by_node`` of rank 0's user
    by_node: bool | None
    #: the host that serves the store; None if it is not a store that a host serves
    host: str | None
    #: whether the ranks are threads of one process
    threads: bool


def meet(request: Request, *, by_node: bool | None = None) -> Meeting:
    """Meet the other ranks where the launcher or the user says, and wait for all of them.

    Raises:
        CollectiveTimeoutError: nobody serves the store, or a rank has not joined, within ``request.timeout``.
        LaunchEnvironmentError: the meeting point is not set, or rank 0 cannot serve the store there, or ranks
            run different versions of this library.
        InvalidArgumentError: ``init_method=`` does not work, or ranks have different settings.
        PeerLostError: the process that serves the store has ended.
    """
    store, rank, world_size = _rendezvous(request)
    launch = request.launch
    told = launch is not None and launch.placed and _speaks_of(launch, rank, world_size)
    node = launch.node_rank if told and launch is not None else None
    me = Member(node_name(), node, by_node, request.memory, request.check, own_version())
    part, members = assemble(store, rank, world_size, me, request.timeout)
    refuse_differences(part, rank, members)
    return Meeting(
        part,
        locate(launch, rank, world_size, members),
        nodes_of(members),
        members[0].by_node,
        host_of(store),
        isinstance(store, dist.HashStore) and world_size > 1,
    )


def _rendezvous(request: Request) -> tuple[dist.Store, int, int]:
    """Return (store, rank, world size) for a request; wait for the store's server, not for all ranks."""
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
        return _meet_at(url.hostname, _port_of(url, world_size), rank, world_size, timeout)
    if url.scheme == "file" and url.path:
        _await_directory(method, Path(url.path).parent, request.timeout)
    try:
        store, rank, world_size = next(dist.rendezvous(method, rank, world_size, timeout=timeout))
    except dist.DistStoreError as error:
        raise CollectiveTimeoutError(
            f"rank {rank} of {world_size} found no other rank at {method} within {request.timeout} s: {error}"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"init_method {method!r} does not work: {error}") from error
    return store, rank, world_size


def _await_directory(method: str, directory: Path, seconds: float) -> None:
    """Wait for the ``directory`` of ``init_method``, which another rank may be about to make."""
    for _ in looks(min(seconds, _MAKING_SECONDS)):
        if directory.is_dir():
            return
    raise InvalidArgumentError(f"init_method {method!r} is in a directory that does not exist here")


def _port_of(url: SplitResult, world_size: int) -> int:
    """Return the port of ``init_method``; 0 lets a world of one take any."""
    try:
        port = url.port or 0
    except ValueError as error:
        raise InvalidArgumentError(f"init_method {url.geturl()!r} does not work: {error}") from error
    if not port and world_size > 1:
        raise InvalidArgumentError(
            f"init_method {url.geturl()!r} names no port, so the ranks could not find each other: add one "
            f"that is free on the host of rank 0, as in 'tcp://{url.hostname}:29400'"
        )
    return port


def _place(request: Request) -> tuple[int, int]:
    """Return the rank and the world size: those given, else the launcher's."""
    if request.rank is not None and request.world_size is not None:
        return request.rank, request.world_size
    launch = request.launch or detect(os.environ)
    if launch.launcher == "serial" and request.init_method:
        raise InvalidArgumentError(
            f"init_method={request.init_method!r} needs rank= and world_size=: no launcher has set them"
        )
    return launch.rank, launch.world_size


def _from_environment(request: Request, timeout: timedelta) -> tuple[dist.Store, int, int]:
    rank, world_size = _place(request)
    launch = request.launch
    host = (launch.master_addr if launch else None) or os.environ.get("MASTER_ADDR")
    port = (launch.master_port if launch else None) or Variables(os.environ).port("MASTER_PORT")
    if world_size == 1 and not host:
        return dist.HashStore(), 0, 1
    if not host or not port:
        raise LaunchEnvironmentError(
            f"rank {rank} of {world_size} does not know where the ranks meet: MASTER_ADDR="
            f"{host or 'unset'}, MASTER_PORT={port or 'unset'}; set both, start the script with `asynccoll "
            "run`, or pass init_method='tcp://host:port'"
        )
    job = launch.job if launch is not None and launch.master_port == port else None
    return _meet_at(host, port, rank, world_size, timeout, job)


def _meet_at(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta, job: str | None = None
) -> tuple[dist.Store, int, int]:
    # torchrun's agent already serves a store at its address. If one agent has all ranks, they meet at a store
    # of rank 0's instead (``agent``); otherwise all ranks are clients of the agent's store.
    agent = is_agents(host, port)
    try:
        own = meet_under_one_agent(rank, world_size, timeout) if agent else None
        if own is not None:
            return own, rank, world_size
        if job is not None and not agent:
            return connect_as(job, host, port, serve=rank == 0, timeout=timeout), rank, world_size
        store = connect(host, port, serve=rank == 0 and not agent, timeout=timeout, knock=not agent)
    except (dist.DistStoreError, dist.DistNetworkError, OSError) as error:
        if rank == 0 and not agent:
            raise LaunchEnvironmentError(
                f"rank 0 of {world_size} cannot listen for the other ranks at {host}:{port}; if another "
                f"program is listening there, choose another MASTER_PORT on all ranks: {error}"
            ) from error
        raise CollectiveTimeoutError(
            f"rank {rank} of {world_size} found no store at {host}:{port} within "
            f"{timeout.total_seconds():g} s: {error}"
        ) from error
    if agent:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"attempt_{attempt}", store), rank, world_size
    return store, rank, world_size


def nodes_of(members: list[Member]) -> tuple[int, ...]:
    """Return the node of each rank. Ranks are on one node if its name and the launcher's number for it agree.

    If the launcher sets no number, it is guessed from the local ranks.
    """
    numbers: dict[tuple[str, int | None], int] = {}
    return tuple(numbers.setdefault((one.host, one.node), len(numbers)) for one in members)


def locate(launch: LaunchInfo | None, rank: int, world_size: int, members: list[Member]) -> Identity:
    """Return this rank's place: what the launcher says, else derived from the names of the members' nodes."""
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


def _speaks_of(launch: LaunchInfo, rank: int, world_size: int) -> bool:
    return (launch.rank, launch.world_size) == (rank, world_size)
