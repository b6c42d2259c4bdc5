"""Decode untrusted bytes into plain data: check every length and type, and call nothing that they name.

See the package's docstring for what a message cannot do.
"""

from __future__ import annotations

import argparse
import collections
import json
import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from asynccoll.errors import CollectiveError
from asynccoll.payload.safecodec import tags
from asynccoll.payload.safecodec.types import (
    FACTORIES,
    PARTS,
    UnfitError,
    check_attributes,
    class_named,
    fields_of,
    plain_hash,
    scalar_dtype,
)
from asynccoll.plan.spec import DTYPES_BY_NAME

_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")


def decode(raw: bytes) -> object:
    """Return the object that ``encode`` turned into ``raw``; raise ``CollectiveError`` for other bytes."""
    try:
        decoder = _Decoder(raw)
        found = decoder.value()
        decoder.finish()
        return found
    except CollectiveError:
        raise
    except Exception as error:  # bytes that ``encode`` did not write may raise anything in the readers
        raise CollectiveError(
            f"the message is not an object of the default codec ({type(error).__name__}: {error}); pass the "
            "same codec= on every rank"
        ) from error


class _Decoder:
    __slots__ = ("_at", "_depth", "_end", "_key_depth", "_keys", "_names", "_raw", "_seen")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0
        self._end = len(raw)
        self._seen: list[object] = []
        self._keys: list[Sequence[str]] = []
        self._names: list[tuple[str, Any]] = []
        self._depth = 0
        self._key_depth = 0

    def value(self) -> Any:
        tag = self._raw[self._at]
        self._at += 1
        return _READ[tag](self)

    def finish(self) -> None:
        if self._at != self._end:
            raise UnfitError(f"{self._end - self._at} bytes are left over")

    # What values are made of

    def size(self) -> int:
        count = self._raw[self._at]
        self._at += 1
        if count == tags.LONG:
            (count,) = _U64.unpack_from(self._raw, self._at)
            self._at += 8
        return count

    def count(self, size_bytes: int = 1) -> int:
        """Read a count of things that take at least ``size_bytes`` each; refuse more than can follow."""
        count = self.size()
        if count * size_bytes > self._end - self._at:
            raise UnfitError(f"{count} items are announced, but {self._end - self._at} bytes are left")
        return count

    def skip(self, count: int) -> int:
        """Skip the next ``count`` bytes, and return where they begin."""
        at = self._at
        if count > self._end - at:
            raise UnfitError(f"{count} bytes are announced, but {self._end - at} are left")
        self._at = at + count
        return at

    def memory(self) -> bytes:
        at = self.skip(self.size())
        return self._raw[at : self._at]

    def writable(self, size_bytes: int) -> bytearray:
        """Read a block of bytes, which must have ``size_bytes``, into new memory."""
        at = self.skip(self.size())
        if self._at - at != size_bytes:
            raise UnfitError(f"{self._at - at} bytes instead of {size_bytes}")
        return bytearray(memoryview(self._raw)[at : self._at])

    def text(self) -> str:
        return self.memory().decode("utf-8", "surrogatepass")

    def remember(self, x: object) -> None:
        if not self._key_depth:
            self._seen.append(x)

    def again(self) -> object:
        number = self.size()
        if self._key_depth:
            raise UnfitError("a key refers to another value")
        return self._seen[number]

    def items(self) -> Sequence[Any]:
        count = self.count()
        kind = self._raw[self._at]
        self._at += 1
        if kind != tags.MIXED:
            return _RUNS[kind](self, count)
        self._depth += 1
        if self._depth > tags.MAX_DEPTH:
            raise UnfitError(f"containers are nested more than {tags.MAX_DEPTH} deep")
        raw, found = self._raw, []
        for _ in range(count):
            tag = raw[self._at]
            self._at += 1
            found.append(_READ[tag](self))
        self._depth -= 1
        return found

    def floats(self, count: int) -> Sequence[float]:
        at = self.skip(8 * count)
        return struct.unpack_from(f"<{count}d", self._raw, at)

    def ints(self, count: int) -> Sequence[int]:
        at = self.skip(8 * count)
        return struct.unpack_from(f"<{count}q", self._raw, at)

    def bools(self, count: int) -> Sequence[bool]:
        at = self.skip(count)
        return list(map(bool, self._raw[at : self._at]))

    def texts(self, count: int) -> Sequence[str]:
        found = json.loads(self.text())
        if type(found) is not list or len(found) != count or {*map(type, found)} - {str}:
            raise UnfitError(f"expected {count} strings")
        return found

    def keys(self) -> Sequence[Any]:
        self._key_depth += 1
        found = self.items()
        self._key_depth -= 1
        return found

    def mapping(self) -> zip[tuple[object, object]]:
        kind = self.size()
        if kind == tags.SAME_KEYS:
            keys = self._keys[self.size()]
        else:
            keys = self.keys()
            if kind == tags.NEW_KEYS:
                if set(map(type, keys)) != {str} or self._key_depth:
                    raise UnfitError("keys that are not strings")
                self._keys.append(keys)
        values = self.items()
        return zip(keys, values, strict=True)

    def ints_only(self) -> tuple[int, ...]:
        found = tuple(self.items())
        if not all(type(x) is int and x >= 0 for x in found):
            raise UnfitError("an invalid shape")  # do not format what was received: that runs its __repr__
        return found

    def known_class(self, tag: str) -> Any:
        number = self.size()
        if number < len(self._names):
            said, kind = self._names[number]
            if said != tag:
                raise UnfitError(f"a {said} is used as a {tag}")
        else:
            kind = self._new_class(tag)
            self._names.append((tag, kind))
        if self._key_depth and not plain_hash(kind, tag):
            raise UnfitError(f"a {kind.__qualname__} as a key would run its own __hash__ or __eq__")
        return kind

    def _new_class(self, tag: str) -> object:
        module, name = self.text(), self.text()
        names = tuple(self.items())
        if any(type(field) is not str for field in names):
            raise UnfitError("names of fields that are not strings")
        try:
            kind = class_named(module, name)
            fields = fields_of(kind, tag)
            if names != fields:
                raise UnfitError(f"its fields are {', '.join(names)} there and {', '.join(fields)} here")
        except UnfitError as error:
            raise CollectiveError(f"received an object of type {module}.{name}, but {error}") from None
        return kind


