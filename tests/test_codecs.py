"""The codecs by themselves: round trips, refusals, and that decoding runs no code of the sender's."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import io
import os
import pathlib
import pickle
import random
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
import payloads
from asynccoll.payload.codecs import PICKLE, SAFE, get_codec
from asynccoll.payload.safecodec import tags
from ranks import raising

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.just(dt.timezone.utc)),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.sampled_from(
        [pathlib.PurePosixPath("a/é"), Path("b"), range(3, 9, 2), torch.float16, torch.device("cpu")]
    ),
    st.lists(st.integers()).map(collections.deque),
    st.dictionaries(st.text(), st.integers(0, 5)).map(collections.Counter),
    st.frozensets(st.integers()),
    st.sets(st.text()),
)
OBJECTS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.booleans()), inner),
        st.dictionaries(st.text(), inner).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


@given(OBJECTS)
@pytest.mark.parametrize("codec", [SAFE, PICKLE], ids=["safe", "pickle"])
def test_plain_objects_go_round(codec: Any, value: Any) -> None:
    """Decoding gives the same value of the same type, for either codec."""
    got = codec.decode(codec.encode(value))
    assert type(got) is type(value)
    assert got == value


DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]


@given(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES))
def test_tensors_go_round(shape: list[int], dtype: torch.dtype) -> None:
    """Every dtype is kept bit for bit, in any shape, also empty, 0-d and from a strided view."""
    value = oracle.moving(1, tuple(shape), dtype)
    oracle.same(SAFE.decode(SAFE.encode([value]))[0], value)
    turned = value.transpose(0, -1) if shape else value
    oracle.same(SAFE.decode(SAFE.encode(turned)), turned.contiguous())


@pytest.mark.parametrize(
    "value",
    [
        *(np.arange(6).reshape(2, 3).T, np.float32(1.5), np.array(["é", ""]), np.zeros(0)),
        *(np.str_("é"), np.str_(""), np.str_("a\0"), np.bytes_(b"a"), np.bytes_(b""), np.bytes_(b"\0a\0\0")),
    ],
)
def test_arrays_go_round(value: Any) -> None:
    """NumPy arrays and scalars keep dtype, shape and kind; texts also keep trailing zeros."""
    got, behind = SAFE.decode(SAFE.encode([value, "behind"]))
    assert behind == "behind"
    assert type(got) is type(value)
    assert got.dtype == value.dtype
    assert got.tobytes() == value.tobytes()
    np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(),
        argparse.Namespace(lr=0.1, data=Path("x"), layers=[1, 2], nested=argparse.Namespace(seed=None)),
        [argparse.Namespace(a=turn, b="x") for turn in range(3)],
    ],
)
def test_arguments_of_a_command_line_go_round(value: Any) -> None:
    """``parse_args`` returns a Namespace, the most common object to send."""
    got = SAFE.decode(SAFE.encode(value))
    assert type(got) is type(value)
    assert got == value
    assert repr(got) == repr(value)


@pytest.mark.parametrize("factory", [None, list, dict, set, int, float, str])
def test_a_defaultdict_keeps_its_default(factory: Any) -> None:
    """This holds if the default factory is a built-in type."""
    value = collections.defaultdict(factory, {"a": [1], (2, 3): {"b": 4.0}})
    got = SAFE.decode(SAFE.encode(value))
    assert type(got) is collections.defaultdict
    assert got == value
    assert got.default_factory is factory
    empty = SAFE.decode(SAFE.encode(collections.defaultdict(factory)))
    assert (empty, empty.default_factory) == ({}, factory)


def test_new_kinds_are_shared_and_may_contain_themselves() -> None:
    arguments = argparse.Namespace(seen=collections.defaultdict(list))
    arguments.seen["again"].append(arguments)
    got, same = SAFE.decode(SAFE.encode([arguments, arguments.seen]))
    assert got.seen is same
    assert same["again"][0] is got


@pytest.mark.parametrize("name", ["__deepcopy__", "__dict__", "_get_kwargs", 3])
def test_a_message_sets_no_attribute_that_is_called(name: object) -> None:
    """The sender chooses the names of a Namespace's attributes, so they are checked."""
    plain = SAFE.encode(collections.OrderedDict({name: 1, "b": 2}))
    crafted = bytes([tags.NAMESPACE]) + plain[1:]
    assert plain[0] == tags.ORDERED
    with pytest.raises(ac.CollectiveError, match="attribute"):
        SAFE.decode(crafted)


