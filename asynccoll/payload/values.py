"""Python values and tensors of unknown shape <-> messages.

Numbers are sent exactly (an int as 64 bits, a float as its bits), strings may be any Unicode, and tensors
carry their dtype, shape and device type. Any other object goes through a codec (``codecs``).
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asynccoll.errors import CollectiveError, PayloadTypeError
from asynccoll.host.misfits import check
from asynccoll.memory.plain import plain_tensor, raw
from asynccoll.payload.codecs import Codec
from asynccoll.payload.kinds import KINDS, OBJECT, TENSOR, VALUES, is_number, kind_of
from asynccoll.payload.messages import Message
from asynccoll.plan.spec import DEQUANTIZED, DTYPES_BY_NAME, ReduceOp, dtype_name

#: The header of each value in a message of several: its kind, and the length of what follows.
_VALUE = struct.Struct("<BQ")


def as_number(x: object) -> object:
    """Return a NumPy scalar (anything 0-d with ``item()`` but a tensor) as a Python number, else ``x``.

    NumPy dates are not numbers, although ``item()`` of some of them is an int; nor is a masked value, whose
    ``item()`` is what the mask hides.
    """
    item = getattr(x, "item", None)
    if item is None or getattr(x, "shape", None) != () or isinstance(x, torch.Tensor):
        return x
    if isinstance(x, str):
        return str.__str__(x)  # ``item()`` drops trailing zeros
    date = getattr(getattr(x, "dtype", None), "kind", "") in ("M", "m")
    masked = hasattr(x, "filled") and getattr(x, "mask", False)
    return x if date or masked else item()


def to_message(x: object, codec: Codec | None = None) -> Message:
    """Return ``x`` as a message; with a ``codec``, ``x`` may be anything that the codec can encode."""
    if codec is not None:
        encoded = codec.encode(x)
        check(f"what encode of codec {codec.name!r} returns", encoded, bytes, "bytes")
        return Message(OBJECT, codec.name.encode(), encoded)
    x = as_number(x)
    if isinstance(x, torch.Tensor):
        return _tensor_message(x)
    kind = kind_of(x)
    if kind is not None:
        return Message(kind, b"", KINDS[kind].pack(x))
    raise PayloadTypeError(
        f"cannot send a {type(x).__name__}: expected a tensor, a number, a str, a pathlib.Path, or a "
        "dict, list, tuple or dataclass of these; for other objects use the *_object functions"
    )


def _tensor_message(x: torch.Tensor) -> Message:
    x = plain_tensor("a message", x)
    if x.is_quantized:
        raise PayloadTypeError(f"cannot send a quantized tensor ({dtype_name(x.dtype)}), {DEQUANTIZED}")
    if x.layout is not torch.strided or x.device.type == "meta":
        raise PayloadTypeError(
            f"cannot send a {x.layout} tensor on {x.device} whose shape the others do not know; pass a "
            "dense one that has data"
        )
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    header = "/".join((dtype_name(x.dtype), x.device.type, ",".join(map(str, x.shape)))).encode()
    return Message(TENSOR, header, raw(x))


def values_message(values: Sequence[object]) -> Message:
    """Return numbers, strings and paths in one message, which ``from_message`` turns into a list."""
    packed = [(message.kind, message.body_bytes()) for message in map(to_message, values)]
    return Message(VALUES, b"", b"".join(_VALUE.pack(kind, len(body)) + body for kind, body in packed))


def _values_from(body: bytes) -> list[object]:
    values, start = [], 0
    while start < len(body):
        kind, length = _VALUE.unpack_from(body, start)
        start += _VALUE.size + length
        values.append(KINDS[kind].unpack(body[start - length : start]))
    return values


def tensor_from_message(message: Message, device: torch.device) -> torch.Tensor:
    """Return the tensor in a message: on ``device`` if sent from a device of that type, else on the CPU."""
    name, device_type, extents = message.header.decode().split("/")
    shape = [int(extent) for extent in extents.split(",") if extent]
    dtype = DTYPES_BY_NAME[name]
    target = device if device.type == device_type else torch.device("cpu")
    if not message.size_bytes:
        return torch.empty(shape, dtype=dtype, device=target)
    body = message.body_tensor()
    if body.storage_offset() % dtype.itemsize:
        body = body.clone()
    return body.view(dtype).view(shape).to(target).data  # no view, as bodies may share memory


def from_message(message: Message, device: torch.device, codec: Codec | None = None) -> object:
    """Return what was sent. An object is decoded only by the codec that this rank asked for."""
    if message.kind == TENSOR:
        return tensor_from_message(message, device)
    if message.kind == OBJECT:
        sent_by = message.header.decode()
        if codec is None or codec.name != sent_by:
            ours = "none" if codec is None else repr(codec.name)
            raise CollectiveError(
                f"an object was encoded by codec {sent_by!r}, but this rank decodes with {ours}; pass "
                "the same codec= on every rank"
            )
        return codec.decode(message.body_bytes())
    if message.kind == VALUES:
        return _values_from(message.body_bytes())
    return KINDS[message.kind].unpack(message.body_bytes())


# Reducing numbers


def check_number_reduction(x: object, op: ReduceOp) -> None:
    """Refuse a number for which ``op`` is not defined, before anything is sent."""
    whole = isinstance(x, int)
    if not is_number(x):
        raise PayloadTypeError(f"{op.value} of a {type(x).__name__} is not defined; it takes numbers")
    if op is ReduceOp.AVG and whole:
        raise PayloadTypeError(
            f"avg of the {type(x).__name__} {x!r} is not defined; reduce with sum, or pass a float"
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and isinstance(x, complex):
        raise PayloadTypeError(f"{op.value} of complex numbers is not defined: they have no order")
    if op is ReduceOp.ADASUM:
        raise PayloadTypeError(f"adasum of the {type(x).__name__} {x!r} is not defined; it is for tensors")
    if op in _BITWISE and not whole:
        raise PayloadTypeError(f"{op.value} of the {type(x).__name__} {x!r} is not defined; pass an int")


_BITWISE: dict[ReduceOp, Callable[[object, object], object]] = {
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
_ON_NUMBERS: dict[ReduceOp, Callable[[object, object], Any]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    **_BITWISE,
}


def reduce_numbers(numbers: list[Any], op: ReduceOp) -> Any:
    """Reduce the numbers of all ranks, in rank order, by Python's own arithmetic.

    Every rank reduces the same numbers in the same order and gets the same bits. A sum of ints may need more
    than the 64 bits in which each is sent.
    """
    if op is ReduceOp.AND:
        return type(numbers[0])(all(numbers))
    if op is ReduceOp.OR:
        return type(numbers[0])(any(numbers))
    if op in (ReduceOp.MIN, ReduceOp.MAX) and any(math.isnan(x) for x in numbers):
        return float("nan")  # as torch does; Python's min depends on the order
    total = functools.reduce(_ON_NUMBERS[op], numbers)
    if op in (ReduceOp.SUM, ReduceOp.PRODUCT) and isinstance(total, bool):
        total = int(total)  # of a single bool: several would also give an int
    return total / len(numbers) if op is ReduceOp.AVG else total
