"""The address by which the other hosts of a job reach this host.

gloo gives every peer one address for each rank. torch uses the one that the host's own name resolves to; on
many hosts that is a loopback address, by which every other host means itself. This module uses the address
from which this host talks to the host where the ranks meet, which is reachable by definition.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

#: The variable that tells gloo, and so torch's own groups, which interface to use.
VARIABLE = "GLOO_SOCKET_IFNAME"

#: Addresses reserved for documentation: the route to them is the route to any other host.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_SIOCGIFADDR = 0x8915


def own_address(meeting_host: str | None) -> str | None:
    """Return this host's address as seen by the other ranks, which meet at ``meeting_host``; or None.

    If ``meeting_host`` is a loopback address, all ranks are on this host. On the meeting host itself, its
    *name* may also resolve to a loopback address. In that case return the address used towards any other
    host, or without a route there, the first address that is not a loopback address.
    """
    if meeting_host and _is_loopback(meeting_host):
        return _address_towards(meeting_host)
    candidates = (meeting_host, *_ELSEWHERE) if meeting_host else _ELSEWHERE
    ways = (_address_towards(host) for host in candidates)
    found = itertools.chain(ways, (address for _, address in _addresses()))
    return next((address for address in found if address and not _is_loopback(address)), None)


def _is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback address; a host name is not."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def _address_towards(host: str) -> str | None:
    """Return the address that packets to ``host`` leave from, or None; no packet is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has ``address``, where the system reports it (Linux)."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, found in _addresses() if ipaddress.ip_address(found) == wanted), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield the names of the interfaces, each with an address; nothing if the system is not Linux."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                asked = struct.pack("256s", name.encode()[:15])
                yield name, socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield name, str(ipaddress.IPv6Address(int(digits, 16)))


def use_for_torch(address: str) -> str | None:
    """Make torch's own gloo groups use ``address`` too, unless the user has set the variable.

    Returns the argument for ``take_back``: the interface's name, or None if nothing was changed.
    """
    name = interface_of(address)
    if name is None or os.environ.get(VARIABLE):
        return None
    os.environ[VARIABLE] = name
    return name


def take_back(name: str | None) -> None:
    """Undo ``use_for_torch``."""
    if name is not None and os.environ.get(VARIABLE) == name:
        del os.environ[VARIABLE]
