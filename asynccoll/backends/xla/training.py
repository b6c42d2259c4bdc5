"""Training on XLA: batches are loaded onto the device in advance, and a step executes what was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynccoll.backends.api import Training

if TYPE_CHECKING:
    import logging

    import torch
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

__all__ = ["XlaTraining"]


class XlaTraining(Training):
    """No DDP, which does not support XLA; torch_xla's own ``optimizer_step`` reduces outside of our order."""

    ddp = False
    pins_memory = False
    wraps_loader = True

    def loader(self, loader: DataLoader[object], device: torch.device, log: logging.Logger) -> object:
        from torch_xla.distributed import parallel_loader

        class MpDeviceLoader(parallel_loader.MpDeviceLoader):  # type: ignore[misc]  # torch_xla is not typed
            def __iter__(self) -> Any:
                counting = getattr(loader.sampler, "counting", None)  # if it is a sampler of ours
                return counting(super().__iter__, loader) if counting else super().__iter__()

        log.info("DataLoader is wrapped by `MpDeviceLoader` on XLA")
        wrapped = MpDeviceLoader(loader, device)
        wrapped.sampler = loader.sampler
        return wrapped

    def adopt(self, optimizer: Optimizer) -> None:
        optimizer.register_step_post_hook(_execute)


def _execute(*_: object) -> None:
    """Have XLA run what the step has recorded, as its own ``optimizer_step`` does."""
    import torch_xla

    torch_xla.sync()
