"""The kinds of values that are sent without a codec, and how each becomes bytes and back.

On the wire a kind is the index of its row in ``KINDS``, so a new kind goes to the end.
"""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asynccoll.errors import InvalidArgumentError

_INT64 = struct.Struct("<q")
_FLOAT64 = struct.Struct("<d")
_COMPLEX128 = struct.Struct("<dd")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: its types, and how its values become bytes and back."""

    types: tuple[type, ...]
    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], object]
    #: how many bytes ``pack`` makes of a number; 0 if the kind is not a number
    size: int = 0


def _pack_int(x: int) -> bytes:
    try:
        return _INT64.pack(x)
    except struct.error:
        raise InvalidArgumentError(
            f"an int of {x.bit_length() + 1} bits does not fit into 64; send it by an *_object function"
        ) from None


#: A value belongs to the first kind whose types it is an instance of. So bool is before int.
KINDS = (
    Kind((bool,), lambda x: bytes([x]), lambda raw: bool(raw[0]), 1),
    Kind((int,), _pack_int, lambda raw: _INT64.unpack(raw)[0], 8),
    Kind((float,), _FLOAT64.pack, lambda raw: _FLOAT64.unpack(raw)[0], 8),
    Kind(
        (complex,),
        lambda x: _COMPLEX128.pack(x.real, x.imag),
        lambda raw: complex(*_COMPLEX128.unpack(raw)),
        16,
    ),
    Kind(
        (str,), lambda x: x.encode("utf-8", "surrogatepass"), lambda raw: raw.decode("utf-8", "surrogatepass")
    ),
    Kind(
        (pathlib.PurePath,),
        lambda x: str(x).encode("utf-8", "surrogatepass"),
        lambda raw: pathlib.Path(raw.decode("utf-8", "surrogatepass")),
    ),
    Kind((type(None),), lambda _: b"", lambda _: None),
)
#: The kinds of messages that are not in the table are numbered from the top down.
TENSOR, OBJECT, VALUES = 255, 254, 253

_BY_TYPE = {kind.types[0]: code for code, kind in enumerate(KINDS)}
_VALUES = tuple(each for kind in KINDS for each in kind.types if each is not type(None))
_NUMBERS = tuple(each for kind in KINDS if kind.size for each in kind.types)


def is_value(x: object) -> bool:
    """Whether ``x`` is a number, a string or a path."""
    return isinstance(x, _VALUES)


def is_number(x: object) -> bool:
    """Whether ``x`` is a Python number (bool included)."""
    return isinstance(x, _NUMBERS)


def kind_of(x: object) -> int | None:
    """Return the index of the kind in ``KINDS`` that ``x`` is sent as, or None if none fits."""
    code = _BY_TYPE.get(type(x))
    if code is None:
        code = next((code for code, kind in enumerate(KINDS) if isinstance(x, kind.types)), None)
    return code


def kind_name(x: object) -> str:
    """Return the name of the type that ``x``, a number, string or path, is sent as."""
    code = kind_of(x)
    assert code is not None, f"{x!r} was checked to be a value"
    return KINDS[code].types[0].__name__


#: The length of a row that can hold any number: the byte of its kind, and the longest packed number.
ROW_BYTES = 1 + max(kind.size for kind in KINDS)


def number_row(x: complex) -> bytes:
    """Return the number ``x`` as ``ROW_BYTES`` bytes: its kind, its packed value, and zeros."""
    code = kind_of(x)
    assert code is not None and KINDS[code].size, f"{x!r} was checked to be a number"
    return (bytes((code,)) + KINDS[code].pack(x)).ljust(ROW_BYTES, b"\0")


def numbers_of(rows: bytearray, first: int, step: int) -> list[object]:
    """Return every ``step``-th of the numbers in joined rows of ``number_row``, from the ``first`` on."""
    starts = range(first * ROW_BYTES, len(rows), step * ROW_BYTES)
    kinds = (KINDS[rows[start]] for start in starts)
    return [
        kind.unpack(bytes(rows[start + 1 : start + 1 + kind.size]))
        for start, kind in zip(starts, kinds, strict=True)
    ]
