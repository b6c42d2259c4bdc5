"""Runs scripts as separate programs, one process per rank, with a hard time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patience import patient
from ports import free_port
from worlds import rank_environment


@dataclass(frozen=True)
class Ended:
    """The exit code, output and duration of one process."""

    code: int
    out: str
    err: str
    seconds: float


def run(
    directory: Path,
    source: str,
    *,
    ranks: int = 1,
    launched: bool = True,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    interrupt_at: str | None = None,
) -> list[Ended]:
    """Run `source` on every rank with a launcher's variables; fail if any rank does not end in time.

    The script must not leave any process behind. With `interrupt_at`, all ranks get Ctrl-C once
    each has printed that line.
    """
    script = directory / "script.py"
    script.write_text(textwrap.dedent(source))
    port = str(free_port())
    processes = []
    start = time.monotonic()
    for rank in range(ranks):
        environ = rank_environment() | {"PYTHONUNBUFFERED": "1"}
        if launched:
            environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ |= env or {}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=(directory / f"out-{rank}").open("wb"),
                stderr=(directory / f"err-{rank}").open("wb"),
                start_new_session=True,
            )
        )
    try:
        if interrupt_at is not None:
            _interrupt(directory, processes, interrupt_at, start + patient(timeout))
        ended = [_end(directory, k, p, start, start + patient(timeout)) for k, p in enumerate(processes)]
    finally:
        left = [process.pid for process in processes if _kill(process.pid)]
    assert not left, f"the scripts {left} left processes behind\n{ended}"
    return ended


#: Messages that older versions of torch print.
_LIBRARY_SAYS = re.compile(r"^\[Gloo\].*\n", re.MULTILINE)


def _end(
    directory: Path, rank: int, process: subprocess.Popen[bytes], start: float, deadline: float
) -> Ended:
    try:
        code = process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        said = directory.joinpath(f"out-{rank}").read_text()
        heard = directory.joinpath(f"err-{rank}").read_text()
        raise AssertionError(f"rank {rank} does not end:\n{said}\n{heard[-4000:]}") from None
    return Ended(
        code,
        _LIBRARY_SAYS.sub("", directory.joinpath(f"out-{rank}").read_text()),
        directory.joinpath(f"err-{rank}").read_text(),
        time.monotonic() - start,
    )


def _interrupt(directory: Path, processes: list[subprocess.Popen[bytes]], line: str, deadline: float) -> None:
    for rank, process in enumerate(processes):
        while line not in directory.joinpath(f"out-{rank}").read_text():
            assert process.poll() is None, directory.joinpath(f"err-{rank}").read_text()
            assert time.monotonic() < deadline, f"rank {rank} never printed {line!r}"
            time.sleep(0.01)
    for process in processes:
        process.send_signal(signal.SIGINT)


def _kill(group: int) -> bool:
    """Kill what is left of a process group. Returns whether there was anything."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
