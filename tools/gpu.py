#!/usr/bin/env python3
"""What needs a GPU, tested on this machine's: ``make gpu``.

    python tools/gpu.py look             say in one line whether there is a GPU; end with 1 if not
    python tools/gpu.py run [ARGUMENTS]  pytest on tests/test_gpu.py, then the table of figures

The first is run by any Python, before 3 GB are downloaded for nothing; the second in an environment.
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
    """How many GPUs the driver knows."""
    number = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
    return 0 if failed else number.value


def look() -> None:
    """End here where there is no GPU."""
    if not count():
        raise SystemExit(f"gpu: no GPU here. {HOW}")


def run(arguments: list[str]) -> int:
    """The tests, and what they measured."""
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
    """One figure a line."""
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
