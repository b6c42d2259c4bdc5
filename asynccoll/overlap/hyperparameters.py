"""What the steps of an optimizer follow from besides parameters and gradients, in words, for comparison.

The ranks of a sharded optimizer have to step alike: each one updates its own part of the parameters, and
parts made with different learning rates would be put together in silence.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from asynccoll.overlap.states import is_shared

__all__ = ["hyperparameters_of", "states_of"]

#: These choose how a step is computed, not its result.
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})


def hyperparameters_of(optimizer: Optimizer, among: Container[int] | None = None) -> list[str]:
    """Return the hyperparameters of each group of parameters, a line each.

    ``among``: only of groups that have parameters with these ids. Those on a device are left out: reading a
    number from it would wait for the device.
    """
    return [
        f"{name} {value} in param_groups[{index}]"
        for index, given, _ in _groups(optimizer, among)
        for name in optimizer.defaults
        if name not in _HOW and (value := _plain(given.get(name)))
    ]


def states_of(optimizer: Optimizer, among: Container[int] | None = None) -> list[str]:
    """Return what states each group of parameters (``among`` these) has, and its number of steps, in lines.

    Those of its first part alone: the others have made the same steps.
    """
    return [
        f"a state with {name}{' ' + _plain(state[name]) if is_shared(name, state[name]) else ''} in "
        f"param_groups[{index}]"
        for index, _, parts in _groups(optimizer, among)
        for state in (optimizer.state.get(x, {}) for x in parts[:1])
        for name in sorted(state)
    ]


def _groups(
    optimizer: Optimizer, among: Container[int] | None
) -> Iterator[tuple[int, dict[str, Any], list[torch.Tensor]]]:
    """Yield the groups, and those of their parameters that are ``among`` these, if any.

    Only such groups are numbered: a rank may have more of its own in the optimizer.
    """
    index = 0
    for given in optimizer.param_groups:
        parts = [x for x in given["params"] if among is None or id(x) in among]
        if parts or among is None:
            yield index, given, parts
            index += 1


def _plain(value: object) -> str:
    """Return a value in words that are the same on every rank, or "" if it may be shown by its address."""
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist()) if value.device.type == "cpu" else ""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, (bool, str, type(None))):
        return repr(value)
    return repr(float(value)) if isinstance(value, Real) else ""
