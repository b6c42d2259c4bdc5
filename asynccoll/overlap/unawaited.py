"""What is told of gradients that were not awaited, here or on another rank, in the calls that the user knows.

``overlap_gradients`` returns the reducer, which is awaited itself; the reducers of an optimizer are behind
that, and its methods are what is awaited.
"""

from __future__ import annotations

from dataclasses import dataclass

from asynccoll.errors import PeerLostError
from asynccoll.host.words import listed

__all__ = ["BY_BACKWARD", "BY_OPTIMIZER", "BY_REDUCER", "Calls"]


@dataclass(frozen=True)
class Calls:
    """What ends a step: of an object that users call ``name``."""

    name: str
    end: str
    before_use: str
    without_data: str

    @property
    def second_backward(self) -> str:
        """Why a backward is refused while the gradients of another are being sent."""
        return (
            "backward ran a second time before the gradients of the first were awaited, and has added to "
            f"what is being sent: {self.end} after each backward, or accumulate first, under "
            f"`with {self.name}.no_sync():`, and send with the last backward. (The backward of another "
            "model's loss that goes through this one, as a generator's goes through the discriminator, "
            f"counts: run it under this model's `{self.name}.no_sync()`, or with its parameters frozen)"
        )

    @property
    def stepped_too_early(self) -> str:
        """Why an optimizer of torch's is refused, or a scaler."""
        return (
            "the optimizer steps, or a scaler unscales, before the gradients of the last backward were "
            f"awaited, which are being sent: {self.before_use} (an optimizer that steps in hooks of backward "
            "always comes too early)"
        )

    def add_cure(self, error: PeerLostError) -> None:
        """Say, of ranks that have left in order, what to do where those had fewer batches.

        In place: another error would bring frames of its own, and several who wait may have this one.
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
    "`await optimizer.step()` (or .step().wait()), which has the optimizer of torch's step, too; before "
    "clipping `await optimizer.reduced()`, before unscaling `await optimizer.unscale_(scaler)`",
    "A rank without data for a step just awaits `optimizer.step()`",
)

#: Where backward waits by itself, unless it is interrupted.
BY_BACKWARD = Calls(
    "optimizer",
    "`optimizer.synchronize()`",
    "`optimizer.synchronize()` before it",
    "A rank without data for a step just calls `optimizer.step()`",
)
