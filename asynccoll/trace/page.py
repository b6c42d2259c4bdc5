"""One self-contained HTML page of a trace: the template ``page.html`` with the data in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from asynccoll.trace.advice import advice, breaks_off
from asynccoll.trace.findings import Findings
from asynccoll.trace.parts import Part
from asynccoll.trace.spans import Span, stack

_TEMPLATE = Path(__file__).with_name("page.html")
_TITLE = b"<title>asynccoll trace</title>"
_MARK = '"the data"'
#: Microseconds are enough for the eye, and make the page half as large.
_DIGITS = 6


def write_page(path: Path, parts: Sequence[Part], found: Findings, uncertain: float | None) -> Path:
    """Write the page of ``parts``, whose times are on one clock, to ``path``."""
    data = json.dumps(_data(parts, found, uncertain), separators=(",", ":"))
    # Inside a script element, "</" would end it.
    path.write_text(_TEMPLATE.read_text().replace(_MARK, data.replace("</", "<\\/")))
    return path


def is_page(path: Path) -> bool:
    """Whether ``write_page`` has written this file."""
    with path.open("rb") as file:
        return _TITLE in file.read(1024)


def _data(parts: Sequence[Part], found: Findings, uncertain: float | None) -> dict[str, object]:
    texts: dict[str, int] = {}
    return {
        "ranks": [_rank(part, texts) for part in parts],
        "texts": list(texts),
        "uncertain": uncertain,
        "advice": advice(found),
        "breaks_off": breaks_off(found),
        "findings": found.to_dict(),
    }


def _rank(part: Part, texts: dict[str, int]) -> dict[str, object]:
    rows = [
        {
            "name": row,
            "operations": tracks[0][0].is_operation,
            "tracks": [[_span(span, texts) for span in track] for track in tracks],
        }
        for row, tracks in stack(part.spans)
    ]
    about = {"rank": part.rank, "of": part.world_size, "host": part.host, "pid": part.pid}
    steps = [round(step, _DIGITS) for step in part.steps]
    return {**about, "backend": part.backend, "seconds": part.seconds, "steps": steps, "rows": rows}


def _span(span: Span, texts: dict[str, int]) -> list[object]:
    """Return what the page's script reads: start, end (null: none), name, place, bytes, sequence, failed."""
    start = round(span.start, _DIGITS)
    end = None if span.end is None else round(span.end, _DIGITS)
    name, place = (texts.setdefault(text, len(texts)) for text in (span.name, span.place))
    return [start, end, name, place, span.size_bytes, span.sequence, int(span.failed)]
