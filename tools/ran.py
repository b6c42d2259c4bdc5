#!/usr/bin/env python3
"""Print the table of which tests ran on which backend, from the records of the tests.

    python tools/ran.py DIRECTORY

``tests/records.py`` writes the records. A test that was rerun counts with its last outcome; backends without
any record are listed as not run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

OUTCOMES = ("passed", "failed", "skipped")
#: The backends in the order of the table, and how to run the tests on each.
BACKENDS = {
    "gloo": "make test",
    "gloo, old torch": "make xla",
    "memory": "make memory",
    "mpi, MPICH": "make mpi",
    "mpi, Open MPI": "make mpi",
    "horovod": "make horovod",
    "xla": "make xla",
    "slurm": "make test, as root where apt-get is",
    "nccl": "make gpu, on a machine with a GPU",
}


def read(directory: Path) -> list[dict[str, Any]]:
    """Return each test's last record, with the seconds of all its runs."""
    files = sorted(directory.glob("*"), key=lambda path: path.stat().st_mtime_ns)
    tests: dict[str, dict[str, Any]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            key = json.dumps([record["backend"], record["run"], record["test"]])
            before = tests.get(key, {"seconds": 0.0, "outcome": "", "again": False})
            record["seconds"] += before["seconds"]
            record["again"] = before["again"] or before["outcome"] == "failed"
            tests[key] = record
    return list(tests.values())


def table(tests: list[dict[str, Any]]) -> str:
    """Format the outcomes by backend, why tests were skipped, and which passed only the second time."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for test in tests:
        counts[test["backend"]][test["outcome"]] += 1
        seconds[test["backend"]] += test["seconds"]
        if test["outcome"] == "skipped":
            reasons[test["reason"]] += 1
    lines = [f"{'what ran':16}" + "".join(f"{name:>9}" for name in (*OUTCOMES, "seconds"))]
    for backend in (*BACKENDS, *sorted(counts.keys() - BACKENDS.keys())):
        ran = counts[backend]
        if ran["passed"] or ran["failed"]:
            figures = "".join(f"{ran[outcome]:9}" for outcome in OUTCOMES)
            lines.append(f"{backend:16}{figures}{seconds[backend]:9.0f}")
        else:
            lines.append(f"{backend:16}  not run: {BACKENDS.get(backend, 'all of it was skipped')}")
    lines += [f"skipped {count:5}: {reason}" for reason, count in sorted(reasons.items())]
    lines += [
        f"passed the second time only: {test['test']} ({test['backend']})"
        for test in tests
        if test["again"] and test["outcome"] == "passed"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1]))))
