#!/usr/bin/env python3
"""pytest on each file in a process of its own, with a time limit: one that aborts takes no other along.

    python tools/apart.py [--limit SECONDS] [PYTEST ARGUMENTS] FILES...

Prints what pytest prints, then which files failed and how; ends with 1 if any did.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

NOTHING_COLLECTED = 5


def run(command: list[str], limit: float) -> str:
    """Run one file; empty if it passed, else how it ended."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit)
    except BaseException as error:  # its children, too, must not outlive us
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return f"was not done after {limit:.0f} s"
        raise
    return "" if code in (0, NOTHING_COLLECTED) else f"ended with {code}"


def main() -> None:
    """Run all files, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=300.0)
    options, rest = parser.parse_known_args()
    files = [word for word in rest if word.endswith(".py")]
    others = [word for word in rest if not word.endswith(".py")]
    failed = []
    began = time.monotonic()
    for file in files:
        how = run([sys.executable, "-m", "pytest", *others, file], options.limit)
        if how:
            failed.append(f"{file} {how}")
    print(f"{len(files)} files in {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
