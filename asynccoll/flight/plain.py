"""Turn a ``Flight`` into JSON values and back, to send it to other hosts and to keep it in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from asynccoll.flight.reading import Call, Flight, Progress

__all__ = ["from_plain", "plain_call", "to_plain"]

#: The most calls in an answer: questions are about the latest.
_MOST_CALLS = 1024


def to_plain(flight: Flight, calls: int = _MOST_CALLS) -> dict[str, Any]:
    """``flight`` with its last ``calls`` calls, each a list in the order of the fields of ``Call``."""
    plain = {field.name: getattr(flight, field.name) for field in fields(flight) if field.init}
    kept = flight.calls[-calls:] if calls else ()
    plain["calls"] = [[getattr(call, field.name) for field in fields(call)] for call in kept]
    plain["lanes"] = [asdict(one) for one in flight.lanes]
    return plain


def plain_call(call: Call, now: float) -> dict[str, object]:
    """A call for people and programs: what was called, where, how many seconds ago; None is not known."""
    return {
        "operation": call.operation,
        "sequence": call.sequence,
        "of": call.of,
        "lane": call.lane,
        "group": call.group,
        "size_bytes": call.size_bytes,
        "place": call.place,
        "state": call.state,
        "ago_s": round(now - call.called, 3) if now else None,
        "took_s": round(call.ended - call.called, 6) if call.ended else None,
        "failure": call.failure,
    }


def from_plain(plain: Mapping[str, Any]) -> Flight:
    """The ``Flight`` that ``to_plain`` turned into ``plain``. Raises ``ValueError`` for anything else."""
    try:
        calls = tuple(Call(*call) for call in plain["calls"])
        lanes = tuple(Progress(**one) for one in plain["lanes"])
        return Flight(**{**plain, "calls": calls, "lanes": lanes})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a flight: {error}") from error
