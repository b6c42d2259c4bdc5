"""Ranks under a launcher (mpiexec, horovodrun), started and watched separately from it.

Each rank runs under a shell, which records the rank's process id and exit code. The launcher only sees the
shell, so that the test, not the launcher, decides what the end of a rank means.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patience import patient

if TYPE_CHECKING:
    from worlds import World

HERE = Path(__file__).parent
_GUARD = r"""
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}}
directory=$1 python=$2 program=$3 address=$4 backend=$5
exec >> "$directory/stderr-$rank" 2>&1 < /dev/null
sh -c 'echo $$ > "$1.tmp"; mv "$1.tmp" "$1"; shift; exec "$@"' sh "$directory/pid-$rank" \
    "$python" "$program" "$address" "$rank" "$backend" "$directory/stacks-$rank"
code=$?
echo $code > "$directory/code.tmp-$rank"; mv "$directory/code.tmp-$rank" "$directory/code-$rank"
while [ $code != 0 ] && [ -e "$directory" ] && kill -0 $PPID; do sleep 0.1; done
"""


class LaunchedRank:
    """One rank with the interface of ``subprocess.Popen``, although its parent is not this process."""

    def __init__(self, directory: Path, rank: int, launcher: subprocess.Popen[bytes]) -> None:
        self._directory = directory
        self._rank = rank
        self._launcher = launcher
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        return int(self._directory.joinpath(f"pid-{self._rank}").read_text())

    def poll(self) -> int | None:
        """Return the rank's exit code, in Popen's convention, once it has ended."""
        if self.returncode is None:
            ended = self._launcher.poll()
            with contextlib.suppress(FileNotFoundError):
                code = int(self._directory.joinpath(f"code-{self._rank}").read_text())
                ended = 128 - code if code > 128 else code
            self.returncode = ended
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or patient(60))
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self._rank}", timeout or patient(60))
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the rank."""
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(patient(5))


class LastLaunchedRank(LaunchedRank):
    """The rank that also stands for the launcher: it is waited for and killed last."""

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or patient(60))
        code = super().wait(timeout)
        if code == 0 and all(self._directory.joinpath(f"code-{rank}").exists() for rank in range(self._rank)):
            return self._launcher.wait(max(0.1, deadline - time.monotonic()))
        return code

    def kill(self) -> None:
        super().kill()
        if self._launcher.poll() is None:
            self._launcher.terminate()  # ends the shells around the ranks
            self._launcher.wait(patient(10))


def start(
    world: World, address: str, launch: Callable[[list[str]], list[str]], environ: dict[str, str]
) -> list[Any]:
    """Start all ranks by the command line that `launch` makes.

    The output of each rank goes to stderr-0, -1, ..., the launcher's to stderr-0.
    """
    from worlds import _Process

    for rank in range(world.size):
        world.directory.joinpath(f"stderr-{rank}").touch()
    rank_program = [str(world.directory), sys.executable, str(HERE / "ranks.py"), address, world.backend]
    with world.directory.joinpath("stderr-0").open("ab") as stderr:
        launcher = subprocess.Popen(
            launch(["bash", "-c", _GUARD, "bash", *rank_program]),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=environ,
        )
    kinds = [LaunchedRank] * (world.size - 1) + [LastLaunchedRank]
    return [
        _Process(rank, kind(world.directory, rank, launcher), world.directory)  # type: ignore[arg-type]
        for rank, kind in enumerate(kinds)
    ]
