"""Training on Horovod: its optimizer if its options are given, and optimizers that start as rank 0's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from asynccoll.backends.api import Training

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["HorovodTraining"]


class HorovodTraining(Training):
    """No DDP, which does not support Horovod. Horovod's optimizer has gradients in flight until ``step``."""

    ddp = False

    def own_optimizer(self, optimizer: Optimizer, options: Mapping[str, object]) -> Optimizer | None:
        import horovod.torch as hvd

        distributed: Optimizer = hvd.DistributedOptimizer(optimizer, **options)
        self.adopt(distributed)
        return distributed

    def adopt(self, optimizer: Optimizer) -> None:
        """Copy the state of rank 0's optimizer to the other ranks."""
        import horovod.torch as hvd

        # LBFGS has no state before its first step, and Horovod cannot broadcast a missing state.
        if optimizer.state or not isinstance(optimizer, torch.optim.LBFGS):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
