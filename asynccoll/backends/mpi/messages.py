"""What goes ahead of each message between two ranks: what it is, or why there is none.

MPI takes bytes of another dtype without a word, and a message that is too short, too; and it has no way to
say that a send was refused. So a small message goes first, with the same tag: MPI keeps their order.
"""

from __future__ import annotations

import struct

import torch
from mpi4py import MPI

from asynccoll.backends.api import DTYPES_BY_NAME, encoded, unlike
from asynccoll.backends.mpi.completion import Many
from asynccoll.errors import PeerRefusedError

__all__ = ["Received", "header", "refusal", "room"]

#: The dtype, the number of elements, and how much text follows, as a refusal has.
_HEADER = struct.Struct("<BQH")
#: In place of a dtype: the text says why there is no message.
_REFUSED = 255
#: In place of a dtype: nothing came.
_UNSAID = 254
_ROOM_BYTES = 1024
_DTYPES = [DTYPES_BY_NAME[name] for name in sorted(DTYPES_BY_NAME)]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def header(x: torch.Tensor) -> bytes:
    """What goes ahead of ``x``."""
    return _HEADER.pack(_CODES[x.dtype], x.numel(), 0)


def refusal(why: str) -> bytes:
    """What goes ahead of an empty message, in place of one that was refused."""
    text = encoded(why)[: _ROOM_BYTES - _HEADER.size]
    return _HEADER.pack(_REFUSED, 0, len(text)) + text


def room() -> bytearray:
    """Where what comes ahead of a message is received."""
    said = bytearray(_ROOM_BYTES)
    said[0] = _UNSAID
    return said


class Received(Many):
    """A receive that must fill its buffer with what it was made for; ``said`` is what comes ahead of it."""

    __slots__ = ("_said", "_x")

    def __init__(self, said: bytearray, x: torch.Tensor) -> None:
        super().__init__()
        self._said = said
        self._x = x

    def Test(self) -> bool:  # noqa: N802  # spelled as mpi4py's
        try:
            if not super().Test():
                return False
        except MPI.Exception:  # it is longer than its buffer
            self._compare()
            raise
        self._compare()
        return True

    def _compare(self) -> None:
        code, count, length = _HEADER.unpack_from(self._said)
        if code == _UNSAID:
            return
        if code == _REFUSED:
            text = self._said[_HEADER.size : _HEADER.size + length]
            raise PeerRefusedError(text.decode(errors="replace"))
        x = self._x
        if (_DTYPES[code], count) != (x.dtype, x.numel()):
            raise unlike(count, _DTYPES[code], x.numel(), x.dtype)
