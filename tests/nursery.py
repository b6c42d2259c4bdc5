"""Ranks that are forked from a process that has already imported everything, so worlds start quickly.

Importing torch takes two seconds of processor time per rank, and a run of the tests starts hundreds of ranks.
There is one such process per rank number, so that ranks differ in their hash seeds, like separately started
ones. Run as a script, this file is that process: it forks a rank for each line that asks for one, and reports
how ranks ended. A rank ends like a script, at the end of this one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_KEPT: dict[int, Nurse] = {}


class Nurse:
    """The process from which the ranks of one number are forked."""

    def __init__(self) -> None:
        import worlds

        self._popen = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worlds.rank_environment(),
            text=True,
        )

    def ask(self, *question: Any) -> Any:
        """Send one line, and return the answer."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        try:
            self._popen.stdin.write(json.dumps(question) + "\n")
            self._popen.stdin.flush()
            return json.loads(self._popen.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            code = self._popen.wait(10)
            raise AssertionError(f"the process from which ranks are forked has ended, code {code}") from error


class Forked:
    """The part of ``subprocess.Popen``'s interface that a world needs."""

    def __init__(self, nurse: Nurse, arguments: list[str], output: str, environ: dict[str, str]) -> None:
        self._nurse = nurse
        self.pid: int = nurse.ask("start", arguments, output, environ)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nurse.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout or 0)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(world: Any, address: str) -> list[Any]:
    """Fork one process per rank, with the test's current environment."""
    from worlds import _Process, rank_environment

    for rank in range(world.size):
        if rank not in _KEPT:
            _KEPT[rank] = Nurse()
    started = []
    for rank in range(world.size):
        arguments = [address, str(rank), world.backend, str(world.directory / f"stacks-{rank}")]
        output = str(world.directory / f"stderr-{rank}")
        forked = Forked(_KEPT[rank], arguments, output, rank_environment())
        started.append(_Process(rank, forked, world.directory))  # type: ignore[arg-type]
    return started


def _become_rank(arguments: list[str], output: str, environ: dict[str, str]) -> None:
    import ranks

    for number, path in ((0, os.devnull), (1, output), (2, output)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["ranks.py", *arguments]
    ranks.main()


def _ended(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    """Import what the ranks need, then answer questions."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import trio  # noqa: F401

    import compositions_run  # noqa: F401

    while line := sys.stdin.readline():
        question = json.loads(line)
        answer = os.fork() if question[0] == "start" else _ended(question[1])
        if answer == 0 and question[0] == "start":
            return _become_rank(*question[1:])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    main()
