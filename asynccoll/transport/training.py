"""What training on a backend needs in addition to collectives; the ``auto`` helpers read it.

The defaults suit backends on which torch's ``DistributedDataParallel`` works and averages gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

    import torch
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

__all__ = ["Training"]


class Training:
    """How a backend wants models to be trained."""

    #: torch's DDP averages the gradients; if False, ``auto_optim`` averages them when backward returns.
    ddp = True
    #: Batches may be put into pinned memory, which a GPU reads while the host continues.
    pins_memory = True
    #: With several ranks, ``loader`` wraps the loader in one that prefetches batches for the training loop.
    wraps_loader = False
    #: With several ranks, an optimizer takes over the state of rank 0's.
    starts_as_first = False

    def loader(self, loader: DataLoader[object], device: torch.device, log: logging.Logger) -> object:
        """Return what the training loop iterates over: ``loader``, or a wrapper that feeds ``device``.

        If the sampler has ``counting``, a wrapper iterates through it, so that the batches taken are counted.
        """
        return loader

    def own_optimizer(self, optimizer: Optimizer, options: Mapping[str, object]) -> Optimizer | None:
        """Wrap ``optimizer`` in the native library's own, if it has one that takes ``options``; else None."""
        return None

    def adopt(self, optimizer: Optimizer) -> None:
        """Prepare ``optimizer`` for steps whose gradients have already been averaged."""
