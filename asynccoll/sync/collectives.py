"""ignite's collectives on top of the async ones: start, wait, return what ignite returns.

A rank publishes what it refuses here (``ops.refuse``), as the async operations do: peers that made the call
get an error instead of waiting forever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from numbers import Integral, Number
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

import asynccoll as ac
from asynccoll.errors import AsyncCollError, InvalidArgumentError, PayloadTypeError, UnsupportedOpError
from asynccoll.ops.collectives import refuse
from asynccoll.order.stepping import waiting
from asynccoll.sync import compiled, horovod
from asynccoll.sync.models import HOROVOD, NATIVE, SERIAL
from asynccoll.sync.world import model
from asynccoll.world.group import GroupLike

__all__ = [
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "barrier",
    "broadcast",
    "new_group",
]

T = TypeVar("T")

_NUMBERS = (int, float, complex, Number)


def _waited_for(start: Callable[..., ac.Work[T]], *args: object, **kwargs: object) -> T:
    """Return ``start(*args, **kwargs).wait()``, by the shorter path for calls that are waited for."""
    try:
        waiting.set(True)  # inside: Ctrl-C may come as it returns
        return start(*args, **kwargs).wait()
    finally:
        waiting.set(False)


def _of_tensor(
    start: Callable[..., ac.Work[torch.Tensor]], tensor: torch.Tensor, *, in_place: bool, **kwargs: object
) -> torch.Tensor:
    """Return the result; if ``in_place``, in ``tensor``, even if that is a parameter or inference tensor."""
    plain = _detached(tensor)
    if not in_place or is_lazy(tensor):  # which is refused
        return _waited_for(start, plain, **kwargs)
    if plain.layout is not torch.strided:  # ``out=`` cannot be filled with another number of values
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            return tensor.copy_(_waited_for(start, plain, **kwargs))
    if plain.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            _waited_for(start, plain, out=plain, **kwargs)
    else:
        _waited_for(start, plain, out=plain, **kwargs)
    return tensor


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without history; a lazy parameter itself, which has no data and is refused later."""
    return tensor.detach() if tensor.requires_grad and not is_lazy(tensor) else tensor


def all_reduce(tensor: torch.Tensor | float, op: str = "SUM", group: GroupLike = None) -> Any:
    """Reduce every rank's tensor or number; outside of ``group`` return ``tensor`` itself.

    On torch's backends, xla-tpu and mpi the tensor itself is overwritten and returned.

    Args:
        tensor: a tensor or a number (whose type is kept exactly).
        op: ``SUM``, ``PRODUCT``, ``MIN``, ``MAX``, ``AND``, ``OR`` (bitwise); Horovod also has ``AVERAGE``
            and ``ADASUM``.
        group: None, a list of global ranks, or what ``new_group`` returned.

    Raises:
        TypeError: neither tensor nor number.
        ValueError: an unknown ``op`` or ``group``.
    """
    if is_compiling() and isinstance(tensor, torch.Tensor):
        return compiled.all_reduce(tensor, op, group)
    now = model()
    if now is SERIAL:
        return tensor
    if not isinstance(tensor, (torch.Tensor, *_NUMBERS)):
        _refuse("all_reduce", PayloadTypeError(f"Unhandled input type {type(tensor)}"), group)
    ours = now.ops.get(op) if isinstance(op, str) else None
    if ours is None:
        _refuse("all_reduce", InvalidArgumentError(f"Unsupported reduction operation: '{op}'"), group)
    if group is not None:
        group = _group(group)
        if _outside(group):
            # As torch does, for this function only.
            where = f"global rank {ac.get_rank()} which does not belong to the given group."
            warnings.warn(f"Running all_reduce on {where}", stacklevel=2)
            return _plain(tensor)
    if ours == "adasum":
        if group is not None and ac.get_world_size(group) < ac.get_world_size():
            raise UnsupportedOpError("ADASUM runs over the world; leave group= out")  # on each of its ranks
        return horovod.adasum(tensor)
    if isinstance(tensor, torch.Tensor):
        return _of_tensor(ac.all_reduce, tensor, in_place=now.in_place, op=ours, group=group)
    result = _waited_for(ac.all_reduce, tensor, op=ours, group=group)
    return bool(result) if isinstance(tensor, bool) else result


