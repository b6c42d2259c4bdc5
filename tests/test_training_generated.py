"""Training under everything that real loops do: the parameters are those of one process with all the data.

Programs are drawn from fixed seeds. `ASYNCCOLL_TEST_TRAINING=2000` runs that many in each world, and
`ASYNCCOLL_TEST_SEED` sets the first seed; `make training` draws others for as long as one likes.
"""

from __future__ import annotations

import os

import pytest

import worlds
from programs import Program, drawn, same_as_alone

#: How many programs are drawn, by number of ranks.
DRAWN = {1: 5, 2: 25, 3: 10, 5: 3}
FIRST = int(os.environ.get("ASYNCCOLL_TEST_SEED", "2353095456"))


#: Programs that once failed, each for a different reason.
PINNED = [
    Program("channels_last", "plain", "overlap_gradients", "Adam fused"),
    Program("channels_last", "plain", "auto_optim", "Adagrad fused"),
    Program("plain", "clipped", "auto_optim", "SGD foreach"),
    Program("plain", "scaled", "auto_optim", "SGD foreach", second="plain"),
    Program("plain", "accumulated", "overlap_gradients(op='sum')", "SGD"),
    Program("thawed", "plain", "overlap_gradients", "SGD"),
    Program("weight_norm", "plain", "shard_optimizer", "Adam fused"),
    Program("plain", "skipped", "shard_optimizer", "SGD foreach"),
    Program("complex", "forgotten", "shard_optimizer", "Adam foreach"),
    Program("LSTM", "no_sync on top", "shard_optimizer", "Adam foreach", second="attention"),
    Program("batch norm", "clipped", "shard_layers", "Adam fused", second="plain"),
    Program("weight_norm", "in a thread", "shard_layers", "SGD foreach"),
    Program("plain", "coalesced", "overlap_gradients", "SGD"),
    Program("plain", "chained", "auto_optim", "SGD"),
    Program("plain", "no_sync between", "overlap_gradients", "SGD"),
    Program("LayerDrop", "plain", "shard_layers", "SGD"),
    Program("plain", "interrupted", "auto_optim", "AdamW"),
    Program("plain", "plain", "shard_optimizer, dropped", "SGD"),
    Program("plain", "graph of gradients", "async_optim", "SGD"),
    Program("plain", "clipped, skipped", "shard_optimizer", "Adam foreach"),
    Program("plain", "cut short", "prepare", "SGD"),
    Program("plain", "plain", "average_parameters", "SGD", second="tied"),
    Program("plain", "plain", "InFlight", "SGD", second="tied", at_once=True),
    Program("plain", "uneven", "shard_optimizer", "AdamW"),
    Program("plain", "cut short on some", "shard_optimizer", "Adam foreach"),
    Program("LayerDrop", "plain", "shard_layers, two sets", "SGD"),
    Program("plain", "touched", "shard_optimizer", "SGD"),
    Program("plain", "halved", "overlap_gradients(op='sum')", "SGD"),
]


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(5, marks=pytest.mark.nightly)])
def test_same_parameters_as_one_process(size: int) -> None:
    """This holds for any model and loop, and for every helper that averages."""
    count, first = int(os.environ.get("ASYNCCOLL_TEST_TRAINING", DRAWN[size])), FIRST + 20 * size - 40
    pinned = PINNED if size < 5 else PINNED[:12]  # five ranks are slow
    programs = [(f"pinned {index}", program) for index, program in enumerate(pinned)]
    programs += [(f"seed {seed}", drawn(seed)) for seed in range(first, first + count)]
    worlds.world("gloo", size).run(same_as_alone, programs, timeout=60 + count)
