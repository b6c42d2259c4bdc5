"""``asynccoll`` as a command line: processes that are started, signalled and looked for in tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import asynccoll
from patience import patient

#: Seconds after which a job is killed; a test that sees to its end itself has to be sooner.
LIMIT_S = patient(60)

INHERITED = re.compile(r"^(PET_|SLURM_|OMPI_|PMI_|TORCHELASTIC_|GLOO_|OMP_)|^(RANK|WORLD_SIZE)$")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


class Job:
    """A command line of ours in a session of its own, whose every process can be found again."""

    def __init__(self, directory, *arguments, python=(sys.executable,), apart=True, **variables):
        """Not ``apart``: in this session, so that this process is the shell that could continue it."""
        self.token = uuid.uuid4().hex
        environ = {k: v for k, v in os.environ.items() if not INHERITED.search(k)}
        here = str(Path(asynccoll.__file__).parent.parent)
        path = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        environ |= {"PYTHONPATH": os.pathsep.join(path), "ASYNCCOLL_TEST_TOKEN": self.token}
        self.process = subprocess.Popen(
            [*python, *map(str, arguments)],
            cwd=directory,
            env=environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **({"start_new_session": True} if apart else {"process_group": 0}),
        )
        self._limit = threading.Timer(LIMIT_S, self.kill)
        self._limit.start()
        self._stderr = ""
        self._ended = None
        self._reader = threading.Thread(target=self._read_stderr)
        self._reader.start()

    def _read_stderr(self):
        self._stderr = self.process.stderr.read()

    def kill(self):
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def lines(self, count):
        """The next lines that ranks print, to say that they are where a test wants them."""
        found = [self.process.stdout.readline().strip() for _ in range(count)]
        assert all(found), f"ended early: {found} {self.wait()}"
        return sorted(found)

    def wait(self):
        """The exit code, the rest of standard output, and all of standard error."""
        if self._ended is None:
            output = self.process.stdout.read()
            self._reader.join()
            self._ended = self.process.wait(), output, self._stderr
            self._limit.cancel()
            self.process.stdout.close()
            self.process.stderr.close()
        return self._ended

    def left(self):
        """Processes of this job that still are."""
        token = f"ASYNCCOLL_TEST_TOKEN={self.token}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if token in entry.read_bytes():
                    found.append(int(entry.parent.name))
        return found


@contextlib.contextmanager
def starting(directory: Path) -> Iterator[Callable[..., Job]]:
    """Starts ``asynccoll`` in a fresh directory; whatever is left at the end is killed."""
    jobs = []

    def start(*arguments, **options):
        jobs.append(Job(directory, "-m", "asynccoll", *arguments, **options))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def writing(directory: Path) -> Callable[..., str]:
    """Writes a script of the given text and returns its name."""

    def write(text, name="program.py"):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    return write
