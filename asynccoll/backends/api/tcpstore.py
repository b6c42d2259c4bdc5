"""The TCPStore of a world: served by rank 0, joined by the other ranks without delay.

torch's own server listens on a dual-stack IPv6 socket and looks up the name of every peer. It sees an IPv4
peer as an IPv4-mapped IPv6 address, which no hosts file lists. So each connection costs a query to a name
server, made by the only thread that serves the ranks. Hence, if the host is IPv4, the server gets an IPv4
socket. And torch's client, if it connects before the server listens, retries after half a second or more;
ours retries every few milliseconds.
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
#: How long a name that does not resolve is retried: hosts that start with the job may be registered late.
_NAME_SECONDS = 30.0

#: The store served last, kept so that its server stays up. Ranks that return to its address for the next
#: world may be earlier than rank 0, and must not find a server that is about to close.
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
    """Return the store at ``host:port``, served here if ``serve``; on any free port if ``port`` is 0.

    ``knock=False`` skips the probing connection, for a server that is known to be up. ``names_are_quick``
    says what a look-up would otherwise have to find out.

    Raises:
        OSError: no server was reachable within ``timeout``.
        torch.distributed.DistError: torch's store failed.
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
    """Return a listening IPv4 socket; None if the address is not plain IPv4, or in use (by our server)."""
    with contextlib.suppress(OSError):
        if any(family != socket.AF_INET for family, *_ in socket.getaddrinfo(host, port)):
            return None
        return socket.create_server((host if host in LOOPBACK else "", port), backlog=2048)
    return None


def await_server(host: str, port: int, seconds: float) -> None:
    """Wait until a server listens at ``host:port``.

    Raises:
        OSError: none did in time. A name that does not resolve, which may be misspelt, is given up sooner.
    """
    _await(lambda: socket.create_connection((host, port), min(_KNOCK_SECONDS, seconds)).close(), seconds)


def await_name(host: str) -> None:
    """Wait until ``host`` resolves.

    Raises:
        OSError: it did not resolve in time.
    """
    _await(lambda: socket.getaddrinfo(host, None), _NAME_SECONDS)


def _await(attempt: Callable[[], object], seconds: float) -> None:
    """Retry ``attempt`` until it does not raise ``OSError``, or the time is up."""
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
