"""Training on MPI: torch's DDP does not support it, so ``auto_optim`` has the gradients averaged."""

from __future__ import annotations

from asynccoll.backends.api import Training

__all__ = ["MpiTraining"]


class MpiTraining(Training):
    """The defaults, but without DDP."""

    ddp = False
