"""Hooks before a gradient scaler unscales gradients or steps; torch has hooks only for optimizers.

One such check is here, too: each rank sees only its own parts of sharded layers, but all ranks have to skip a
step if a gradient of one overflowed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from asynccoll import host
from asynccoll.errors import InvalidArgumentError

__all__ = ["agreed", "before_scaling", "scaled_together"]

T = TypeVar("T")
#: Called with a scaler, an optimizer, and whether the scaler steps (else it unscales).
Check = Callable[[GradScaler, Optimizer, bool], None]

#: This rank's parts of sharded layers, by their ids.
_parts: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
#: The optimizers for whose next step the ranks have agreed on whether a gradient overflowed.
_agreed: weakref.WeakSet[Optimizer] = host.per_process(weakref.WeakSet)


def before_scaling(check: Check) -> None:
    """Call ``check`` from now on before a scaler uses the gradients of one of torch's optimizers."""
    GradScaler.unscale_ = _checked(GradScaler.unscale_, check, False)  # type: ignore[method-assign]
    GradScaler.step = _checked(GradScaler.step, check, True)  # type: ignore[method-assign]


def _checked(method: Callable[..., T], check: Check, steps: bool) -> Callable[..., T]:
    @functools.wraps(method)
    def checked(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> T:
        if issubclass(type(optimizer), Optimizer):  # else it is one of ours, which raises a better error
            check(scaler, optimizer, steps)
        return method(scaler, optimizer, *args, **kwargs)

    return checked


def scaled_together(parts: Iterable[torch.Tensor]) -> None:
    """Have scalers refuse optimizers of these ``parts`` until the ranks have ``agreed`` on an overflow."""
    _parts.update((id(x), x) for x in parts)
    _look_at_scalers()


def agreed(optimizer: Optimizer) -> None:
    """Note that the ranks have agreed on whether a gradient overflowed, until the optimizer's next step."""
    _agreed.add(optimizer)


@functools.cache
def _look_at_scalers() -> None:
    before_scaling(_check_agreed)


def _check_agreed(scaler: GradScaler, optimizer: Optimizer, steps: bool) -> None:
    given = (x for group in optimizer.param_groups for x in group["params"])
    if not scaler.is_enabled() or not any(_parts.get(id(x)) is x for x in given):
        return
    if optimizer not in _agreed:
        raise InvalidArgumentError(
            "the optimizer has this rank's parts of layers (shard_layers), and only some ranks may see an "
            "overflow: `await layers.unscale_(scaler, optimizer)` before scaler.step(optimizer)"
        )
    if steps:
        _agreed.discard(optimizer)
