"""Memory that other processes on this host can read, even when its owner cannot answer.

The owner may be stopped, be stuck in native code with the GIL held, or have just died: the kernel still
shares its descriptor, through ``/proc/PID/fd``, with any process that may inspect it (one of the same user).
This module must not know what is written to the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


class Memory:
    """``size`` bytes in ``buffer``, initially zero. Others open it by ``descriptor``; -1 if they cannot."""

    def __init__(self, size: int, name: str = "") -> None:
        """``name``: the name by which others find it; without one the memory is private to this process."""
        self.descriptor: int = -1
        if name and hasattr(os, "memfd_create"):
            self.descriptor = _file(name, size)
        self.buffer: mmap.mmap = mmap.mmap(self.descriptor, size)

    def close(self) -> None:
        """Prevent other processes from opening the memory; a process that has opened it can still read it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        with contextlib.suppress(BufferError):  # views are in use: the last of them frees the memory
            self.buffer.close()


def _file(name: str, size: int) -> int:
    """Open a file of that size that is in no directory; -1 if no descriptor is left or it is too large."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:
        return -1
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def look(pid: int, descriptor: int) -> memoryview | None:
    """Map the file that process ``pid`` has at ``descriptor``, read-only; None if that fails."""
    try:
        opened = os.open(_PROC / str(pid) / "fd" / str(descriptor), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    return taken(opened)


def taken(descriptor: int, *, write: bool = False) -> memoryview | None:
    """Map the file at ``descriptor``, and close the descriptor; None if the file cannot be mapped.

    The mapping is read-only, except with ``write``: a process's launcher writes there how the process ended.
    """
    try:
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ))
    except (OSError, ValueError):  # a pipe, a socket, an empty file
        return None
    finally:
        os.close(descriptor)


def find(pid: int, name: str) -> Iterator[int]:
    """Yield the descriptors by which process ``pid`` of this host has memory called ``name``."""
    with contextlib.suppress(OSError):
        for link in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(link.readlink()).startswith(f"/memfd:{name}"):
                    yield int(link.name)


def process_state(pid: int) -> str:
    """Return the kernel's state of process ``pid``: R, S, D, T or Z (see ``man proc``); "" if it is gone.

    "?" if the state cannot be read right now, for example because no descriptor is left.
    """
    try:
        status = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return "?"
    return status.rpartition(")")[2].split()[0]


def exit_code(pid: int) -> int | None:
    """Return the exit code of process ``pid``, as in ``subprocess``; None if it is running or was reaped."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] != "Z":
        return None
    status = int(fields[-1])  # as waitpid returns it
    return -(status & 0x7F) if status & 0x7F else status >> 8
