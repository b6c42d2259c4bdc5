#!/usr/bin/env python3
"""A link with a delay: forwards packets between two network namespaces after a fixed time.

    python tools/delayline.py PID_A PID_B SECONDS

PID_A and PID_B are processes in the two namespaces. Each namespace gets a TUN device ``eth0`` (down, without
an address). This program prints ``ready``. From the first line on its standard input until end of file, it
forwards packets from each end to the other. netem does this in the kernel, but not every kernel has it.
``netns.py`` starts this program.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
from collections import deque
from pathlib import Path
from time import monotonic

INTERFACE = b"eth0"
#: The largest packet. Larger packets mean fewer of them, and so less work for this program.
MTU = 65_000
_CLONE_NEWNET, _TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000


def open_end(pid: int) -> int:
    """Open a TUN device in the namespace of ``pid``. The calling thread stays in that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH14x", INTERFACE, _IFF_TUN | _IFF_NO_PI))
    return end


def carry(first: int, second: int, delay: float) -> None:
    """Forward packets, each ``delay`` seconds after its arrival, until the standard input ends."""
    other = {first: second, second: first}
    told = sys.stdin.fileno()
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, under_way[0][0] - monotonic()) if under_way else None
        ready, _, _ = select.select([first, second, told], [], [], wait)
        if told in ready:
            return
        for end in ready:
            under_way.append((monotonic() + delay, other[end], os.read(end, MTU)))
        while under_way and under_way[0][0] <= monotonic():
            _, end, packet = under_way.popleft()
            os.write(end, packet)


if __name__ == "__main__":
    ends = [open_end(int(pid)) for pid in sys.argv[1:3]]
    print("ready", flush=True)
    sys.stdin.readline()  # a device that is down cannot be read
    carry(ends[0], ends[1], float(sys.argv[3]))
