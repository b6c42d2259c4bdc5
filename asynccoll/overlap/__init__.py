"""Training loops of your own whose communication disappears behind their compute.

On top of the public operations; must not know backends, nor what ``auto`` does. Each way to overlap
is a module, and the others are what several of these share:

- ``gradients``: reduced bucket by bucket while backward runs (``overlap_gradients``);
- ``ddp``: DDP's own buckets on a lane of ours (``ddp_hook``);
- ``sharded``: an optimizer of which each rank does its part (``shard_optimizer``);
- ``layers``: layers of which each rank keeps its part, gathered ahead of use (``shard_layers``);
- ``averaging``: local steps, and parameters averaged in the background (``average_parameters``);
- ``prefetch``, ``window``: operations started ahead of a loop, and held back (``prefetch``, ``InFlight``);
- ``parameters``: what the ranks start from (``broadcast_parameters``);
- ``divergence``: whether they still have the same (``check_parameters``);
- ``backward``: for ``auto_optim``, gradients that are averaged when ``backward`` returns;
- ``asking``: for ``async_optim``, whose gradients are reduced once more where a rank has added some;
- ``arrivals``: parameters on their way from a sharded optimizer's step;
- ``unawaited``: what is told of gradients that were not awaited;
- ``scaling``: what comes before a gradient scaler unscales, or steps.
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
