"""``asynccoll`` as a command line: starts, signals and finds its processes for tests."""

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

#: Seconds after which a job is killed; a test that ends a job itself must do so earlier.
LIMIT_S = patient(60)

INHERITED = re.compile(r"^(PET_|SLURM_|OMPI_|PMI_|TORCHELASTIC_|GLOO_|OMP_)|^(RANK|WORLD_SIZE)$")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


class Job:
    """A command line of ours in a separate session, all of whose processes can be found."""

    def __init__(self, directory, *arguments, python=(sys.executable,), apart=True, **variables):
        """``apart=False``: it runs in this session, where this process acts as a shell with job control."""
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
        """Return the next lines that ranks print, with which they say that they have got that far."""
        found = [self.process.stdout.readline().strip() for _ in range(count)]
        assert all(found), f"ended early: {found} {self.wait()}"
        return sorted(found)

    def wait(self):
        """Wait for the end. Returns the exit code, the rest of stdout, and all of stderr."""
        if self._ended is None:
            output = self.process.stdout.read()
            self._reader.join()
            self._ended = self.process.wait(), output, self._stderr
            self._limit.cancel()
            self.process.stdout.close()
            self.process.stderr.close()
        return self._ended

    def left(self):
        """Return the processes of this job that still exist."""
        token = f"ASYNCCOLL_TEST_TOKEN={self.token}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if token in entry.read_bytes():
                    found.append(int(entry.parent.name))
        return found


@contextlib.contextmanager
def starting(directory: Path) -> Iterator[Callable[..., Job]]:
    """Yield a function that starts ``asynccoll`` in a directory; jobs still running at the end are killed."""
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
    """Return a function that writes a script of the given text and returns its name."""

    def write(text, name="program.py"):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    return write
