"""Pictures: those of benchmarks depend on their data only; those of the concepts match their code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import patient

ROOT = Path(__file__).parents[1]
BENCHMARKS = str(ROOT / "benchmarks")
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
        "backend": "gloo",
        "memory": True,
        "ranks": 2,
        "rows": [
            {
                "operation": "all_reduce",
                "peer": peer,
                "way": "in-place",
                "size_bytes": size,
                "median_us": 5.0,
                "busbw_gbs": 0.5,
                "error": "",
            }
            for peer in ("asynccoll", "torch", "mpi4py")
            for size in (4, 1 << 20)
        ],
    },
}
#: Text that must be readable in each picture.
SHOWN = {
    "fusion": ("by hand", "a loop of raw calls"),
    "growth": ("barrier", "ring"),
    "memory": ("asynccoll in-place", "mpi4py in-place"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_picture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every series of the data is named in its picture."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "pictures", raising=False)
    import pictures

    monkeypatch.setitem(pictures.mpl.rcParams, "svg.fonttype", "none")  # so that text is not drawn as paths
    tmp_path.joinpath(f"{name}.json").write_text(json.dumps(FOUND[name]))
    first = pictures.draw(name, tmp_path, tmp_path).read_text()
    assert pictures.draw(name, tmp_path, tmp_path).read_text() == first
    for text in SHOWN[name]:
        assert f">{text}<" in first


def test_the_pictures_of_the_concepts(tmp_path: Path) -> None:
    """The documentation has what `make drawings` draws, and a page shows each picture."""
    command = [sys.executable, str(ROOT / "tools" / "drawings.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=patient(60))
    page = (ROOT / "docs" / "concepts.md").read_text()
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == page.count("](images/")
    for path in drawn:
        assert path.read_text() == (ROOT / "docs" / "images" / path.name).read_text()
        assert f"(images/{path.name})" in page


def test_a_text_that_does_not_fit_its_box_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import drawings

    with pytest.raises(ValueError, match="too long for 40 px"):
        drawings.Drawing(100, "").box(0, 0, 40, "a long text")
