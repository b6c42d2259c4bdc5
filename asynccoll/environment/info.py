"""A process's place in its job, and the reader of environment variables that all launchers share.

This module does not know which launcher uses which variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asynccoll.errors import LaunchEnvironmentError

#: No rank, count or port has more digits; Python itself refuses to parse a few thousand.
_MAX_DIGITS = 12
LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """This process's place in the job, and where its ranks can meet if the launcher says so.

    ``placed`` is False if the launcher does not say which ranks share a node: local ranks and nodes are then
    found out when the ranks meet, and here each rank is described as alone on its node. ``own_gpus`` is True
    if the launcher shows each rank only its own GPUs instead of all of the node's. ``job`` names the job if
    nobody chose ``master_port``, but all ranks derived it: another program may have taken that port, so that
    they meet at a later one (``tcpstore.connect_as``).
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    nnodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    placed: bool = True
    own_gpus: bool = False
    job: str | None = None

    @property
    def sharing_gpus(self) -> int:
        """How many ranks share the GPUs that this one sees."""
        return 1 if self.own_gpus else self.local_world_size


class Variables:
    """Reads numbers from an environment; raises errors that name the variables if they are missing or wrong.

    An empty value counts as unset: that is how people unset a variable for one command.
    """

    __slots__ = ("_environ",)

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {name: value for name, value in environ.items() if value}

    def any(self, names: Sequence[str]) -> bool:
        """Whether at least one of ``names`` is set."""
        return any(name in self._environ for name in names)

    def all(self, names: Sequence[str]) -> bool:
        """Whether every one of ``names`` is set."""
        return all(name in self._environ for name in names)

    def text(self, name: str) -> str | None:
        """Return the value of ``name``, if it is set."""
        return self._environ.get(name)

    def integer(self, name: str) -> int:
        """Return the value of ``name`` as a number that is not negative."""
        given = self._environ[name]
        if not (given.strip().isdecimal() and len(given.strip()) <= _MAX_DIGITS):
            raise LaunchEnvironmentError(
                f"{name}={given!r} is not a rank, count or port: expected a decimal number that is"
                f" not negative. Let the launcher set it, or unset {name}"
            )
        return int(given)

    def port(self, name: str) -> int | None:
        """Return the port in ``name``; None if it is not set, or 0, which stands for any port."""
        given = self.first(name)
        if given is not None and given > LAST_PORT:
            raise LaunchEnvironmentError(
                f"{name}={self._environ[name]!r} is not a port: expected a number up to {LAST_PORT}"
            )
        return given or None

    def first(self, *names: str) -> int | None:
        """Return the first of ``names`` that is set, as a number."""
        return next((self.integer(name) for name in names if name in self._environ), None)

    def require(self, launcher: str, names: Sequence[str], advice: str) -> None:
        """Raise unless all of ``names`` are set; the error lists given and missing ones."""
        missing = [name for name in names if name not in self._environ]
        if missing:
            raise LaunchEnvironmentError(
                f"the {launcher} environment is incomplete: given {self.show(names)};"
                f" missing {', '.join(missing)}. {advice}"
            )

    def show(self, names: Sequence[str]) -> str:
        """Return those of ``names`` that are set, with their values, as text."""
        given = [f"{name}={self._environ[name]!r}" for name in names if name in self._environ]
        return ", ".join(given) or "none of them"


def checked(info: LaunchInfo, variables: Variables, names: Sequence[str]) -> LaunchInfo:
    """Return ``info`` if its numbers are consistent; ``names`` are the variables they came from."""
    possible = (
        info.rank < info.world_size
        and info.local_rank < info.local_world_size <= info.world_size
        and info.node_rank < info.nnodes <= info.world_size
    )
    if possible:
        return info
    raise LaunchEnvironmentError(
        f"the {info.launcher} environment contradicts itself: {variables.show(names)} give rank"
        f" {info.rank} of {info.world_size}, local rank {info.local_rank} of"
        f" {info.local_world_size}, node {info.node_rank} of {info.nnodes}. Each rank must be below"
        " its count, and no node holds more processes than the job. Unset the stale variables, or"
        " start again through one launcher"
    )


def with_master(info: LaunchInfo, variables: Variables) -> LaunchInfo:
    """Return ``info`` with the meeting point that the user or launcher named, if any."""
    return replace(
        info,
        master_addr=variables.text("MASTER_ADDR") or info.master_addr,
        master_port=variables.port("MASTER_PORT") or info.master_port,
    )


def blockwise(
    launcher: str, rank: int, world_size: int, local_rank: int, local_world_size: int
) -> LaunchInfo:
    """Return a place on nodes that are filled one after the other, as launchers do."""
    per_node = max(local_world_size, 1)
    return LaunchInfo(
        launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // per_node,
        nnodes=-(-world_size // per_node),
    )


def unplaced(launcher: str, rank: int, world_size: int) -> LaunchInfo:
    """Return a place in a job whose launcher does not say which ranks share a node."""
    return LaunchInfo(
        launcher, rank=rank, world_size=world_size, node_rank=rank, nnodes=world_size, placed=False
    )
