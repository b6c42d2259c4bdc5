"""What may be sent: empty payloads, unordered keys, wrappers without memory, outputs that can't be filled."""

from __future__ import annotations

import collections
import contextlib
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import asynccoll as ac
import oracle
from asynccoll.plan.trees import flatten, unflatten
from ranks import Rank, raising
from worlds import World

REFUSED = (TypeError, ValueError)
CALLS = {
    "all_reduce": ac.all_reduce,
    "reduce": ac.reduce,
    "broadcast": ac.broadcast,
    "all_gather": ac.all_gather,
    "gather": ac.gather,
    "reduce_scatter": ac.reduce_scatter,
}


async def nothing(me: Rank) -> None:
    for name, call in CALLS.items():
        for empty in (None, {}, [], (), {"a": [], "b": None}):
            await me.refuses(
                f"{name} of {empty}", ac.PayloadTypeError, call, empty, says=(name, "sends nothing")
            )
    for name, call in {
        "all_to_all": ac.all_to_all,
        "scaled": lambda x: ac.all_reduce(x, prescale=2.0),
    }.items():
        await me.refuses(f"{name} of None", ac.PayloadTypeError, call, None, says=("sends nothing",))
    with me.case("prepare"):
        try:
            ac.prepare("all_reduce", like={})
        except ac.PayloadTypeError as error:
            assert "sends nothing" in str(error)
        else:
            raise AssertionError("prepared")
    tree = {"kept": None, "x": torch.ones(2), "none": [None]}
    await me.check(
        "None beside leaves", ac.all_reduce, tree, expect={**tree, "x": torch.full((2,), float(me.size))}
    )


def test_what_has_no_leaves_is_refused_by_name(world: World) -> None:
    """Every collective refuses on every rank; the lane keeps working; None next to leaves is structure."""
    world.run(nothing)


async def in_step(me: Rank) -> None:
    """Wait until all ranks know of the refusal; until then, calls behind it are lost on all ranks."""
    while True:
        try:
            await me.get(ac.barrier())
        except ac.PeerRefusedError:
            continue
        return


async def idiom(me: Rank) -> None:
    for value in (torch.arange(3.0), 5, "text", {"a": torch.ones(2), "b": 1}):
        mine = None if 0 < me.rank == me.size - 1 else value
        with me.case(f"{value} or None"):
            if mine is None:
                with raising(ac.PayloadTypeError, "safe_mode=True"):
                    ac.broadcast(None, src=0)
            else:  # a root may have sent its value before it is told
                with contextlib.suppress(ac.PeerRefusedError):
                    oracle.same(await me.get(ac.broadcast(mine, src=0)), value)
        await in_step(me)
        mine = value if me.rank == 0 else None
        await me.check("safe_mode", ac.broadcast, mine, src=0, safe_mode=True, expect=value)
    await me.check("afterwards", ac.all_reduce, me.rank, expect=sum(range(me.size)))


def test_broadcast_of_none_on_the_others(world: World) -> None:
    """``x if rank == 0 else None`` is refused on every rank, with the remedy; with safe_mode it works."""
    world.run(idiom)


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Unordered:
    """An object whose repr contains its address."""


KEYS = [
    "b",
    "a",
    2,
    1.5,
    True,
    b"x",
    None,
    Colour.RED,
    Colour.BLUE,
    (1, "a"),
    ("a", 1),
    (Colour.RED, None),
    PurePosixPath("p"),
    torch.float32,
    np.int64(7),
]


#: By key, because comparing a NumPy array with anything else is not a plain yes or no.
PLACES = {key: place for place, key in enumerate(KEYS)}


