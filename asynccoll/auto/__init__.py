"""One-line helpers for model, optimizer and data: what ignite calls ``auto``.

>>> loader = ac.auto_dataloader(dataset, batch_size=64)       # each rank loads its own part
>>> model = ac.auto_model(Net())                              # on this rank's device, ready to be trained
>>> optimizer = ac.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

This package knows ``overlap``, and how models are trained on the backend. It must not know which one that is.
"""

from asynccoll.auto.data import DistributedProxySampler, auto_dataloader
from asynccoll.auto.metrics import gather_for_metrics
from asynccoll.auto.models import AsyncOptimizer, async_optim, auto_model, auto_optim
from asynccoll.auto.seeds import manual_seed

__all__ = [
    "AsyncOptimizer",
    "DistributedProxySampler",
    "async_optim",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "gather_for_metrics",
    "manual_seed",
]
