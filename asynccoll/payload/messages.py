"""Payloads whose size only the sender knows: one round for short ones, a second for long bodies.

A message is a kind, a small header and a body of bytes. Each rank sends a slot of fixed size. If header and
body of every message fit into its slot, one round is enough. Else the slots tell the ranks how long the
bodies are, and a second round sends the bodies, padded to the longest. Numbers, strings, objects, and tensors
of unknown shape are sent this way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

import torch

from asynccoll.errors import InvalidArgumentError
from asynccoll.health.checks import checked
from asynccoll.order.job import Program
from asynccoll.order.lane import Lane
from asynccoll.order.operation import Operation
from asynccoll.plan.dispatch import refuse_missing
from asynccoll.plan.spec import Op
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import AllOf, Completion, Promise
from asynccoll.waiting.started import Started

#: The length of a slot: on every transport we know, sending it takes as long as sending one byte.
SLOT_BYTES = 512
_FIXED = struct.Struct("<BHQQ")  # kind, header length, body length, the longest body (``_slot``'s longest)
_ROOM = SLOT_BYTES - _FIXED.size
T = TypeVar("T")

_CPU = torch.device("cpu")
_EMPTY = torch.empty(0, dtype=torch.uint8, device=_CPU)


class Message(NamedTuple):
    """One payload as it is sent.

    ``kind`` is an index in ``kinds.KINDS``, or one of the constants next to it. ``body`` is bytes, or a flat
    uint8 tensor on the CPU or on the communication device.
    """

    kind: int
    header: bytes = b""
    body: bytes | torch.Tensor = b""

    @property
    def size_bytes(self) -> int:
        return len(self.body) if isinstance(self.body, bytes) else self.body.numel()

    @property
    def fits(self) -> bool:
        """Whether the slot has room for the body."""
        return self.size_bytes <= _ROOM - len(self.header)

    def body_bytes(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else bytes(self.body.cpu().numpy())

    def body_tensor(self) -> torch.Tensor:
        """Return the body as a flat uint8 tensor."""
        if isinstance(self.body, torch.Tensor):
            return self.body
        return torch.frombuffer(bytearray(self.body), dtype=torch.uint8) if self.body else _EMPTY


def _slot(message: Message, longest: int = 0) -> bytearray:
    """Return the slot that the first round sends for ``message``.

    ``longest`` tells the receiver the longest body of all ranks' messages, if the sender knows it (scatter):
    the receiver then takes part in the second round even if its own body fitted into the slot.
    """
    kind, header, body = message
    size_bytes = message.size_bytes
    row = bytearray(SLOT_BYTES)
    _FIXED.pack_into(row, 0, kind, len(header), size_bytes, longest)
    start = _FIXED.size + len(header)
    if start > SLOT_BYTES:
        raise InvalidArgumentError(
            f"the payload's description (a tensor's shape, or a codec's name) takes {len(header)} bytes, and "
            f"may take at most {_ROOM}; pass fewer dimensions, or a Codec with a shorter name"
        )
    row[_FIXED.size : start] = header
    if size_bytes <= _ROOM - len(header):
        row[start : start + size_bytes] = body if isinstance(body, bytes) else message.body_bytes()
    return row


def _as_tensor(raw: bytearray) -> torch.Tensor:
    """Return a tensor on the same memory, for a backend to send or to fill."""
    return torch.frombuffer(raw, dtype=torch.uint8)


class _Slots:
    """The slots of a first round, in one stretch of memory, and the messages that are read from them."""

    __slots__ = ("_found", "_missing", "_raw", "longest", "tensor")

    def __init__(self, raw: bytearray) -> None:
        self._raw = raw
        self.tensor = _as_tensor(raw)
        self._found: list[Message] = []
        self._missing: list[tuple[int, int]] = []
        #: the longest body of the round, if one did not fit into its slot; else 0
        self.longest = 0

    @classmethod
    def empty(cls, count: int) -> _Slots:
        return cls(bytearray(count * SLOT_BYTES))

    def read(self) -> int:
        """Read the received slots, and return ``longest``: if it is not 0, a second round follows."""
        raw, longest = self._raw, 0
        for place in range(0, len(raw), SLOT_BYTES):
            kind, header_length, size_bytes, said = _FIXED.unpack_from(raw, place)
            start = place + _FIXED.size + header_length
            body = b""
            if size_bytes <= _ROOM - header_length:
                body = bytes(raw[start : start + size_bytes])
            else:
                self._missing.append((len(self._found), size_bytes))
                longest = max(longest, size_bytes)
            self._found.append(Message(kind, bytes(raw[place + _FIXED.size : start]), body))
            longest = max(longest, said)
        self.longest = longest
        return longest

    def messages(self, bodies: Sequence[torch.Tensor] = ()) -> list[Message]:
        """Return the messages; those whose body did not fit get it from ``bodies`` of the second round."""
        for index, size_bytes in self._missing if bodies else ():
            self._found[index] = self._found[index]._replace(body=bodies[index][:size_bytes])
        return self._found


def _padded(message: Message, length: int, device: torch.device) -> torch.Tensor:
    body = message.body_tensor().to(device)
    if body.numel() == length:
        return body
    padded = torch.empty(length, dtype=torch.uint8, device=device)
    padded[: body.numel()] = body
    return padded


def _run(
    lane: Lane,
    name: str,
    calls: Sequence[Op],
    detail: str,
    program: Program,
    size_bytes: int,
    timeout: float | None,
) -> Operation:
    _refuse_missing(lane, calls)
    if lane.compares_calls:
        program = checked(lane, (name, detail), program=program)
    return lane.run(name, program, size_bytes, timeout, what=(name, detail), awaited_soon=True)


def _refuse_missing(lane: Lane, calls: Sequence[Op]) -> None:
    """Refuse an operation made of the native ``calls`` if the backend lacks one of them."""
    known = lane.group.topology("cpu").capabilities
    for op in calls:
        refuse_missing(op, known)


def all_gather_rows(
    lane: Lane,
    name: str,
    row: bytes,
    timeout: float | None,
    *,
    then: Callable[[bytearray], T],
    detail: str = "",
) -> Started[T]:
    """Gather every rank's row; the result is ``then`` of the joined rows.

    All ranks must pass rows of the same length. It takes one native call.
    """
    _refuse_missing(lane, (Op.ALL_GATHER,))
    mine = _as_tensor(bytearray(row))
    rows = bytearray(lane.group.size * len(row))
    into = _as_tensor(rows)

    def start(communicator: Communicator) -> Completion:
        return communicator.all_gather(into, mine)

    if lane.compares_calls:
        compared = checked(lane, (name, detail), start)
        operation = lane.run(name, compared, len(row), timeout)
    else:
        estimate = lane.estimate(name, len(row))
        operation = lane.issue(estimate, start, len(row), timeout, what=(name, detail))
    return Started((operation,), lambda: then(rows))


def gather_messages(
    lane: Lane,
    name: str,
    message: Message,
    dst: int | None,
    timeout: float | None,
    *,
    then: Callable[[list[Message]], T],
    device: torch.device = _CPU,
    detail: str = "",
) -> Started[T]:
    """Gather every rank's message on the member with index ``dst``; on every rank if that is None.

    The result is ``then`` of the messages there, in rank order, and ``then`` of an empty list on the other
    ranks. Bodies are sent from, and received on, ``device``.
    """
    size = lane.group.size
    slots = _Slots.empty(size)
    bodies: list[torch.Tensor] = []
    wanted = dst is None or dst == lane.group.rank
    mine = _as_tensor(_slot(message))

    def program(communicator: Communicator) -> Generator[Completion, None, Completion]:
        # An all_gather also if only dst wants the messages: every rank pads its body to the longest.
        first: Completion = communicator.all_gather(slots.tensor, mine)
        yield first
        longest = slots.read()
        if not longest:
            return first
        sent = _padded(message, longest, device)
        if wanted:
            bodies.append(torch.empty((size, longest), dtype=torch.uint8, device=device))
        if dst is None:
            return communicator.all_gather(bodies[0].view(-1), sent)
        return communicator.gather(list(bodies[0].unbind(0)) if wanted else None, sent, dst)

    def finish() -> T:
        return then(slots.messages(bodies[0].unbind(0) if bodies else ()) if wanted else [])

    calls = (Op.ALL_GATHER,) if dst is None else (Op.ALL_GATHER, Op.GATHER)
    operation = _run(lane, name, calls, detail, program, message.size_bytes, timeout)
    return Started((operation,), finish)


def broadcast_message(
    lane: Lane,
    name: str,
    message: Message | None,
    src: int,
    timeout: float | None,
    *,
    then: Callable[[Message], T],
    detail: str = "",
) -> Started[T]:
    """Broadcast the message of the member with index ``src``; the result is ``then`` of it on every rank.

    The other ranks pass None.
    """
    slot = _Slots(_slot(message)) if message is not None else _Slots.empty(1)
    body: list[torch.Tensor] = []

    def program(communicator: Communicator) -> Generator[Completion, None, Completion]:
        first: Completion = communicator.broadcast(slot.tensor, src)
        yield first  # also at the source: if this round fails, no second one is started
        longest = slot.read()
        if not longest:
            return first
        body.append(
            message.body_tensor().to(_CPU, copy=True).contiguous()  # src gets a result of its own
            if message is not None
            else torch.empty(longest, dtype=torch.uint8, device="cpu")
        )
        return communicator.broadcast(body[0], src)

    size_bytes = message.size_bytes if message is not None else 0
    operation = _run(lane, name, (Op.BROADCAST,), detail, program, size_bytes, timeout)
    return Started((operation,), lambda: then(slot.messages(body)[0]))


def scatter_messages(
    lane: Lane,
    name: str,
    messages: Sequence[Message] | None,
    src: int,
    timeout: float | None,
    *,
    then: Callable[[Message], T],
    detail: str = "",
) -> Started[T]:
    """Scatter the messages of the member with index ``src``, one for each rank; the others pass None.

    The result is ``then`` of the message for this rank.
    """
    slot = _Slots.empty(1)
    body: list[torch.Tensor] = []
    longest = max((0 if m.fits else m.size_bytes for m in messages), default=0) if messages else 0
    slots = [_as_tensor(_slot(message, longest)) for message in messages] if messages is not None else None

    def program(communicator: Communicator) -> Generator[Completion, None, Completion]:
        first: Completion = communicator.scatter(slot.tensor, slots, src)
        yield first
        needed = slot.read()
        if not needed:
            return first
        body.append(torch.empty(needed, dtype=torch.uint8, device="cpu"))
        sent = [_padded(m, needed, _CPU) for m in messages] if messages is not None else None
        return communicator.scatter(body[0], sent, src)

    operation = _run(lane, name, (Op.SCATTER,), detail, program, longest, timeout)
    return Started((operation,), lambda: then(slot.messages(body)[0]))


def send_message(lane: Lane, message: Message, dst: int, tag: int, timeout: float | None) -> Started[None]:
    """Send ``message`` to the member with index ``dst``, which calls ``recv_message`` with the same tag."""
    _refuse_missing(lane, (Op.SEND,))
    slot = _as_tensor(_slot(message))
    pieces = [slot] if message.fits else [slot, message.body_tensor().cpu()]

    def start(communicator: Communicator) -> Completion:
        return AllOf([communicator.send(piece, dst, tag) for piece in pieces])

    estimate, stream = lane.estimate("send_object", message.size_bytes), ("send", dst, tag)
    return Started((lane.issue(estimate, start, message.size_bytes, timeout, stream=stream),))


def recv_message(
    lane: Lane, src: int, tag: int, timeout: float | None, *, then: Callable[[Message], T]
) -> Started[T]:
    """Receive the next message that the member with index ``src`` sends by ``send_message`` with this tag.

    The result is ``then`` of it.
    """
    _refuse_missing(lane, (Op.RECV,))
    slot = _Slots.empty(1)
    body: list[torch.Tensor] = []

    def start(communicator: Communicator) -> Completion:
        def ask(asked: Promise) -> Completion:
            over = Promise()
            first: Completion = communicator.recv(slot.tensor, src, tag)

            def go_on() -> None:
                try:
                    error = first.error()
                    if error is not None or not slot.read():
                        over.settle(error)
                    else:
                        body.append(torch.empty(slot.longest, dtype=torch.uint8, device="cpu"))
                        over.follow(communicator.recv(body[0], src, tag))
                except BaseException as error:  # for the operation's waiter to raise, not this thread
                    lane.turns.lose(error)
                    over.settle(error)
                finally:
                    asked.settle()

            first.add_callback(go_on)
            return over

        return lane.turns.take((src, tag), ask)

    operation = lane.issue(lane.estimate("recv_object", 0), start, 0, timeout, stream=("recv", src, tag))
    return Started((operation,), lambda: then(slot.messages(body)[0]))
