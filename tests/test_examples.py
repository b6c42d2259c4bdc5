"""The examples run for real, as a reader would run them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import asynccoll
import needs
from patience import patient, until
from worlds import LAUNCHER_VARIABLES

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = patient(140)


def run(directory: Path, name: str, *arguments: str, ranks: int = 2, launched: bool = True) -> str:
    """Return what an example prints; it must succeed in time and without a warning of ours."""
    environ = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    here = str(Path(asynccoll.__file__).parent.parent)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environ.get("PYTHONPATH")]))
    launcher = ["-m", "asynccoll", "run", "-n", str(ranks)] if launched else []
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    programs = [path for path in EXAMPLES.glob("*.py") if "asynccoll run" in path.read_text()]
    assert len(programs) >= 3
    assert not [path for path in programs if f'"{path.stem}"' not in source]


def test_quickstart(tmp_path: Path) -> None:
    said = sorted(run(tmp_path, "quickstart", ranks=2).splitlines())
    assert said == [f"rank {r}: 3, and meanwhile (512, 512) computed" for r in range(2)]


def test_quickstart_without_a_launcher(tmp_path: Path) -> None:
    said = run(tmp_path, "quickstart", launched=False)
    assert said == "rank 0: 1, and meanwhile (512, 512) computed\n"


def test_two_lanes(tmp_path: Path) -> None:
    said = run(tmp_path, "two_lanes", ranks=2)
    for name, numbers in (("apples", (1, 2, 3)), ("pears", (10, 20, 30))):
        lines = [line for line in said.splitlines() if line.startswith(name)]
        assert lines == [f"{name}: {n} on each rank makes {2 * n}" for n in numbers]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "launched"), [(1, False), (2, True)], ids=["plain", "2"])
def test_train_digits(tmp_path: Path, ranks: int, launched: bool) -> None:
    """It reaches its accuracy, agrees on all ranks and with the blocking run, and writes its picture."""
    needs.need_package_of("demo", "sklearn")
    picture = tmp_path / "here" / "timeline.png"
    epochs = ("--epochs", "3" if launched else "1")
    options = ("--steps", "2", "--picture", str(picture), *epochs)
    said = run(tmp_path, "train_digits", *options, ranks=ranks, launched=launched)
    accuracy = re.search(r"test accuracy ([\d.]+)% after", said)
    assert accuracy is not None
    assert float(accuracy[1]) >= (90.0 if launched else 50.0)
    assert f"the ranks ({ranks}) hold the same parameters, bit for bit" in said
    apart = re.search(
        r"a run that blocks (?:are the same|differ from these by at most (\S+))$", said, re.MULTILINE
    )
    assert apart is not None
    assert float(apart[1] or 0) <= 1e-6
    for way in ("blocking", *(["DDP"] if launched else []), "overlapped"):
        assert re.search(rf"^ +{way} +[\d.]+ +[\d.]+ +[\d.]+$", said, re.MULTILINE), said
    hidden = (
        r"\d+% of the communication that was recorded ran while something was computed; a step takes \d\.\d+"
    )
    assert re.search(hidden if launched else "nothing to hide", said), said
    assert f"what ran when: {picture}" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 200_000


@pytest.mark.slow
def test_slow_link(tmp_path: Path) -> None:
    """It times the steps, and leaves no process of its two hosts behind."""
    needs.need_package_of("demo", "sklearn")
    needs.need_root("a network of two hosts")
    said = run(tmp_path, "slow_link", "--steps", "2", launched=False)
    for way in ("blocking", "DDP", "overlapped"):
        assert re.search(rf"^ +{way} +[\d.]+ +[\d.]+ +[\d.]+$", said, re.MULTILINE), said
    told = r"over a link of 300 Mbit/s between two hosts \d+% of the communication is hidden; a step takes\n"
    assert re.search(told + r"\d\.\d\d of", said), said
    assert not timing()


def test_slow_link_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C ends the ranks on both hosts, and the hosts themselves."""
    needs.need_package_of("demo", "sklearn")
    needs.need_root("a network of two hosts")
    line = [sys.executable, str(EXAMPLES / "slow_link.py"), "--steps", "1000000"]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        assert until(lambda: len(timing()) >= 2, LIMIT_S)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 128 + signal.SIGINT
    assert b"Traceback" not in errors
    assert until(lambda: not timing(), LIMIT_S)


def timing() -> list[str]:
    """Return the ids of rank processes that time their steps over a link."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if "/train_digits.py\0--link\0" in path.read_text():
                found.append(path.parent.name)
    return found


#: By number of steps: for each way its runs as (ranks, last step). All ways run at night only.
GPT = {
    4: {"ddp": [(2, 4)], "overlapped": [(2, 2), (2, 4)]},
    8: {"ddp": [(2, 8)], "overlapped": [(2, 4), (2, 8)], "sharded": [(2, 4), (1, 8)]},
}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, pytest.param(8, marks=pytest.mark.nightly)])
def test_train_gpt(tmp_path: Path, steps: int) -> None:
    """Stopped and resumed, it matches DDP's steps: bit for bit, or up to rounding if sums are sharded."""
    needs.need_package_of("demo", "matplotlib")
    options = ("--steps", str(steps), "--dtype", "float64", "--checkpoint")
    found = {}
    for way, worlds in GPT[steps].items():
        path = tmp_path / f"{way}.pt"
        for ranks, last in worlds:
            more = ("--way", way, "--until", str(last))
            said = run(tmp_path, "train_gpt", *options, str(path), *more, ranks=ranks)
            assert f"{last} steps, in {path}" in said
        found[way] = torch.load(path, weights_only=True)
    reference = found["ddp"]
    assert reference["losses"][-1] < reference["losses"][0] - 0.05 * steps  # it learns
    for way in found.keys() - {"ddp"}:
        exactly = way == "overlapped"
        limit = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-9, "atol": 1e-9}
        for name in ("losses", "evaluations", "sampled", "model", "optimizer"):
            torch.testing.assert_close(found[way][name], reference[name], **limit)
    if "sharded" not in found:
        return
    drawn = ("--draw", "--directory", str(tmp_path), "--picture", str(tmp_path / "gpt.png"))
    said = run(tmp_path, "compare_gpt", *drawn, launched=False)
    assert "at most 0 from DDP's loss, 0 from its parameters" in said
    assert tmp_path.joinpath("gpt.png").read_bytes().startswith(b"\x89PNG")
