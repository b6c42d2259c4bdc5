"""The TCPStore of a world: served by rank 0, joined by the others without delay.

torch's own server listens on IPv6 for both families and asks for the name of every peer, which as an
IPv4 address in IPv6 dress no hosts file knows: each connection is then a question to a name server,
put by the only thread that serves the ranks. So where IPv4 is meant, it listens on IPv4. And a client
that comes before the server would try again after half a second or more; ours looks every few
milliseconds.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist

from asynccoll.backends.api.resolver import without_lookups

__all__ = ["LOOPBACK", "await_name", "await_server", "connect", "served"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.05
_KNOCK_SECONDS = 1.0
#: Names of hosts that start together with the job may be known a little later.
_NAME_SECONDS = 30.0

#: The store served last. Ranks that come back to its address for a next life of the world may be
#: earlier than the one that serves it, and must not find a server that is about to go.
served: dict[tuple[str, int], dist.TCPStore] = {}


def connect(
    host: str,
    port: int,
    *,
    serve: bool,
    timeout: timedelta,
    knock: bool = True,
    names_are_quick: bool | None = None,
) -> dist.TCPStore:
    """The store at ``host:port``, served here if ``serve``; at any free port if that is 0.

    ``knock=False`` spares a server that is known to be there the connection that finds out, and
    ``names_are_quick`` tells what would have to be found out by a look-up.

    Raises:
        OSError: nobody serves it within ``timeout``.
        torch.distributed.DistError: torch's store could not.
    """
    host = "127.0.0.1" if host == "localhost" else host  # the same on both sides, whatever it resolves to
    listener = _listener(host, port) if serve else None
    if listener is not None:
        port = listener.getsockname()[1]
    if knock and not serve:
        await_server(host, port, timeout.total_seconds())
    with without_lookups(host, quick=names_are_quick):
        store = dist.TCPStore(
            host,
            port,
            is_master=serve,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # one server per address and process, shared with torch's own
            master_listen_fd=listener.detach() if listener is not None else None,  # the store closes it
        )
    if serve:
        served.clear()
        served[host, port] = store
    return store


def _listener(host: str, port: int) -> socket.socket | None:
    """A listening IPv4 socket; None where the address is not plain IPv4, or taken (then by our server)."""
    with contextlib.suppress(OSError):
        if any(family != socket.AF_INET for family, *_ in socket.getaddrinfo(host, port)):
            return None
        return socket.create_server((host if host in LOOPBACK else "", port), backlog=2048)
    return None


def await_server(host: str, port: int, seconds: float) -> None:
    """Return when somebody listens there.

    Raises:
        OSError: nobody did in time, or (sooner, for it may be misspelt) nobody knows the name.
    """
    _await(lambda: socket.create_connection((host, port), min(_KNOCK_SECONDS, seconds)).close(), seconds)


def await_name(host: str) -> None:
    """Return when the address of ``host`` is known.

    Raises:
        OSError: nobody knows the name.
    """
    _await(lambda: socket.getaddrinfo(host, None), _NAME_SECONDS)


def _await(attempt: Callable[[], object], seconds: float) -> None:
    """Return once ``attempt`` does not raise."""
    started = monotonic()
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            attempt()
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)
            if monotonic() - started + pause > (min(seconds, _NAME_SECONDS) if unknown else seconds):
                raise
        else:
            return
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
