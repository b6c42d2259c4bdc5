"""``ignite.distributed.auto``: the helpers of ``asynccoll.auto.models`` for the world as ``sync`` sees it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from asynccoll.auto.data import DistributedProxySampler, dataloader_for
from asynccoll.auto.models import model_for, optim_for
from asynccoll.auto.place import Place
from asynccoll.backends.api import Training
from asynccoll.runtime.process import known
from asynccoll.sync import utils as idist
from asynccoll.sync.logs import setup_logger

__all__ = ["DistributedProxySampler", "auto_dataloader", "auto_model", "auto_optim"]


def auto_dataloader(dataset: Dataset[object], **kwargs: object) -> Any:
    """Return a ``DataLoader`` for this rank; see ``ac.auto_dataloader``."""
    return dataloader_for(_here("auto_dataloader"), dataset, kwargs)


def auto_model(model: nn.Module, sync_bn: bool = False, **kwargs: object) -> nn.Module:
    """Return the model on this rank's device, ready to be trained by all ranks; see ``ac.auto_model``."""
    return model_for(_here("auto_model"), model, sync_bn, kwargs)


def auto_optim(optimizer: Optimizer, **kwargs: object) -> Optimizer:
    """Return the optimizer, ready to step on gradients of all ranks; see ``ac.auto_optim``."""
    return optim_for(_here("auto_optim"), optimizer, kwargs)


def _here(name: str) -> Place:
    rank = idist.get_rank()
    training = Training() if idist.backend() is None else known().backend.training
    return Place(
        rank,
        idist.get_world_size(),
        idist.get_local_rank(),
        idist.get_nproc_per_node(),
        idist.backend() or "serial",
        idist.device(),
        training,
        setup_logger(f"{__name__}.{name}", rank),
    )
