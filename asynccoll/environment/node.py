"""The name of this process's node, which is the same for all processes of the node and for no others.

A host name alone is not enough: clones of one image all have the same one. The kernel's boot id tells them
apart, and the host name tells apart containers that share a kernel. Neither proves that memory can be shared.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from asynccoll import host

#: Overrides the name: containers may know that they share a host, and tests make two nodes of one kernel.
VARIABLE = "ASYNCCOLL_NODE"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_name() -> str:
    """Return the name of this node: what ``ASYNCCOLL_NODE`` says, else host name and boot id."""
    said = os.environ.get(VARIABLE)
    if said:
        return said
    boot = ""
    with contextlib.suppress(OSError):  # not Linux
        boot = _BOOT_ID.read_text().strip()
    return f"{host.gethostname()}/{boot}"
