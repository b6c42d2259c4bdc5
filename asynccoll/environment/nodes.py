"""How many ranks a job has, which node this is, and where the ranks meet: checked in one place for all.

``node_name`` is the same for all processes of a node and for no others. A host name alone is not enough:
clones of one image all have the same one. The kernel's boot id tells them apart, and the host name tells
apart containers that share a kernel. Neither proves that memory can be shared.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from asynccoll import host
from asynccoll.environment.info import LAST_PORT, Variables
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import integer

_PORT = 15000


@dataclass(frozen=True)
class Nodes:
    """The place of this node in a job that is started node by node; the rules are ignite's."""

    nproc_per_node: int
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    init_method: str | None = None

    def __post_init__(self) -> None:
        _positive("nproc_per_node", self.nproc_per_node)
        nnodes = 1 if self.nnodes is None else _positive("nnodes", self.nnodes)
        if nnodes > 1 and self.node_rank is None:
            raise InvalidArgumentError(f"nnodes={nnodes} needs node_rank=, this node's number")
        rank = 0 if self.node_rank is None else integer(self.node_rank)
        if rank is None or not 0 <= rank < nnodes:
            raise InvalidArgumentError(f"node_rank must be from 0 to {nnodes - 1}, got {self.node_rank!r}")
        if self.master_port is not None and _positive("master_port", self.master_port) > LAST_PORT:
            raise InvalidArgumentError(f"master_port must be at most {LAST_PORT}, got {self.master_port!r}")
        self._check_meeting(nnodes)
        object.__setattr__(self, "nnodes", nnodes)
        object.__setattr__(self, "node_rank", rank)

    def _check_meeting(self, nnodes: int) -> None:
        by_url = self.init_method not in (None, "env://")
        if by_url and self.named:
            raise InvalidArgumentError(
                f"init_method={self.init_method!r} says where the ranks meet; master_addr and master_port "
                "belong to 'env://'"
            )
        if nnodes > 1 and not by_url and None in (self.master_addr, self.master_port):
            raise InvalidArgumentError(
                f"nnodes={nnodes} needs master_addr= and master_port= (or init_method=), where ranks meet; "
                f"got master_addr={self.master_addr!r} and master_port={self.master_port!r}"
            )

    @property
    def named(self) -> bool:
        """Whether the caller gave an address or a port."""
        return self.master_addr is not None or self.master_port is not None

    @property
    def address(self) -> str:
        return self.master_addr or os.environ.get("MASTER_ADDR") or "127.0.0.1"

    @property
    def port(self) -> int:
        return self.master_port or Variables(os.environ).port("MASTER_PORT") or _PORT

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * (self.nnodes or 1)

    @property
    def first(self) -> int:
        """The first rank of this node."""
        return self.nproc_per_node * (self.node_rank or 0)


def _positive(name: str, value: object) -> int:
    number = integer(value)
    if number is None or number < 1:
        raise InvalidArgumentError(f"{name} must be a positive number, got {value!r}")
    return number


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
