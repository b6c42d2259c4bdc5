"""Encode plain data as bytes; refuse, by name, objects that cannot be decoded without running code."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from asynccoll.errors import PayloadTypeError
from asynccoll.memory.plain import plain_tensor, raw
from asynccoll.payload.safecodec import tags
from asynccoll.payload.safecodec.types import (
    FACTORIES,
    PARTS,
    Parts,
    UnfitError,
    check_attributes,
    class_named,
    fields_of,
    plain_hash,
    scalar_dtype,
)
from asynccoll.plan.spec import DEQUANTIZED, DTYPES_BY_NAME, dtype_name
from asynccoll.plan.trees import beside_fields

_U64 = struct.Struct("<BQ")
_F64 = struct.Struct("<Bd")
_BYTE = [bytes([value]) for value in range(256)]
#: This JSON encoder runs in C, and writes texts as they are, so that lone surrogates are kept.
_to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_SCALARS = frozenset({str, int, float, bool, type(None)})
_JSON = _SCALARS | {list, dict}
_RUNS = frozenset({str, int, float, bool})
#: Not their subclasses, which may mean more than their elements: a mask, a unit.
_ARRAYS = (np.ndarray, np.memmap)


def encode(obj: object) -> bytes:
    """Return ``obj`` in the default codec's format; raise ``PayloadTypeError`` for an unsupported object."""
    encoder = _Encoder()
    try:
        encoder.whole(obj)
    except (UnfitError, AttributeError, RecursionError) as error:
        raise PayloadTypeError(f"cannot encode a {type(obj).__name__}: {error}") from error
    return b"".join(encoder.parts)


class _Encoder:
    __slots__ = ("_depth", "_kept", "_key_depth", "_keys", "_names", "_seen", "parts")

    def __init__(self) -> None:
        self.parts: list[Any] = []  # bytes, and memory of tensors and arrays
        self._seen: dict[int, int] = {}  # id of an object -> its number, by which later values refer to it
        self._kept: list[object] = []  # these objects: while they are kept, no id is reused
        self._keys: dict[tuple[object, ...], int] = {}
        self._names: dict[tuple[str, type], int] = {}
        self._depth = 0
        self._key_depth = 0  # keys have no references, so that hashing them takes no longer than reading them

    def value(self, x: object) -> None:
        _WRITE.get(type(x), _other)(self, x)

    def whole(self, x: object) -> None:
        """Write the outermost object: as one JSON text if that keeps it as it is, else by ``value``."""
        if type(x) in (dict, list) and _is_json(x, set()):
            try:
                raw = _to_json(x).encode("utf-8", "surrogatepass")
            except ValueError:  # an int with more digits than Python converts
                raw = b""
            if 0 < len(raw) <= tags.JSON_LENGTH:
                self.parts.append(_BYTE[tags.JSON])
                self.memory(raw, len(raw))
                return
        self.value(x)

    # What values are made of

    def size(self, count: int) -> None:
        self.parts.append(_BYTE[count] if count < tags.LONG else _U64.pack(tags.LONG, count))

    def text(self, x: str) -> None:
        raw = x.encode("utf-8", "surrogatepass")
        self.size(len(raw))
        self.parts.append(raw)

    def memory(self, raw: object, size_bytes: int) -> None:
        self.size(size_bytes)
        self.parts.append(raw)

    def again(self, x: object) -> bool:
        """Write a reference to ``x`` if it was written before; return whether it was."""
        number = None if self._key_depth else self._seen.get(id(x))
        if number is None:
            return False
        self.parts.append(_BYTE[tags.AGAIN])
        self.size(number)
        return True

    def remember(self, x: object) -> None:
        """Number ``x``, so that later occurrences are written as references to it."""
        if not self._key_depth:
            self._seen[id(x)] = len(self._kept)
            self._kept.append(x)

    def items(self, values: Sequence[object]) -> None:
        """Write how many values there are, and each of them."""
        self.size(len(values))
        if len(values) >= tags.MIN_RUN and self._run(values):
            return
        self.parts.append(_BYTE[tags.MIXED])
        self._depth += 1
        if self._depth > tags.MAX_DEPTH:
            raise UnfitError(f"containers are nested more than {tags.MAX_DEPTH} deep, or one contains itself")
        write, other = _WRITE.get, _other
        for x in values:
            write(type(x), other)(self, x)
        self._depth -= 1

    def _run(self, values: Sequence[Any]) -> bool:
        """Write values of one simple type as one block; return whether that was possible."""
        kinds = set(map(type, values))
        if len(kinds) > 1:
            return False
        kind = kinds.pop()
        if kind is float:
            self.parts += (_BYTE[tags.FLOATS], struct.pack(f"<{len(values)}d", *values))
        elif kind is int:
            try:
                self.parts += (_BYTE[tags.INTS], struct.pack(f"<{len(values)}q", *values))
            except struct.error:  # one of them is wider
                return False
        elif kind is str:
            return self._texts(values)
        elif kind is bool:
            self.parts += (_BYTE[tags.BOOLS], bytes(values))
        else:
            return False
        return True

    def _texts(self, values: Sequence[str]) -> bool:
        if max(map(len, values)) > tags.SHARED_LENGTH:
            return False
        self.parts.append(_BYTE[tags.TEXTS])
        self.text(_to_json(values))
        return True

    def keys(self, keys: Iterable[object]) -> None:
        """Write the keys of a dict, or the members of a set, which the decoder will hash."""
        self._key_depth += 1
        self.items(list(keys))
        self._key_depth -= 1

    def mapping(self, x: dict[object, Any]) -> None:
        """Write keys and values; string keys that several dicts share are written only once."""
        keys = tuple(x)
        texts = set(map(type, keys)) == {str}
        known = self._keys.get(keys) if texts else None  # equal keys may differ in type
        if known is not None:
            self.parts.append(_BYTE[tags.SAME_KEYS])
            self.size(known)
        elif texts and not self._key_depth:
            self._keys[keys] = len(self._keys)
            self.parts.append(_BYTE[tags.NEW_KEYS])
            self.keys(keys)
        else:
            self.parts.append(_BYTE[tags.ANY_KEYS])
            self.keys(keys)
        self.items(list(x.values()))

    def class_name(self, x: Any, tag: str, fields: Callable[[Any], tuple[str, ...]]) -> tuple[str, ...]:
        """Write the class of ``x`` and its field names (later by number), and return the names."""
        kind: Any = type(x)
        if self._key_depth and not plain_hash(kind, tag):
            raise _refused(kind, "as a key it would run its own __hash__ or __eq__")
        names = fields(kind)
        number = self._names.get((tag, kind))
        if number is not None:
            self.size(number)
            return names
        try:
            if class_named(kind.__module__, kind.__qualname__) is not kind:
                raise UnfitError("its module has another class of this name")
            self.size(len(self._names))
            self._names[tag, kind] = len(self._names)
        except UnfitError as error:
            raise _refused(kind, str(error)) from None
        self.text(kind.__module__)
        self.text(kind.__qualname__)
        self.items(names)
        return names


