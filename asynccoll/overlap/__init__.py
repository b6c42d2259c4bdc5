"""Helpers for your own training loops that hide communication behind compute.

Built on the public operations; must not know backends, nor what ``auto`` does. Each module is one way to
overlap, or has what several of them share:

- ``gradients``: gradients reduced bucket by bucket while backward runs (``overlap_gradients``);
- ``ddp``: DDP's own buckets, sent on one of our lanes (``ddp_hook``);
- ``sharded``: an optimizer whose work is divided among the ranks (``shard_optimizer``);
- ``layers``: layers whose parameters are divided among the ranks, gathered ahead of use (``shard_layers``);
- ``averaging``: local steps, with parameters averaged in the background (``average_parameters``);
- ``prefetch``, ``window``: prefetching, and back-pressure (``prefetch``, ``InFlight``);
- ``parameters``: the same parameters on all ranks at the start (``broadcast_parameters``);
- ``divergence``: whether the ranks still have the same parameters (``check_parameters``);
- ``backward``: for ``auto_optim``, gradients that are averaged when ``backward`` returns;
- ``asking``: for ``async_optim``, gradients that are reduced again if a rank has added some;
- ``arrivals``: parameters that a sharded optimizer's step has sent and the model has yet to wait for;
- ``unawaited``: the errors for gradients that were not awaited;
- ``scaling``: checks before a gradient scaler unscales gradients or steps.
"""

from asynccoll.overlap.averaging import ParameterAverager, average_parameters
from asynccoll.overlap.ddp import DDPState, ddp_hook
from asynccoll.overlap.divergence import ParameterChecker, check_parameters
from asynccoll.overlap.gradients import GradientReducer, overlap_gradients
from asynccoll.overlap.layers import GatheredLayer, ShardedLayers, shard_layers
from asynccoll.overlap.parameters import broadcast_parameters
from asynccoll.overlap.pending import Pending
from asynccoll.overlap.prefetch import prefetch
from asynccoll.overlap.sharded import ShardedOptimizer, shard_optimizer
from asynccoll.overlap.window import InFlight

__all__ = [
    "DDPState",
    "GatheredLayer",
    "GradientReducer",
    "InFlight",
    "ParameterAverager",
    "ParameterChecker",
    "Pending",
    "ShardedLayers",
    "ShardedOptimizer",
    "average_parameters",
    "broadcast_parameters",
    "check_parameters",
    "ddp_hook",
    "overlap_gradients",
    "prefetch",
    "shard_layers",
    "shard_optimizer",
]
