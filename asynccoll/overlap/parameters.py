"""Broadcasting parameters and buffers, so that all ranks start from those of the first one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from asynccoll.errors import CollectiveMismatchError
from asynccoll.host.misfits import fitting
from asynccoll.host.words import by_text
from asynccoll.ops.collectives import all_gather, broadcast
from asynccoll.overlap.accepted import check_whole, tensors_of
from asynccoll.overlap.arrivals import wait_for
from asynccoll.runtime.process import get_rank, get_world_size
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike

__all__ = [
    "broadcast_buffers",
    "broadcast_parameters",
    "check_layouts",
    "first_rank",
    "first_that_differs",
    "is_of_told",
    "named_parameters",
    "named_tensors",
    "start_alike",
    "tell_apart",
    "told_alike",
]


@fitting
def broadcast_parameters(
    model: torch.nn.Module,
    *,
    src: int = 0,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[None]:
    """Give every rank the parameters and buffers that ``model`` has on ``src``, before training begins.

    Awaiting the work overwrites them in place; do not use the model until then. They are sent in a few large
    messages.
    """
    given = model if isinstance(model, torch.nn.Module) else tensors_of(model)
    return _broadcast(named_tensors(given)[1], src=src, group=group, lane=lane, timeout=timeout)


def broadcast_buffers(model: torch.nn.Module, *, src: int, **tail: object) -> Work[None]:
    """Give every rank the buffers that ``model`` has on ``src``. ``tail``: group, lane and timeout."""
    return _broadcast([x.detach() for x in model.buffers()], src=src, **tail)


def first_rank(**tail: Any) -> int:
    """Return the global rank of the group's first rank."""
    return 0 if tail.get("group") is None else all_gather(get_rank(), **tail).wait()[0]


def start_alike(model: torch.nn.Module | Iterable[torch.Tensor], **tail: Any) -> None:
    """Give every rank the tensors of the group's first rank; blocks until they have arrived, as DDP does.

    The tensors are a module's parameters and buffers, or those given. ``tail``: group, lane and timeout.

    Raises:
        CollectiveMismatchError: on every rank, if the ranks' tensors differ in number, order, name or layout,
            or are frozen on some ranks only; it shows the first that differs.
    """
    if get_world_size(tail.get("group")) == 1:
        return
    pairs = _pairs(model)
    check_layouts(pairs, **tail)
    _broadcast([x.detach() for _, x in pairs], src=first_rank(**tail), **tail).wait()


def named_tensors(model: torch.nn.Module | Iterable[torch.Tensor]) -> tuple[list[str], list[torch.Tensor]]:
    """Return the names and tensors of a module, or the numbers and tensors of a list.

    Waits for tensors that a sharded optimizer has sent.
    """
    pairs = _pairs(model)
    return [name for name, _ in pairs], [x.detach() for _, x in pairs]


def named_parameters(model: torch.nn.Module | Iterable[torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the parameters of a module with their names, or tensors with their numbers."""
    if isinstance(model, torch.nn.Module):
        return model.named_parameters()
    return ((f"number {index}", x) for index, x in enumerate(model))


def _pairs(model: torch.nn.Module | Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return what ``named_tensors`` does, as pairs, and not detached."""
    pairs = [*named_parameters(model), *(model.named_buffers() if isinstance(model, torch.nn.Module) else ())]
    check_whole(x for _, x in pairs)
    wait_for(x for _, x in pairs)
    return pairs


def _broadcast(tensors: list[torch.Tensor], **call: Any) -> Work[None]:
    tensors = [_once(x) for x in tensors]
    # If there are no tensors (a model without buffers, say), an empty one is broadcast.
    received = broadcast(tensors or [torch.empty(0, device="cpu")], **call)
    return received.map(lambda values: _overwrite(tensors, values[: len(tensors)]))


def _overwrite(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for x, value in zip(tensors, values, strict=True):
        x.copy_(value)


def _once(x: torch.Tensor) -> torch.Tensor:
    """Return a view of ``x`` with each place in memory once: ``expand()`` makes one place many elements."""
    for dim, (stride, size) in enumerate(zip(x.stride(), x.shape, strict=True)):
        if not stride and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


# Comparing parameters


def told_alike(told: list[str], **tail: Any) -> Work[None]:
    """Start to compare the ranks' descriptions of their new parameters. ``tail``: group, lane and timeout.

    Raises from the await:
        CollectiveMismatchError: on every rank; it shows two ranks' descriptions of the first that differs.
    """
    return all_gather("\n".join(told), **tail).map(_check_told)


#: How the call of ``told_alike`` is described in the error of ranks that called something else.
_TOLD_BY_A_RANK = "all_gather str"
#: An error names at most this many parameters.
_MOST_TOLD = 4


def is_of_told(error: CollectiveMismatchError) -> bool:
    """Whether some ranks compared parameters (``told_alike``) while others called something else."""
    return _TOLD_BY_A_RANK in str(error)


def tell_apart(error: CollectiveMismatchError, later: Sequence[str]) -> None:
    """Explain the error of a comparison that only some ranks made, because only they have later parameters.

    ``later``: those that this rank has added. The error is changed in place: several waiters may have it.
    """
    if not is_of_told(error):
        return
    some = ", ".join(later[:_MOST_TOLD]) + ", ..." * (len(later) > _MOST_TOLD)
    which = f"added or unfrozen {some}" if later else "added or unfrozen no parameter"
    others = "ranks that call all_reduce have not" if later else "ranks that call all_gather have"
    told = (
        f"Since the last await this rank has {which}, and {others}: do the same on every rank, then close() "
        "this one and make another"
    )
    if told not in str(error):
        error.args = (f"{error}. {told}",)


def _check_told(of_ranks: list[str]) -> None:
    if differing := first_that_differs(of_ranks):
        raise CollectiveMismatchError(
            "the parameters that were added or unfrozen since the last await differ between ranks: "
            f"{differing}. Add the same ones with the same values in the same order on every rank; then "
            "close() this one and make another"
        )


def first_that_differs(of_ranks: list[str]) -> str:
    """Return the first line in which the ranks' texts differ, as each rank has it; "" if none does."""
    for lines in zip_longest(*(said.split("\n") for said in of_ranks), fillvalue="no other one"):
        (first, its), *others = by_text(range(len(lines)), lines)
        if others:
            sides = [(f"{first} (of the group)", its), *others]
            return ", and ".join(f"{who} ha{'ve' if 'ranks' in who else 's'} {line}" for who, line in sides)
    return ""


def check_layouts(pairs: Iterable[tuple[str, torch.Tensor]], **tail: Any) -> None:
    """Refuse tensors whose names or layouts differ between ranks, or which are frozen on some ranks only.

    Strides have to agree, not only shapes, since buckets are summed element by element in memory order. Names
    have to, since layers of one shape may be in another order. Digests are compared first: the descriptions
    are long.
    """
    told = "\n".join(
        f"tensor {name} of shape {list(x.shape)}, {x.dtype}, strides {list(x.stride())}, "
        f"requires_grad={x.requires_grad}"
        for name, x in pairs
    )
    digests = all_gather(hashlib.sha256(told.encode()).hexdigest(), **tail).wait()
    if len(set(digests)) > 1:
        raise CollectiveMismatchError(
            "the ranks do not have the same parameters and buffers in the same order: "
            f"{first_that_differs(all_gather(told, **tail).wait())}. Build the same model on every rank, in "
            "the same memory format, and freeze the same parameters"
        )
