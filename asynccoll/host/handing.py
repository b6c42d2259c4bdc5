"""Memory that a rank hands over to its launcher when it joins its world; it survives however the rank ends.

The launcher listens on a socket in the job directory. Memory sent there belongs to the launcher immediately,
even if the rank dies before the launcher receives it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_SOCKET = "memory"
#: How long to wait for a launcher that is behind or stopped; after that it never gets this rank's records.
_SEND_SECONDS = 1.0


def listen(directory: Path) -> socket.socket | None:
    """Return a socket to which ranks hand over their memory; None where that is not possible."""
    try:
        with _within(directory) as name:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            made.bind(name)
    except (AttributeError, OSError):  # not supported on this system, or no descriptors are left
        return None
    return made


def hand_over(directory: str, rank: int, descriptor: int) -> None:
    """Send the memory at ``descriptor``; do nothing if no launcher listens in ``directory``, or it is ""."""
    if not directory or descriptor < 0:
        return
    with (
        contextlib.suppress(AttributeError, OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending,
        _within(Path(directory)) as name,
    ):
        sending.settimeout(_SEND_SECONDS)
        sending.connect(name)
        socket.send_fds(sending, [f"{rank} {os.getpid()} {_numbering()}".encode()], [descriptor])


def received(line: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a message with descriptors, which programs executed by this process do not inherit."""
    data, found, _, _ = socket.recv_fds(line, size, most)  # ignores its flags, even MSG_CMSG_CLOEXEC
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return data, found


def handed(listening: socket.socket) -> Iterator[tuple[int, int, int]]:
    """Yield what has been sent so far: rank, process and descriptor; the caller closes the descriptors.

    A process in another PID namespace than this one's, as in another container, is given a negative number.
    """
    while True:
        try:
            said, descriptors = received(listening, 64, 1)
        except OSError:  # nothing more has been sent
            return
        rank, pid, numbering = map(int, said.split())
        if numbering != _numbering():
            pid = -1 - rank
        for descriptor in descriptors:
            yield rank, pid, descriptor


def _numbering() -> int:
    """Return a number that is equal for processes in the same PID namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino


@contextlib.contextmanager
def _within(directory: Path) -> Iterator[str]:
    """Yield a path to the socket in ``directory`` that fits a socket address, however long the real one."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}/{_SOCKET}"
    finally:
        os.close(opened)