def _int(of: _Decoder) -> int:
    return int.from_bytes(of.memory(), "little", signed=True)


def _float(of: _Decoder) -> float:
    at = of.skip(8)
    found: float = _F64.unpack_from(of._raw, at)[0]
    return found


def _text(of: _Decoder) -> str:
    found = of.text()
    if len(found) > tags.SHARED_LENGTH:
        of.remember(found)
    return found


def _bytes(of: _Decoder) -> bytes:
    found = of.memory()
    if len(found) > tags.SHARED_LENGTH:
        of.remember(found)
    return found


def _filled(
    make: Callable[[], Any], fill: Callable[[Any, Any], object], members: Callable[[_Decoder], object]
) -> Callable[[_Decoder], object]:
    """Return what reads a container that is numbered before its members: one of them may refer to it."""

    def read(of: _Decoder) -> object:
        made = make()
        of.remember(made)
        fill(made, members(of))
        return made

    return read


def _built(
    make: Callable[[Any], object], members: Callable[[_Decoder], object]
) -> Callable[[_Decoder], object]:
    """Return what reads a value that is made of its members."""

    def read(of: _Decoder) -> object:
        made = make(members(of))
        of.remember(made)
        return made

    return read


def _defaultdict(of: _Decoder) -> object:
    made: collections.defaultdict[object, object] = collections.defaultdict(FACTORIES[of.size()])
    of.remember(made)
    made.update(of.mapping())
    return made


def _namespace(of: _Decoder) -> argparse.Namespace:
    made = argparse.Namespace()
    of.remember(made)
    attributes = dict(of.mapping())
    check_attributes(attributes)
    vars(made).update(attributes)  # type: ignore[arg-type]  # checked to be strings
    return made


def _deque(of: _Decoder) -> collections.deque[object]:
    maxlen = of.value()
    if not (maxlen is None or type(maxlen) is int):
        raise UnfitError("a deque's maxlen that is not an int")
    made: collections.deque[object] = collections.deque(maxlen=maxlen)
    of.remember(made)
    made.extend(of.items())
    return made


def _parts(of: _Decoder) -> object:
    parts = PARTS[of.size()]
    found = of.items()
    if not parts.fit(found):
        raise UnfitError(f"parts of a {parts.kind.__name__} of other types")
    return parts.join(*found)


