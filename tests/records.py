"""Records of the tests that ran, for the table at the end of `make test`: a line of JSON as each test ends.

If ``ASYNCCOLL_TEST_RECORDS`` names a directory, each pytest process writes a file there; `tools/ran.py` reads
them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import pytest

DIRECTORY = "ASYNCCOLL_TEST_RECORDS"
#: Test files about something other than the backend under test.
_OF_FILES = {"test_slurm": "slurm", "test_gpu": "nccl"}
_NAMES = {"xla-tpu": "xla"}
#: Packages of which an environment has at most one, and under which name its tests of a backend then count.
_KINDS = {
    "mpi": {"mpich": "mpi, MPICH", "openmpi": "mpi, Open MPI"},
    "gloo": {"torch_xla": "gloo, old torch"},  # comes with the oldest supported torch
}


def register(config: pytest.Config) -> None:
    """Write records of this run if asked to, in the processes that run tests (not the one that hands out)."""
    directory = os.environ.get(DIRECTORY)
    hands_out = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if directory and not hands_out:
        config.pluginmanager.register(Recorder(Path(directory)))


class Recorder:
    """A pytest plugin that writes the records."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / f"{os.getpid()}"
        self._label = label()
        self._run = sorted((k, v) for k, v in os.environ.items() if k.startswith("ASYNCCOLL_TEST_"))
        self._phases: list[pytest.TestReport] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":  # of a whole file
            self._write(report.nodeid, report.outcome, _reason(report), 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._phases.append(report)
        if report.when == "teardown":
            phases, self._phases = self._phases, []
            worst = min(phases, key=lambda phase: ("failed", "skipped", "passed").index(phase.outcome))
            seconds = sum(phase.duration for phase in phases)
            self._write(report.nodeid, worst.outcome, _reason(worst), seconds)

    def _write(self, test: str, outcome: str, reason: str, seconds: float) -> None:
        name = Path(test.partition("::")[0]).stem
        label = next((of for start, of in _OF_FILES.items() if name.startswith(start)), self._label)
        line = {"backend": label, "run": self._run, "test": test, "outcome": outcome}
        line |= {"seconds": round(seconds, 3), "reason": reason}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def label() -> str:
    """Return the backend under test, with its library if there are several."""
    names = os.environ.get("ASYNCCOLL_TEST_BACKENDS", "gloo").split(",")
    return " + ".join(_kind(_NAMES.get(name, name)) for name in names)


def _kind(name: str) -> str:
    for package, kind in _KINDS.get(name, {}).items():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return kind
    return name


def _reason(report: Any) -> str:
    """Return why a test was skipped."""
    if report.outcome != "skipped":
        return ""
    where = report.longrepr
    return str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")
