"""Payloads whose size only the sender knows: one round for short ones, a second for what is left.

A message is a kind, a small header and a body of bytes. Each rank sends a slot of fixed size; where
header and body fit, that is all. Else the slots tell everyone how much is missing, and the bodies
follow, padded to the longest. Numbers, strings, objects, and tensors of unknown shape travel so.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asynccoll.checks import checked, signature
from asynccoll.completion import Completion
from asynccoll.lane import Lane, Program
from asynccoll.work import Work

__all__ = [
    "Message",
    "all_gather_messages",
    "broadcast_message",
    "gather_messages",
    "scatter_messages",
]

#: One slot: on every transport we know, this costs as much as one byte does.
SLOT_BYTES = 512
_FIXED = struct.Struct("<BHQQ")  # kind, header length, body length, the longest body of the round
_EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Message:
    """``body`` is a flat uint8 tensor, on the CPU or on the communication device."""

    kind: int
    header: bytes = b""
    body: torch.Tensor = _EMPTY

    @classmethod
    def of_bytes(cls, kind: int, body: bytes, header: bytes = b"") -> Message:
        return cls(kind, header, torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else _EMPTY)

    @property
    def room(self) -> int:
        """What the slot has left for the body."""
        return SLOT_BYTES - _FIXED.size - len(self.header)

    @property
    def fits(self) -> bool:
        return self.body.numel() <= self.room

    def body_bytes(self) -> bytes:
        return bytes(self.body.cpu().numpy())


def _slot(message: Message, longest: int = 0) -> torch.Tensor:
    """The message as the first round sends it."""
    body = message.body_bytes() if message.fits else b""
    fixed = _FIXED.pack(message.kind, len(message.header), message.body.numel(), longest)
    row = (fixed + message.header + body).ljust(SLOT_BYTES, b"\0")
    return torch.frombuffer(bytearray(row), dtype=torch.uint8)


def _open(row: torch.Tensor, body: torch.Tensor | None = None) -> tuple[Message, int]:
    """The message of a slot (with the body that came after it), and the longest body of its round."""
    raw = bytes(row.numpy())
    kind, header_length, body_length, longest = _FIXED.unpack_from(raw)
    start = _FIXED.size + header_length
    header = raw[_FIXED.size : start]
    if SLOT_BYTES - start >= body_length:
        # A copy, so that a short tensor does not sit at an odd address of the slot.
        body = (
            torch.frombuffer(bytearray(raw[start : start + body_length]), dtype=torch.uint8)
            if body_length
            else _EMPTY
        )
    elif body is not None:
        body = body[:body_length]
    else:
        body = _EMPTY
    return Message(kind, header, body), longest or _overflow(body_length, header_length)


def _overflow(body_length: int, header_length: int) -> int:
    """The length of a body that did not fit into its slot, else 0."""
    return body_length if body_length > SLOT_BYTES - _FIXED.size - header_length else 0


def _padded(message: Message, length: int, device: torch.device) -> torch.Tensor:
    body = message.body.to(device)
    if body.numel() == length:
        return body
    padded = torch.empty(length, dtype=torch.uint8, device=device)
    padded[: body.numel()] = body
    return padded


def _run(lane: Lane, name: str, detail: str, program: Program, size_bytes: int, timeout: float | None) -> Any:
    if lane.group.context.policy.check:
        program = checked(lane, signature(name, detail=detail), program=program)
    return lane.run(name, program, size_bytes, timeout)


def all_gather_messages(
    lane: Lane,
    name: str,
    message: Message,
    timeout: float | None,
    *,
    device: torch.device = torch.device("cpu"),
    detail: str = "",
) -> Work[list[Message]]:
    """Every rank's message, in rank order, on every rank. Bodies travel on ``device``."""
    return _gather(lane, name, message, None, timeout, device, detail)