def _is_json(x: Any, seen: set[int]) -> bool:
    """Whether JSON reproduces the dict or list ``x`` exactly: no other types, and no container twice in it.

    False also for long lists and dicts of one type, which ``items`` writes faster, as a block.
    """
    values = x
    if type(x) is dict:
        if not {*map(type, x)} <= {str}:
            return False
        values = x.values()
    kinds = {*map(type, values)}
    if len(kinds) == 1 and len(x) > tags.JSON_RUN and not kinds.isdisjoint(_RUNS):
        return False
    seen.add(id(x))
    if kinds <= _SCALARS:
        return True
    return kinds <= _JSON and all(
        id(one) not in seen and _is_json(one, seen) for one in values if type(one) in (dict, list)
    )


def _refused(kind: type, why: str) -> PayloadTypeError:
    return PayloadTypeError(
        f"the default codec does not support {kind.__module__}.{kind.__qualname__} ({why}); send plain data, "
        'or, to a call that takes codec=, pass codec="pickle" if you trust every rank'
    )


def _fields(tag: str) -> Callable[[type], tuple[str, ...]]:
    def fields(kind: type) -> tuple[str, ...]:
        try:
            return fields_of(kind, tag)
        except UnfitError as error:
            raise _refused(kind, str(error)) from None

    return fields


_ENUM_FIELDS, _TUPLE_FIELDS, _DATACLASS_FIELDS = map(_fields, ("enum", "namedtuple", "dataclass"))


def _int(to: _Encoder, x: int) -> None:
    count = (x.bit_length() + 8) >> 3
    to.parts.append(_BYTE[tags.INT])
    to.memory(x.to_bytes(count, "little", signed=True), count)


def _float(to: _Encoder, x: float) -> None:
    to.parts.append(_F64.pack(tags.FLOAT, x))


def _text(to: _Encoder, x: str) -> None:
    shared = len(x) > tags.SHARED_LENGTH
    if shared and to.again(x):
        return
    to.parts.append(_BYTE[tags.TEXT])
    to.text(x)
    if shared:
        to.remember(x)


def _bytes(to: _Encoder, x: bytes) -> None:
    shared = len(x) > tags.SHARED_LENGTH
    if shared and to.again(x):
        return
    to.parts.append(_BYTE[tags.BYTES])
    to.memory(x, len(x))
    if shared:
        to.remember(x)


def _container(
    tag: int, write: Callable[[_Encoder, Any], object], *, first: bool = True
) -> Callable[[_Encoder, Any], None]:
    """Return what writes values of one kind, each once: ``tag``, then its members by ``write``.

    ``first``: it is numbered before its members, as one of them may refer to it.
    """

    def write_once(to: _Encoder, x: object) -> None:
        if not to.again(x):
            if first:
                to.remember(x)
            to.parts.append(_BYTE[tag])
            write(to, x)
            if not first:
                to.remember(x)

    return write_once


def _defaultdict(to: _Encoder, x: collections.defaultdict[object, object]) -> None:
    if x.default_factory not in FACTORIES:
        known = ", ".join(kind.__name__ for kind in FACTORIES if kind is not None)
        raise _refused(type(x), f"its default_factory is none of {known}; send dict(x)")
    to.size(FACTORIES.index(x.default_factory))
    to.mapping(x)


