"""How a flight recorder's memory is laid out: what its writer and its readers, of any version, agree on.

    header    4 KiB    which rank, clocks, how the rank ended; then what it says about itself, as JSON
    lanes     64 KiB   for each lane: its name, and the latest place in its order, however old
    records   88 KiB   a ring: the operation with ticket t is in record t % 1,024
    headers   2 MiB    for each lane: a ring of two words per call: number and running checksum; its text
    texts     12 MiB   the texts that records refer to, one for each kind of call, in two halves

Only pages that were written to use memory. A text's number is the offset at which it begins, never 0; the
halves are filled in turn. A half has room for the three texts that an operation may have (compared, recorded,
its failure), at their longest, for every record, so texts live as long as their record.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

#: The memory's name, by which it is found among a process's descriptors.
NAME = "asynccoll-flight"
MAGIC = b"acflight"
VERSION = 5
HEADER_BYTES = 4096
#: magic, version, rank, world size, pid, monotonic and wall clock at the beginning.
HEADER = struct.Struct("=8sIiiidd")
#: When and how it ended, after the header; then the exit code, as in ``subprocess``.
ENDING = struct.Struct("=dIi")
ENDING_AT = 64
#: How a rank has ended, by number: it has not; it called ``finalize``; its program ended without an error;
#: its program ended with one; its process ended, as seen by its launcher.
ENDINGS = ("running", "finalized", "ended", "died", "exited")
#: The exit code is not known.
NO_CODE = -(1 << 31)
#: A JSON object, preceded by its length.
SAID_AT = 128
LENGTH = struct.Struct("=I")

LANES = 256
#: The latest place in the order, then the length of the lane's text and that text.
LANE = struct.Struct("=QH246s")
LANES_AT = HEADER_BYTES

RECORDS = 1024
#: ticket, text, place in the order, part, peer, bytes, called, begun, ended (if negative: it was last polled
#: then, and had not), waited for since (if negative: until then, when the wait timed out), how it failed,
#: ticket. While a record is being written, its two tickets differ.
RECORD = struct.Struct("=QQQIiQddddQQ")
RECORDS_AT = LANES_AT + LANES * LANE.size
#: The size of a record, and the index of some of its fields, in words of eight bytes.
WORDS = RECORD.size // 8
BEGUN, ENDED, WAITED, OUTCOME = 6, 7, 8, 9
#: Recorded in place of an operation after the last part of a call, which has no further parts.
END = "end of coalescing"
#: In place of "waited for since": the rank itself has refused the call.
REFUSED = -1.0
#: In place of "waited for since": the wait was cancelled before the operation was seen to end.
GIVEN_UP = -2.0

#: For each lane, the number of calls in its ring (see ``headers``).
HEADERS = 512
HEADER_WORDS = 2
HEADERS_AT = RECORDS_AT + RECORDS * RECORD.size

TEXT_BYTES = 2040
HALF_BYTES = 6 << 20
TEXTS_AT = HEADERS_AT + LANES * HEADERS * HEADER_WORDS * 8
SIZE_BYTES = TEXTS_AT + 2 * HALF_BYTES + TEXT_BYTES + LENGTH.size


#: The most bytes of each part of the text of a kind of operation: group, the lane's key, lane, operation,
#: its data, file and line.
PARTS = (60, 80, 80, 60, 100, 110)
_SEPARATOR = b"\x1f"
_DIGEST_BYTES = 8


def joined(parts: Sequence[str]) -> bytes:
    """Join parts into one text. Long parts are cut, with a digest so that different ones stay different."""
    return _SEPARATOR.join(
        _fitting(part.encode(errors="replace").replace(_SEPARATOR, b"?"), most)
        for part, most in zip(parts, PARTS, strict=False)
    )


def parted(text: bytes) -> list[str]:
    """Split a text into its parts."""
    return text.decode(errors="replace").split(_SEPARATOR.decode())


def lane_id(group: str, key: str) -> tuple[str, str]:
    """Return the group and key of a lane as readers see them, with long ones cut."""
    known_group, known_key = parted(joined((group, key)))
    return known_group, known_key


def is_cut(part: str) -> bool:
    """Whether this part, as read, was too long: then it begins with a digest, and has only the end."""
    return part[2 * _DIGEST_BYTES :].startswith("..")


def _fitting(part: bytes, most: int) -> bytes:
    if len(part) <= most:
        return part
    digest = hashlib.blake2b(part, digest_size=_DIGEST_BYTES).hexdigest().encode()
    return digest + b".." + part[len(part) - (most - len(digest) - 2) :]