def test_what_comes_back_may_be_written_to() -> None:
    """Decoded tensors and arrays own their memory."""
    x, a = SAFE.decode(SAFE.encode([torch.zeros(2), np.zeros(2)]))
    x += 1
    a += 1
    assert x.tolist() == a.tolist() == [1.0, 1.0]


class Stranger:
    """A class that the default codec does not know."""


class OwnList(list):
    """A subclass of a harmless type counts as a class like any other."""


@pytest.mark.parametrize(
    "value",
    [Stranger(), Stranger, OwnList([1]), len, lambda: 0, iter([1]), [{"deep": Stranger()}], io.StringIO()],
    ids=lambda value: type(value).__name__,
)
def test_classes_are_refused_where_they_are_sent(value: Any) -> None:
    """The error names the type and a codec that can send it."""
    with pytest.raises(ac.PayloadTypeError):
        SAFE.encode(value)


def test_the_refusal_names_the_type_and_the_cure() -> None:
    with pytest.raises(ac.PayloadTypeError, match=r'Stranger.*codec="pickle"'):
        SAFE.encode(Stranger())


class Trap:
    """Unpickling an instance runs a command that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_a_trap_springs_in_plain_pickle(tmp_path: Path) -> None:
    """The next test relies on this: plain pickle runs the trap."""
    assert pickle.loads(pickle.dumps(Trap(tmp_path / "sprung"))) == 0
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_crafted_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    """Bytes that would call os.system are refused, whatever the pickle protocol."""
    crafted = pickle.dumps([1, Trap(tmp_path / "sprung")], protocol=protocol)
    with pytest.raises(ac.CollectiveError, match="default codec"):
        SAFE.decode(crafted)
    assert not (tmp_path / "sprung").exists()


ran: list[str] = []


def _noted(name: str) -> Any:
    return lambda self, *_: ran.append(name)


@dataclasses.dataclass
class Record:
    """Plain data whose class has methods that a pickle's opcodes could call."""

    a: Any = 1
    b: Any = 2

    append = extend = add = __setitem__ = __setstate__ = _noted("a method")


class Colour(enum.Enum):
    RED = 1

    __setitem__ = append = _noted("a method")


