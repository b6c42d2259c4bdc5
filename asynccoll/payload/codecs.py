"""How arbitrary objects become bytes.

The default codec has its own format (``safecodec``), which is decoded without running user code.
``codec="pickle"`` takes any picklable object, at the risk that decoding runs code that the sender chose.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass

from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.host.misfits import check, check_function
from asynccoll.payload import safecodec


@dataclass(frozen=True, slots=True)
class Codec:
    """A named pair of functions. Pass one as ``codec=`` to use your own (say, msgspec or cloudpickle)."""

    name: str
    encode: Callable[[object], bytes]
    decode: Callable[[bytes], object]

    def __post_init__(self) -> None:
        check("the name of a Codec", self.name, str, "a string")
        for what in ("encode", "decode"):
            check_function(f"{what} of a Codec", getattr(self, what))


def _encode_pickle(obj: object) -> bytes:
    try:
        return pickle.dumps(obj, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise PayloadTypeError(f"cannot pickle a {type(obj).__name__}: {error}") from error


SAFE = Codec("safe", safecodec.encode, safecodec.decode)
PICKLE = Codec("pickle", _encode_pickle, pickle.loads)
_CODECS = {codec.name: codec for codec in (SAFE, PICKLE)}


def get_codec(codec: Codec | str | None) -> Codec:
    """Return the ``Codec`` for the ``codec=`` of a user: None (the default), a name, or a ``Codec``."""
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
