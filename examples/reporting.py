"""The output of ``train_digits.py``: a progress bar while it trains, and step times at the end."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor

import asynccoll as ac
from digits import Batches

Step = Callable[[Tensor, Tensor], Awaitable[None]]
Advance = Callable[[int, float], None]  # the number of further steps, the current accuracy


@contextlib.contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Show a progress bar on rank 0."""
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "steps", TimeElapsedColumn())
    with Progress(*columns, "{task.fields[note]}", disable=ac.get_rank() != 0) as bar:
        task = bar.add_task("training", total=total, note="")

        def advance(steps: int, accuracy: float) -> None:
            note = f"test accuracy {accuracy:.1%}" if accuracy else ""
            bar.update(task, advance=steps, note=note)

        yield advance


async def time_steps(ways: dict[str, Step], batches: Batches, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step of each way; the ways alternate, so that machine load affects all."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(steps + 3):
        x, y = next(batches.of(number))
        for name, step in ways.items():
            await ac.barrier()
            began = time.perf_counter()
            await step(x, y)
            if number >= 3:  # the first steps open connections
                seconds[name].append(time.perf_counter() - began)
    return seconds


def table(seconds: dict[str, list[float]]) -> str:
    """Return one line per way, with its median relative to DDP's (to blocking's if DDP was not timed)."""
    first = "DDP" if "DDP" in seconds else "blocking"
    against = f"against {first}"
    lines = [f"{'a step, in ms':>14} {'median':>8} {'fastest tenth':>14} {against:>17}"]
    reference = statistics.median(seconds[first])
    for name, values in seconds.items():
        median, tenth = statistics.median(values), sorted(values)[len(values) // 10]
        lines.append(f"{name:>14} {1e3 * median:8.1f} {1e3 * tenth:14.1f} {median / reference:17.2f}")
    return "\n".join(lines)


def meaning(seconds: dict[str, list[float]], hidden: float) -> str:
    """Say in words what the table shows, and why a step may be slower."""
    if "DDP" not in seconds:
        return "one rank alone communicates with nobody, so there is nothing to hide: try it on two"
    ratio = statistics.median(seconds["overlapped"]) / statistics.median(seconds["DDP"])
    return (
        f"{hidden:.0%} of the communication that was recorded ran while something was computed; a step takes "
        f"{ratio:.2f} of DDP's time\n"
        "ranks of one machine share its cores: communication takes little time here, and takes it from\n"
        "the cores that compute, so hiding it gains little, or nothing"
    )


def over_a_link(seconds: dict[str, list[float]], hidden: float, link: str) -> str:
    """Return the same for two hosts with a slow link between them."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    blocking, ddp = (median["overlapped"] / median[name] for name in ("blocking", "DDP"))
    return (
        f"over a link of {link} between two hosts {hidden:.0%} of the communication is hidden; a step takes\n"
        f"{blocking:.2f} of the time that it takes if it waits for each gradient, and {ddp:.2f} of DDP's"
    )