async def keys(me: Rank) -> None:
    order = KEYS[me.rank :] + KEYS[: me.rank] if me.rank % 2 else KEYS[::-1]
    tree = {key: torch.tensor([float(PLACES[key]), me.rank]) for key in order}
    ranks = float(sum(range(me.size)))
    expect = {key: torch.tensor([me.size * float(PLACES[key]), ranks]) for key in order}
    await me.check("keys", ac.all_reduce, tree, expect=expect)
    mixed = {(True if me.rank % 2 else 1): torch.ones(1), 0.5: torch.zeros(1)}
    with me.case("1 is True"):
        assert [x.item() for x in (await me.get(ac.all_reduce(mixed))).values()] == [me.size, 0]
    for key in (
        (frozenset("ab"), frozenset("cd")),
        (Unordered(), Unordered()),
        (float("nan"), 1),
        ((1, 1j), 2),
    ):
        tree = {one: torch.ones(1) for one in key}
        await me.refuses(f"{key}", ac.PayloadTypeError, ac.all_reduce, tree, says=("order", "list"))
    await me.check("afterwards", ac.all_reduce, me.rank, expect=sum(range(me.size)))


def test_the_same_leaves_meet_whatever_the_keys(world: World) -> None:
    """Keys with an order are matched by it; keys without one are refused by name."""
    world.run(keys)


