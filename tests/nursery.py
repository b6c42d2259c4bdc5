"""Ranks that are forked from a process which has imported everything: a world is replaced in no time.

One such process for each rank, so that the ranks differ in the seed of their hashes as started ones do.
Run as a script, this file is that process: it forks a rank for each line that asks for one, and says how
it ended.
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
    """The process that the ranks of this number are forked from."""

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
        """One line there, one line back."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write(json.dumps(question) + "\n")
        self._popen.stdin.flush()
        return json.loads(self._popen.stdout.readline())


class Forked:
    """As much of a ``subprocess.Popen`` as a world needs."""

    def __init__(self, nurse: Nurse, arguments: list[str], output: str) -> None:
        self._nurse = nurse
        self.pid: int = nurse.ask("start", arguments, output)
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
    """As `worlds._start_processes`."""
    from worlds import _Process

    for rank in range(world.size):
        if rank not in _KEPT:
            _KEPT[rank] = Nurse()
    started = []
    for rank in range(world.size):
        arguments = [address, str(rank), world.backend, str(world.directory / f"stacks-{rank}")]
        forked = Forked(_KEPT[rank], arguments, str(world.directory / f"stderr-{rank}"))
        started.append(_Process(rank, forked, world.directory))  # type: ignore[arg-type]
    return started


def _fork(arguments: list[str], output: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import ranks

        for number, path in ((0, os.devnull), (1, output), (2, output)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        sys.argv = ["ranks.py", *arguments]
        ranks.main()
        code = 0
    finally:
        os._exit(code)


def _ended(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    """Import, then answer."""
    import trio  # noqa: F401  # as the ranks will

    import compositions_run  # noqa: F401

    for line in sys.stdin:
        question = json.loads(line)
        answer = _fork(*question[1:]) if question[0] == "start" else _ended(question[1])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
