#!/usr/bin/env python3
"""Run the tests that need a GPU on this machine's: ``make gpu``.

    python tools/gpu.py look             exit with 1, and a line that says why, if there is no GPU
    python tools/gpu.py run [ARGUMENTS]  run pytest on tests/test_gpu.py, then print the table of figures

``look`` runs under any Python, before 3 GB are downloaded in vain; ``run`` needs the environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOW = (
    "`make gpu` needs a machine with an NVIDIA GPU and its driver (nvidia-smi lists it), and nothing else: "
    "torch brings CUDA and nccl"
)


def count() -> int:
    """Return how many GPUs the driver sees."""
    number = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
    return 0 if failed else number.value


def look() -> None:
    """Exit if there is no GPU."""
    if not count():
        raise SystemExit(f"gpu: no GPU here. {HOW}")


def run(arguments: list[str]) -> int:
    """Run the tests, and print the figures that they measured."""
    import torch

    if not torch.cuda.is_available():
        build = torch.version.cuda or "no CUDA: the index served a build for the CPU; take torch from PyPI"
        raise SystemExit(f"gpu: torch {torch.__version__} sees no GPU (built for {build}). {HOW}")
    print(
        f"gpu: {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        figures = Path(directory, "figures")
        command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *arguments]
        command.append(str(ROOT / "tests" / "test_gpu.py"))
        environ = {**os.environ, "ASYNCCOLL_TEST_FIGURES": str(figures)}
        code = subprocess.run(command, env=environ, check=False).returncode
        if figures.exists():
            print(table(figures.read_text()))
    return code


def table(lines: str) -> str:
    """Format one figure per line."""
    rows = [json.loads(line) for line in lines.splitlines()]
    return "\n".join(f"{what:50}{value:12.2f} {unit}" for what, value, unit in rows)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["look"]:
            look()
        case ["run", *rest]:
            sys.exit(run(rest))
        case _:
            raise SystemExit(__doc__)
