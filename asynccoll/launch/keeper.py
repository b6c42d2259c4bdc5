"""Stands between torch elastic and one rank if survivors go on: exits once all ranks of the host have ended.

    python keeper.py child.py script PATH ARGS...

torch elastic ends the other ranks as soon as one process that it started fails. So it starts keepers
instead: each starts a rank, and waits for the other ranks before it ends as its own rank did. Like
``child``, it imports the standard library only: it lives as long as the ranks do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynccoll.launch.child import PID_FILE, die_with_launcher, launching
else:  # started by its path, with ``child`` next to it; the package would import torch
    from child import PID_FILE, die_with_launcher, launching

#: How often to check whether the others have ended; torch elastic polls its processes, too. They are not
#: children of this one, and some may not have started yet: there is nothing to wait on.
_LOOK_SECONDS = 0.1
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    die_with_launcher()
    environ = {**os.environ, **launching()}
    # In its own process group: what stops a job is sent to this process or its group, and reaches the rank
    # only once.
    rank = subprocess.Popen([sys.executable, *sys.argv[1:]], env=environ, start_new_session=True)

    # The launcher knows only this process, whereas the other ranks know the rank's own.
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(PID_FILE).write_text(str(rank.pid))

    stopped: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        rank.send_signal(number)

    for number in _STOPPING:
        signal.signal(number, pass_on)
    code = rank.wait()
    _await_others(stopped)
    # When the first keeper exits, torch elastic stops the others, which are about to end as their ranks did.
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if code < 0:
        _end_by(-code)
    sys.exit(code)


def _await_others(stopped: Sequence[int]) -> None:
    """Wait until each rank of this host has ended. The directory of an attempt is torch elastic's.

    Or until the job is ``stopped``, which also happens if another keeper was killed: that one leaves no note.
    """
    attempt = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent
    ended = [attempt / f"{rank}.ended" for rank in range(int(os.environ["LOCAL_WORLD_SIZE"]))]
    ended[int(os.environ["LOCAL_RANK"])].touch()
    while not stopped and not all(one.exists() for one in ended):
        time.sleep(_LOOK_SECONDS)


def _end_by(number: int) -> None:
    """End like a process that was killed by this signal."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
