"""The arguments of ``initialize``, as a backend gets them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from asynccoll.environment.info import LaunchInfo
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import meant


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``initialize``, with the backend chosen and what the launcher says."""

    backend: str
    launch: LaunchInfo | None
    init_method: str | None = None
    store: dist.Store | None = None
    rank: int | None = None
    world_size: int | None = None
    timeout: float = 1800.0
    check: str = "local"
    memory: bool = True
    options: Mapping[str, object] = field(default_factory=dict)

    def take_options(self, *known: str) -> dict[str, Any]:
        """Return the backend options; raise if one is not ``known``."""
        check_backend_options(self.backend, self.options, known, ARGUMENTS)
        return dict(self.options)


#: The arguments of ``initialize`` that a misspelled option may have been meant to be.
ARGUMENTS = ("check", "init_method", "memory", "rank", "stall_warning", "store", "timeout", "world_size")


def check_backend_options(
    backend: str, given: Collection[str], known: Collection[str], arguments: Collection[str]
) -> None:
    """Raise ``InvalidArgumentError`` for the keywords ``given`` that ``backend`` does not know as options.

    ``arguments``: those of the function that was called, one of which may have been meant.
    """
    if unknown := sorted({*given} - {*known}):
        # Half of the letters are enough: ``nproc`` for ``nproc_per_node``.
        hints = dict.fromkeys(meant(unknown, {*known, *arguments}, 0.5))
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        what = f"backend {backend!r} has no option {', '.join(map(repr, unknown))}"
        raise InvalidArgumentError("; ".join([what, *hints, takes]))


def of_torch() -> str:
    """Return the backend of the default group that the user made with torch.

    If the group was made without a backend's name, as by a DeviceMesh, torch has chosen one for each device.
    """
    named = dist.get_backend()
    if named != "undefined":
        return named
    chosen = [part.split(":", 1) for part in dist.get_backend_config().split(",")]
    here = {device: native for device, native in chosen if device != "cuda" or torch.cuda.is_available()}
    known = {("cpu:gloo",): "gloo", ("cpu:gloo", "cuda:nccl"): "nccl"}
    parts = tuple(f"{device}:{native}" for device, native in sorted(here.items()))
    return known.get(parts, ",".join(parts))
