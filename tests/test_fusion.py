"""Fusion: how leaves are put into buckets, packed and unpacked, locally and between ranks."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
from asynccoll.plan.spec import Cost
from asynccoll.runtime.process import current
from asynccoll.tensors import fusing
from asynccoll.tensors.bucketing import buckets, fill, pack, unpack
from asynccoll.tensors.fusing import DIRECT_BYTES
from asynccoll.testing import simulate
from ranks import Rank, raising
from struck import Strike
from worlds import World

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(torch.Size)
KINDS = st.sampled_from([torch.float32, torch.float64, torch.int32, torch.bool])
LEAVES = st.lists(st.tuples(SHAPES, KINDS), min_size=1, max_size=12)


def _tensors(leaves: list[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    return [oracle.moving(index, tuple(shape), dtype) for index, (shape, dtype) in enumerate(leaves)]


@given(LEAVES, st.integers(1, 200))
def test_every_leaf_travels_once_in_order_among_its_like(
    leaves: list[tuple[torch.Size, torch.dtype]], limit: int
) -> None:
    """Each bucket has one dtype, ascending indices, and at most the limit's size unless it is one leaf."""
    tensors = _tensors(leaves)
    made = buckets(tensors, limit)
    assert sorted(index for bucket in made for index in bucket) == list(range(len(tensors)))
    for bucket in made:
        members = [tensors[index] for index in bucket]
        assert list(bucket) == sorted(bucket)
        assert len({x.dtype for x in members}) == 1
        assert len(members) == 1 or sum(x.nbytes for x in members) <= limit


@given(LEAVES, st.integers(1, 200))
def test_buckets_depend_on_nothing_but_the_leaves(
    leaves: list[tuple[torch.Size, torch.dtype]], limit: int
) -> None:
    """Ranks with different values, but the same shapes and dtypes, make the same buckets."""
    assert buckets(_tensors(leaves), limit) == buckets([torch.zeros(s, dtype=d) for s, d in leaves], limit)


@given(LEAVES)
def test_one_bucket_per_dtype_where_all_fit(leaves: list[tuple[torch.Size, torch.dtype]]) -> None:
    assert len(buckets(_tensors(leaves))) == len({dtype for _, dtype in leaves})


@given(st.lists(SHAPES, min_size=1, max_size=8))
def test_unpack_is_the_inverse_of_pack(shapes: list[torch.Size]) -> None:
    """Values, shapes and order are restored, also for 0-d and empty leaves."""
    tensors = _tensors([(shape, torch.float32) for shape in shapes])
    flat = pack(tensors)
    assert flat.shape == (sum(x.numel() for x in tensors),)
    oracle.same(unpack(flat, tensors), tensors)


def test_what_is_unpacked_are_views() -> None:
    """Unpacking copies nothing."""
    flat = torch.zeros(6)
    first, second = unpack(flat, [torch.empty(2, 2), torch.empty(2)])
    flat += 1
    assert first.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert second.tolist() == [1.0, 1.0]


def test_what_is_flat_is_not_copied_either() -> None:
    flat = torch.zeros(5)
    first, second = unpack(flat, [torch.empty(3), torch.empty(2)])
    flat += 1
    assert first.tolist() == [1.0, 1.0, 1.0]
    second += 1
    assert flat.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1, 2)])
def test_results_know_nothing_of_each_other(shape: tuple[int, ...]) -> None:
    """Changing one in place has no effect on the gradients of another."""
    like = torch.empty(shape)
    first, second = unpack(torch.zeros(2 * like.numel()), [like, like])
    squares = (second * torch.ones(shape, requires_grad=True)).square().sum()
    first.add_(torch.ones(shape, requires_grad=True))
    squares.backward()  # a view of the same tensor would have been "modified by an inplace operation"
    assert first.requires_grad
    assert not second.requires_grad


def test_ctrl_c_as_results_are_filled_leaves_gradients_enabled() -> None:
    outs, views = [torch.zeros(2, requires_grad=True), torch.zeros(1)], [torch.ones(2), torch.ones(1)]
    for left in range(1, 40):
        code = torch.no_grad.__enter__.__code__
        with contextlib.suppress(KeyboardInterrupt), Strike(left, code, at="opcode"):
            fill(outs, views)
        assert torch.is_grad_enabled()
    assert outs[0].tolist() == [1.0, 1.0]
    assert outs[0].requires_grad


