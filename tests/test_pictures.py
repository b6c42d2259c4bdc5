"""The pictures of the benchmarks: drawn from data alone, and the same data draws the same file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
FOUND: dict[str, Any] = {
    "fusion": {
        "trees": {"two": {"ours": {"median": 2.0}, "by hand": {"median": 6.0}, "loop over ours": 25.0}}
    },
    "growth": {
        "overhead": {
            ranks: {
                "first call": 0.5,
                "barrier": {"ours": 5.5, "raw": 3.5},
                "str": {"ours": 9.0, "raw": None},
            }
            for ranks in ("64", "256")
        },
        "predicted": {"ring": {"8": {"bucket": 1, "seconds": 0.25}, "64": {"bucket": 2, "seconds": 0.5}}},
    },
    "memory": {
        "ranks": 2,
        "rows": [
            {
                "peer": peer,
                "way": way,
                "error": "",
                "size_bytes": size,
                "median_us": size / 8,
                "algbw_gbs": 8.0,
            }
            for peer in ("asynccoll", "torch", "mpi4py")
            for way in ("in-place", "out-of-place")
            for size in (4, 4096)
        ],
    },
}
#: What has to be read in each.
SHOWN = {
    "fusion": ("by hand", "a loop of raw calls"),
    "growth": ("barrier", "ring"),
    "memory": ("gloo", "4.0 KiB"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_picture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every series of the data is named in it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "pictures", raising=False)
    import pictures

    monkeypatch.setitem(pictures.mpl.rcParams, "svg.fonttype", "none")  # text as text
    tmp_path.joinpath(f"{name}.json").write_text(json.dumps(FOUND[name]))
    first = pictures.draw(name, tmp_path, tmp_path).read_text()
    assert pictures.draw(name, tmp_path, tmp_path).read_text() == first
    for text in SHOWN[name]:
        assert f">{text}<" in first
