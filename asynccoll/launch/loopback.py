"""The rendezvous of a job on one host: a store that listens on the loopback address only.

torch elastic's own rendezvous listens on every address of the host. Here the agent makes the store on its own
socket. The agent's ranks usually meet in a store that rank 0 serves (``backends.api.agent``), and connect to
this one only if they cannot. One host has no others to wait for, so nothing else is needed.
"""

from __future__ import annotations

import errno
import socket
from datetime import timedelta

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from asynccoll.errors import InvalidArgumentError

#: The name torch elastic knows this rendezvous by.
NAME = "asynccoll-loopback"
ADDRESS = "127.0.0.1"

_TIMEOUT = timedelta(minutes=5)


class LoopbackRendezvous(RendezvousHandler):
    """One agent, one store per attempt, so that a restart never reads what the last one wrote.

    The agent's own entries go into a store in memory: if the agent held a reference to the ranks' store, the
    old one would stay alive, and with it a port that the user asked for and that a restart needs again.
    """

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id = run_id
        self._port = port
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None  # frees the port
        self._store = listening_store(self._port)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def listening_store(port: int) -> TCPStore:
    """Return a store served at the loopback address; port 0 takes any that is free.

    Raises:
        InvalidArgumentError: another process listens at that port.
    """
    try:
        listener = socket.create_server((ADDRESS, port))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise InvalidArgumentError(
            f"port {port} of {ADDRESS} cannot be used ({error.strerror}); choose another --master-port, or "
            "leave it out on one host to use a free one"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(
        ADDRESS,
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    _, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    return LoopbackRendezvous(parameters.run_id, max(port, 0))


def register() -> None:
    """Make torch elastic know this rendezvous."""
    rendezvous_handler_registry.register(NAME, _create)
