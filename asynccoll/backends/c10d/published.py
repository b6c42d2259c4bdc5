"""Our groups as torch process groups, for DDP and ``torch.compile``.

They have their own native groups, as every lane has, so that torch's collectives on them never interleave
with our queued programs. torch looks them up by name in its tables, which are filled here and emptied when
the world ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch._C._distributed_c10d as _native
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d


def publish(
    name: str, ranks: tuple[int, ...], rank: int, store: dist.Store, natives: Mapping[str, tuple[str, object]]
) -> dist.ProcessGroup:
    """Make a torch process group around ``natives``: device type -> (backend name, native group)."""
    group: Any = dist.ProcessGroup(store, rank, len(ranks))
    for device, (backend, native) in natives.items():
        kind = getattr(dist.ProcessGroup.BackendType, backend.upper(), dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device(device), kind, native)
        group._set_default_backend(kind)
    group._set_group_name(name)
    group._set_group_desc(name)
    world: Any = _c10d._world
    world.pg_names[group] = name
    world.pg_map[group] = (next(iter(natives.values()))[0], store)
    # torch.profiler looks this up for every group
    world.pg_backend_config[group] = ",".join(f"{device}:{kind}" for device, (kind, _) in natives.items())
    world.pg_group_ranks[group] = {global_rank: index for index, global_rank in enumerate(ranks)}
    _native._register_process_group(name, group)  # type: ignore[arg-type]  # a NewType of str
    return group  # type: ignore[no-any-return]  # built from Any: the stubs leave out half of it


def withdraw(group: dist.ProcessGroup) -> None:
    """Remove ``group`` from torch's tables; its connections are closed with the last reference to it."""
    world: Any = _c10d._world
    for table in (world.pg_map, world.pg_backend_config, world.pg_group_ranks):
        table.pop(group, None)
    name = world.pg_names.pop(group, None)
    if name is not None:
        with contextlib.suppress(RuntimeError):  # a user's destroy_process_group() forgets all of them
            _native._unregister_process_group(name)
