"""The bases of objects that work on a model without wrapping it: errors if they are used as the model itself.

Other libraries return the model in a wrapper, so users may write ``model = ac.overlap_gradients(model)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from asynccoll.errors import InvalidCallError
from asynccoll.host.timeouts import check_patience
from asynccoll.host.uncopied import Uncopied
from asynccoll.overlap.steps import Steps, run, run_blocking

__all__ = ["Companion", "EachStep"]

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


class EachStep(Companion, ABC):
    """Base of companions that are awaited once per step, or waited for without an event loop."""

    @abstractmethod
    def _step(self) -> Steps[None]:
        """Do this step's part, and yield what to wait for. A wait that was cut short is continued."""

    def __await__(self) -> Generator[object, object, None]:
        return run(self._step()).__await__()

    def wait(self, timeout: float | None = None) -> None:
        """Do what ``await`` does, without an event loop.

        After ``timeout`` seconds ``CollectiveTimeoutError`` is raised; the next wait continues the step.
        """
        check_patience(timeout)
        run_blocking(self._step(), timeout)