def test_strided_leaves_are_packed_in_their_own_order() -> None:
    x = torch.arange(6).reshape(2, 3).T
    assert pack([x, x]).tolist() == [0, 3, 1, 4, 2, 5] * 2


def test_shapes_that_do_not_add_up_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 elements"):
        unpack(torch.zeros(3), [torch.zeros(2)])


# The best bucket size


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-8), st.integers(1, 1 << 32))
def test_the_bucket_size_is_where_the_cost_is_least(alpha: float, gamma: float, total: int) -> None:
    """Within the bounds, no size that differs by a quarter costs less than the chosen one."""
    chosen = Cost(alpha, 1e-9, gamma).bucket_bytes(total)
    cost = lambda size: total / size * alpha + size * gamma  # noqa: E731
    for other in (chosen * 3 // 4, chosen * 5 // 4):
        if 1 << 20 <= other <= 64 << 20:
            assert cost(chosen) <= cost(other) * 1.0001


def test_the_fit_is_the_line_through_what_was_measured() -> None:
    cost = Cost.fit((1000, 2e-4), (101_000, 3e-4), 1e-10)
    assert cost.beta == pytest.approx(1e-9)
    assert cost.alpha == pytest.approx(1.99e-4)
    assert "199 us" in str(cost)


# Between ranks


def many(rank: int) -> dict[str, torch.Tensor]:
    """Return more than one bucket of float32, one large tensor, and others that fit neither."""
    # 40 times 256 KiB
    tree = {f"{k}": torch.full((64 << 10,), float(rank + k)) for k in range(40)}
    tree["large"] = torch.full((DIRECT_BYTES // 4 + 7,), 10.0 * (rank + 1))
    tree["double"] = torch.full((3, 2), rank + 0.5, dtype=torch.float64).t()
    tree["whole"] = torch.full((2,), rank, dtype=torch.int16)
    tree["none"] = torch.empty(0)
    return tree


async def large_trees(me: Rank) -> None:
    inputs = [many(rank) for rank in range(me.size)]
    total = oracle.tree_map(lambda leaves: oracle.reduced_leaf(leaves, "sum"), inputs)
    for label in ("first", "again"):  # the first one measures the cost
        await me.check(label, ac.all_reduce, inputs[me.rank], expect=total)
    await me.check("broadcast", ac.broadcast, inputs[me.rank], src=me.size - 1, expect=inputs[-1])
    inside = many(me.rank)
    work = ac.all_reduce(inside, out=inside)
    behind = ac.all_reduce(torch.ones(3))  # queues behind the program
    got = await me.get(work)
    assert got is inside
    oracle.same(got, total)
    oracle.same(await me.get(behind), torch.full((3,), float(me.size)))
    out = many(7)
    assert await me.get(ac.broadcast(inputs[me.rank], src=0, out=out)) is out
    oracle.same(out, inputs[0])


def test_trees_of_many_buckets(world: World, runner: str) -> None:
    """Results are right, functional and in place, with a packing thread; the cost is measured meanwhile."""
    world.run(large_trees, runner=runner)


async def on_lanes(me: Rank) -> None:
    """Send trees on all lanes together: the first one to start measures."""
    lanes = ["a", "b"] if me.rank % 2 else ["b", "a"]
    works = {name: ac.all_reduce(many(me.rank), lane=name) for name in lanes}
    inputs = [many(rank) for rank in range(me.size)]
    total = oracle.tree_map(lambda leaves: oracle.reduced_leaf(leaves, "sum"), inputs)
    for name in lanes:
        oracle.same(await me.get(works[name]), total)
    if me.backend == "gloo":  # on others a device may hold the tensors, and nothing is measured
        shown = str(ac.explain("all_reduce", many(me.rank), lane="a"))
        assert "us/MiB" in shown, shown
        return shown
    return None


def test_all_lanes_and_ranks_go_by_one_measurement(pair: World) -> None:
    shown = pair.run(on_lanes)
    assert shown[0] == shown[1]


async def small_in_place(me: Rank) -> None:
    mine = {"a": torch.full((2,), float(me.rank)), "b": [torch.ones(3), torch.ones(2, dtype=torch.int32)]}
    total = {"a": torch.full((2,), float(sum(range(me.size)))), "b": [torch.full((3,), float(me.size)), None]}
    parameter = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        await me.get(ac.all_reduce([parameter, mine["a"]], out=[parameter, mine["a"]]))
    oracle.same(parameter.detach(), torch.full((4,), float(me.size)))
    oracle.same(mine["a"], total["a"])
    rows = torch.zeros(2, 3)
    got = await me.get(ac.all_reduce([torch.ones(2), torch.ones(2)], out=[rows[:, 0], rows[:, 2]]))
    oracle.same(got[0], torch.full((2,), float(me.size)), value=True)
    oracle.same(rows, torch.tensor([[1.0, 0.0, 1.0]] * 2) * me.size)
    pair, field = torch.zeros(2, 2, dtype=torch.complex64), torch.zeros(2, 2, dtype=torch.complex64)
    with me.case("lazily conjugated and negated"):
        await me.get(ac.all_reduce([torch.tensor([1 + 2j, 3j])] * 2, out=list(pair.conj().unbind())))
        oracle.same(pair, torch.tensor([[1 - 2j, -3j]] * 2) * me.size, value=True)
        await me.get(ac.all_reduce([torch.tensor([1.0, 2.0])] * 2, out=list(field.conj().imag.unbind())))
        oracle.same(field, torch.tensor([[-1j, -2j]] * 2) * me.size, value=True)
    x = torch.ones(2)
    call = ac.all_reduce
    memory = torch.ones(12)
    xs, behind = memory[:9].split(3), memory[1:10].split(3)
    await me.refuses(
        "across another", ValueError, call, xs, out=behind, says=("leaf [0] of out=", "of leaf [1]")
    )
    inside = [memory[6:], memory[7:9]]
    await me.refuses(
        "in another", ValueError, call, inside, out=inside, says=("leaf [0] of out=", "leaf [1]")
    )
    with me.case("between each other"):
        await me.get(call([memory[::2], memory[1::2]], out=[memory[::2], memory[1::2]]))
        oracle.same(memory, torch.full((12,), float(me.size)))
    await me.refuses("another tree", ValueError, call, [x], out={"a": x}, says=("dict", "list(*)"))
    await me.refuses("another shape", ValueError, call, [x, x], out=[x, torch.ones(3)], says=("[3]", "[2]"))
    await me.refuses("numbers", ValueError, call, [x, 1], out=[x, 1], says=("numbers",))
    await me.refuses("a tensor", ValueError, call, [x], out=x, says=("list",))
    await me.check("afterwards", call, 1, expect=me.size)


def test_trees_are_filled_in_place(world: World, runner: str) -> None:
    """``out`` is a tree like the input, also of parameters and strided tensors; anything else is refused."""
    world.run(small_in_place, runner=runner)


def memory_in_place(me: Rank) -> None:
    """Check how much packed memory exists while 16 MiB are reduced in place."""
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def seen(parts: list[torch.Tensor]) -> torch.Tensor:
        nonlocal most
        flat = pack(parts)
        made.append(weakref.ref(flat))
        alive = [x for ref in made if (x := ref()) is not None]
        most = max(most, sum(x.nbytes for x in alive))
        return flat

    tree = [torch.zeros(64 << 10) for _ in range(64)]
    ac.all_reduce(tree, out=tree).wait()
    cost = Cost(alpha=300e-6, beta=700e-6 / 2**20, gamma=400e-6 / 2**20)  # measured, it may make two buckets
    with patch.object(fusing, "pack", seen), patch.object(current().world.lane(), "cost", cost):
        ac.all_reduce(tree, out=tree).wait()
    assert len(made) > 2
    assert 0 < most <= cost.bucket_bytes(16 << 20)


def test_in_place_there_is_at_most_one_bucket_besides(pair: World) -> None:
    """This holds however many buckets a tree has."""
    if pair.backend != "xla-tpu":  # where no thread packs
        pair.run(memory_in_place)


async def failing(me: Rank) -> None:
    """Check that if one of many leaves cannot be reduced, no rank sends anything."""
    tree = many(me.rank)
    with raising(TypeError, "meta"):
        await me.get(ac.all_reduce({**tree, "z": torch.empty(2, device="meta")}))
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


def test_a_large_tree_is_refused_as_a_whole(pair: World) -> None:
    pair.run(failing)


async def gradients(me: Rank) -> None:
    tree = {name: x.requires_grad_(x.is_floating_point()) for name, x in many(me.rank).items()}
    got = await me.get(ac.all_reduce(tree))
    assert not got["whole"].requires_grad
    loss = sum(((k + 1) * got[str(k)].sum() for k in range(40)), start=got["large"].sum())
    loss.backward()
    for k in range(40):
        oracle.same(tree[str(k)].grad, torch.full((64 << 10,), float((k + 1) * me.size)))
    oracle.same(tree["double"].grad, torch.zeros(2, 3, dtype=torch.float64), value=True)
    leaf = torch.ones(2, requires_grad=True)
    got = await me.get(ac.broadcast([leaf, torch.ones(3)], src=0))
    (got[0] * (me.rank + 1)).sum().backward()
    want = float(sum(rank + 1 for rank in range(me.size))) if me.rank == 0 else 0.0
    oracle.same(leaf.grad, torch.full((2,), want))


def test_gradients_travel_together_too(pair: World) -> None:
    """Gradients of all tensors of a tree are sent on the backward lane, also if a tensor has none."""
    pair.run(gradients)


def _elsewhere(odd: bool) -> dict[str, Any]:
    """Return calls whose parts match in number and size on each rank, but belong to different leaves."""
    one, two, few = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3)
    dtypes = [one, two, few] if odd else [one, few, two]
    numbers = {"loss": one, "count": 5} if odd else {"loss": 5, "count": one}
    rows = [torch.eye(3), torch.eye(3).to_sparse()]
    large = [torch.ones(DIRECT_BYTES), *(rows if odd else rows[::-1])]
    return {
        "dtypes": lambda: ac.all_reduce(dtypes),
        "dtypes in a block": lambda: _in_a_block(dtypes),
        "dtypes prepared": lambda: ac.prepare("all_reduce", like=dtypes).start(),
        "layouts": lambda: ac.all_reduce(rows if odd else rows[::-1]),
        "layouts of a large tree": lambda: ac.all_reduce(large),
        "numbers": lambda: ac.all_reduce(numbers),
        "numbers gathered": lambda: ac.all_gather(numbers),
    }


def _in_a_block(xs: list[torch.Tensor]) -> ac.Work[torch.Tensor]:
    with ac.coalescing():
        *others, last = [ac.all_reduce(x) for x in xs]
    for other in others:
        other.detach()
    return last


async def placed_elsewhere(me: Rank) -> None:
    for label, call in _elsewhere(me.rank == me.size - 1).items():
        if "layouts" in label and me.backend == "xla-tpu":  # which refuses sparse tensors
            continue
        with me.case(label), raising(ac.CollectiveMismatchError):
            await me.get(call())
        await me.check(f"after {label}", ac.all_reduce, 1, expect=me.size)


def test_leaves_meet_only_their_like(several: World) -> None:
    """A tensor against a number, or against another dtype: each rank would get another leaf's sum."""
    several.run(placed_elsewhere)


def test_a_sparse_tensor_without_a_gradient_is_named_among_those_of_a_tree() -> None:
    """The error said only that there was one."""

    async def main(rank: int) -> None:
        tree = [torch.ones(2, requires_grad=True), torch.eye(3).to_sparse()]
        with pytest.raises(
            ac.UnsupportedOpError, match=r"sparse tensor \(float32\[3, 3\], tensor 2 of 2\) has"
        ):
            ac.all_reduce(tree)
        with pytest.raises(ac.UnsupportedOpError, match="of a sparse tensor has no gradient here"):
            ac.all_reduce(tree[1].requires_grad_())

    simulate(main, world_size=2, transport="memory").check()
