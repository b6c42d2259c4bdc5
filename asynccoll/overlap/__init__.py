"""Helpers for your own training loops that hide communication behind compute.

>>> gradients = ac.overlap_gradients(model)   # sends them while backward runs
>>> loss.backward()
>>> await gradients                           # now they are averaged

- ``overlap_gradients``: gradients reduced bucket by bucket while backward runs;
- ``ddp_hook``: DDP's own buckets, sent on one of our lanes;
- ``shard_optimizer``: an optimizer whose work is divided among the ranks;
- ``shard_layers``: layers whose parameters are divided among the ranks, gathered ahead of use;
- ``average_parameters``: local steps, with parameters averaged in the background;
- ``prefetch``, ``InFlight``: prefetching, and back-pressure;
- ``broadcast_parameters``: the same parameters on all ranks at the start;
- ``check_parameters``: whether the ranks still have the same parameters.

Built on the public operations: a user could have written this package. It must not know backends, nor what
``auto`` does.
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
