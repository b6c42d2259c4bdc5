"""The base of optimizers whose step is awaited: each wraps a torch optimizer and stands in for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

from torch.optim import Optimizer

from asynccoll.errors import InvalidArgumentError, InvalidCallError
from asynccoll.host.uncopied import Uncopied
from asynccoll.overlap.accepted import scaler_told
from asynccoll.overlap.gradients import GradientReducer

__all__ = ["Wrapping"]

_STEP = (
    "an optimizer is not awaited itself, but its step: `await optimizer.step()` (or optimizer.step().wait())"
)


class Wrapping(Uncopied):
    """Passes unknown attributes on to ``wrapped``; torch's schedulers accept it as an ``Optimizer``."""

    _instead = (
        "save its state_dict() (of a sharded one `await optimizer.full_state_dict()`), and load that into "
        "another"
    )
    wrapped: Optimizer
    gradients: GradientReducer

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> type:
            """``Optimizer``, for ``isinstance``: schedulers refuse other classes.

            This class does not inherit from it: its methods would be found before those of ``wrapped``.
            """
            return Optimizer

        def __await__(self) -> NoReturn:
            """Refused: await its step. What ``overlap_gradients`` returns is awaited itself."""
            raise InvalidCallError(_STEP)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # not set yet, in a copy that is being made
            raise AttributeError(name)
        if name == "wait":
            raise AttributeError(_STEP, name=name)
        return getattr(self.wrapped, name)

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Refused: ``scaler.step`` reads this before it calls ``step``, which has to be awaited."""
        raise InvalidArgumentError(scaler_told("optimizer"))

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a block in which backward accumulates and sends nothing (``GradientReducer.no_sync``)."""
        return self.gradients.no_sync()
