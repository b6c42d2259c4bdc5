"""Run the benchmarks and draw their results: ``make pictures``.

    python benchmarks/pictures.py            run fusion, growth and memory, then draw
    python benchmarks/pictures.py --draw     redraw the data of the last run

Each benchmark writes its figures to ``build/bench/NAME.json``; the pictures go to ``docs/images`` as SVG.
``memory`` runs `asynccoll bench` in the environment that has MPI, which measures all peers in one run. The
picture of latency comes from `asynccoll bench --plot`, the timeline from ``examples/train_digits.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from asynccoll.bench import picture
from asynccoll.trace.plot import STYLE

ROOT = Path(__file__).parents[1]
DATA = ROOT / "build" / "bench"
IMAGES = ROOT / "docs" / "images"

#: The palette of Okabe and Ito, as in the timeline: ours in blue and green, the peers in other colors.
COLOURS = ("#0072B2", "#009E73", "#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#222222")

RUNS = {
    "fusion": [
        "-m",
        "asynccoll",
        "run",
        "-n",
        "2",
        "benchmarks/fusion.py",
        "--only",
        "trees",
        "--rounds",
        "12",
    ],
    "growth": ["benchmarks/growth.py", "--rounds", "5"],
}
_SIZES = "4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M"
#: Prints its figures instead of writing a file, and is drawn as `asynccoll bench --plot` draws.
BENCH = (
    "tools/envs.py exec mpich -- mpiexec -n 2 python -m asynccoll bench "
    f"--backend gloo --peers asynccoll,torch,mpi4py --sizes {_SIZES} --json"
).split()


def measure(name: str) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    data = DATA / f"{name}.json"
    if name in RUNS:
        subprocess.run([sys.executable, *RUNS[name], "--data", str(data)], check=True, cwd=ROOT)
        return
    with data.open("w") as file:
        subprocess.run([sys.executable, *BENCH], check=True, cwd=ROOT, stdout=file)


# Pictures, each drawn from the data of one benchmark


def fusion(found: dict[str, Any]) -> Figure:
    """Draw how much longer than ours a loop of raw calls and each other way take."""
    trees = found["trees"]
    figure = Figure(figsize=(10.5, 1.2 + 2.6), layout="constrained")
    for axes, (tree, ways) in zip(
        figure.subplots(1, len(trees), squeeze=False)[0], trees.items(), strict=True
    ):
        own = ways["ours"]["median"]
        speed = {name: way["median"] / own for name, way in ways.items() if isinstance(way, dict)}
        speed = {"a loop of raw calls": ways["loop over ours"], **speed}
        names = sorted(speed, key=lambda name: speed[name])
        colours = [COLOURS[0] if name.startswith("ours") else COLOURS[3] for name in names]
        bars = axes.barh(names, [speed[name] for name in names], color=colours, height=0.7)
        axes.bar_label(bars, [f"{speed[name]:.2g}" for name in names], padding=3, fontsize=8)
        axes.set_xlim(0, max(speed.values()) * 1.2)
        axes.tick_params(axis="y", labelsize=8)
        axes.set_xlabel("time, in times that of ours")
        axes.set_title(tree)
    return figure


def scaling(found: dict[str, Any]) -> Figure:
    """Draw our own overhead (measured) and the time of a step (predicted) over the number of ranks."""
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    worlds = [int(ranks) for ranks in found["overhead"]]
    calls = [name for name, one in found["overhead"][str(worlds[0])].items() if isinstance(one, dict)]
    shown = [name for name in calls if found["overhead"][str(worlds[0])][name]["raw"] is not None]
    for name, colour in zip(shown, COLOURS, strict=False):
        at = [found["overhead"][str(ranks)][name] for ranks in worlds]
        own = [one["ours"] for one in at]
        left.plot(worlds, own, color=colour, marker="o", markersize=4, label=name)
        left.plot(worlds, [one["raw"] for one in at], color=colour, linestyle=":", linewidth=1.2)
    for (name, steps), colour in zip(found["predicted"].items(), COLOURS, strict=False):
        seconds = [one["seconds"] * 1e3 for one in steps.values()]
        right.plot([int(ranks) for ranks in steps], seconds, color=colour, linestyle="--", label=name)
    left.set_yscale("log")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([8, *worlds] if axes is right else worlds)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("ranks")
        axes.legend()
    left.set_title("Python per call in us, simulated (dotted: raw call)")
    right.set_title("a step in ms: predicted, not verified")
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "fusion": fusion,
    "growth": scaling,
}
NAMES = [*PICTURES, "memory"]


def draw(name: str, data: Path, images: Path) -> Path:
    """Draw the figures that benchmark ``name`` wrote to ``data``; the same figures give the same file."""
    path, found = images / f"{name}.svg", json.loads((data / f"{name}.json").read_text())
    if name == "memory":
        return picture.draw(found, found["rows"], path)
    mpl.rcParams.update({**STYLE, "svg.hashsalt": name})
    PICTURES[name](found).savefig(path, metadata={"Date": None})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--draw", action="store_true", help="draw again, without running anything")
    parser.add_argument("--data", type=Path, default=DATA, help="where to draw from (default: build/bench)")
    given = parser.parse_args()
    for name in given.only:
        if not given.draw:
            measure(name)
        print(draw(name, given.data, IMAGES).relative_to(ROOT))


if __name__ == "__main__":
    main()
