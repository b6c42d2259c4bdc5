"""Fuzz the decoder of objects with arbitrary bytes: `python tests/fuzz_decoder.py SECONDS [SEED]`.

Messages are mutated and spliced, and kept if they reach a line of the decoder that no earlier one reached.
Each must decode to a value or raise `CollectiveError`. It must not run code, open or import anything (an
audit hook checks), and may use memory only in proportion to its length. A violation ends the run, and is
printed.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from argparse import Namespace
from collections import OrderedDict, defaultdict
from types import FrameType
from typing import Any

import numpy as np
import torch

from asynccoll.errors import CollectiveError
from asynccoll.payload.safecodec import decode, encode

#: The bytes that a message may take: a constant, and per byte, as Python's objects exceed their encoding.
MOST_BYTES = (1 << 20, 400)
FORBIDDEN = (
    "exec",
    "compile",
    "import",
    "open",
    "os.",
    "subprocess",
    "socket",
    "ctypes",
    "pickle",
    "code.",
    "marshal",
)

SEEDS: list[Any] = [
    None, 1, -(1 << 70), 1.5, 2j, "text", b"bytes", bytearray(b"x"), True, [1, 2, 3], (1, "a", None),
    {"a": [1.0, 2.0], 3: {4}}, {1, 2}, frozenset("ab"), [0.5] * 20, ["x", "y"], [True, False],
    OrderedDict(a=1), range(3), slice(1, None), torch.arange(6).view(2, 3), torch.zeros(0),
    torch.tensor([1.0], dtype=torch.bfloat16), np.arange(4.0), np.float32(2), np.array(["a", "bc"]),
    [{"k": i} for i in range(5)], torch.Size([1, 2]), torch.float32, torch.device("cpu"), 10**30,
    Namespace(lr=0.1, path=None, layers=[1, 2]), [Namespace(a=i, b="x") for i in range(3)], Namespace(),
    defaultdict(list, a=[1]), defaultdict(None, {(1, 2): 0.5}), defaultdict(int), np.float64(1.5),
]  # fmt: skip
_found: set[tuple[str, int]] = set()
_new = False
_inside = False


def _trace(frame: FrameType, event: str, _arg: Any) -> Any:
    global _new
    if "safecodec" not in frame.f_code.co_filename:
        return None
    if event == "line" and (at := (frame.f_code.co_filename, frame.f_lineno)) not in _found:
        _found.add(at)
        _new = True
    return _trace


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _inside and event.startswith(FORBIDDEN):
        raise AssertionError(f"the decoder does {event} {arguments}")


def _mutated(drawn: random.Random, messages: list[bytes]) -> bytes:
    raw = bytearray(drawn.choice(messages))
    for _ in range(drawn.choice((1, 1, 2, 4, 8))):
        at = drawn.randrange(len(raw) + 1)
        kind = drawn.randrange(6)
        if kind == 0 and at < len(raw):
            raw[at] = drawn.randrange(256)
        elif kind == 1 and at < len(raw):
            raw[at] ^= 1 << drawn.randrange(8)
        elif kind == 2:
            raw[at:at] = drawn.randbytes(drawn.choice((1, 2, 8)))
        elif kind == 3:
            del raw[at : at + drawn.choice((1, 2, 8, 64))]
        elif kind == 4:
            other = drawn.choice(messages)
            start = drawn.randrange(len(other) + 1)
            raw[at:at] = other[start : start + drawn.randrange(1, 64)]
        else:
            size = drawn.choice((4, 8))
            number = drawn.choice((0, 1, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1))
            raw[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(raw)


def _tried(raw: bytes) -> None:
    """Decode ``raw``; raise ``AssertionError`` if the decoder does something forbidden."""
    global _inside
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    _inside = True
    try:
        decode(raw)
    except CollectiveError as error:
        assert not isinstance(error.__cause__, AssertionError), error.__cause__
    finally:
        _inside = False
    taken = tracemalloc.get_traced_memory()[1] - before
    assert taken <= MOST_BYTES[0] + MOST_BYTES[1] * len(raw), f"{len(raw)} bytes take {taken} of memory"


def fuzz(seconds: float, seed: int) -> tuple[int, int]:
    """Fuzz for ``seconds``. Returns how many messages were tried, and how many kept."""
    global _new
    drawn = random.Random(seed)
    messages = []
    for value in SEEDS:
        try:
            messages.append(bytes(encode(value)))
        except Exception as error:  # already refused by the sender
            print(f"not a seed: {value!r}: {error}", file=sys.stderr)
    tracemalloc.start()
    for raw in messages:
        decode(raw)
    tried, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        raw = _mutated(drawn, messages)
        _new = False
        sys.settrace(_trace if tried % 8 == 0 else None)
        try:
            _tried(raw)
        except BaseException:
            sys.settrace(None)
            print(f"seed {seed}, message {tried}: {raw!r}", flush=True)
            raise
        finally:
            sys.settrace(None)
        tried += 1
        if _new and len(raw) < 4096:
            messages.append(raw)
        if tried % 5000 == 0:
            gc.collect()
    return tried, len(messages)


if __name__ == "__main__":
    sys.addaudithook(_audit)
    count, kept = fuzz(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    print(f"{count} messages, {kept} kept, {len(_found)} lines of the decoder reached: nothing found")
