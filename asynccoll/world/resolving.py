"""Resolves whatever a user may pass as ``group=`` to a ``Group``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from asynccoll.errors import InvalidArgumentError, PayloadTypeError, UnsupportedOpError
from asynccoll.host.misfits import integer
from asynccoll.world.context import Context
from asynccoll.world.group import Group, GroupLike, ranks_of


def resolve_group(context: Context, group: GroupLike) -> Group:
    """Return the ``Group`` for anything that a user may pass as ``group=``."""
    if group is None:
        return context.world
    if isinstance(group, Group):
        if group.context is not context:
            raise InvalidArgumentError(
                f"{group!r} belongs to a context that was finalized or is another rank's; make a new "
                "one with ac.new_group(ranks)"
            )
        return group
    native = _native_ranks(group)
    return ad_hoc_group(context, group if native is None else native)


def ad_hoc_group(context: Context, ranks: object) -> Group:
    """Return the group of a list of ranks; the first call with these ranks creates it."""
    wanted = check_ranks(context, ranks)
    known = context.groups.get(wanted)
    if known is None:
        if not context.backend.ad_hoc_groups:
            raise UnsupportedOpError(
                f"{context.backend.name} cannot open the group {list(wanted)} among its members alone; "
                "call ac.new_group(ranks) on every rank first"
            )
        known = context.add_group(wanted)
    return known


def check_ranks(context: Context, ranks: object) -> tuple[int, ...]:
    """Return the ranks sorted; refuse a list with a rank outside the world, or a rank listed twice."""
    if not isinstance(ranks, Iterable) or isinstance(ranks, (str, bytes)):
        raise PayloadTypeError(
            "group must be None, an asynccoll Group, a list of global ranks, a one-dimensional "
            f"DeviceMesh or a torch ProcessGroup, got {type(ranks).__name__}: {ranks!r}"
        )
    listed = list(ranks)
    whole = [rank for rank in map(integer, listed) if rank is not None]
    if len(whole) != len(listed):
        raise PayloadTypeError(f"a group lists global ranks (int), got {listed!r}")
    wanted = tuple(sorted(set(whole)))
    if not wanted or len(wanted) != len(listed):
        raise InvalidArgumentError(f"a group lists each rank once and at least one, got {listed!r}")
    if wanted[0] < 0 or wanted[-1] >= context.world_size:
        raise InvalidArgumentError(
            f"group {listed!r} names ranks outside the world; expected {ranks_of(context.world_size)}"
        )
    return wanted


def _native_ranks(group: Any) -> list[int] | None:
    """Return the ranks of a DeviceMesh or a torch process group, or None for anything else."""
    if isinstance(group, dist.ProcessGroup):
        return _ranks_of(group)
    if not (hasattr(group, "mesh") and hasattr(group, "get_group")):
        return None
    if group.ndim != 1:
        raise InvalidArgumentError(
            f"a collective runs over one mesh dimension, got a DeviceMesh of {group.ndim}; "
            'name one, as in mesh["dp"]'
        )
    if group.get_coordinate() is None:  # torch has made no process group for it on this rank
        return _ranks_of_others(group)
    return _ranks_of(group.get_group())


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    try:
        return list(dist.get_process_group_ranks(group))
    except KeyError:
        raise InvalidArgumentError(
            f"{group!r} is a torch ProcessGroup that was destroyed, or was of a world that is finalized; "
            "pass a group that was made since"
        ) from None


def _ranks_of_others(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of ``mesh``, of which this rank is not one."""
    try:
        return list(mesh.mesh.tolist())
    except RuntimeError:  # of a mesh of several dimensions, each group along this one could be meant
        raise InvalidArgumentError(
            f"rank {dist.get_rank()} is not in the mesh that {mesh!r} is a dimension of, so it has no group "
            "along that dimension; only members of the mesh may name one"
        ) from None
