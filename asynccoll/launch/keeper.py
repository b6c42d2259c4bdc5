"""Stands between torch elastic and one rank where survivors go on: ends once all ranks of the host have.

    python keeper.py child.py script PATH ARGS...

torch elastic ends the other ranks as soon as one process that it has started ends with a failure. So it
starts these, each of which starts a rank, and waits for the others before it ends as its rank did. Like
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
else:  # started by its path, beside which child is; the package would import torch
    from child import PID_FILE, die_with_launcher, launching

#: How often it looks whether the others have ended, as torch elastic looks after its processes. They are not
#: its children, and one may not have begun: there is nothing to wait on.
_LOOK_SECONDS = 0.1
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    die_with_launcher()
    environ = {**os.environ, **launching()}
    # In a group of its own: what stops a job is sent to this process or its group, and reaches the rank once.
    rank = subprocess.Popen([sys.executable, *sys.argv[1:]], env=environ, start_new_session=True)

    # The launcher knows this process alone, and the other ranks that one.
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(PID_FILE).write_text(str(rank.pid))

    stopped: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        rank.send_signal(number)

    for number in _STOPPING:
        signal.signal(number, pass_on)
    code = rank.wait()
    _await_others(stopped)
    # The first of these to end has torch elastic stop the others, which end, too: each as its rank did.
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if code < 0:
        _end_by(-code)
    sys.exit(code)


def _await_others(stopped: Sequence[int]) -> None:
    """Return once each rank of this host has ended. The directory of an attempt is torch elastic's.

    Or once the job was ``stopped``, as it is where another of these processes was killed, which says nothing.
    """
    attempt = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent
    ended = [attempt / f"{rank}.ended" for rank in range(int(os.environ["LOCAL_WORLD_SIZE"]))]
    ended[int(os.environ["LOCAL_RANK"])].touch()
    while not stopped and not all(one.exists() for one in ended):
        time.sleep(_LOOK_SECONDS)


def _end_by(number: int) -> None:
    """End as a process does that this signal has killed."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
