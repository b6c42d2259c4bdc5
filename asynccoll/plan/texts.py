"""Calls as text that is the same in every process, and the error for a message that does not fit."""

from __future__ import annotations

import zlib

import torch

from asynccoll.errors import CollectiveMismatchError
from asynccoll.host.words import encoded
from asynccoll.plan.spec import dtype_name
from asynccoll.plan.tree_texts import packed

#: At most this much of a text is shown.
_SHOWN_BYTES = 500


def shown(what: object) -> str:
    """Return names and values as text, without empty ones: ``all_reduce sum float32 [4, 8]``."""
    if isinstance(what, torch.dtype):
        return dtype_name(what)
    if isinstance(what, torch.Size):
        return str(list(what))
    if isinstance(what, list):
        return f"[{', '.join(map(shown, what))}]"
    if isinstance(what, tuple):
        return " ".join(text for text in map(shown, what) if text)
    return "" if what is None else str(getattr(what, "value", what))


def at_line(what: object, place: object, most: int) -> bytes:
    """Return the text of the call ``what`` and the line that made it (``place``), in at most ``most`` bytes.

    A long text is truncated before the line, which is its most helpful part, and gets a checksum of the whole
    text there: texts that differ only in what was cut off must not look the same. The nodes of the call's
    tree follow, if there is room for all of them (``tree_texts``).
    """
    said = encoded(shown(what))
    line = encoded(f" at {place}") if place else b""
    shown_bytes = min(most, _SHOWN_BYTES)
    if len(said) + len(line) > shown_bytes:
        line = f"... (checksum of all: {zlib.crc32(said):08x})".encode() + line
        said = said[: max(0, shown_bytes - len(line))]
    nodes = packed(what).encode()
    return said + line + (nodes if len(said) + len(line) + len(nodes) <= most else b"")


def unlike(count: int, dtype: torch.dtype, wanted: int, wanted_dtype: torch.dtype) -> CollectiveMismatchError:
    """Return the error for a message of ``count`` elements whose receiver expects another size or dtype."""
    sent, fits = f"{count} elements of {dtype_name(dtype)}", f"{wanted} of {dtype_name(wanted_dtype)}"
    return CollectiveMismatchError(
        f"the sender's message has {sent}, but the receiver expects {fits}: a tensor is received by recv, "
        "with a `like` of its size and dtype, an object by recv_object (the message was received and "
        "discarded; the channel is still usable)"
    )
