"""Turn a ``Flight`` into JSON values and back, to send it to other hosts and to keep it in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from asynccoll.flight.reading import Call, Flight, Progress


def to_plain(flight: Flight, calls: int | None = None) -> dict[str, Any]:
    """Return ``flight`` as JSON values, each call as a list in the order of the fields of ``Call``.

    ``calls``: keep only that many of the latest calls, and earlier ones that are not over; None keeps all.
    """
    plain = {field.name: getattr(flight, field.name) for field in fields(flight) if field.init}
    early = 0 if calls is None else max(0, len(flight.calls) - calls)
    kept = [*(call for call in flight.calls[:early] if call.is_open), *flight.calls[early:]]
    plain["calls"] = list(map(list, kept))
    plain["lanes"] = [one._asdict() for one in flight.lanes]
    return plain


def plain_call(call: Call, now: float) -> dict[str, object]:
    """Return a call for people and programs: what, where, and how many seconds ago; None is unknown."""
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
    """Return the ``Flight`` that ``to_plain`` turned into ``plain``. Raises ``ValueError`` if it did not."""
    try:
        calls = tuple(Call(*call) for call in plain["calls"])
        lanes = tuple(Progress(**one) for one in plain["lanes"])
        return Flight(**{**plain, "calls": calls, "lanes": lanes})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a recorded flight: {error}") from error
