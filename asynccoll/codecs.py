"""How arbitrary objects become bytes.

The default codec decodes without running anybody's code: it is pickle's own machinery, in C, with an
unpickler that knows a short list of harmless types and nothing else (the idea of torch's
``weights_only``). ``codec="pickle"`` takes any picklable object, and with it the risk that decoding
runs code which the sender chose.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asynccoll.errors import CollectiveError, InvalidArgumentError, PayloadTypeError

__all__ = ["Codec", "get_codec"]


@dataclass(frozen=True, slots=True)
class Codec:
    """A named pair of functions. Pass one as ``codec=`` to use your own (say, msgspec or cloudpickle)."""

    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


#: Types in C, which nobody can change: a pickle may call its types and set attributes on them.
_HARMLESS: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        complex,
        set,
        frozenset,
        bytearray,
        range,
        slice,
        collections.OrderedDict,
        collections.deque,
        dt.date,
        dt.time,
        dt.datetime,
        dt.timedelta,
        dt.timezone,
        decimal.Decimal,
        torch.Size,
        torch.device,
    )
}
_TYPES = frozenset(_HARMLESS.values())
_PATHS = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}
#: Types in Python, which a pickle never gets to see: they travel as what they are made of.
_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    collections.Counter: lambda counter: ("counter", dict(counter)),
    fractions.Fraction: lambda value: ("fraction", value.numerator, value.denominator),
    uuid.UUID: lambda value: ("uuid", value.int),
    **dict.fromkeys(_PATHS.values(), lambda path: ("path", type(path).__name__, str(path))),
}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _SafePickler(pickle.Pickler):
    """Refuses what the safe unpickler would, before anything is sent; tensors go as plain bytes.

    Plain data stays within the pickler, which is C: only what it does not know itself is asked about here.
    """

    def reducer_override(self, obj: Any) -> Any:
        if obj is _REBUILD:
            return "_REBUILD"
        parts = self._parts(obj)
        if parts is not None:
            return _REBUILD, parts
        kind = obj if isinstance(obj, type) else type(obj)
        if kind in _TYPES:
            return NotImplemented
        raise PayloadTypeError(
            f"the default codec does not carry {kind.__module__}.{kind.__qualname__} (it decodes without "
            'running code); send plain data, or pass codec="pickle" if you trust every rank'
        )

    @staticmethod
    def _parts(obj: Any) -> tuple[Any, ...] | None:
        """What a value is made of, as ``_REBUILD`` takes it; None for what pickle itself carries."""
        parts = _PARTS.get(type(obj))
        if parts is not None:
            return parts(obj)
        if isinstance(obj, torch.Tensor):
            return _from_tensor(obj)
        if isinstance(obj, torch.dtype):
            return ("dtype", str(obj))
        if isinstance(obj, enum.Enum):
            return ("enum", *_name_of(obj), obj.name)
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            values = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
            return ("dataclass", *_name_of(obj), values)
        if isinstance(obj, tuple) and hasattr(obj, "_fields"):
            return ("namedtuple", *_name_of(obj), tuple(obj))
        if isinstance(obj, (np.ndarray, np.generic)) and obj.dtype.kind in "biufcSUMm":
            array = np.ascontiguousarray(obj)
            raw = pickle.PickleBuffer(array.reshape(-1).view(np.uint8).data) if array.nbytes else b""
            return ("numpy", obj.dtype.str, obj.shape, raw, isinstance(obj, np.generic))
        return None


def _name_of(obj: Any) -> tuple[str, str]:
    return type(obj).__module__, type(obj).__qualname__


def _known_type(module: str, name: str, fits: Callable[[Any], bool]) -> Any:
    """A type that this process has imported already: nothing is imported, let alone run, for a sender."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and fits(found)):
        raise CollectiveError(
            f"an object of type {module}.{name} came, which this rank has not imported (or which is not "
            "plain data here); import it on every rank"
        )
    return found


def _to_dataclass(module: str, name: str, values: dict[str, Any]) -> Any:
    made = object.__new__(_known_type(module, name, dataclasses.is_dataclass))
    for field, value in values.items():
        object.__setattr__(made, field, value)
    return made


