"""Training on Horovod: its optimizer if its options are given, and optimizers that start as rank 0's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from asynccoll.backends.api import Training

if TYPE_CHECKING:
    from torch.optim import Optimizer


class HorovodTraining(Training):
    """No DDP, which does not support Horovod. Horovod's optimizer has gradients in flight until ``step``."""

    ddp = False
    starts_as_first = True

    def own_optimizer(self, optimizer: Optimizer, options: Mapping[str, object]) -> Optimizer | None:
        import horovod.torch as hvd

        distributed: Optimizer = hvd.DistributedOptimizer(optimizer, **options)
        distributed.state.update(optimizer.state)  # Horovod takes over only the parameters and their options
        return distributed