class Named(dict):
    """A dict with its own constructor."""

    def __init__(self, name: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.name = name


class Copied(Named):
    def __copy__(self) -> Copied:
        return type(self)()


def test_dicts_of_other_classes_are_rebuilt_or_refused_at_the_call() -> None:
    """Type, order, factory and attributes are kept; what cannot be copied is refused when flattened."""
    named = Named("n", b=1, a=2)
    by_default: Any = collections.defaultdict(list, b=1, a=2)
    for tree in (named, by_default, collections.OrderedDict(b=1, a=2), collections.Counter(b=1, a=2)):
        leaves, spec = flatten(tree)
        for _ in range(2):
            made = unflatten(spec, [10 * leaf for leaf in leaves])
            assert type(made) is type(tree)
            assert list(made.items()) == [("b", 10), ("a", 20)]
        assert list(tree.items()) == [("b", 1), ("a", 2)]
    leaves, spec = flatten(named)
    assert unflatten(spec, leaves).name == "n"
    leaves, spec = flatten(by_default)
    assert unflatten(spec, leaves).default_factory is list
    with pytest.raises(ac.PayloadTypeError, match=r"Copied.*dict\(x\)"):
        flatten(Copied("n", a=1))


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


class Wrapper(torch.Tensor):
    """A subclass that wraps another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def to_local(self) -> torch.Tensor:
        return torch.ones(4)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


def _freed() -> torch.Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def _fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode  # slow to import

    with FakeTensorMode():
        return torch.ones(4)


def _nested(**layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], **layout)


#: How to make each of them, and what the error says.
WITHOUT_MEMORY: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "wrapper": (lambda: Wrapper(torch.ones(4)), "to_local()"),
    "parameter of a wrapper": (lambda: torch.nn.Parameter(Wrapper(torch.ones(4))), "to_local()"),
    "fake": (_fake, "FakeTensor"),
    "freed": (_freed, "freed"),
    "nested": (_nested, "unbind"),
    "jagged": (lambda: _nested(layout=torch.jagged), ""),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), ""),
    "mkldnn": (lambda: torch.ones(4).to_mkldnn(), ""),
    "csr": (lambda: torch.ones(2, 2).to_sparse_csr(), ""),
    "meta": (lambda: torch.ones(4, device="meta"), ""),
    "uninitialized": (torch.nn.parameter.UninitializedParameter, "run the module once"),
    "zero": (lambda: torch._efficientzerotensor(4), "clone()"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_what_has_no_plain_memory_is_refused_by_name(kind: str) -> None:
    """In a world of one, whose path to native code is the same: as a tensor, a leaf, and an output."""
    make, says = WITHOUT_MEMORY[kind]
    x = make()
    ones = torch.ones(4)
    errors = (ac.PayloadTypeError, ac.UnsupportedOpError, ac.InvalidArgumentError)
    ac.initialize("serial")
    try:
        for start in (
            lambda: ac.all_reduce(x),
            lambda: ac.broadcast([ones, x]),
            lambda: ac.prepare("all_reduce", x),
        ):
            with pytest.raises(errors, match=re.escape(says)):
                start()
        for start in (
            lambda: ac.all_reduce(ones, out=x),
            lambda: ac.all_reduce([ones], out=[x]),
            lambda: ac.all_gather(x, uneven=True),
            lambda: ac.all_gather_object([x]),
            lambda: _coalesced(x),
        ):
            with pytest.raises(errors):
                start()
    finally:
        ac.finalize()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantized_tensor_is_refused_with_its_own_cure() -> None:
    """It is dense and has data, so every position needs the check."""
    x = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    for start in (
        lambda: ac.all_reduce(x),
        lambda: ac.all_gather(x, uneven=True),
        lambda: ac.scatter([x]),
        lambda: ac.all_gather_object([x]),
    ):
        with pytest.raises(ac.PayloadTypeError, match=r"quantized.*pass x\.dequantize\(\)"):
            start()


async def wrappers(me: Rank) -> None:
    ones, bad = torch.ones(4), torch.nn.Parameter(Wrapper(torch.ones(4)))
    expected = (ac.PayloadTypeError, ac.InvalidArgumentError)
    calls = {f"{call} of": (function, (bad,), {}) for call, function in CALLS.items()}
    calls |= {
        "a leaf": (ac.all_reduce, ({"a": ones, "b": [bad]},), {}),
        "uneven": (ac.all_gather, (bad,), {"uneven": True}),
        "all_to_all": (ac.all_to_all, (bad,), {}),
        "permute": (ac.permute, (bad, [(0, 0)]), {}),
        "object": (ac.all_gather_object, ([bad],), {}),
        "out": (ac.all_reduce, (ones,), {"out": bad}),
        "out leaf": (ac.all_reduce, ([ones],), {"out": [bad]}),
        "coalesced": (_coalesced, (bad,), {}),
    }
    for position, (function, args, keywords) in calls.items():
        await me.refuses(position, expected, function, *args, **keywords, says=("to_local()",))
    parts = [bad] * me.size if me.rank == 0 else None
    either = (*expected, ac.PeerRefusedError)
    await me.refuses("scatter", either, ac.scatter, parts, says=("to_local()",))
    await me.check("afterwards", ac.all_reduce, me.rank, expect=sum(range(me.size)))


def _coalesced(x: torch.Tensor) -> None:
    with ac.coalescing():
        ac.all_reduce(x)


def test_what_has_no_plain_memory_is_refused_in_every_position(world: World) -> None:
    """Each is refused by name before native code sees it; the lane keeps working."""
    world.run(wrappers)


async def transformed(me: Rank) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        ac.all_reduce(x)
        return x.sum()

    for name, inside in {
        "vmap": lambda: torch.vmap(call)(torch.ones(2, 3)),
        "grad": lambda: torch.func.grad(call)(torch.ones(3)),
        "jvp": lambda: torch.func.jvp(call, (torch.ones(3),), (torch.ones(3),)),
    }.items():
        with me.case(name):
            try:
                inside()
            except ac.PayloadTypeError as error:
                assert "vmap" in str(error)
            else:
                raise AssertionError("not refused")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        for name, x in {"dual": dual, "dual view": dual[1:]}.items():
            await me.refuses(name, ac.PayloadTypeError, ac.all_reduce, x, says=("unpack_dual",))
            await me.refuses(
                f"tree of a {name}", ac.PayloadTypeError, ac.all_reduce, [x], says=("unpack_dual",)
            )
        with me.case("sparse"):
            got = await me.get(ac.all_reduce(torch.eye(2).to_sparse()))
            assert torch.equal(got.to_dense(), me.size * torch.eye(2))
        primal, tangent = forward_ad.unpack_dual(dual)
        await me.check("its parts", ac.all_reduce, [primal, tangent], expect=[primal * me.size] * 2)
    await me.check("afterwards", ac.all_reduce, me.rank, expect=sum(range(me.size)))


def test_transformed_functions_are_refused(world: World) -> None:
    """Inside vmap and torch.func a tensor stands for several calls; a dual's tangent would not be sent."""
    world.run(transformed)


async def harmless(me: Rank) -> None:
    base = torch.arange(4.0)
    total, size = base * me.size, me.size
    for name, x in {
        "subclass": base.clone().as_subclass(Plain),
        "parameter": torch.nn.Parameter(base.clone(), requires_grad=False),
        "negative view": torch.complex(torch.zeros(4), -base).conj().imag,
    }.items():
        for label, got, expect in (
            (f"sum of {name}", ac.all_reduce(x), total),
            (f"sum of a tree of {name}", ac.all_reduce([x, x]).map(lambda both: both[1]), total),
            (f"rows of {name}", ac.all_gather(x), base.repeat(size)),
            (f"broadcast of {name}", ac.broadcast(x), base),
        ):
            with me.case(label):
                y = await me.get(got)
                assert type(y) is torch.Tensor
                oracle.same(y, expect)
    x = torch.complex(base, base)
    for out in (torch.empty(4, dtype=x.dtype).conj(), torch.empty(4, dtype=x.dtype)):
        with me.case(f"into {out.is_conj()}"):
            oracle.same((await me.get(ac.broadcast(x, out=out))).resolve_conj(), x)
            oracle.same((await me.get(ac.all_reduce(x, out=out))).resolve_conj(), x * size)


def test_harmless_subclasses_and_views_work_and_give_tensors(world: World) -> None:
    """For a subclass with memory, a parameter, conjugate and negative views, results are ``torch.Tensor``."""
    world.run(harmless)


async def unfillable(me: Rank) -> None:
    x = torch.ones(4)
    with torch.inference_mode():
        inference = torch.empty(4)
    for name, out, says in (
        ("expanded", torch.empty(1).expand(4), "contiguous()"),
        ("overlapping", torch.empty(4).as_strided((2, 2), (1, 1)), "same memory"),
        ("inference", inference, "inference mode"),
    ):
        mine = x.view(out.shape)
        await me.refuses(name, ac.InvalidArgumentError, ac.all_reduce, mine, out=out, says=(says,))
        await me.refuses(
            f"{name} leaf", ac.InvalidArgumentError, ac.all_reduce, [mine], out=[out], says=(says,)
        )
        await me.refuses(
            f"{name} broadcast", ac.InvalidArgumentError, ac.broadcast, mine, out=out, says=(says,)
        )
        gathered = torch.ones(0) if out.numel() else x
        await me.refuses(f"{name} gathered", ac.InvalidArgumentError, ac.all_gather, gathered, out=out)
    same = torch.empty(4)
    for outs in ([same, same], [torch.empty(4), x]):
        inputs = [x, torch.ones(4)]
        await me.refuses(
            "shared", ac.InvalidArgumentError, ac.all_reduce, inputs, out=outs, says=("leaf [0]", "leaf [1]")
        )
    columns = torch.empty(4, 2)
    with me.case("columns"):
        await me.get(ac.all_reduce([x, 2 * x], out=[columns[:, 0], columns[:, 1]]))
        oracle.same(columns, torch.tensor([[1.0, 2.0]] * 4) * me.size)
    leaf = torch.nn.Parameter(torch.empty(4))
    with me.case("leaf"), torch.no_grad():
        assert await me.get(ac.broadcast(x, out=leaf)) is leaf
        assert leaf.tolist() == [1.0] * 4


def test_out_that_cannot_be_filled_is_refused(world: World) -> None:
    """It is refused before anything is sent; columns of one matrix and parameters can be filled."""
    world.run(unfillable)


@dataclass
class Odd:
    """A dataclass whose field is not a valid leaf."""

    x: Any


@dataclass
class Late:
    """A dataclass with a field that nothing has set yet."""

    x: Any = field(init=False)


def nested(depth: int, leaf: int) -> Any:
    """The leaf inside so many lists."""
    tree: Any = leaf
    for _ in range(depth):
        tree = [tree]
    return tree


async def untyped(me: Rank) -> None:
    """What Python itself refuses somewhere on the way: each raised Python's error."""
    for call in (ac.all_reduce, ac.all_gather):
        await me.refuses("int", ac.InvalidArgumentError, call, 10**5000, says=("bits", "*_object"))
        await me.refuses("depth", ac.InvalidArgumentError, call, nested(101, 1), says=("more than 100 deep",))
        await me.refuses("field", ac.PayloadTypeError, call, Late(), says=("Late", "'x'"))
    await me.check("as deep as can be", ac.all_reduce, nested(100, 1), expect=nested(100, me.size))
    paths = [Path("a\ud800"), Path("a\udcff"), Path("a/\U0001f389")]
    await me.check("paths", ac.all_gather, paths, expect=[[path] * me.size for path in paths])


def test_what_python_refuses_raises_a_typed_error(world: World) -> None:
    """Huge ints, deep trees, unset fields; and paths of any characters, though not as a file's, arrive."""
    world.run(untyped)


async def masked(me: Rank) -> None:
    hidden = np.ma.masked_array([1.0, 2.0], mask=True)
    for call in (ac.all_reduce, ac.all_gather, ac.broadcast):
        for label, value in (("mean", hidden.mean()), ("0-d", np.ma.masked_array(7, mask=True))):
            await me.refuses(label, ac.PayloadTypeError, call, value, says=("Masked", "filled()"))
            await me.refuses(f"{label} leaf", ac.PayloadTypeError, call, [1, value], says=("Masked",))
        await me.refuses("array", ac.PayloadTypeError, call, hidden, says=("MaskedArray", "filled()"))
    await me.check("not masked", ac.all_reduce, np.ma.masked_array(7, mask=False), expect=7 * me.size)


def test_masked_values_are_no_numbers(world: World) -> None:
    """The mean of values that are all masked was sent as 0.0."""
    world.run(masked)


async def others(me: Rank) -> None:
    await me.refuses("array", TypeError, ac.all_reduce, np.ones(3), says=("ndarray", "torch.as_tensor"))
    await me.refuses("leaf", TypeError, ac.all_gather, [torch.ones(1), np.ones(3)], says=("torch.as_tensor",))
    await me.refuses("generator", TypeError, ac.all_gather, (x for x in [1]), says=("generator", "list"))
    await me.refuses("set", TypeError, ac.broadcast, {1, 2}, says=("set", "make a list"))
    await me.refuses("keys", TypeError, ac.all_gather, {"a": 1}.keys(), says=("make a list",))
    await me.refuses("bytes", TypeError, ac.broadcast, b"raw", says=("bytes", "*_object"))
    await me.refuses("mixed", TypeError, ac.all_reduce, [torch.ones(1), "text"], says=("str",))
    await me.refuses("object", TypeError, ac.all_reduce, Odd(object()), says=("object",))


def test_refusals_say_what_to_do(world: World) -> None:
    """For arrays, generators, sets and bytes, the error names the given type, and says what to pass."""
    world.run(others)


class Shade(str, enum.Enum):  # StrEnum came with Python 3.11
    """Strings with names."""

    DARK = "dark"


async def texts(me: Rank) -> None:
    given = ["plain", Shade.DARK, np.str_("zero\0")]
    sent = ["plain", "dark", "zero\0"]
    expect = [sent[rank % 3] for rank in range(me.size)]
    await me.check("texts", ac.all_gather, given[me.rank % 3], expect=expect)
    mine = {"a": given[me.rank % 3], "b": 1}
    await me.check("leaves", ac.all_gather, mine, expect={"a": expect, "b": [1] * me.size})
    for root in range(min(me.size, 3)):
        await me.check("broadcast", ac.broadcast, given[me.rank % 3], src=root, expect=sent[root])


def test_a_text_is_one_whatever_its_class(world: World) -> None:
    """An enum's string is sent as a str and matches one; NumPy's strings keep trailing zeros."""
    world.run(texts)


async def dates(me: Rank) -> None:
    for unit in ("ns", "D"):
        for kind, value in (("datetime64", np.datetime64(5, unit)), ("timedelta64", np.timedelta64(5, unit))):
            for call in (ac.all_reduce, ac.all_gather, ac.broadcast):
                await me.refuses(f"{value!r}", ac.PayloadTypeError, call, value, says=(kind,))
            await me.refuses(f"leaf {value!r}", ac.PayloadTypeError, ac.all_gather, [1, value], says=(kind,))


def test_dates_of_numpy_are_no_numbers(world: World) -> None:
    """Regression: dates in nanoseconds have an int as ``item()``, as which they were sent and summed."""
    world.run(dates)
