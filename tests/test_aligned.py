"""Tensors in flat memory start where kernels may read 16 bytes at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import asynccoll as ac
from asynccoll.memory.aligned import Layout
from ranks import Rank
from worlds import World

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


@given(
    counts=st.lists(st.integers(0, 40), max_size=8), dtype=st.sampled_from(DTYPES), parts=st.integers(1, 5)
)
def test_layouts(counts: list[int], dtype: torch.dtype, parts: int) -> None:
    """No tensors overlap, and all are aligned, as are the equal parts that the memory is cut into."""
    layout = Layout(counts, dtype.itemsize, parts)
    flat = torch.zeros(layout.elements + 3, dtype=dtype)  # the last three elements are not ours
    places = layout.cut(flat)
    assert [place.numel() for place in places] == counts
    for number, place in enumerate(places, 1):
        place.fill_(number)
        assert place.storage_offset() * dtype.itemsize % 16 == 0
    assert all((place == number).all() for number, place in enumerate(places, 1))
    assert int((flat != 0).sum()) == sum(counts)
    assert layout.elements % parts == 0
    assert layout.elements // parts * dtype.itemsize % 16 == 0
    assert layout.elements <= sum(counts) + (len(counts) + parts) * 16


def odd() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 3))


async def flat_memory(me: Rank) -> None:
    model = odd()
    optimizer = ac.overlap.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 7)).sum().backward()
    aligned = [x for x in model.parameters() if x.data_ptr() % 16 == 0]
    assert len(aligned) == 6
    assert all(x.grad is not None and x.grad.data_ptr() % 16 == 0 for x in aligned)
    await me.get(optimizer.step())
    await me.get(optimizer.gathered())
    layers = ac.overlap.shard_layers(odd(), lane="layers")
    x = torch.ones(2, 7)
    for layer in layers:
        assert all(y.data_ptr() % 16 == 0 for y in layer.parameters.values())
        x = layer(x)
    x.sum().backward()


def test_parameters_of_sharding_helpers(several: World) -> None:
    """CUDA kernels fault on misaligned parameters; this test only checks the addresses."""
    several.run(flat_memory)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_layout_of_nothing(size: int) -> None:
    """A layout of no tensors has no elements."""
    assert Layout([], 4, size).elements == 0
    assert Layout([], 4, size).cut(torch.empty(0)) == []
