"""Gathers what the ranks have computed on their shares of a dataset, for a metric."""

from __future__ import annotations

import math
from typing import Any

import torch

from asynccoll.errors import AsyncCollError, InvalidArgumentError, PayloadTypeError
from asynccoll.host.misfits import fitting, integer
from asynccoll.ops.collectives import all_gather, refuse
from asynccoll.plan.trees import flatten, unflatten
from asynccoll.runtime.process import get_world_size
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike


@fitting
def gather_for_metrics(
    x: Any,
    /,
    *,
    samples: int,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[Any]:
    """Gather all ranks' predictions of an epoch on every rank, in the sampler's order, each sample once.

    ``x`` is a tensor, or a tree of tensors, with a row in dim 0 for each sample that a torch
    ``DistributedSampler`` gave this rank, in its order. Rank r of n has the samples r, r + n, r + 2n ...; if
    ``samples`` is not divisible by n, the first samples are repeated, and the repeated rows are dropped here.

    >>> rows = await ac.gather_for_metrics(predictions, samples=len(dataset))   # 5 samples on two ranks:
    tensor([p0, p1, p2, p3, p4])    # r0 has [p0, p2, p4], r1 has [p1, p3, p0]: shape (3,) -> (5,)

    Without shuffling the rows are in the order of the dataset. With ``drop_last`` the samples that no rank
    got are missing at the end.

    Args:
        x: the same number of rows on every rank.
        samples: how many the whole dataset has; in a resumed epoch, how many of it were left
            (``state["length"] - state["seen"]`` of the sampler's state).
        group, lane, timeout: as for ``all_gather``.

    Raises:
        PayloadTypeError: a leaf is not a tensor with a dim 0.
        InvalidArgumentError: ``samples`` is not a positive number, or there are more rows than a rank's
            share.

    Source: ``accelerate.Accelerator.gather_for_metrics``, for a whole epoch at once.
    """
    size = get_world_size(group)
    try:
        wrong = _wrong(flatten(x)[0], samples, size)
    except AsyncCollError as error:  # ``x`` is not a valid tree
        wrong = error
    if wrong is not None:
        refuse(wrong, group=group, lane=lane, name="all_gather")

    def in_order(found: object) -> object:
        leaves, spec = flatten(found)
        return unflatten(spec, [_interleaved(leaf, size)[:samples] for leaf in leaves])

    return all_gather(x, group=group, lane=lane, timeout=timeout).map(in_order)


def _wrong(leaves: list[object], samples: object, size: int) -> AsyncCollError | None:
    """Return the error if these cannot be a rank's predictions of that many samples; else None."""
    length = integer(samples)
    if length is None or length < 1:
        return InvalidArgumentError(f"gather_for_metrics: samples={samples!r}; expected the dataset's length")
    share = math.ceil(length / size) if size > 0 else math.inf  # outside the group, the call is refused
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            what = f"a {type(leaf).__name__}" if not isinstance(leaf, torch.Tensor) else "a 0-d tensor"
            return PayloadTypeError(f"gather_for_metrics got {what}; expected tensors with a row per sample")
        if len(leaf) > share:
            return InvalidArgumentError(
                f"gather_for_metrics got {len(leaf)} rows, but a rank's share of {samples} samples on "
                f"{size} ranks is {share}: pass the predictions of one epoch, from a loader that gives each "
                "rank its share (ac.auto_dataloader), and the length of its dataset as samples="
            )
    return None


def _interleaved(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rows of ``size`` equal parts in turn: the first of each part, then the second, and so on."""
    parts = rows.reshape(size, len(rows) // size, *rows.shape[1:])
    return parts.transpose(0, 1).reshape(rows.shape)
