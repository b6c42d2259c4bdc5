"""Train the GPT of ``train_gpt.py`` in each way, compare every step with DDP's, and draw it: ``make gpt``.

    python examples/compare_gpt.py           train, then compare and draw
    python examples/compare_gpt.py --draw    compare and draw the results of the last trainings

DDP trains on two ranks without interruption. Ours are stopped in the middle and resumed from a checkpoint, in
new processes: ``ac.overlap_gradients`` on two ranks again, ``ac.overlap.shard_optimizer`` on one rank. DDP on
one rank, with the same samples in each step, shows how much rounding alone contributes when the order of
summation changes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

HERE = Path(__file__).parent
MUTED = "#6b6b6b"
GRID = "#e4e4e4"


class Training(NamedTuple):
    """What averages the gradients, on how many ranks (before and after the stop), and how it is drawn."""

    way: str
    ranks: tuple[int, ...]
    label: str
    colour: str  # from the palette of Okabe and Ito, as in the timeline


TRAININGS = {
    "ddp": Training("ddp", (2,), "DistributedDataParallel, 2 ranks", "#E69F00"),
    "overlapped": Training("overlapped", (2, 2), "overlap_gradients, 2 ranks, then 2 again", "#0072B2"),
    "sharded": Training("sharded", (2, 1), "shard_optimizer, 2 ranks, then 1", "#009E73"),
    "one": Training("ddp", (1,), "DistributedDataParallel, 1 rank", "#D55E00"),
}
#: Summing two numbers in either order gives the same bits. Otherwise the order changes the rounding, whose
#: differences grow from step to step.
LIMITS = {"overlapped": 0.0, "sharded": 1e-5}


def train(name: str, steps: int, checkpoint: Path) -> None:
    checkpoint.unlink(missing_ok=True)
    training = TRAININGS[name]
    for part, ranks in enumerate(training.ranks, 1):
        until = steps * part // len(training.ranks)
        print(f"{training.label}: up to step {until}", flush=True)
        program = ["-m", "asynccoll", "run", "-n", str(ranks), str(HERE / "train_gpt.py")]
        options = ["--way", training.way, "--steps", str(steps), "--until", str(until)]
        subprocess.run([sys.executable, *program, *options, "--checkpoint", str(checkpoint)], check=True)


class Difference(NamedTuple):
    """How much a training differs from DDP's, at each step."""

    loss: Tensor  # |difference| of the loss over all ranks
    distance: Tensor  # norm of the difference of the parameters (every 97th of them) / norm of DDP's
    last: float  # the same for all parameters, after the last step


def difference(of: dict[str, Any], reference: dict[str, Any]) -> Difference:
    own, its = (torch.tensor(one["losses"], dtype=torch.float64) for one in (of, reference))
    apart = (of["sampled"] - reference["sampled"]).norm(dim=1) / reference["sampled"].norm(dim=1)
    return Difference((own - its).abs(), apart, _distance(_flat(of["model"]), _flat(reference["model"])))


def _flat(model: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in model.values()])


def _distance(of: Tensor, reference: Tensor) -> float:
    return float((of - reference).norm() / reference.norm())


# The picture


def draw(results: dict[str, dict[str, Any]], differences: dict[str, Difference]) -> Figure:
    """Draw the losses of all trainings and, below, how much each differs from DDP's."""
    figure = Figure(figsize=(10.5, 7.0), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "loss"], ["difference", "distance"]], height_ratios=(1.4, 1))
    steps = len(results["ddp"]["losses"])
    _losses(axes["loss"], results)
    for name, found in differences.items():
        look: dict[str, Any] = {"color": TRAININGS[name].colour, "label": TRAININGS[name].label}
        axes["difference"].plot(found.loss, linestyle="none", marker=".", markersize=4, **look)
        axes["distance"].plot(found.distance, "--" if name == "one" else "-", linewidth=1.6, **look)
    _plain(axes["loss"], "Loss of each step, over all ranks, in nats per character", steps)
    _plain(axes["difference"], "|loss - DDP's|", steps, zero=1e-9)
    _plain(axes["distance"], "|parameters - DDP's| / |DDP's|, as each step finds them", steps, zero=1e-9)
    axes["distance"].legend(framealpha=1.0, edgecolor="white", fontsize=8, loc="upper left")
    where = {"xy": (steps / 2, 0.93), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes["loss"].annotate("stopped, and started again", xytext=(6, 0), color=MUTED, fontsize=9, **where)
    return figure


def _losses(axes: Axes, results: dict[str, dict[str, Any]]) -> None:
    """Draw DDP's losses as a broad pale line, and the others as thin lines on top of it."""
    for name in ("ddp", "overlapped", "sharded"):
        training, below = TRAININGS[name], name == "ddp"
        look: dict[str, Any] = {"color": training.colour, "alpha": 0.6 if below else 1.0}
        at, losses = zip(*results[name]["evaluations"], strict=True)
        dashes = "--" if name == "sharded" else "-"
        width = 5 if below else 1.2
        axes.plot(results[name]["losses"], dashes, linewidth=width, label=training.label, **look)
        axes.plot(at, losses, linestyle="none", marker="o", markersize=11 if below else 4, **look)
    axes.legend(frameon=False, fontsize=9, title="lines: trained on; dots: not trained on")


def _plain(axes: Axes, title: str, steps: int, zero: float | None = None) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("step")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.axvline(steps / 2, color=MUTED, linewidth=0.8, linestyle=":")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if zero is not None:  # symlog can also show a difference of zero, which a plain log axis cannot
        axes.set_yscale("symlog", linthresh=zero)
        axes.set_ylim(-zero / 3, 1e-3)


def main(arguments: argparse.Namespace) -> None:
    paths = {name: arguments.directory / f"{name}.pt" for name in TRAININGS}
    if not arguments.draw:
        for name, path in paths.items():
            train(name, arguments.steps, path)
    results = {name: torch.load(path, weights_only=True) for name, path in paths.items() if path.exists()}
    reference = results["ddp"]
    differences = {name: difference(of, reference) for name, of in results.items() if name != "ddp"}
    for name, found in differences.items():
        loss, distance = found.loss.max(), max(found.distance.max().item(), found.last)
        print(
            f"{TRAININGS[name].label}: at most {loss:.2g} from DDP's loss, {distance:.2g} from its parameters"
        )
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(results, differences).savefig(arguments.picture, dpi=100)
    print(f"drawn in {arguments.picture.resolve()}")
    for name, limit in LIMITS.items():
        found = differences[name]
        if max(found.distance.max().item(), found.last) > limit:
            raise SystemExit(f"{name} is further from DDP than {limit}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Compare trainings of a small GPT with DDP's, and draw them."
    )
    parser.add_argument("--draw", action="store_true", help="draw what the last trainings left")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--directory", type=Path, default=Path("build/gpt"), help="of the checkpoints")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "images" / "gpt.png")
    main(parser.parse_args())
