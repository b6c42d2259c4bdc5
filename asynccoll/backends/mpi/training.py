"""Training on MPI: DDP does not serve it, so ``auto_optim`` has the gradients averaged."""

from __future__ import annotations

from asynccoll.backends.api import Training

__all__ = ["MpiTraining"]


class MpiTraining(Training):
    """Nothing but that."""

    ddp = False
