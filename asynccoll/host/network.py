"""Which of this host's addresses the other hosts of a job reach it by.

gloo tells every peer one address of each rank. torch takes what the host's own name resolves to, which on
many hosts is a loopback address, and that means another machine to everybody else. Here it is the address
from which this host talks to the place where the ranks meet, which is reachable by definition.
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

__all__ = ["VARIABLE", "interface_of", "own_address", "take_back", "use_for_torch"]

#: What gloo, and so torch's own groups, are told by.
VARIABLE = "GLOO_SOCKET_IFNAME"

#: Nobody's addresses, kept for documentation: the way to them is the way to anywhere.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_SIOCGIFADDR = 0x8915


def own_address(meeting_host: str | None) -> str | None:
    """This host's address as seen by the others, who meet at ``meeting_host``; None if it has none.

    A meeting at a loopback address means that all are here. On the meeting host its own *name* may be a
    loopback address, though; then that on the way to anywhere else counts, and without such a way the
    first that it has.
    """
    if meeting_host and _is_loopback(meeting_host):
        return _address_towards(meeting_host)
    candidates = (meeting_host, *_ELSEWHERE) if meeting_host else _ELSEWHERE
    ways = (_address_towards(host) for host in candidates)
    found = itertools.chain(ways, (address for _, address in _addresses()))
    return next((address for address in found if address and not _is_loopback(address)), None)


def _is_loopback(address: str) -> bool:
    """Whether this is a loopback address; a name is none."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def _address_towards(host: str) -> str | None:
    """The address that packets to ``host`` leave from; none is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has ``address``, where the system tells (Linux)."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, found in _addresses() if ipaddress.ip_address(found) == wanted), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """The interfaces with their addresses."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # has no IPv4 address
                asked = struct.pack("256s", name.encode()[:15])
                yield name, socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield name, str(ipaddress.IPv6Address(int(digits, 16)))


def use_for_torch(address: str) -> str | None:
    """Have torch's own gloo groups use ``address`` too, unless the user chose; what to ``take_back``."""
    name = interface_of(address)
    if name is None or os.environ.get(VARIABLE):
        return None
    os.environ[VARIABLE] = name
    return name


def take_back(name: str | None) -> None:
    """Undo ``use_for_torch``."""
    if name is not None and os.environ.get(VARIABLE) == name:
        del os.environ[VARIABLE]
