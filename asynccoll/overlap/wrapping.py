"""What the optimizers that are awaited have in common: each stands for one of torch's, which it wraps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

from torch.optim import Optimizer

from asynccoll.errors import InvalidArgumentError, InvalidCallError
from asynccoll.overlap.accepted import scaler_told
from asynccoll.overlap.gradients import GradientReducer

__all__ = ["Wrapping"]

_STEP = (
    "an optimizer is not awaited itself, but its step: `await optimizer.step()` (or optimizer.step().wait())"
)


class Wrapping:
    """What it does not say itself is said by ``wrapped``; schedulers of torch's take it."""

    wrapped: Optimizer
    gradients: GradientReducer

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> type:
            """What ``isinstance`` asks for, too: schedulers refuse what is no ``Optimizer``.

            It is none by inheritance: methods of ``Optimizer`` would be found before those of ``wrapped``.
            """
            return Optimizer

        def __await__(self) -> NoReturn:
            """Refused: its step is awaited, as what ``overlap_gradients`` returns is itself."""
            raise InvalidCallError(_STEP)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # of a copy that is being made
            raise AttributeError(name)
        if name == "wait":
            raise AttributeError(_STEP, name=name)
        return getattr(self.wrapped, name)

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """What ``scaler.step`` asks for first: it would call ``step``, which has to be awaited."""
        raise InvalidArgumentError(scaler_told("optimizer"))

    def no_sync(self) -> AbstractContextManager[None]:
        """A block in which backward accumulates and sends nothing, as ``GradientReducer.no_sync``."""
        return self.gradients.no_sync()
