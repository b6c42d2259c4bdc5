"""The base of objects that work on a model without wrapping it: errors if they are used as the model itself.

Other libraries return the model in a wrapper, so users may write ``model = ac.overlap_gradients(model)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from asynccoll.errors import InvalidCallError
from asynccoll.host.uncopied import Uncopied

__all__ = ["Companion"]

#: The attributes of a model or an optimizer; only instances have ``training`` and ``param_groups``.
_THEIRS = frozenset({*dir(nn.Module), *dir(Optimizer), "training", "param_groups"})


class Companion(Uncopied):
    """Base of objects that are neither the model nor the optimizer, and do not change either."""

    #: for errors: what to do with the object
    _use = ""

    # Hidden from type checkers, so that they still report these uses.
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
