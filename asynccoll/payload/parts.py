"""A list with a part for each rank, as scatter and all_to_all take it: tensors of any shape, values, trees.

Every part describes itself, so that its receiver need not know what it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from asynccoll.errors import InvalidArgumentError
from asynccoll.memory.plain import plain_tensor
from asynccoll.payload.codecs import SAFE
from asynccoll.payload.common import refuse
from asynccoll.payload.kinds import is_value
from asynccoll.payload.messages import Message
from asynccoll.payload.values import as_number, from_message, to_message
from asynccoll.plan.trees import flatten, is_tree, unflatten

__all__ = ["join_messages", "part_message", "part_of", "parts_of", "split_messages", "tensors_of"]

#: A joined message starts with its kind and the lengths of header and body; all is padded to whole units.
_LENGTHS = struct.Struct("<BHQ")
_UNIT_BYTES = 16


def parts_of(name: str, x: Sequence[object], size: int) -> list[object]:
    """The parts of the list ``x``, one for each of ``size`` ranks, each fit to be sent."""
    if len(x) != size:
        raise InvalidArgumentError(
            f"{name}: got a list of {len(x)} for {size} ranks; pass one part for each rank of the group"
        )
    return [_sendable(name, part) for part in x]


def _sendable(name: str, part: object) -> object:
    leaves, spec = flatten(part)
    plain = []
    for leaf in map(as_number, leaves):
        if not isinstance(leaf, torch.Tensor) and not is_value(leaf):
            raise refuse(name, leaf)
        plain.append(plain_tensor(name, leaf) if isinstance(leaf, torch.Tensor) else leaf)
    return unflatten(spec, plain)


def tensors_of(parts: Sequence[object]) -> list[torch.Tensor]:
    """All tensors in ``parts``: those that autograd may be recording."""
    return [leaf for part in parts for leaf in flatten(part)[0] if isinstance(leaf, torch.Tensor)]


def part_message(part: object) -> Message:
    """The message of one part."""
    return to_message(part, SAFE if is_tree(part) else None)


def part_of(message: Message, device: torch.device) -> object:
    """The part that came, its tensor on ``device`` if it was sent from one of that type."""
    return from_message(message, device, SAFE)


def join_messages(messages: Sequence[Message]) -> tuple[torch.Tensor, list[int]]:
    """All of them as bytes on the CPU, one after the other, and how many bytes each has."""
    pieces: list[torch.Tensor] = []
    lengths = []
    for message in messages:
        head = _LENGTHS.pack(message.kind, len(message.header), message.size_bytes) + message.header
        head += bytes(-len(head) % _UNIT_BYTES)
        rest = bytes(-message.size_bytes % _UNIT_BYTES)
        body = message.body_tensor().cpu()
        these = [_bytes(head), body, *([_bytes(rest)] if rest else [])]
        lengths.append(sum(piece.numel() for piece in these))
        pieces += these
    return torch.cat(pieces), lengths


def split_messages(joined: torch.Tensor) -> list[Message]:
    """The messages again, in memory of ``joined``, where every body is fit for any dtype."""
    messages, start = [], 0
    while start < joined.numel():
        kind, header, body = _LENGTHS.unpack(bytes(joined[start : start + _LENGTHS.size].numpy()))
        at = start + _LENGTHS.size
        begin = at + header + -(_LENGTHS.size + header) % _UNIT_BYTES
        messages.append(Message(kind, bytes(joined[at : at + header].numpy()), joined[begin : begin + body]))
        start = begin + body + -body % _UNIT_BYTES
    return messages


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
