"""Checks every few steps, by checksums, that the ranks still have the same parameters.

    checking = ac.overlap.check_parameters(model.parameters(), every=100)
    for x, y in loader:
        ...
        optimizer.step()
        await checking                   # or checking.wait(); compares after every hundredth step

Built on the public operations alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from asynccoll.errors import CollectiveMismatchError, still_pending
from asynccoll.host.misfits import check_count, fitting
from asynccoll.ops.collectives import all_gather
from asynccoll.overlap.accepted import tensors_of
from asynccoll.overlap.companion import EachStep
from asynccoll.overlap.parameters import named_tensors
from asynccoll.overlap.steps import Steps
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike

__all__ = ["ParameterChecker", "check_parameters", "checksum", "checksum_text"]

#: Parameters are compared first, so all of them are equal if a buffer is the first that differs.
_OF_BUFFERS = (
    "All parameters are the same. Each rank has its own running statistics unless they are broadcast "
    "(broadcast_buffers=True of ac.overlap_gradients): compare model.parameters(), or broadcast them"
)
_OF_OTHERS = (
    "Was a gradient changed before it was reduced, a rank's step skipped, a checkpoint loaded or a scheduler "
    "stepped on some ranks only, or the model not started from the same values "
    "(ac.overlap.broadcast_parameters)?"
)


class ParameterChecker(EachStep):
    """Compares parameters over all ranks; made by ``check_parameters``.

    Use ``await checking`` once per step, or ``checking.wait()`` without an event loop. Every ``every``-th
    await compares, the others do nothing. After a cancelled or timed-out await the next one continues the
    same comparison.
    """

    _use = "`await checking` (or checking.wait()) after each step of the optimizer"

    def __init__(
        self, model: torch.nn.Module | Iterable[torch.Tensor], *, every: int, **call: object
    ) -> None:
        check_count("every", every)
        self._given = model if isinstance(model, torch.nn.Module) else tensors_of(model)
        self._every = every
        self._call = call
        self._steps = 0
        self._work: Work[None] | None = None

    def __repr__(self) -> str:
        return f"<ParameterChecker, every {self._every} steps: step {self._steps}>"

    def _step(self) -> Steps[None]:
        """Count the await, and compare if that is due, unless an earlier await was cut short."""
        if self._work is None:
            self._steps += 1
            if self._steps % self._every:
                return
            self._work = _compared(self._given, self._call)
        try:
            yield self._work
        except Exception as error:
            if not still_pending(error):
                self._work = None
            raise
        self._work = None


@fitting
def check_parameters(
    model: torch.nn.Module | Iterable[torch.Tensor],
    *,
    every: int = 1,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> ParameterChecker:
    """Compare parameters (and buffers, of a module) across all ranks, bit for bit, by a checksum of each.

    >>> checking = ac.overlap.check_parameters(model.parameters(), every=100)
    >>> for x, y in loader:
    ...     ...
    ...     optimizer.step()
    ...     await checking                                   # compares after every hundredth step
    >>> await ac.overlap.check_parameters(model)             # once, now

    Data parallel training keeps them identical; this detects when it has not. Sixteen bytes are sent for
    each tensor. Pass ``model.parameters()`` if each rank has buffers of its own (batch norm).

    Args:
        model: a module, whose tensors are looked up at each comparison, or tensors. The same on every rank.
        every: compare in one of this many awaits.
        group, lane, timeout: as in every operation.

    Raises:
        InvalidArgumentError: ``every`` is not a positive int.
        CollectiveMismatchError: on every rank, from the await: which tensor differs, and between which ranks.
    """
    return ParameterChecker(model, every=every, group=group, lane=lane, timeout=timeout)


def _compared(model: torch.nn.Module | Iterable[torch.Tensor], call: dict[str, Any]) -> Work[None]:
    names, tensors = named_tensors(model)
    sums = (
        torch.stack([checksum(x) for x in tensors])
        if tensors
        else torch.zeros(0, 2, dtype=torch.int64, device="cpu")
    )
    buffers = {name for name, _ in model.named_buffers()} if isinstance(model, torch.nn.Module) else set()
    return all_gather(sums[None], **call).map(lambda rows: _check_sums(rows.tolist(), names, buffers))


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Return two numbers that change if a bit is flipped or two elements are swapped."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(x.element_size(), torch.int64)
    words = x.contiguous().view(-1).view(word).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return torch.stack([words.sum(), (words * (places * 2654435761 % 4294967291)).sum()]).cpu()


def checksum_text(x: torch.Tensor) -> str:
    """Return ``checksum`` of ``x`` as an error shows it."""
    return "-".join(f"{number:x}" for number in checksum(x.detach()).tolist())


def _check_sums(rows: list[list[list[int]]], names: list[str], buffers: set[str]) -> None:
    for index, name in enumerate(names):
        differing = [rank for rank, sums in enumerate(rows) if sums[index] != rows[0][index]]
        if differing:
            kind, why = ("buffer", _OF_BUFFERS) if name in buffers else ("tensor", _OF_OTHERS)
            raise CollectiveMismatchError(
                f"the ranks have diverged: {kind} {name} (one of {len(names)}) on ranks {differing} differs "
                f"from that of rank 0 (of the group). {why}"
            )
