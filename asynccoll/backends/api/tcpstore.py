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
from time import monotonic
from typing import TypeVar

import torch.distributed as dist

from asynccoll.backends.api.resolver import without_lookups
from asynccoll.backends.api.within import within
from asynccoll.host.looks import looks

T = TypeVar("T")

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_KNOCK_SECONDS = 1.0
#: torch's own errors, at the end of the time limit, say more.
_LATER_SECONDS = 0.5
#: How long a server that may be somebody else's has to answer.
_ANSWER_SECONDS = 5.0
#: From one port where the ranks of a job may meet to the next, and the number of these ports.
_APART, _CHOICES = 10_000, 3
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
    listens = None if listener is None else listener.detach()  # the store closes it

    def opened() -> dist.TCPStore:
        with without_lookups(host, quick=names_are_quick):
            return dist.TCPStore(
                host,
                port,
                is_master=serve,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,  # one server per address and process, shared with torch's own
                master_listen_fd=listens,
            )

    # torch waits without a time limit for the answer of a server, which may be another program.
    store = within(timeout.total_seconds() + _LATER_SECONDS, opened, f"the store at {host}:{port}")
    if serve:
        served.clear()
        served[host, port] = store
    return store


def connect_as(job: str, host: str, port: int, *, serve: bool, timeout: timedelta) -> dist.Store:
    """Return the part of a store that is this job's, where nobody chose ``port``, but all ranks derived it.

    Another program, or another job, may be listening there. Rank 0 therefore serves the store at the first
    port that is free of ``port``, ``port + 10000`` and ``port + 20000``, and writes the job's name into it;
    the other ranks look for the store with that name at all three.

    Raises:
        OSError: the store was not found within ``timeout``.
        torch.distributed.DistError: rank 0 cannot listen at any of the ports.
    """
    name = f"job {job}"
    ports = range(port, port + _CHOICES * _APART, _APART)
    store = _serve_one(host, ports, timeout) if serve else _find_named(name, host, ports, timeout)
    if serve:
        store.set(name, "")
    return dist.PrefixStore(name, store)


def _serve_one(host: str, ports: range, timeout: timedelta) -> dist.TCPStore:
    for port in ports[:-1]:
        with contextlib.suppress(dist.DistNetworkError):
            return connect(host, port, serve=True, timeout=timeout)
    return connect(host, ports[-1], serve=True, timeout=timeout)


def _find_named(name: str, host: str, ports: range, timeout: timedelta) -> dist.TCPStore:
    """Return the store that contains ``name``, served at one of ``ports``."""
    seconds = timeout.total_seconds()
    answer = timedelta(seconds=min(_ANSWER_SECONDS, seconds))

    def look() -> dist.TCPStore:
        for port in ports:
            with contextlib.suppress(OSError, RuntimeError):  # torch's, if no store answers
                _knock(host, port, seconds)
                found = connect(host, port, serve=False, timeout=answer, knock=False)
                if found.check([name]):
                    found.set_timeout(timeout)
                    return found
        raise TimeoutError(f"no store of {name} was served at port {', '.join(map(str, ports))}")

    await_name(host)
    return _await(look, seconds)


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
    _await(lambda: _knock(host, port, seconds), seconds)


def _knock(host: str, port: int, seconds: float) -> None:
    """Raise OSError unless a server listens at ``host:port``; it has a moment, or ``seconds``, to accept."""
    socket.create_connection((host, port), min(_KNOCK_SECONDS, seconds)).close()


def await_name(host: str) -> None:
    """Wait until ``host`` resolves.

    Raises:
        OSError: it did not resolve in time.
    """
    _await(lambda: socket.getaddrinfo(host, None), _NAME_SECONDS)


def _await(attempt: Callable[[], T], seconds: float) -> T:
    """Retry ``attempt`` until it does not raise ``OSError``, or the time is up; return what it returns."""
    started = monotonic()
    for pause in looks(first=0.002, longest=0.05):
        try:
            return attempt()
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)
            if monotonic() - started + pause > (min(seconds, _NAME_SECONDS) if unknown else seconds):
                raise
    raise AssertionError("there is always another attempt")
