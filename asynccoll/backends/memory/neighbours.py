"""How the ranks of one host exchange descriptors, and prove that they share memory.

They meet at a socket without a path, whose name the first rank tells the others in the store. Each rank hands
in three descriptors, and the first rank passes all of them on to all: one of the rank's arena, to map; one of
its bell, to ring; and one of its process, which becomes readable when the process has ended. Then every rank
writes a word to every arena, and looks for the words of all others there. Only ranks that find all of them
share memory, whatever their hosts are called.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from asynccoll.backends.api import received
from asynccoll.backends.memory.arena import PAGE, Arena, map_region

#: So that the descriptors of all ranks fit into one message: the kernel's limit is 253.
MOST_RANKS = 64
_WORD_BYTES = 16
_TOKEN_BYTES = 16
_ASK_SECONDS = 0.05
#: A peer that connects must identify itself within this time.
_SAYS_SOON_SECONDS = 2.0
_CREDENTIALS = struct.Struct("iII")  # process, user, group


class Failed(Exception):  # noqa: N818  # not an error: another transport is used instead
    """The ranks do not share memory; the text says why."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The descriptors that a rank hands in, or this process's copies of another rank's."""

    arena: int
    bell: int
    process: int

    def all(self) -> tuple[int, int, int]:
        return self.arena, self.bell, self.process

    def close(self) -> None:
        for descriptor in self.all():
            with contextlib.suppress(OSError):
                os.close(descriptor)


def own(arena: Arena) -> Descriptors:
    """Make the descriptors that this rank hands in."""
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        return Descriptors(arena.descriptor, bell, os.pidfd_open(os.getpid()))
    except OSError:
        os.close(bell)
        raise


class Meeting:
    """Where the first rank of a node waits for the others."""

    def __init__(self) -> None:
        self.token: bytes = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0asynccoll-{secrets.token_hex(16)}")
        self._listener.listen(MOST_RANKS)

    @property
    def address(self) -> str:
        """The name and the token of the meeting, as a line of text for the other ranks."""
        name = self._listener.getsockname()
        return json.dumps([name[1:].decode(), self.token.hex()])

    def close(self) -> None:
        """Close the socket without a meeting."""
        self._listener.close()

    def gather(
        self, count: int, mine: Descriptors, seconds: float, given_up: Callable[[], bool]
    ) -> list[Descriptors]:
        """Take the descriptors of ``count`` other ranks, give all of them to all, and return them by rank.

        Raises ``Failed`` if a rank does not connect in time, or earlier if ``given_up`` says it will not.
        """
        deadline = monotonic() + seconds
        came: dict[int, tuple[socket.socket, Descriptors]] = {}
        with contextlib.ExitStack() as taken:
            try:
                while len(came) < count:
                    index, connection, handed = self._accept(deadline, given_up)
                    taken.callback(handed.close)
                    came[index] = connection, handed
                everything = [mine, *(came[index][1] for index in sorted(came))]
                descriptors = [descriptor for one in everything for descriptor in one.all()]
                for connection, _ in came.values():
                    socket.send_fds(connection, [b"all"], descriptors)
            except (OSError, KeyError, ValueError) as error:
                raise Failed(f"a rank of this host could not be reached: {error}") from error
            finally:
                self._listener.close()
                for connection, _ in came.values():
                    connection.close()
            taken.pop_all()
        return everything

    def _accept(
        self, deadline: float, given_up: Callable[[], bool]
    ) -> tuple[int, socket.socket, Descriptors]:
        """Wait for the next rank that knows the token; close the connections of all others."""
        while True:
            self._listener.settimeout(_ASK_SECONDS)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if monotonic() >= deadline or given_up():
                    raise Failed("a rank of this host did not join the rendezvous") from None
                continue
            handed = None
            if _user_of(connection) == os.geteuid():
                connection.settimeout(_SAYS_SOON_SECONDS)
                with contextlib.suppress(TimeoutError):
                    handed = self._take(connection)
            if handed is not None:
                return handed[0], connection, handed[1]
            connection.close()

    def _take(self, connection: socket.socket) -> tuple[int, Descriptors] | None:
        """Return which rank has connected, and its descriptors; None if it does not know the token."""
        data, found = received(connection, _TOKEN_BYTES + 4, 3)
        if data[:_TOKEN_BYTES] == self.token and len(found) == 3:
            return int.from_bytes(data[_TOKEN_BYTES:], "little"), Descriptors(*found)
        for descriptor in found:
            os.close(descriptor)
        return None


def hand_in(address: str, index: int, count: int, mine: Descriptors, seconds: float) -> list[Descriptors]:
    """Give this rank's descriptors to the first rank of the node; return those of all, in rank order.

    ``index`` is this rank's number among the ``count`` ranks of the node.
    """
    name, token = json.loads(address)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(seconds)
            line.connect(f"\0{name}")
            if _user_of(line) != os.geteuid():
                raise Failed("the first rank of this host belongs to another user")
            socket.send_fds(line, [bytes.fromhex(token) + index.to_bytes(4, "little")], list(mine.all()))
            _, found = received(line, 16, 3 * count)
    except OSError as error:
        raise Failed(f"the first rank of this host cannot be reached: {error}") from error
    if len(found) != 3 * count:
        for descriptor in found:
            os.close(descriptor)
        raise Failed("the kernel did not pass on the descriptors of the ranks of this host")
    everything = [Descriptors(*found[place : place + 3]) for place in range(0, len(found), 3)]
    everything[index].close()  # copies of this rank's own
    everything[index] = mine
    return everything


def _user_of(connection: socket.socket) -> int:
    """Return the effective user of the other process, as the kernel reports it."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(said)[1])


def write_words(arenas: Sequence[int], index: int) -> str:
    """Write a random word for this rank into each arena; return it, to be told to the others."""
    word = secrets.token_bytes(_WORD_BYTES)
    for descriptor in arenas:
        page = map_region(descriptor, 0, PAGE)
        page[index * _WORD_BYTES : (index + 1) * _WORD_BYTES] = word
    return word.hex()


def prove(arenas: Sequence[int], words: Sequence[str]) -> None:
    """Look for the words of all ranks in all arenas; raise ``Failed`` if one is not there."""
    if not all(words):
        raise Failed("a rank of this host cannot write to the memory of the others")
    expected = b"".join(map(bytes.fromhex, words))
    for descriptor in arenas:
        if map_region(descriptor, 0, PAGE)[: len(expected)] != expected:
            raise Failed("a rank of this host cannot see what another rank has written to shared memory")
