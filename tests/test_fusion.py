"""Fusion alone: how leaves are put into buckets, packed, and handed back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from asynccoll.fusion import buckets, pack, unpack

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(torch.Size)
KINDS = st.sampled_from([torch.float32, torch.float64, torch.int32, torch.bool])
LEAVES = st.lists(st.tuples(SHAPES, KINDS), min_size=1, max_size=12)


def _tensors(leaves: list[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    return [oracle.moving(index, tuple(shape), dtype) for index, (shape, dtype) in enumerate(leaves)]


@given(LEAVES, st.integers(1, 200))
def test_every_leaf_travels_once_in_order_among_its_like(
    leaves: list[tuple[torch.Size, torch.dtype]], limit: int
) -> None:
    """Each bucket is of one dtype, ascending, and no larger than the limit unless it is one leaf."""
    tensors = _tensors(leaves)
    made = buckets(tensors, limit)
    assert sorted(index for bucket in made for index in bucket.indices) == list(range(len(tensors)))
    for bucket in made:
        members = [tensors[index] for index in bucket.indices]
        assert list(bucket.indices) == sorted(bucket.indices)
        assert len({x.dtype for x in members}) == 1
        assert len(members) == 1 or sum(x.nbytes for x in members) <= limit


@given(LEAVES, st.integers(1, 200))
def test_buckets_depend_on_nothing_but_the_leaves(
    leaves: list[tuple[torch.Size, torch.dtype]], limit: int
) -> None:
    """Ranks with other values, but the same shapes and dtypes, make the same buckets."""
    assert buckets(_tensors(leaves), limit) == buckets([torch.zeros(s, dtype=d) for s, d in leaves], limit)


@given(LEAVES)
def test_one_bucket_per_dtype_where_all_fit(leaves: list[tuple[torch.Size, torch.dtype]]) -> None:
    assert len(buckets(_tensors(leaves))) == len({dtype for _, dtype in leaves})


@given(st.lists(SHAPES, min_size=1, max_size=8))
def test_unpack_is_the_inverse_of_pack(shapes: list[torch.Size]) -> None:
    """Values, shapes and order come back; 0-d and empty leaves, too."""
    tensors = _tensors([(shape, torch.float32) for shape in shapes])
    flat = pack(tensors)
    assert flat.shape == (sum(x.numel() for x in tensors),)
    oracle.same(unpack(flat, shapes), tensors)


def test_what_is_unpacked_are_views() -> None:
    """Nothing is copied a second time."""
    flat = torch.zeros(6)
    first, second = unpack(flat, [torch.Size([2, 2]), torch.Size([2])])
    flat += 1
    assert first.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert second.tolist() == [1.0, 1.0]


def test_strided_leaves_are_packed_in_their_own_order() -> None:
    x = torch.arange(6).reshape(2, 3).T
    assert pack([x, x]).tolist() == [0, 3, 1, 4, 2, 5] * 2


def test_shapes_that_do_not_add_up_are_an_error() -> None:
    with pytest.raises(RuntimeError):
        unpack(torch.zeros(3), [torch.Size([2])])
