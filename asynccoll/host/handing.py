"""Memory that a rank hands to its launcher as it joins its world, which keeps it however the rank ends.

The launcher listens at a socket in the job directory. What was sent there is the launcher's at once, also if
the rank dies before the launcher looks.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["hand_over", "handed", "listen", "received"]

_SOCKET = "memory"
#: For a launcher that is behind, or stopped; then it never learns what this rank has recorded.
_SEND_SECONDS = 1.0


def listen(directory: Path) -> socket.socket | None:
    """A socket at which ranks hand their memory over; None where there is no such thing."""
    try:
        with _within(directory) as name:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            made.bind(name)
    except (AttributeError, OSError):  # not on this system, or no descriptors are left
        return None
    return made


def hand_over(directory: str, rank: int, descriptor: int) -> None:
    """Send the memory at ``descriptor``; do nothing if nobody listens in ``directory``, or it is ""."""
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
    """Receive a message with descriptors, which programs that this process executes do not inherit."""
    data, found, _, _ = socket.recv_fds(line, size, most)  # ignores its flags, also MSG_CMSG_CLOEXEC
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return data, found


def handed(listening: socket.socket) -> Iterator[tuple[int, int, int]]:
    """What has been sent so far: ranks, their processes, and descriptors, which the caller closes.

    A process that is numbered otherwise than this one's, as in another container, has a negative number.
    """
    while True:
        try:
            said, descriptors = received(listening, 64, 1)
        except OSError:  # that was all
            return
        rank, pid, numbering = map(int, said.split())
        if numbering != _numbering():
            pid = -1 - rank
        for descriptor in descriptors:
            yield rank, pid, descriptor


def _numbering() -> int:
    """Equal for processes that number processes alike."""
    return Path("/proc/self/ns/pid").stat().st_ino


@contextlib.contextmanager
def _within(directory: Path) -> Iterator[str]:
    """A name of the socket in ``directory`` that is short enough for a socket, however long that one's is."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}/{_SOCKET}"
    finally:
        os.close(opened)
