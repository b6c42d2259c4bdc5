"""Cases for two and three ranks also hold on five: an odd number, with more in the middle than at the ends.

The cases are those of other files, each with one way to wait; all share one world.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import worlds

pytestmark = pytest.mark.slow

#: By file: each case, how it waits, and its arguments.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "test_composed": [
        ("scoped", "trio"),
        ("counted", "asyncio"),
        ("awaited_without_recording", "trio"),
        ("none_there", "blocking"),
        ("into_out", "asyncio"),
        ("modes_in_a_block", "trio"),
        ("outs_differ_by_rank", "asyncio"),
        ("dependent", "asyncio"),
        ("passed_too_early", "asyncio"),
        ("passed_while_at_work", "asyncio"),
        ("cut_while_out", "trio", "cancelled", True),
        ("detached", "asyncio"),
        ("of_one_element", "trio"),
        ("averaged", "asyncio"),
        ("strides_kept", "asyncio"),
    ],
    "test_overlap": [
        ("awaited_twice", "asyncio", torch.bfloat16, 0),
        ("awaited_twice", "asyncio", torch.float32, 3),
    ],
    "test_coalescing": [
        ("mixed", "trio"),
        ("sent_early", "blocking"),
        ("failing_on_one", "trio"),
        ("with_gradients", "blocking"),
        ("one_refused", "asyncio", True),
        ("filled_beside", "trio"),
        ("one_dropped", "blocking"),
    ],
    "test_payload_kinds": [
        ("nothing", "asyncio"),
        ("idiom", "asyncio"),
        ("keys", "asyncio"),
        ("wrappers", "asyncio"),
        ("unfillable", "asyncio"),
    ],
    "test_prepare": [("in_place", "trio"), ("movements", "blocking"), ("trees", "trio")],
    "test_closing": [("anew", "trio")],
    "test_modes": [("inferring", "trio", False)],
    "test_lanes": [
        ("opposite", "trio"),
        ("crossed", "blocking"),
        ("grouped", "trio"),
        ("refused_amid_others", "trio"),
        ("refused_in_turn", "blocking"),
        ("all_refuse", "trio"),
        ("programs_and_calls", "trio"),
    ],
    "test_scaling": [("factors", "trio"), ("compressed", "blocking"), ("trees", "trio")],
    "test_autograd": [("gradients", "trio"), ("trees", "blocking"), ("any_order", "trio")],
    "test_training": [("different_starts", "asyncio"), ("summed_twice", "asyncio")],
    "test_forks": [("loads", "asyncio")],
    "test_clocks": [("shorter", "asyncio")],
}


@pytest.mark.parametrize(
    ("file", "said"), [pytest.param(file, said, id=said[0]) for file in CASES for said in CASES[file]]
)
@pytest.mark.parametrize("backend", worlds.BACKENDS)
def test_on_five_ranks(backend: str, file: str, said: tuple[Any, ...]) -> None:
    """The case holds as on fewer ranks."""
    name, runner, *given = said
    case = getattr(importlib.import_module(file), name)
    worlds.world(backend, 5).run(case, *given, runner=runner, timeout=30)
