"""The types other than containers that the default codec supports: their parts, and how they are rebuilt.

Nothing here may run a user's code: classes are looked up without an import or an attribute hook, and their
objects are built without their ``__new__``, ``__init__`` or ``__setattr__``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch


class UnfitError(Exception):
    """Raised for an object, or bytes, that the codec cannot handle; the text says why."""


# Values that consist of a few scalars


class Parts(NamedTuple):
    """How values of type ``kind`` become a few scalars (``split``), and are rebuilt from them (``join``).

    ``takes`` has the permitted types of each scalar, or is one type for any number of scalars.
    """

    kind: type
    split: Callable[[Any], tuple[object, ...]]
    join: Callable[..., object]
    takes: tuple[tuple[type, ...], ...] | type

    def fit(self, found: Sequence[object]) -> bool:
        """Whether ``found`` are as many scalars as a value consists of, and of the permitted types."""
        takes = self.takes if isinstance(self.takes, tuple) else ((self.takes,),) * len(found)
        return len(found) == len(takes) and all(
            type(x) in kinds for x, kinds in zip(found, takes, strict=True)
        )


_NO_TYPE = type(None)
_INT, _TEXT = (int,), (str,)
_ANY = (int, float, str, bytes, bool, _NO_TYPE)
_ZONE = ((int, _NO_TYPE), (int, _NO_TYPE), (int, _NO_TYPE), (str, _NO_TYPE))
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _split_zone(zone: object) -> tuple[object, ...]:
    if zone is None:
        return (None, None, None, None)
    if type(zone) is not dt.timezone:
        raise UnfitError("its time zone is not a datetime.timezone; send x.astimezone(datetime.timezone.utc)")
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]  # what pickle and copy use
    return (offset.days, offset.seconds, offset.microseconds, name[0] if name else None)


def _zone(days: int | None, seconds: int, microseconds: int, name: str | None) -> dt.timezone | None:
    if days is None:
        return None
    offset = dt.timedelta(days, seconds, microseconds)
    if name is not None:
        return dt.timezone(offset, name)
    return dt.timezone(offset) if offset else dt.timezone.utc


def _path_parts(kind: Any) -> Parts:
    return Parts(kind, lambda path: (str(path),), kind, (_TEXT,))


_ALL = (
    Parts(complex, lambda z: (z.real, z.imag), complex, ((float,), (float,))),
    Parts(range, lambda r: (r.start, r.stop, r.step), range, (_INT, _INT, _INT)),
    Parts(slice, lambda s: (s.start, s.stop, s.step), slice, (_ANY, _ANY, _ANY)),
    Parts(dt.date, lambda d: (d.year, d.month, d.day), dt.date, (_INT, _INT, _INT)),
    Parts(
        dt.time,
        lambda t: (t.hour, t.minute, t.second, t.microsecond, t.fold, *_split_zone(t.tzinfo)),
        lambda h, m, s, us, fold, *zone: dt.time(h, m, s, us, _zone(*zone), fold=fold),
        (_INT,) * 5 + _ZONE,
    ),
    Parts(
        dt.datetime,
        lambda t: (*t.timetuple()[:6], t.microsecond, t.fold, *_split_zone(t.tzinfo)),
        lambda y, mo, d, h, m, s, us, fold, *zone: dt.datetime(
            y, mo, d, h, m, s, us, _zone(*zone), fold=fold
        ),
        (_INT,) * 8 + _ZONE,
    ),
    Parts(dt.timedelta, lambda d: (d.days, d.seconds, d.microseconds), dt.timedelta, (_INT, _INT, _INT)),
    Parts(dt.timezone, _split_zone, _zone, (_INT, _INT, _INT, (str, _NO_TYPE))),
    Parts(decimal.Decimal, lambda d: (str(d),), decimal.Decimal, (_TEXT,)),
    Parts(fractions.Fraction, lambda f: (f.numerator, f.denominator), fractions.Fraction, (_INT, _INT)),
    Parts(uuid.UUID, lambda u: (u.int,), lambda value: uuid.UUID(int=value), (_INT,)),
    Parts(torch.Size, tuple, lambda *sizes: torch.Size(sizes), int),
    Parts(torch.device, lambda device: (str(device),), torch.device, (_TEXT,)),
    Parts(torch.dtype, lambda dtype: (str(dtype),), _DTYPES.__getitem__, (_TEXT,)),
    *map(
        _path_parts,
        (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath),
    ),
)
#: By the number that represents the type in a message.
PARTS: dict[int, Parts] = dict(enumerate(_ALL))

#: The default factories that a defaultdict may have; a message has the index. None of them is a user's code.
FACTORIES: tuple[type | None, ...] = (None, list, dict, set, int, float, str)


def check_attributes(names: Iterable[object]) -> None:
    """Refuse attributes of a Namespace that Python, ``copy`` or its ``repr`` would call."""
    for name in names:
        if type(name) is not str:
            raise UnfitError("an attribute whose name is not a string")
        if name.startswith("__") or hasattr(argparse.Namespace, name):
            raise UnfitError(f"its attribute {name} hides a method")


_SCALAR_DTYPE = re.compile(r"[<>|=]?([biufc]\d{1,2}|[SU]\d{1,12}|[Mm]8(\[\d{0,6}[A-Za-zμ]{1,7}\])?)")


def scalar_dtype(text: str) -> str:
    """Return ``text`` if it names a NumPy dtype of numbers, texts or dates; refuse any other."""
    if not _SCALAR_DTYPE.fullmatch(text):
        raise UnfitError(f"{text!r} is not a dtype of plain elements")
    return text


# Classes of users: dataclasses, named tuples, enums


def class_named(module: str, name: str) -> Any:
    """Return the class with this name. It must be imported already: a message never causes an import."""
    found: object = sys.modules.get(module)
    try:
        for part in name.split("."):
            found = (
                object.__getattribute__(found, "__dict__")[part]
                if not isinstance(found, type)
                else (type.__getattribute__(found, "__dict__")[part])
            )
    except (AttributeError, KeyError):
        found = None
    if not isinstance(found, type):
        raise UnfitError(
            "this rank has not imported it; import it (or define it at the top of a module) on every rank"
        )
    return found


def _from_class(kind: type, name: str) -> object:
    """Return the attribute ``name`` of the class or its bases, or None, without invoking descriptors."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


