"""One-line helpers for model, optimizer and data: what ignite calls ``auto``.

Knows ``overlap``, and how models are trained on the backend; must not know which backend it is.
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