def _namespace(to: _Encoder, x: argparse.Namespace) -> None:
    check_attributes(vars(x))
    to.mapping(vars(x))  # type: ignore[arg-type]  # keys are of any type for a mapping


def _deque(to: _Encoder, x: collections.deque[object]) -> None:
    to.value(x.maxlen)
    to.items(list(x))


def _parts(number: int, parts: Parts) -> Callable[[_Encoder, object], None]:
    head = bytes([tags.PARTS, number])

    def write(to: _Encoder, x: object) -> None:
        found = parts.split(x)
        if not parts.fit(found):
            raise _refused(type(x), "it contains more than Python's own numbers and strings")
        to.parts.append(head)
        to.items(found)

    return write


def _tensor(to: _Encoder, x: torch.Tensor) -> None:
    if to.again(x):
        return
    x, given = plain_tensor("the default codec", x), x
    if dtype_name(x.dtype) not in DTYPES_BY_NAME:
        raise PayloadTypeError(f"cannot encode a quantized tensor ({dtype_name(x.dtype)}), {DEQUANTIZED}")
    if x.layout is not torch.strided or x.device.type == "meta":
        raise PayloadTypeError(
            f"cannot encode a {x.dtype} tensor ({x.layout}) on {x.device}; pass a dense one"
        )
    data = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    to.parts.append(_BYTE[tags.TENSOR])
    to.text(dtype_name(x.dtype))
    to.items(tuple(x.shape))
    to.memory(raw(data).numpy().data if data.numel() else b"", data.nbytes)
    to.remember(given)


def _array(to: _Encoder, x: Any) -> None:
    if to.again(x):
        return
    scalar = isinstance(x, np.generic)
    array = np.ascontiguousarray(x)  # which widens a text dtype of no characters to one character
    to.parts.append(_BYTE[tags.SCALAR if scalar else tags.ARRAY])
    to.text(scalar_dtype(x.dtype.str))
    to.items(tuple(x.shape))
    to.memory(array.reshape(-1).view(np.uint8).data if x.nbytes else b"", x.nbytes)
    to.remember(x)


def _enum(to: _Encoder, x: enum.Enum) -> None:
    if x.name not in type(x).__members__:
        raise _refused(type(x), f"{x!r} is not a single member; send its value")
    to.parts.append(_BYTE[tags.ENUM])
    to.class_name(x, "enum", _ENUM_FIELDS)
    to.text(x.name)


def _dataclass(to: _Encoder, x: Any) -> None:
    if not to.again(x):
        to.parts.append(_BYTE[tags.DATACLASS])
        names = to.class_name(x, "dataclass", _DATACLASS_FIELDS)
        if others := beside_fields(x, names):
            raise _refused(type(x), f"its attributes that are not fields would be lost: {', '.join(others)}")
        to.items([getattr(x, name) for name in names])
        to.remember(x)


def _namedtuple(to: _Encoder, x: Any) -> None:
    if not to.again(x):
        to.parts.append(_BYTE[tags.NAMEDTUPLE])
        to.class_name(x, "namedtuple", _TUPLE_FIELDS)
        to.items(tuple(x))
        to.remember(x)


_WRITE: dict[type, Callable[[_Encoder, Any], None]] = {
    type(None): lambda to, _: to.parts.append(_BYTE[tags.NONE]),
    bool: lambda to, x: to.parts.append(_BYTE[tags.TRUE if x else tags.FALSE]),
    int: _int,
    float: _float,
    str: _text,
    bytes: _bytes,
    bytearray: _container(tags.BYTEARRAY, lambda to, x: to.memory(x, len(x))),
    list: _container(tags.LIST, _Encoder.items),
    tuple: _container(tags.TUPLE, _Encoder.items, first=False),
    dict: _container(tags.DICT, _Encoder.mapping),
    collections.OrderedDict: _container(tags.ORDERED, _Encoder.mapping),
    collections.Counter: _container(tags.COUNTER, _Encoder.mapping),
    collections.defaultdict: _container(tags.DEFAULTDICT, _defaultdict),
    argparse.Namespace: _container(tags.NAMESPACE, _namespace),
    collections.deque: _container(tags.DEQUE, _deque),
    set: _container(tags.SET, _Encoder.keys),
    frozenset: _container(tags.FROZENSET, _Encoder.keys, first=False),
    **{parts.kind: _parts(number, parts) for number, parts in PARTS.items()},
}


def _other(to: _Encoder, x: Any) -> None:
    """Write a value that is not found in ``_WRITE`` by its exact type."""
    if isinstance(x, torch.Tensor):
        _tensor(to, x)
    elif isinstance(x, enum.Enum):
        _enum(to, x)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        _dataclass(to, x)
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        _namedtuple(to, x)
    elif (isinstance(x, np.generic) or type(x) in _ARRAYS) and x.dtype.kind in "biufcSUMm":
        _array(to, x)
    else:
        raise _refused(x if isinstance(x, type) else type(x), "it decodes without running code")