@lru_cache(maxsize=512)
def fields_of(kind: Any, tag: str) -> tuple[str, ...]:
    """Return the field names of a class that is sent as ``tag``; raise ``UnfitError`` if it cannot be."""
    if _from_class(kind, "__del__") is not None:
        raise UnfitError("it has a __del__ that would run where it is decoded")
    if tag == "enum":
        if enum.Enum not in kind.__mro__:
            raise UnfitError("it is not an enum here")
        return ()
    if tag == "namedtuple":
        fields = _from_class(kind, "_fields")
        if tuple not in kind.__mro__ or not isinstance(fields, tuple):
            raise UnfitError("it is not a named tuple here")
        return fields
    return _dataclass_fields(kind)


def _dataclass_fields(kind: type) -> tuple[str, ...]:
    if _from_class(kind, "__dataclass_fields__") is None:
        raise UnfitError("it is not a dataclass here")
    try:
        object.__new__(kind)
    except TypeError as error:
        raise UnfitError(f"it cannot be built from its fields alone: {error}") from None
    names = tuple(field.name for field in dataclasses.fields(kind))
    has_dict = any("__dict__" in vars(base) for base in kind.__mro__)
    for name in names:
        found = _from_class(kind, name)
        slot = isinstance(found, types.MemberDescriptorType)
        if not slot and (hasattr(type(found), "__set__") or not has_dict):
            raise UnfitError(f"its field {name} is a {type(found).__name__}, which runs code when it is set")
    return names


@lru_cache(maxsize=512)
def plain_hash(kind: Any, tag: str) -> bool:
    """Whether hashing and comparing objects of ``kind`` runs no code except Python's own.

    That is the code of ``object`` and ``tuple``, and what ``dataclass`` generated.
    """
    if tag == "enum":
        return True  # decoding returns a member that exists already, and builds none
    if _from_class(kind, "__getattribute__") is not object.__getattribute__:
        return tag == "namedtuple" and _plain_tuple(kind)
    if tag == "namedtuple":
        return _plain_tuple(kind)
    made = [_from_class(kind, name) for name in ("__hash__", "__eq__")]
    return all(
        found in (object.__hash__, object.__eq__)
        or getattr(getattr(found, "__code__", None), "co_filename", None) == "<string>"  # dataclass's own
        for found in made
    )


def _plain_tuple(kind: type) -> bool:
    return (_from_class(kind, "__hash__"), _from_class(kind, "__eq__")) == (tuple.__hash__, tuple.__eq__)