OPERATIONS = {
    "append": pickle.BININT1 + b"\x05" + pickle.APPEND,
    "extend": pickle.MARK + pickle.BININT1 + b"\x05" + pickle.APPENDS,
    "__setitem__": pickle.BININT1 + b"\x05" + pickle.BININT1 + b"\x06" + pickle.SETITEM,
    "add": pickle.MARK + pickle.BININT1 + b"\x05" + pickle.ADDITEMS,
    "__setstate__": pickle.BININT1 + b"\x05" + pickle.BUILD,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("value", [Record(), Colour.RED, ac.ReduceOp.SUM], ids=["dataclass", "enum", "ours"])
def test_no_operation_reaches_what_was_rebuilt(value: Any, operation: str) -> None:
    """If a message goes on to act on the object it has built, no method runs and no member changes."""
    ran.clear()
    for encoded in (SAFE.encode(value), SAFE.encode([value])):
        crafted = encoded.rstrip(pickle.STOP) + OPERATIONS[operation] + pickle.STOP
        with contextlib.suppress(ac.CollectiveError):
            SAFE.decode(crafted)
    assert not ran


def test_an_enum_member_cannot_be_changed() -> None:
    """A state for a member, as pickle's BUILD sets it, is refused: the whole process shares the member."""
    state = pickle.dumps({"_value_": "product", "extra": 1})[2:-1]
    crafted = SAFE.encode(ac.ReduceOp.SUM).rstrip(pickle.STOP) + state + pickle.BUILD + pickle.STOP
    with pytest.raises(ac.CollectiveError):
        SAFE.decode(crafted)
    assert ac.ReduceOp.SUM.value == "sum"
    assert not hasattr(ac.ReduceOp.SUM, "extra")


class WithUnit(np.ndarray):
    """Numbers whose meaning depends on the unit."""


@dataclasses.dataclass
class WithProperty:
    """A field whose setter runs code."""

    a: int

    @property
    def a(self) -> int:
        return 1

    @a.setter
    def a(self, value: int) -> None:
        pass


@dataclasses.dataclass
class WithFinalizer:
    a: int = 1

    def __del__(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class WithHash:
    a: int = 1

    def __hash__(self) -> int:
        return 1


@dataclasses.dataclass(frozen=True)
class Key:
    a: Any = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (WithProperty(1), "a is a property"),
        (WithFinalizer(), "__del__"),
        ({WithHash(): 1}, "__hash__"),
        ({(1, WithHash())}, "__hash__"),
        (Access.READ | Access.WRITE, "not a single member"),
        (dataclasses.make_dataclass("Elsewhere", [("a", int)])(1), "Elsewhere"),
        (collections.defaultdict(lambda: 1), "default_factory is none of list, dict"),
        (argparse.Namespace(__deepcopy__=1), "__deepcopy__ hides a method"),
        (argparse.Namespace(run=print), "builtin_function"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (np.array([1]).view(WithUnit), "WithUnit"),
        (slice(np.int64(0), np.int64(3)), "slice.*Python's own numbers"),
        (Fraction(np.int64(3), np.int64(4)), "Fraction.*Python's own numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_would_run_code_when_decoded_is_refused_by_name(value: Any, says: str) -> None:
    """The sender gets the error, with the reason."""
    with pytest.raises(ac.PayloadTypeError, match=says):
        SAFE.encode(value)


def test_plain_keys_may_be_records() -> None:
    """A dataclass or named tuple with the standard hash is a key like any other."""
    value = {Key((1, "a")): 1, payloads.Point(1, 2): 2, Colour.RED: 3, frozenset({Key(2)}): 4}
    assert SAFE.decode(SAFE.encode(value)) == value


def test_what_is_shared_stays_shared() -> None:
    """A list, dict, tensor or record that appears twice is one object after decoding; cycles are kept."""
    x, record = torch.ones(2), Record([1], {})
    cycle: list[Any] = [x, record, {"x": x, "record": record}, ["a" * 100] * 3]
    cycle.append(cycle)
    got = SAFE.decode(SAFE.encode(cycle))
    assert got[4] is got
    assert got[0] is got[2]["x"]
    assert got[1] is got[2]["record"]
    assert len(SAFE.encode(["a" * 100_000] * 50)) < 110_000
    inner: list[Any] = []
    inner.append((inner, 1))
    through = SAFE.decode(SAFE.encode((inner,)))
    assert through[0][0][0] is through[0]


def test_a_record_of_other_fields_is_refused() -> None:
    """If the class has changed on one rank, the error gives both lists of fields."""
    raw = SAFE.encode(Record()).replace(b"\x01b", b"\x01c")
    with pytest.raises(ac.CollectiveError, match="its fields are"):
        SAFE.decode(raw)


def test_depth_is_bounded_on_both_sides() -> None:
    """Deep nesting, also of hashed values, gives a typed error."""
    deep: Any = (1,)
    for _ in range(400):
        deep = (deep,)
    with pytest.raises(ac.PayloadTypeError, match="deep"):
        SAFE.encode(deep)
    for level in ([tags.TUPLE, 1, tags.MIXED], [tags.FROZENSET, 1, tags.MIXED]):
        with pytest.raises(ac.CollectiveError):
            SAFE.decode(bytes(level * 100_000))


@pytest.mark.parametrize("length", [300, 2**31, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("tag", range(30))
def test_lengths_are_bounded_before_memory_is_taken(tag: int, length: int) -> None:
    """A few bytes that announce a huge length are refused before any memory is allocated."""
    size = bytes([tags.LONG]) + length.to_bytes(8, "little")
    name = bytes([7]) + b"float32"
    tracemalloc.start()
    for head in (b"", bytes([tags.NONE]), bytes([0]), name, name + bytes([1, tags.MIXED, tags.INT])):
        for kind in range(5):
            with contextlib.suppress(ac.CollectiveError):
                SAFE.decode(bytes([tag]) + head + size + bytes([kind]) + b"\x01" * 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_text_without_characters_takes_no_memory() -> None:
    """numpy allocates one character for an empty one: a message of a few bytes could take 155 PiB."""
    empty = np.empty(3, dtype=[("a", "U0"), ("b", "i4")])["a"]
    back = SAFE.decode(SAFE.encode(empty))
    assert (back.dtype, back.shape) == (empty.dtype, (3,))
    many = np.ndarray((10**15,), "U0")
    tracemalloc.start()
    try:
        assert SAFE.decode(SAFE.encode(many)).shape == many.shape
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_every_mutation_is_a_value_or_a_typed_error() -> None:
    """Messages with changed, missing and repeated bytes raise no other error and run nothing they name."""
    values = [Record([1], {"a": Key()}), {Key(1): [torch.ones(2), np.ones(2)]}, {"a": [1, 2.5, None]}]
    values += [[Colour.RED, ac.ReduceOp.SUM], collections.Counter("abca"), [dt.date(2020, 1, 1)] * 2]
    values += [argparse.Namespace(a=[1], b="x"), collections.defaultdict(list, a=[1])]
    draw = random.Random(7)
    for raw in map(SAFE.encode, values):
        for _ in range(400):
            crafted = bytearray(raw)
            for _ in range(draw.randint(1, 3)):
                at = draw.randrange(len(crafted))
                crafted[at : at + draw.randint(0, 2)] = bytes(
                    draw.choice([draw.randrange(256), draw.randrange(26)]) for _ in range(draw.randint(0, 2))
                )
                crafted = crafted or bytearray(b"\0")
            with contextlib.suppress(ac.CollectiveError):
                SAFE.decode(bytes(crafted))
    assert not ran


@given(st.binary(max_size=60))
def test_garbage_is_a_typed_error(raw: bytes) -> None:
    """For any input, decoding gives a value that can be encoded again, or a CollectiveError."""
    try:
        value = SAFE.decode(raw)
    except ac.CollectiveError as error:
        assert str(error), "an error that says nothing"
    else:
        assert SAFE.decode(SAFE.encode(value)) == value or value != value  # noqa: PLR0124  # NaN


@pytest.mark.parametrize("returned", [bytearray(b"x"), "x", None])
def test_what_a_codec_returns_are_bytes(returned: Any) -> None:
    """Other return values used to raise an AttributeError from internal code."""
    wrong: Any = ac.Codec("wrong", lambda _: returned, lambda raw: raw)
    with raising(ac.InvalidCallError, "codec 'wrong' returns must be bytes"):
        ac.all_gather_object(1, codec=wrong)


@dataclasses.dataclass
class Derived:
    """An attribute that is no field, and values that can be recomputed."""

    x: Any = 1

    def note(self) -> Derived:
        self.count = 2
        return self

    @functools.cached_property
    def twice(self) -> Any:
        return 2 * self.x


Item = TypeVar("Item")


@dataclasses.dataclass
class Holder(Generic[Item]):
    """A generic class: Python itself sets an attribute with the type."""

    x: Any = 1


def test_attributes_that_are_no_fields_are_refused_by_name() -> None:
    """Such attributes used to be lost: reading one raised an AttributeError far from the call."""
    with raising(ac.PayloadTypeError, "Derived", "count"):
        ac.broadcast_object({"a": Derived().note()})
    with raising(ac.PayloadTypeError, "Derived", "count"):
        ac.all_reduce({"a": Derived(torch.ones(2)).note()})
    assert SAFE.decode(SAFE.encode(Holder[int](3))).x == 3


def test_what_follows_from_the_fields_is_computed_again() -> None:
    given = Derived(torch.ones(2))
    assert given.twice.tolist() == [2, 2]
    assert ac.all_reduce(given, prescale=3.0).wait().twice.tolist() == [6, 6]
    assert ac.broadcast_object(given).wait().twice.tolist() == [2, 2]


def test_codecs_are_chosen_by_name_or_given() -> None:
    own = ac.Codec("reversed", lambda text: text[::-1].encode(), lambda raw: raw.decode()[::-1])
    assert get_codec(None) is SAFE
    assert get_codec("PICKLE") is PICKLE
    assert get_codec(own) is own
    assert own.decode(own.encode("abc")) == "abc"
    with pytest.raises(ac.InvalidArgumentError, match="xml"):
        get_codec("xml")
