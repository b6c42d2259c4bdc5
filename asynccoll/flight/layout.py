"""How a flight recorder's memory is laid out: what its writer and its readers, of any version, agree on.

    header    4 KiB    who it is, clocks, how the rank ended; then what it says of itself, as JSON
    lanes     64 KiB   of each lane the last place in its order, however long ago that was
    records   88 KiB   a ring: the operation of ticket t is in record t % 1,024
    headers   2 MiB    of each lane a ring of two words: which call that is, with a running checksum; its text
    texts     2 MiB    what records say in words, each kind of call once, in two halves

Only pages that were written to take memory. A text's number is where it begins, counted from the first ever
written; the halves are filled in turn. A half holds two of the longest texts for each record, so that what a
record refers to stays for as long as the record does.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

__all__ = [
    "BEGUN",
    "END",
    "ENDED",
    "ENDING",
    "ENDINGS",
    "ENDING_AT",
    "GIVEN_UP",
    "HALF_BYTES",
    "HEADER",
    "HEADERS",
    "HEADERS_AT",
    "HEADER_BYTES",
    "HEADER_WORDS",
    "LANE",
    "LANES",
    "LANES_AT",
    "LENGTH",
    "MAGIC",
    "NAME",
    "NO_CODE",
    "OUTCOME",
    "PARTS",
    "RECORD",
    "RECORDS",
    "RECORDS_AT",
    "REFUSED",
    "SAID_AT",
    "SIZE_BYTES",
    "TEXTS_AT",
    "TEXT_BYTES",
    "VERSION",
    "WAITED",
    "WORDS",
    "joined",
    "lane_id",
    "parted",
]

#: Of the memory, by which it is found among a process's descriptors.
NAME = "asynccoll-flight"
MAGIC = b"acflight"
VERSION = 3
HEADER_BYTES = 4096
#: magic, version, rank, world size, pid, monotonic and wall clock at the beginning.
HEADER = struct.Struct("=8sIiiidd")
#: When and how it ended, behind the header; then the exit code, as ``subprocess`` has it.
ENDING = struct.Struct("=dIi")
ENDING_AT = 64
#: How a rank's life in its world is, by its number: it goes on; ``finalize``; its program came to its end, or
#: to an error; its process is over, as its launcher has seen.
ENDINGS = ("running", "finalized", "ended", "died", "exited")
#: Which exit code nobody knows.
NO_CODE = -(1 << 31)
#: A JSON object, behind its length.
SAID_AT = 128
LENGTH = struct.Struct("=I")

LANES = 256
#: The latest place in the order, and the lane's text behind its length.
LANE = struct.Struct("=QH246s")
LANES_AT = HEADER_BYTES

RECORDS = 1024
#: ticket, text, place in the order, part, peer, bytes, called, begun, ended, waited for since (negative:
#: until then, when it timed out), how it failed, ticket: with two different tickets it is being written.
RECORD = struct.Struct("=QQQIiQddddQQ")
RECORDS_AT = LANES_AT + LANES * LANE.size
#: In words of eight bytes.
WORDS = RECORD.size // 8
BEGUN, ENDED, WAITED, OUTCOME = 6, 7, 8, 9
#: In place of an operation, behind the last part of a call: there are no more.
END = "end of coalescing"
#: Since when it is waited for, of a call that its own rank has refused: never.
REFUSED = -1.0
#: And of one for which nobody waits any more, without having seen it end: the wait was cancelled.
GIVEN_UP = -2.0

#: Of each lane: its calls, see ``headers``.
HEADERS = 512
HEADER_WORDS = 2
HEADERS_AT = RECORDS_AT + RECORDS * RECORD.size

TEXT_BYTES = 500
HALF_BYTES = 1 << 20
TEXTS_AT = HEADERS_AT + LANES * HEADERS * HEADER_WORDS * 8
SIZE_BYTES = TEXTS_AT + 2 * HALF_BYTES + TEXT_BYTES + LENGTH.size


#: Of a kind of operation: group, key of the lane, lane, operation, what it is of, file and line; with how
#: many bytes each may have.
PARTS = (60, 80, 80, 60, 100, 110)
_SEPARATOR = b"\x1f"
_DIGEST_BYTES = 8


def joined(parts: Sequence[str]) -> bytes:
    """One text of several. Long ones are cut, and told apart all the same."""
    return _SEPARATOR.join(
        _fitting(part.encode(errors="replace").replace(_SEPARATOR, b"?"), most)
        for part, most in zip(parts, PARTS, strict=False)
    )


def parted(text: bytes) -> list[str]:
    """The parts of a text."""
    return [part.decode(errors="replace") for part in text.split(_SEPARATOR)]


def lane_id(group: str, key: str) -> tuple[str, str]:
    """By which a lane is known in what is read."""
    known_group, known_key = parted(joined((group, key)))
    return known_group, known_key


def _fitting(part: bytes, most: int) -> bytes:
    if len(part) <= most:
        return part
    digest = hashlib.blake2b(part, digest_size=_DIGEST_BYTES).hexdigest().encode()
    return digest + b".." + part[len(part) - (most - len(digest) - 2) :]
