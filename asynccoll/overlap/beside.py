"""What stands beside a model, and is awaited: what it says where it is taken for the model, or the optimizer.

Other libraries return the model in a wrapper, so ``model = ac.overlap_gradients(model)`` is soon written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from asynccoll.errors import InvalidCallError

__all__ = ["Beside"]

#: What those have that are taken for it; ``training`` and ``param_groups`` get there when one is made.
_THEIRS = frozenset({*dir(nn.Module), *dir(Optimizer), "training", "param_groups"})


class Beside:
    """Neither the model nor the optimizer, which stay as they are."""

    #: what its user does with it
    _use = ""

    # Type checkers are to go on telling that there is none of this.
    if not TYPE_CHECKING:

        def __call__(self, *_: object, **__: object) -> NoReturn:
            raise InvalidCallError(
                f"a {type(self).__name__} is not callable: the model is not wrapped, so go on calling the "
                f"model itself; {self._use}"
            )

        def __getattr__(self, name: str) -> Any:
            told = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name.startswith("_") or name not in _THEIRS:
                raise AttributeError(told, name=name, obj=self)
            told += f": model and optimizer are not wrapped, so use their own; {self._use}"
            raise AttributeError(told, name=name)
