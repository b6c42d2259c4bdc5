"""The header before each message between two ranks: what the message is, or why there is none.

MPI does not notice if the two sides differ in dtype, or if a message is too short, and it cannot tell a
receiver that a send was refused. So a small message with the same tag is sent first: MPI keeps their order.
"""

from __future__ import annotations

import struct

import torch
from mpi4py import MPI

from asynccoll.backends.api import DTYPES_BY_NAME, encoded, unlike
from asynccoll.backends.mpi.completion import Many
from asynccoll.errors import PeerRefusedError

#: The dtype's code, the number of elements, and the length of the text that follows (in a refusal).
_HEADER = struct.Struct("<BQH")
#: Instead of a dtype's code: there is no message, and the text says why.
_REFUSED = 255
#: Instead of a dtype's code: no header was received.
_UNSAID = 254
_ROOM_BYTES = 1024
_DTYPES = [DTYPES_BY_NAME[name] for name in sorted(DTYPES_BY_NAME)]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def header(x: torch.Tensor) -> bytes:
    """Return the header for ``x``."""
    return _HEADER.pack(_CODES[x.dtype], x.numel(), 0)


def refusal(why: str) -> bytes:
    """Return the header for the empty message that is sent instead of a refused one."""
    text = encoded(why)[: _ROOM_BYTES - _HEADER.size]
    return _HEADER.pack(_REFUSED, 0, len(text)) + text


def room() -> bytearray:
    """Return a buffer into which to receive a header."""
    said = bytearray(_ROOM_BYTES)
    said[0] = _UNSAID
    return said


class Received(Many):
    """A receive that must get the dtype and number of elements of ``x``; ``said`` gets the header."""

    __slots__ = ("_said", "_x")

    def __init__(self, said: bytearray, x: torch.Tensor) -> None:
        super().__init__()
        self._said = said
        self._x = x

    def Test(self) -> bool:  # noqa: N802  # spelled as mpi4py's
        try:
            if not super().Test():
                return False
        except MPI.Exception:  # the message is longer than its buffer
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