def _to_namedtuple(module: str, name: str, values: tuple[Any, ...]) -> Any:
    fits = lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields")  # noqa: E731
    return tuple.__new__(_known_type(module, name, fits), values)


def _to_enum(module: str, name: str, member: str) -> Any:
    return _known_type(module, name, lambda kind: issubclass(kind, enum.Enum))[member]


def _from_tensor(x: torch.Tensor) -> tuple[Any, ...]:
    if x.layout is not torch.strided or x.device.type == "meta":
        raise PayloadTypeError(f"cannot encode a {x.layout} tensor on {x.device}; pass a dense one")
    data = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A buffer is written as it is; it comes out as bytes, or as a bytearray where it is writable here.
    raw = pickle.PickleBuffer(data.reshape(-1).view(torch.uint8).numpy().data) if data.numel() else b""
    return ("tensor", str(x.dtype), tuple(x.shape), raw)


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, "_REBUILD"):
            return _REBUILD
        found = _HARMLESS.get((module, name))
        if found is None:
            raise CollectiveError(
                f"an object refers to {module}.{name}, which the default codec does not decode; pass "
                'codec="pickle" on every rank if you trust all of them'
            )
        return found


def _to_tensor(dtype: str, shape: tuple[int, ...], raw: bytes | bytearray) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(_writable(raw), dtype=torch.uint8).view(_DTYPES[dtype]).view(shape)


def _writable(raw: bytes | bytearray) -> memoryview:
    # The view pins it: a stream may go on to extend a bytearray of its own, and torch pins nothing.
    return memoryview(raw if isinstance(raw, bytearray) else bytearray(raw))


def _to_numpy(dtype: str, shape: tuple[int, ...], raw: bytes | bytearray, scalar: bool) -> Any:
    array = np.frombuffer(_writable(raw), dtype=np.dtype(dtype)).reshape(shape)
    return array[()] if scalar else array


_LOAD: dict[str, Callable[..., Any]] = {
    "tensor": _to_tensor,
    "numpy": _to_numpy,
    "dtype": lambda name: _DTYPES[name],
    "enum": _to_enum,
    "dataclass": _to_dataclass,
    "namedtuple": _to_namedtuple,
    "counter": collections.Counter,
    "fraction": fractions.Fraction,
    "uuid": lambda value: uuid.UUID(int=value),
    "path": lambda name, text: _PATHS[name](text),
}


class _Rebuild:
    """The one function of ours that a pickle may call. It has no attributes that a pickle could set."""

    __slots__ = ()

    def __call__(self, kind: str, *parts: Any) -> Any:
        return _LOAD[kind](*parts)


_REBUILD = _Rebuild()


def _encode_safe(obj: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _SafePickler(buffer, protocol=5).dump(obj)
    except (pickle.PicklingError, AttributeError, RecursionError) as error:
        raise PayloadTypeError(f"cannot encode a {type(obj).__name__}: {error}") from error
    return buffer.getvalue()


def _decode_safe(raw: bytes) -> Any:
    try:
        return _SafeUnpickler(io.BytesIO(raw)).load()
    except CollectiveError:
        raise
    except Exception as error:  # whatever bytes that nobody encoded here may lead to
        raise CollectiveError(
            f"what came is no object of the default codec ({type(error).__name__}: {error}); pass the same "
            "codec= on every rank"
        ) from error


def _encode_pickle(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise PayloadTypeError(f"cannot pickle a {type(obj).__name__}: {error}") from error


SAFE = Codec("safe", _encode_safe, _decode_safe)
PICKLE = Codec("pickle", _encode_pickle, pickle.loads)
_CODECS = {codec.name: codec for codec in (SAFE, PICKLE)}


def get_codec(codec: Any) -> Codec:
    """The codec for what a user passes as ``codec=``: None, a name, or a ``Codec``."""
    if codec is None:
        return SAFE
    if isinstance(codec, Codec):
        return codec
    if isinstance(codec, str) and codec.lower() in _CODECS:
        return _CODECS[codec.lower()]
    raise InvalidArgumentError(
        f"unknown codec {codec!r}; expected None (the safe default), {', '.join(map(repr, _CODECS))} or "
        "an asynccoll.Codec"
    )
