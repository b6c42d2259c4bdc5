"""The flight recorder: the last operations of each rank, in memory that other processes can read.

It is always on. A ``Recorder`` writes a record of each operation; ``read`` returns the records as a
``Flight``, also those of another process on this host. This package must not know what an operation does.

    for descriptor in shared_memory.find(pid, flight.NAME):     # of any process of this host and user
        memory = shared_memory.look(pid, descriptor)
        recorded = flight.read(memory)                          # a Flight, or None: not a recorder's
        for call in recorded.calls:                             # the oldest first
            print(call.lane, call.sequence, call.operation, call.place, call.state)
"""

from asynccoll.flight.comparing import Parting, Strayed, by_line, parting, partings, strayed
from asynccoll.flight.hanging import (
    FULL_STATE,
    LATELY_SECONDS,
    Hang,
    Unfinished,
    advice,
    hang,
    hang_of,
    reason,
)
from asynccoll.flight.headers import Headers
from asynccoll.flight.layout import END, NAME, RECORDS, joined, lane_id
from asynccoll.flight.messages import (
    Unmet,
    abandoned,
    is_answered,
    latest_side,
    refused_send,
    refused_side,
    unmet,
)
from asynccoll.flight.reading import Call, Flight, Progress, from_plain, read, said, to_plain
from asynccoll.flight.recorder import Recorder, mark_ended
from asynccoll.flight.shifting import Comparison, Made, Shift, made

__all__ = [
    "END",
    "FULL_STATE",
    "LATELY_SECONDS",
    "NAME",
    "RECORDS",
    "Call",
    "Comparison",
    "Flight",
    "Hang",
    "Headers",
    "Made",
    "Parting",
    "Progress",
    "Recorder",
    "Shift",
    "Strayed",
    "Unfinished",
    "Unmet",
    "abandoned",
    "advice",
    "by_line",
    "from_plain",
    "hang",
    "hang_of",
    "is_answered",
    "joined",
    "lane_id",
    "latest_side",
    "made",
    "mark_ended",
    "parting",
    "partings",
    "read",
    "reason",
    "refused_send",
    "refused_side",
    "said",
    "strayed",
    "to_plain",
    "unmet",
]
