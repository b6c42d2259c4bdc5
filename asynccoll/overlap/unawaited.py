"""The errors for gradients that were not awaited, here or on another rank, in terms of the user's own calls.

``overlap_gradients`` returns the reducer, which is awaited itself. An optimizer hides its reducer, and its
methods are awaited.
"""

from __future__ import annotations

from dataclasses import dataclass

from asynccoll.errors import PeerLostError
from asynccoll.host.words import listed

__all__ = ["BY_BACKWARD", "BY_OPTIMIZER", "BY_REDUCER", "Calls"]


@dataclass(frozen=True)
class Calls:
    """The calls that an error names for an object that users call ``name``.

    ``end``: the call that ends a step; ``before_use``: the calls before gradients are used; ``without_data``:
    the advice for a rank without data.
    """

    name: str
    end: str
    before_use: str
    without_data: str

    @property
    def second_backward(self) -> str:
        """Why a backward is refused while the gradients of another are being sent."""
        return (
            "backward ran a second time before the gradients of the first were awaited (again, if that wait "
            f"was cut short), and would add to what is being sent: {self.end} after each backward, or "
            f"accumulate first, under `with {self.name}.no_sync():`, and send with the last backward. (The "
            "backward of another model's loss that goes through this one, as a generator's goes through the "
            f"discriminator, counts: run it under this model's `{self.name}.no_sync()`, or with its "
            "parameters frozen. So does checkpoint(use_reentrant=True) of layers that are used twice: pass "
            "use_reentrant=False)"
        )

    @property
    def stepped_too_early(self) -> str:
        """Why the step of torch's optimizer, or a scaler, is refused."""
        return (
            "the optimizer steps, or a scaler unscales, before the gradients of the last backward were "
            f"awaited (again, if that wait was cut short), which are being sent: {self.before_use} (an "
            "optimizer that steps in backward hooks is always too early)"
        )

    def add_cure(self, error: PeerLostError) -> None:
        """Add to an error what to do if ranks that shut down in an orderly way had fewer batches.

        The error is changed in place: several waiters may have it, and a new one would have other frames.
        """
        if error.left and self.without_data not in str(error):
            error.args = (f"{error}. Fewer batches on {listed(error.left)}? {self.without_data}",)


BY_REDUCER = Calls(
    "gradients",
    "`await gradients` (or gradients.wait())",
    "`await gradients` (or gradients.wait()) between backward and step, and before unscaling and clipping",
    "A rank without data for a step just awaits `gradients`",
)

BY_OPTIMIZER = Calls(
    "optimizer",
    "`await optimizer.step()` (or .step().wait())",
    "`await optimizer.step()` (or .step().wait()), which includes the torch optimizer's step; before "
    "clipping `await optimizer.reduced()`, before unscaling `await optimizer.unscale_(scaler)`",
    "A rank without data for a step just awaits `optimizer.step()`",
)

#: For a reducer that backward itself waits for, unless backward is interrupted.
BY_BACKWARD = Calls(
    "optimizer",
    "`optimizer.synchronize()`",
    "`optimizer.synchronize()` before it",
    "A rank without data for a step just calls `optimizer.step()`",
)
