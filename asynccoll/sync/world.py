"""The world as ``sync`` sees it: which computation model, joined how, and left how.

ignite's rule differs from that of ``ac``: without ``initialize`` there is a world of one, also under a
launcher and after ``finalize``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import asynccoll as ac
from asynccoll import host
from asynccoll.environment.info import Variables
from asynccoll.errors import InvalidArgumentError
from asynccoll.runtime.forked import forked
from asynccoll.runtime.process import refresh
from asynccoll.sync import horovod
from asynccoll.sync import layout as _layout
from asynccoll.sync.environment import Environment
from asynccoll.sync.layout import Layout
from asynccoll.sync.models import HOROVOD, NATIVE, SERIAL, Model, by_backend

__all__ = ["device", "in_seconds", "join", "layout", "leave", "meeting", "model"]

_ALONE = Layout(0, 1, 1, 0)
_SPAWN_PORT = 2222


class _Joined:
    """What ``join`` did, for ``leave`` to undo."""

    environment: Environment | None = None


_joined = host.per_process(_Joined)


def model() -> Model:
    """Return the computation model of the current world."""
    state = refresh()
    if state == "none":
        if not horovod.joined_by_user():
            return SERIAL
        ac.initialize("horovod")
        return HOROVOD
    if state == "adopted":
        _layout.announce()
        return NATIVE
    return by_backend(ac.backend())


def layout() -> Layout:
    """Return where this rank is on its node: as the launcher says if it says all, else by ignite's rules."""
    now, state = model(), refresh()
    if now is SERIAL:
        return _ALONE
    environment = _joined.environment
    if state == "adopted" or (environment is not None and environment.partial):
        return _layout.layout()
    return Layout(ac.get_local_rank(), ac.get_nproc_per_node(), ac.get_nnodes(), ac.get_node_rank())


def device() -> torch.device:
    """Return the device of this rank's tensors."""
    now = model()
    if now is SERIAL:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if now not in (NATIVE, HOROVOD) or not torch.cuda.is_available():
        return ac.device()
    index = torch.cuda.current_device()
    if index < layout().local_rank:
        warnings.warn(
            "Current device index is less than current local rank. "
            "Please, make sure to call torch.cuda.set_device(local_rank).",
            stacklevel=3,
        )
    return torch.device(f"cuda:{index}")


def join(backend: str, kwargs: dict[str, Any]) -> None:
    """Join the world on ``backend``."""
    in_seconds(kwargs)
    if by_backend(backend) is not NATIVE:
        ac.initialize(backend, **kwargs)
        return
    if backend == "nccl" and not torch.cuda.is_available():
        raise RuntimeError("Nccl backend is required but no cuda capable devices")
    state = refresh()
    if state == "adopted":
        raise InvalidArgumentError(
            "trying to initialize the default process group twice! It was made with torch, and works "
            "without asynccoll.sync.initialize"
        )
    if state == "none":  # the environment may still be that of a world that was destroyed with torch
        _restore()
    environment = Environment(kwargs.pop("rank", None), kwargs.pop("world_size", None))
    init_method = kwargs.get("init_method")
    by_variables = init_method is None or init_method.startswith("env://")
    try:
        # In a world of one, torch's defaults are only for programs to read; no rank is met at port 15000.
        early = ("RANK", "LOCAL_RANK", "WORLD_SIZE") if environment.world_size == 1 else ()
        environment.apply(*early)
        if not (environment.complete and by_variables):
            # ``ac`` needs to be told how many ranks this node has; ignite counts them
            kwargs.update(rank=environment.rank, world_size=environment.world_size)
        ac.initialize(backend, **kwargs)
        environment.apply()
    except BaseException:
        environment.restore()
        raise
    _joined.environment = environment
    if environment.partial:
        _layout.announce()
    if torch.cuda.is_available():
        torch.cuda.set_device(layout().local_rank)


def leave(*, abort: bool = False) -> None:
    """Leave the world; a group that was made with torch is destroyed, as in ignite.

    Every step is taken even if one raises, as ``finalize`` does if work was still in flight.
    """
    if forked():  # only the parent can leave the world
        return
    state = refresh()
    steps: list[Callable[[], object]] = []
    if state != "none":
        steps.append(partial(ac.finalize, abort=abort))
    if state == "adopted":
        steps.append(dist.destroy_process_group)
    if state == "ours" and ac.backend() == "horovod":
        steps.append(horovod.shutdown)
    host.call_each([*steps, _restore])


def _restore() -> None:
    """Put back the environment that ``join`` found."""
    if _joined.environment is not None:
        _joined.environment.restore()
        _joined.environment = None


def in_seconds(kwargs: dict[str, object]) -> None:
    """Convert ``timeout`` in ``kwargs`` to seconds: ignite takes what torch takes."""
    timeout = kwargs.get("timeout")
    if isinstance(timeout, timedelta):
        kwargs["timeout"] = timeout.total_seconds()
    elif timeout is None:
        kwargs.pop("timeout", None)


def meeting(kwargs: dict[str, object]) -> dict[str, Any]:
    """Return ``spawn``'s arguments with ignite's defaults for where the ranks meet.

    On one node the port need not be known in advance, so a free one is taken unless ``MASTER_PORT`` is set.
    """
    if kwargs.get("init_method") not in (None, "env://"):
        for name in ("master_addr", "master_port"):
            if kwargs.get(name) is not None:
                raise InvalidArgumentError(
                    f"{name} should be None if init_method is provided other then 'env://'"
                )
        return kwargs
    names = ("master_addr", "master_port")
    named = any(kwargs.get(name) is not None for name in names) or "MASTER_PORT" in os.environ
    if not named and kwargs.get("nnodes") in (None, 1):
        return kwargs
    port, address = kwargs.get("master_port"), kwargs.get("master_addr")
    return {
        **kwargs,
        "master_addr": os.environ.get("MASTER_ADDR", "127.0.0.1") if address is None else address,
        "master_port": (Variables(os.environ).port("MASTER_PORT") or _SPAWN_PORT) if port is None else port,
    }
