"""Training under everything that real loops do: the parameters of one process that saw all the data.

Programs are drawn by seeds that are always the same. `ASYNCCOLL_TEST_TRAINING=2000` runs as many in each
world, and `ASYNCCOLL_TEST_SEED` says where they begin.
"""

from __future__ import annotations

import os

import pytest

import worlds
from programs import HELPERS, Helper, Program, differing, drawn, trained
from ranks import Rank

SEEDS = int(os.environ.get("ASYNCCOLL_TEST_TRAINING", "25"))
FIRST = int(os.environ.get("ASYNCCOLL_TEST_SEED", "0"))


#: What went wrong once, each by another cause.
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
]


async def same_as_alone(me: Rank, programs: list[tuple[str, Program]]) -> None:
    for lane, program in programs:
        with me.case(f"{lane}: {program}"):
            alone = await trained(program, "", list(range(me.size)), me.size, Helper, seed=0)
            helper = HELPERS[program.helper]
            # Every rank starts from numbers of its own: they become those of rank 0.
            got = await trained(program, f"lane {lane}", [me.rank], me.size, helper, seed=me.rank)
            wrong = differing(got, alone)
            assert not wrong, wrong


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_same_parameters_as_one_process(size: int) -> None:
    """Whatever is trained, in whatever loop, and whoever averages."""
    programs = [(f"pinned {index}", program) for index, program in enumerate(PINNED)]
    programs += [(str(seed), drawn(seed)) for seed in range(FIRST, FIRST + SEEDS)]
    worlds.world("gloo", size).run(same_as_alone, programs, timeout=60 + SEEDS)