def all_gather(tensor: torch.Tensor | float | str | object, group: GroupLike = None) -> Any:
    """Gather what every rank passed: tensors of one shape concatenated along dim 0, anything else as a list.

    0-d tensors give a vector. Numbers and strings arrive as they are; other objects are pickled, so gather
    them only among ranks that you trust. Outside of ``group`` return ``tensor`` itself (a string in a list).
    """
    if is_compiling() and isinstance(tensor, torch.Tensor):
        return compiled.all_gather(tensor, group)
    now = model()
    if now is SERIAL:
        return tensor if isinstance(tensor, torch.Tensor) else [tensor]
    if group is not None:
        group = _group(group)
        if _outside(group):
            return [tensor] if isinstance(tensor, str) else _plain(tensor)
    if isinstance(tensor, torch.Tensor):
        return _waited_for(ac.all_gather, _detached(tensor), group=group)
    if isinstance(tensor, (str, *_NUMBERS)):
        return _waited_for(ac.all_gather, tensor, group=group)
    return _waited_for(ac.all_gather_object, tensor, codec="pickle", group=group)


def all_gather_tensors_with_shapes(
    tensor: torch.Tensor, shapes: Sequence[Sequence[int]], group: GroupLike = None
) -> list[torch.Tensor]:
    """Return the tensors of all ranks, of different shapes that every rank knows, as a list.

    >>> idist.all_gather_tensors_with_shapes(torch.ones(rank + 1, 2), [[1, 2], [2, 2]])
    [tensor([[1., 1.]]), tensor([[1., 1.], [1., 1.]])]

    ``shapes`` has one shape for each rank of the group, all with the same number of dimensions. Outside of
    ``group`` the result is ``[tensor]``.

    Raises:
        ValueError: ``shapes`` cannot be those of the ranks, or does not have this rank's shape.
    """
    if group is not None and model() is not SERIAL:
        group = _group(group)
        if _outside(group):
            return [tensor]
    known = _checked_shapes(tensor, shapes, group)
    largest = [max(sizes) for sizes in zip(*known, strict=True)]
    missing = [size - have for size, have in zip(largest, tensor.shape, strict=True)]
    padding = [amount for size in reversed(missing) for amount in (0, size)]
    padded = torch.nn.functional.pad(tensor, padding) if any(missing) else tensor
    rows = all_gather(padded, group=group).view(len(known), *largest)
    return [row[tuple(map(slice, shape))] for row, shape in zip(rows.unbind(0), known, strict=True)]


def _checked_shapes(
    tensor: object, shapes: Sequence[Sequence[int]], group: GroupLike
) -> list[tuple[int, ...]]:
    """Return ``shapes``; refuse wrong ones, for which a tensor would be padded or cut to another rank's."""
    size, place = (1, 0) if model() is SERIAL else (ac.get_world_size(group), ac.get_rank(group))
    if not isinstance(tensor, torch.Tensor):
        _refuse(
            "all_gather",
            PayloadTypeError(f"all_gather_tensors_with_shapes got a {type(tensor).__name__}"),
            group,
        )
    try:
        given = [tuple(map(int, shape)) for shape in shapes]
    except (TypeError, ValueError):  # not shapes at all
        given = []
    if len(given) != size or len({len(shape) for shape in given}) != 1 or given[place] != tensor.shape:
        _refuse(
            "all_gather",
            InvalidArgumentError(
                f"shapes must be those of the tensors of {size} ranks, all with the same number of "
                f"dimensions; rank {place} has a tensor of shape {tuple(tensor.shape)}, and shapes={shapes}"
            ),
            group,
        )
    return given


