"""The codecs alone: what goes round, what is refused, and that decoding runs nobody's code."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import io
import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
import oracle
from asynccoll.codecs import _HARMLESS, PICKLE, SAFE, get_codec

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
    """The same value of the same type comes back, by either codec."""
    got = codec.decode(codec.encode(value))
    assert type(got) is type(value)
    assert got == value


DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]


@given(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES))
def test_tensors_go_round(shape: list[int], dtype: torch.dtype) -> None:
    """Every dtype bit for bit, of any shape, also empty, 0-d and from a strided view."""
    value = oracle.moving(1, tuple(shape), dtype)
    oracle.same(SAFE.decode(SAFE.encode([value]))[0], value)
    turned = value.transpose(0, -1) if shape else value
    oracle.same(SAFE.decode(SAFE.encode(turned)), turned.contiguous())


@pytest.mark.parametrize(
    "value", [np.arange(6).reshape(2, 3).T, np.float32(1.5), np.array(["é", ""]), np.zeros(0)]
)
def test_arrays_go_round(value: Any) -> None:
    """NumPy arrays and scalars keep dtype, shape and kind."""
    got = SAFE.decode(SAFE.encode(value))
    assert type(got) is type(value)
    assert got.dtype == value.dtype
    np.testing.assert_array_equal(got, value)


def test_what_comes_back_may_be_written_to() -> None:
    """Tensors and arrays own their memory."""
    x, a = SAFE.decode(SAFE.encode([torch.zeros(2), np.zeros(2)]))
    x += 1
    a += 1
    assert x.tolist() == a.tolist() == [1.0, 1.0]


class Stranger:
    """A class that the default codec knows nothing of."""


class OwnList(list):
    """A subclass of a harmless type is a class like any other."""


@pytest.mark.parametrize(
    "value",
    [Stranger(), Stranger, OwnList([1]), len, lambda: 0, iter([1]), [{"deep": Stranger()}], io.StringIO()],
    ids=str,
)
def test_classes_are_refused_where_they_are_sent(value: Any) -> None:
    """A typed error that names the type and the codec that would carry it."""
    with pytest.raises(ac.PayloadTypeError):
        SAFE.encode(value)


def test_the_refusal_names_the_type_and_the_cure() -> None:
    with pytest.raises(ac.PayloadTypeError, match=r'Stranger.*codec="pickle"'):
        SAFE.encode(Stranger())


class Trap:
    """Unpickled, it runs a command that leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_a_trap_springs_in_plain_pickle(tmp_path: Path) -> None:
    """What the next test relies on: the trap works where nobody guards."""
    assert pickle.loads(pickle.dumps(Trap(tmp_path / "sprung"))) == 0
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_crafted_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    """Bytes made to call os.system are refused before anything is called."""
    crafted = pickle.dumps([1, Trap(tmp_path / "sprung")], protocol=protocol)
    with pytest.raises(ac.CollectiveError, match="system"):
        SAFE.decode(crafted)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "name", ["builtins\neval", "builtins\ngetattr", "asynccoll.codecs\nPICKLE", "os\nsystem"]
)
def test_no_way_to_other_functions(name: str) -> None:
    """Only the short list resolves, whatever is imported here."""
    with pytest.raises(ac.CollectiveError, match="does not decode"):
        SAFE.decode(f"c{name}\n.".encode())


@pytest.mark.parametrize(("module", "name"), sorted(_HARMLESS), ids=str)
def test_no_way_to_change_a_type(module: str, name: str) -> None:
    """A crafted pickle that sets an attribute on a type it may name: the type stays as it is."""
    crafted = f"c{module}\n{name}\n(N(S'patched'\nI1\ndtb.".encode()
    with pytest.raises(ac.CollectiveError):
        SAFE.decode(crafted)
    assert not hasattr(_HARMLESS[module, name], "patched")


class Persistent(pickle.Pickler):
    """Writes the references that the codec itself uses, with contents of the test's."""

    def persistent_id(self, obj: Any) -> Any:
        return obj if isinstance(obj, tuple) else None


@pytest.mark.parametrize(
    "reference",
    [
        ("no such kind",),
        ("tensor", "torch.nn", (1,), b"1"),
        ("dataclass", "os", "system", {}),
        ("enum", "subprocess", "Popen", "x"),
        ("namedtuple", "not.imported", "Kind", ()),
    ],
    ids=str,
)
def test_crafted_references_are_refused(reference: tuple[Any, ...]) -> None:
    """References to what is no plain data are typed errors."""
    buffer = io.BytesIO()
    pickler = Persistent(buffer, protocol=5)
    pickler.dump([reference])
    with pytest.raises(ac.CollectiveError):
        SAFE.decode(buffer.getvalue())


@given(st.binary(max_size=60))
def test_garbage_is_a_typed_error(raw: bytes) -> None:
    """Whatever comes, decoding gives a value or a CollectiveError."""
    with contextlib.suppress(ac.CollectiveError):
        SAFE.decode(raw)


def test_a_stream_cannot_take_the_memory_of_a_tensor_away() -> None:
    """A bytearray that a tensor lies on stays where it is, whatever the stream goes on to do with it."""
    size = 400
    text = lambda x: pickle.SHORT_BINUNICODE + bytes([len(x)]) + x.encode()  # noqa: E731
    stream = [
        pickle.PROTO + b"\x05",
        pickle.GLOBAL + b"asynccoll.codecs\n_REBUILD\n",
        pickle.MARK + text("tensor") + text("torch.uint8"),
        pickle.BININT + size.to_bytes(4, "little") + pickle.TUPLE1,
        pickle.BYTEARRAY8 + size.to_bytes(8, "little") + b"A" * size + pickle.MEMOIZE,
        pickle.TUPLE + pickle.REDUCE,
        pickle.BINGET + b"\x00" + pickle.MARK + (pickle.BININT1 + b"B") * 50_000 + pickle.APPENDS,
        pickle.TUPLE2 + pickle.STOP,
    ]
    with pytest.raises(ac.CollectiveError, match="BufferError"):
        SAFE.decode(b"".join(stream))


def test_codecs_are_chosen_by_name_or_given() -> None:
    own = ac.Codec("reversed", lambda text: text[::-1].encode(), lambda raw: raw.decode()[::-1])
    assert get_codec(None) is SAFE
    assert get_codec("PICKLE") is PICKLE
    assert get_codec(own) is own
    assert own.decode(own.encode("abc")) == "abc"
    with pytest.raises(ac.InvalidArgumentError, match="xml"):
        get_codec("xml")
