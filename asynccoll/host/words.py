"""Times, sizes, counts, ranks and lanes as readable text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: More ranks than this are shown as ranges, of which at most this many are shown.
_MOST_NUMBERS = 8


def duration(seconds: float) -> str:
    """Return ``1.50 s``, ``12.3 ms`` or ``45 us``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def lane_name(lane: str, group: str) -> str:
    """Return ``lane 'default'`` if ``group`` is ``world``; ``lane 'default' of ranks [0, 2]`` if ``0-2``.

    For a long group, ``group`` may have only the end of its name, after two dots.
    """
    return f"lane {lane!r}" if group == "world" else f"lane {lane!r} of ranks [{ranks_of(group)}]"


def ranks_of(group: str) -> str:
    """Return ``0, 2`` if ``group`` is ``0-2``; ``..., 30, 31`` if ``group`` was cut."""
    _, cut, known = group.rpartition("..")
    if cut:  # possibly in the middle of a number
        known = f"...{known[known.index('-') :]}"
    return known.replace("-", ", ")


def listed(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2``; for many ranks, ``ranks 0-511, 600``."""
    return f"rank{'s' * (len(ranks) != 1)} {enumerated(ranks)}"


def enumerated(ranks: Sequence[int]) -> str:
    """Return ``0, 2``; for many ranks, ranges such as ``0-511``, and of many ranges only the first ones."""
    if len(ranks) <= _MOST_NUMBERS:
        return ", ".join(map(str, ranks))
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    told = [
        f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows[:_MOST_NUMBERS]
    ]
    left_out = sum(map(len, rows[_MOST_NUMBERS:]))
    return ", ".join(told) + (f" and {left_out} more" if left_out else "")


def by_text(ranks: Iterable[int], texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of ranks in words and text, one for each text: ``("ranks 0, 2", "train.py:8")``."""
    found: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        found.setdefault(text, []).append(rank)
    return [(listed(members), text) for text, members in found.items()]


def encoded(text: str) -> bytes:
    """Encode ``text`` in UTF-8; escape what UTF-8 lacks (in non-Unicode file names) with backslashes."""
    return text.encode(errors="backslashreplace")


def shortened(text: str, most: int) -> str:
    """Return ``text`` in at most ``most`` characters: the rest is cut off, after a clause or a word."""
    if len(text) <= most:
        return text
    kept = text[: most - 4]
    at = max(kept.rfind(mark) for mark in ("; ", ", ", ": "))
    if at < most // 2:
        at = kept.rfind(" ")
    return f"{kept[: at + 1] if at > 0 else kept} ..."


def size(size_bytes: float) -> str:
    """Return ``1.5 MiB``."""
    amount, units = float(size_bytes), ["B", "KiB", "MiB", "GiB"]
    while round(amount) >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if amount >= 10 or units[0] == "B" else f"{amount:.1f} {units[0]}"


def plural(count: int, what: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{count} {what}{'s' * (count != 1)}"