def broadcast(
    tensor: torch.Tensor | float | str | Path | None, src: int = 0, safe_mode: bool = False
) -> torch.Tensor | Any | str | Path:
    """Return on every rank what rank ``src`` passes: a tensor, a number, a string or a path.

    The others pass a value of the same kind; if it is a tensor, that is overwritten and returned. With
    ``safe_mode=True`` they may pass None or anything of these types. Numbers keep their type and value.

    Raises:
        TypeError: a payload of another type.
        ValueError: None on ``src``, or elsewhere without ``safe_mode``.
    """
    if is_compiling() and isinstance(tensor, torch.Tensor):
        return compiled.broadcast(tensor, src, safe_mode)
    now = model()
    if now is SERIAL:
        if tensor is None:
            raise InvalidArgumentError("Argument tensor should not be None")
        return tensor
    if isinstance(src, Integral):  # as from ``np.argmin``
        src = int(src)
    _check_broadcast(tensor, src, safe_mode)
    if safe_mode:
        received = _waited_for(ac.broadcast, tensor, src=src, safe_mode=True)
        return tensor if isinstance(tensor, torch.Tensor) and ac.get_rank() == src else received
    if not isinstance(tensor, torch.Tensor):
        return _waited_for(ac.broadcast, tensor, src=src)
    return _of_tensor(ac.broadcast, tensor, in_place=now.in_place, src=src)


def _check_broadcast(tensor: object, src: int, safe_mode: bool) -> None:
    if tensor is None:
        if ac.get_rank() == src:
            refuse(InvalidArgumentError("Source data can not be None"), name="broadcast")
        if not safe_mode:
            refuse(
                InvalidArgumentError("Argument safe_mode should be True if None is passed for non src rank"),
                name="broadcast",
            )
    elif not isinstance(tensor, (torch.Tensor, str, Path, *_NUMBERS)):
        refuse(PayloadTypeError(f"Unhandled input type {type(tensor)}"), name="broadcast")


def barrier() -> None:
    """Return once every rank has called it."""
    if model() is not SERIAL:
        _waited_for(ac.barrier)


def new_group(ranks: list[int], **kwargs: Any) -> Any:
    """Return a group of the global ``ranks`` for the collectives here; all ranks call it in the same order.

    On torch's backends it is a ``torch.distributed.ProcessGroup``, made with ``backend=`` and
    ``pg_options=`` if given (``GroupMember.NON_GROUP_MEMBER`` on ranks outside), on horovod a
    ``ProcessSet``, elsewhere an ``ac.Group``.
    """
    now = model()
    if not (isinstance(ranks, list) and all(isinstance(item, int) for item in ranks)):
        raise InvalidArgumentError("Argument ranks should be list of int")
    if now is SERIAL:
        return ranks
    if now is NATIVE:
        return dist.new_group(ranks=ranks, **kwargs)
    return horovod.new_group(ranks) if now is HOROVOD else ac.new_group(ranks)


def _group(group: Any) -> Any:
    """Return ``group`` as ``ac`` takes it, if it has one of the supported forms."""
    if isinstance(group, list) and all(isinstance(item, int) for item in group):
        # On Horovod members cannot open a group alone, but all ranks are here: ignite makes one at each call.
        return ac.new_group(group) if model() is HOROVOD else group
    if horovod.is_process_set(group):
        return list(group.ranks) if group.ranks is not None else None
    if isinstance(group, (dist.ProcessGroup, ac.Group)) or group == dist.GroupMember.NON_GROUP_MEMBER:
        return group
    raise InvalidArgumentError(
        f"Argument group should be list of int or ProcessGroup, got {type(group)}, group={group}"
    )


def _plain(x: object) -> object:
    """Return a NumPy number as a Python number; anything else unchanged."""
    return x.item() if isinstance(x, Number) and hasattr(x, "item") else x


def _refuse(name: str, error: AsyncCollError, group: GroupLike) -> NoReturn:
    """Raise ``error``, and tell the members of ``group`` that make the call; ``group`` may be invalid."""
    group = None if group is None else _group(group)
    if model() is SERIAL or _outside(group):
        raise error
    refuse(error, group=group, name=name)


def _outside(group: GroupLike) -> bool:
    """Whether this rank is not in ``group``."""
    if group is None:
        return False
    if not isinstance(group, (list, dist.ProcessGroup, ac.Group)):
        return True
    return ac.get_rank(group) < 0
