"""What comes before a gradient scaler unscales gradients, or steps: torch has hooks for optimizers alone.

And one such check: of parts of layers each rank sees its own, and all have to skip a step if one overflowed.
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
#: Of a scaler and an optimizer; and whether it is to step.
Check = Callable[[GradScaler, Optimizer, bool], None]

#: Parts of which other ranks have others, by their ids; optimizers on whose overflows the ranks agree.
_parts: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_agreed: weakref.WeakSet[Optimizer] = host.per_process(weakref.WeakSet)


def before_scaling(check: Check) -> None:
    """From now on have ``check`` called before a scaler uses the gradients of one of torch's optimizers."""
    GradScaler.unscale_ = _checked(GradScaler.unscale_, check, False)  # type: ignore[method-assign]
    GradScaler.step = _checked(GradScaler.step, check, True)  # type: ignore[method-assign]


def _checked(method: Callable[..., T], check: Check, steps: bool) -> Callable[..., T]:
    @functools.wraps(method)
    def checked(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> T:
        if issubclass(type(optimizer), Optimizer):  # else one of ours, which tell better
            check(scaler, optimizer, steps)
        return method(scaler, optimizer, *args, **kwargs)

    return checked


def scaled_together(parts: Iterable[torch.Tensor]) -> None:
    """Refuse to scale these by a scaler before the ranks have ``agreed`` on whether one overflowed."""
    _parts.update((id(x), x) for x in parts)
    _look_at_scalers()


def agreed(optimizer: Optimizer) -> None:
    """A gradient that overflowed on one rank has done so on all, until the optimizer's next step."""
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
            "the optimizer has this rank's parts of layers (shard_layers), and other ranks may see another "
            "overflow: `await layers.unscale_(scaler, optimizer)` before scaler.step(optimizer)"
        )
    if steps:
        _agreed.discard(optimizer)
