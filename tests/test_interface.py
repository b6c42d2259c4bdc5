"""Which address a host tells the others; `test_hosts.py` tests it on two real hosts."""

from __future__ import annotations

import ipaddress
import socket
import sys

import pytest

from asynccoll.host import network as interface

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the names of interfaces")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_a_meeting_on_loopback_stays_there(address: str) -> None:
    """When ranks meet on loopback, all of them are on this host."""
    told = interface.own_address(address)
    if told is None:
        assert address == "::1"  # a host without IPv6
    else:
        assert ipaddress.ip_address(told).is_loopback


@pytest.mark.parametrize("meeting", [None, "localhost", socket.gethostname(), "no-such-host.invalid"])
def test_a_name_never_gives_a_loopback_address(meeting: str | None) -> None:
    """A name may mean another machine to the others; without a network there is no address."""
    told = interface.own_address(meeting)
    assert told is None or not ipaddress.ip_address(told).is_loopback
    if told is not None:
        assert interface.interface_of(told) not in (None, "lo")


def test_addresses_have_interfaces() -> None:
    """IPv4 and IPv6 addresses have one; unknown addresses have none."""
    assert interface.interface_of("127.0.0.1") == "lo"
    assert interface.interface_of("192.0.2.77") is None


def test_torch_is_told_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that was set for torch is removed again, if it still has that value."""
    monkeypatch.setenv(interface.VARIABLE, "eth7")
    assert interface.use_for_torch("127.0.0.1") is None
    interface.take_back(None)
    assert interface.os.environ[interface.VARIABLE] == "eth7"
    monkeypatch.setenv(interface.VARIABLE, "")
    told = interface.use_for_torch("127.0.0.1")
    assert told == interface.os.environ[interface.VARIABLE] == "lo"
    interface.take_back(told)
    assert interface.VARIABLE not in interface.os.environ
