"""The list that scatter and all_to_all take, with a part for each rank: tensors of any shape, values, trees.

A part is sent as a message that says what the part is, so the receiver need not know its kind or shape. For
all_to_all the messages of all parts are joined into one buffer of bytes, which is exchanged with a split size
for each rank.

(In ``order.cut`` the parts of a call are something else: the native calls that it is made of.)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import cast

import torch

from asynccoll.errors import InvalidArgumentError
from asynccoll.payload.codecs import SAFE
from asynccoll.payload.common import sendable
from asynccoll.payload.messages import Message
from asynccoll.payload.values import from_message, to_message
from asynccoll.plan.trees import flatten, is_tree, unflatten

#: The kind of a message in the buffer, and the lengths of its header and its body, which follow.
_LENGTHS = struct.Struct("<BHQ")
#: Bodies (and so messages) begin at multiples of this: aligned for any dtype, they need no copy on arrival.
_ALIGNMENT_BYTES = 16


def parts_of(name: str, x: Sequence[object], size: int) -> list[object]:
    """Return the parts in ``x``; refuse a list not of length ``size``, and parts that cannot be sent."""
    if len(x) != size:
        raise InvalidArgumentError(
            f"{name}: got a list of {len(x)} for {size} ranks; pass one part for each rank of the group"
        )
    leaves, spec = flatten(list(x))
    return cast("list[object]", unflatten(spec, sendable(name, leaves, spec)))


def tensors_of(parts: Sequence[object]) -> list[torch.Tensor]:
    """Return all tensors in ``parts``, for the caller to check whether autograd records them."""
    return [leaf for part in parts for leaf in flatten(part)[0] if isinstance(leaf, torch.Tensor)]


def part_message(part: object) -> Message:
    """Return the message for one part: a tree goes through the default codec, a tensor or value does not."""
    return to_message(part, SAFE if is_tree(part) else None)


def part_of(message: Message, device: torch.device) -> object:
    """Return the part in a message; a tensor goes to ``device`` if it was sent from a device of that type."""
    return from_message(message, device, SAFE)


def join_messages(messages: Sequence[Message]) -> tuple[torch.Tensor, list[int]]:
    """Return the messages joined in one uint8 tensor on the CPU, and how many bytes each takes there."""
    pieces: list[torch.Tensor] = []
    lengths = []
    for message in messages:
        head = _LENGTHS.pack(message.kind, len(message.header), message.size_bytes) + message.header
        head += bytes(-len(head) % _ALIGNMENT_BYTES)
        rest = bytes(-message.size_bytes % _ALIGNMENT_BYTES)
        body = message.body_tensor().cpu()
        these = [_bytes(head), body, *([_bytes(rest)] if rest else [])]
        lengths.append(sum(piece.numel() for piece in these))
        pieces += these
    return torch.cat(pieces), lengths


def split_messages(joined: torch.Tensor) -> list[Message]:
    """Undo ``join_messages``; the messages' bodies are views of ``joined``, aligned for any dtype."""
    messages, start = [], 0
    while start < joined.numel():
        kind, header, body = _LENGTHS.unpack(bytes(joined[start : start + _LENGTHS.size].numpy()))
        at = start + _LENGTHS.size
        begin = at + header + -(_LENGTHS.size + header) % _ALIGNMENT_BYTES
        messages.append(Message(kind, bytes(joined[at : at + header].numpy()), joined[begin : begin + body]))
        start = begin + body + -body % _ALIGNMENT_BYTES
    return messages


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
