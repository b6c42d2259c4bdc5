"""Connections that carry no data: while one is open, the process at the other end is alive.

The kernel accepts connections on behalf of a live process, even a stopped one, and closes those of a dead
one. This module must not know who uses the connections, or why.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Hashable, Mapping
from typing import TypeVar

from asynccoll import host

K = TypeVar("K", bound=Hashable)
Line = socket.socket

#: How many connections may be open without being accepted, one from each peer; the system may allow fewer.
_PEERS = 1 << 16
#: Seconds of silence before the first probe, seconds between probes, and number of probes; set if possible.
_KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}
#: The results of ``connect_ex`` after which the socket will report the outcome. After any other (no route, no
#: port left), the socket has no error and looks connected.
UNDER_WAY = frozenset({0, errno.EINPROGRESS})


def listen(address: str) -> tuple[Line, int]:
    """Return a socket that listens on ``address`` and never accepts, and its port."""
    beacon = socket.socket(family(address), socket.SOCK_STREAM)
    beacon.bind((address, 0))
    beacon.listen(_PEERS)
    return beacon, beacon.getsockname()[1]


def family(address: str) -> socket.AddressFamily:
    """Return the family of a numeric ``address``."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_open(line: Line) -> bool:
    """Whether the process at the other end still has the connection open; neither end ever sends data."""
    try:
        return bool(line.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def connect(peers: Mapping[K, tuple[str, int]], seconds: float) -> tuple[dict[K, Line], list[K]]:
    """Connect to all of ``peers`` (address, port) concurrently, for up to ``seconds``.

    Returns a connection to each peer whose kernel accepts, and the peers that have not answered. A peer that
    refuses is in neither.
    """
    lines: dict[K, Line] = {}
    unreachable: list[K] = []
    with selectors.DefaultSelector() as selector:
        for peer, at in peers.items():
            attempt = socket.socket(family(at[0]), socket.SOCK_STREAM)
            attempt.setblocking(False)
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():  # so that the line also ends if the peer's host is gone
                attempt.setsockopt(socket.IPPROTO_TCP, option, value)
            if (answer := attempt.connect_ex(at)) not in UNDER_WAY:
                attempt.close()
                unreachable += [peer] * (answer != errno.ECONNREFUSED)
                continue
            selector.register(attempt, selectors.EVENT_WRITE, peer)
        deadline = host.monotonic() + seconds
        while selector.get_map() and (left := deadline - host.monotonic()) > 0:
            for key, _ in selector.select(left):
                attempt = key.fileobj  # type: ignore[assignment]  # registered as a socket above
                selector.unregister(attempt)
                if attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    lines[key.data] = attempt
                else:
                    attempt.close()
        silent = list(selector.get_map().values())
        for key in silent:
            key.fileobj.close()  # type: ignore[union-attr]
    return lines, [*unreachable, *(key.data for key in silent)]
