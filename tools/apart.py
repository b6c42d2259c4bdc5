#!/usr/bin/env python3
"""Run pytest on each file in a separate process, with a time limit, so that an abort affects no other file.

    python tools/apart.py [--limit SECONDS] [--jobs N] [PYTEST ARGUMENTS] FILES...

Prints one line for each file that passed, and the whole output of each that did not. A file in which pytest
collects nothing has not passed. Files that failed run once more, one at a time, because a crowded machine can
miss a deadline; the exit code is 1 if a file failed twice. With ``ASYNCCOLL_TEST_ONCE=1`` nothing runs twice.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NOTHING_COLLECTED = 5


def run(command: list[str], limit: float) -> tuple[str, str]:
    """Run one file. Returns its output and, if it did not pass, how it ended."""
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        end(process)
        return process.communicate()[0], f"was not done after {limit:.0f} s"
    finally:
        end(process)
    how = {0: "", NOTHING_COLLECTED: "has nothing to run"}
    return printed, how.get(process.returncode, f"ended with {process.returncode}")


def end(process: subprocess.Popen[str]) -> None:
    """Kill the process, if it is still running, and its children, which must not outlive us either."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Run all files, a few at a time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each file")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    options, rest = parser.parse_known_args()
    files = [word for word in rest if word.endswith(".py")]
    others = [word for word in rest if not word.endswith(".py")]
    pytest = [sys.executable, "-m", "pytest", *others]
    began = time.monotonic()
    failed = report(files, pytest, options.limit, options.jobs)
    if failed and not os.environ.get("ASYNCCOLL_TEST_ONCE"):
        print("=== once more, by itself, what failed ===", flush=True)
        failed = report(list(failed), pytest, options.limit, jobs=1)
    print(f"{len(files)} files in {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True)
    if failed:
        raise SystemExit("\n".join(f"{file} {how}" for file, how in failed.items()))


def report(files: list[str], pytest: list[str], limit: float, jobs: int) -> dict[str, str]:
    """Run the files and print how each ended. Returns those that did not pass, and how they ended."""
    failed = {}
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda file: run([*pytest, file], limit), files)
        for file, (printed, how) in zip(files, results, strict=True):
            print(f"{Path(file).name}: {printed.strip() if how else last_line(printed)}", flush=True)
            if how:
                failed[file] = how
    return failed


def last_line(printed: str) -> str:
    """Return pytest's summary line."""
    return printed.strip().rpartition("\n")[2]


if __name__ == "__main__":
    main()