def gather_messages(
    lane: Lane,
    name: str,
    message: Message,
    dst: int,
    timeout: float | None,
    *,
    device: torch.device = torch.device("cpu"),
    detail: str = "",
) -> Work[list[Message]]:
    """Every rank's message on the group's ``dst``; an empty list elsewhere."""
    return _gather(lane, name, message, dst, timeout, device, detail)


def _gather(
    lane: Lane,
    name: str,
    message: Message,
    dst: int | None,
    timeout: float | None,
    device: torch.device,
    detail: str,
) -> Work[list[Message]]:
    size = lane.group.size
    rows = torch.empty((size, SLOT_BYTES), dtype=torch.uint8)
    bodies: list[torch.Tensor] = []
    wanted = dst is None or dst == lane.group.rank

    def program(communicator: Any) -> Generator[Completion, None, Completion]:
        # All ranks must know the longest body to pad theirs, also when one of them wants them.
        first: Completion = communicator.all_gather(rows.view(-1), _slot(message))
        yield first
        longest = max(_open(row)[1] for row in rows)
        if not longest:
            return first
        sent = _padded(message, longest, device)
        if dst is None:
            bodies.append(torch.empty((size, longest), dtype=torch.uint8, device=device))
            last: Completion = communicator.all_gather(bodies[0].view(-1), sent)
            return last
        if wanted:
            bodies.append(torch.empty((size, longest), dtype=torch.uint8, device=device))
        last = communicator.gather(list(bodies[0].unbind(0)) if wanted else None, sent, dst)
        return last

    def finish() -> list[Message]:
        if not wanted:
            return []
        return [_open(rows[rank], bodies[0][rank] if bodies else None)[0] for rank in range(size)]

    operation = _run(lane, name, detail, program, message.body.numel(), timeout)
    return Work((operation,), finish)


def broadcast_message(
    lane: Lane,
    name: str,
    message: Message | None,
    src: int,
    timeout: float | None,
    *,
    device: torch.device = torch.device("cpu"),
    detail: str = "",
) -> Work[Message]:
    """The message of the group's ``src`` (who gives it) on every rank."""
    slot = _slot(message) if message is not None else torch.empty(SLOT_BYTES, dtype=torch.uint8)
    body: list[torch.Tensor] = []

    def program(communicator: Any) -> Generator[Completion, None, Completion]:
        first: Completion = communicator.broadcast(slot, src)
        yield first
        longest = _open(slot)[1]
        if not longest:
            return first
        body.append(
            message.body.to(device).contiguous()
            if message is not None
            else torch.empty(longest, dtype=torch.uint8, device=device)
        )
        last: Completion = communicator.broadcast(body[0], src)
        return last

    size_bytes = message.body.numel() if message is not None else 0
    operation = _run(lane, name, detail, program, size_bytes, timeout)
    return Work((operation,), lambda: _open(slot, body[0] if body else None)[0])


def scatter_messages(
    lane: Lane,
    name: str,
    messages: Sequence[Message] | None,
    src: int,
    timeout: float | None,
    *,
    device: torch.device = torch.device("cpu"),
    detail: str = "",
) -> Work[Message]:
    """This rank's message of those that the group's ``src`` gives, one for each rank."""
    slot = torch.empty(SLOT_BYTES, dtype=torch.uint8)
    body: list[torch.Tensor] = []
    longest = max((0 if m.fits else m.body.numel() for m in messages), default=0) if messages else 0
    slots = [_slot(message, longest) for message in messages] if messages is not None else None

    def program(communicator: Any) -> Generator[Completion, None, Completion]:
        first: Completion = communicator.scatter(slot, slots, src)
        yield first
        needed = _open(slot)[1]
        if not needed:
            return first
        body.append(torch.empty(needed, dtype=torch.uint8, device=device))
        sent = [_padded(m, needed, device) for m in messages] if messages is not None else None
        last: Completion = communicator.scatter(body[0], sent, src)
        return last

    operation = _run(lane, name, detail, program, longest, timeout)
    return Work((operation,), lambda: _open(slot, body[0] if body else None)[0])