def _tensor(of: _Decoder) -> torch.Tensor:
    dtype, shape = DTYPES_BY_NAME[of.text()], of.ints_only()
    raw = of.writable(prod(shape) * dtype.itemsize)
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else None
    made = torch.empty(shape, dtype=dtype, device="cpu") if flat is None else flat.view(dtype).view(shape)
    of.remember(made)
    return made


def _array(of: _Decoder) -> object:
    dtype, shape = np.dtype(scalar_dtype(of.text())), of.ints_only()
    raw = of.writable(prod(shape) * dtype.itemsize)
    # Not np.empty: it widens a text dtype of no characters to one character, and so would allocate memory for
    # as many elements as the message claims.
    made = np.frombuffer(raw, dtype=dtype).reshape(shape) if raw else np.ndarray(shape, dtype)
    of.remember(made)
    return made


def _scalar(of: _Decoder) -> object:
    dtype, shape = np.dtype(scalar_dtype(of.text())), of.ints_only()
    if shape:
        raise UnfitError("a scalar with a shape")
    raw = of.writable(dtype.itemsize)
    made: Any = np.frombuffer(raw, dtype=dtype)[0] if raw else dtype.type()
    if dtype.kind == "U":  # NumPy drops trailing zeros
        made = np.str_(made.ljust(len(raw) // 4, "\0"))
    elif dtype.kind == "S":
        made = np.bytes_(made.ljust(len(raw), b"\0"))
    of.remember(made)
    return made


def _enum(of: _Decoder) -> object:
    kind = of.known_class("enum")
    return type.__getattribute__(kind, "_member_map_")[of.text()]


def _dataclass(of: _Decoder) -> object:
    kind = of.known_class("dataclass")
    names, values = fields_of(kind, "dataclass"), of.items()
    if len(names) != len(values):
        raise UnfitError(f"{len(values)} values for the {len(names)} fields of {kind.__qualname__}")
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # runs no code: ``fields_of`` has checked each field
    of.remember(made)
    return made


def _namedtuple(of: _Decoder) -> object:
    kind = of.known_class("namedtuple")
    values = of.items()
    if len(values) != len(fields_of(kind, "namedtuple")):
        raise UnfitError(f"{len(values)} values for a {kind.__qualname__}")
    made = tuple.__new__(kind, values)
    of.remember(made)
    return made


def _json(of: _Decoder) -> object:
    return json.loads(of.text())


def _unknown(of: _Decoder) -> object:
    raise UnfitError(f"no value begins with {of._raw[of._at - 1]}")


_BY_TAG: dict[int, Callable[[_Decoder], object]] = {
    tags.NONE: lambda _: None,
    tags.TRUE: lambda _: True,
    tags.FALSE: lambda _: False,
    tags.INT: _int,
    tags.FLOAT: _float,
    tags.TEXT: _text,
    tags.BYTES: _bytes,
    tags.AGAIN: _Decoder.again,
    tags.LIST: _filled(list, list.extend, _Decoder.items),
    tags.TUPLE: _built(tuple, _Decoder.items),
    tags.DICT: _filled(dict, dict.update, _Decoder.mapping),
    tags.SET: _filled(set, set.update, _Decoder.keys),
    tags.FROZENSET: _built(frozenset, _Decoder.keys),
    tags.BYTEARRAY: _built(bytearray, _Decoder.memory),
    tags.ORDERED: _filled(collections.OrderedDict, collections.OrderedDict.update, _Decoder.mapping),
    tags.COUNTER: _filled(collections.Counter, dict.update, _Decoder.mapping),
    tags.DEQUE: _deque,
    tags.DEFAULTDICT: _defaultdict,
    tags.NAMESPACE: _namespace,
    tags.TENSOR: _tensor,
    tags.ARRAY: _array,
    tags.SCALAR: _scalar,
    tags.ENUM: _enum,
    tags.DATACLASS: _dataclass,
    tags.NAMEDTUPLE: _namedtuple,
    tags.PARTS: _parts,
    tags.JSON: _json,
}
_READ = [_BY_TAG.get(tag, _unknown) for tag in range(256)]
_RUNS: dict[int, Callable[[_Decoder, int], Sequence[object]]] = {
    tags.FLOATS: _Decoder.floats,
    tags.INTS: _Decoder.ints,
    tags.TEXTS: _Decoder.texts,
    tags.BOOLS: _Decoder.bools,
}
