"""What training on a backend needs besides collectives: what the auto helpers ask.

The defaults are right where torch's ``DistributedDataParallel`` works, which has gradients averaged by torch.
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

    #: torch's DDP averages the gradients; else ``auto_optim`` has it done when backward returns.
    ddp = True
    #: Batches may be put into pinned memory, from which a GPU copies beside the host.
    pins_memory = True
    #: In a world of several, ``loader`` makes a loader that takes batches ahead of the loop.
    wraps_loader = False

    def loader(self, loader: DataLoader[object], device: torch.device, log: logging.Logger) -> object:
        """What feeds ``device`` from ``loader``; ``counting`` of its sampler counts what is taken."""
        return loader

    def own_optimizer(self, optimizer: Optimizer, options: Mapping[str, object]) -> Optimizer | None:
        """The library's own around ``optimizer``, if it has one that ``options`` are for."""
        return None

    def adopt(self, optimizer: Optimizer) -> None:
        """Make ``optimizer`` ready for steps whose gradients are averaged already."""
