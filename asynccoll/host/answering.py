"""Short questions and answers between the ranks of a job, which share a secret.

A question is a line of text; an answer is one JSON object, compressed because it may share a link with the
data that the ranks wait for. A client that connects is sent a nonce, and has two seconds to send the question
with a digest of both under the secret. A client that sends anything else, too much, or nothing is
disconnected, and nothing about it is kept. This module must not know what is asked.

    nonce, 16 bytes  ->
                     <-  HMAC-SHA-256 of nonce and question, 32 bytes; length, 2 bytes; question
    length, 4 bytes; JSON, deflated  ->
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import random
import selectors
import socket
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from asynccoll import host
from asynccoll.host import lines

K = TypeVar("K", bound=Hashable)

#: How long one connection may take.
PATIENCE_SECONDS = 2.0
#: The most connections open at a time; for another one, the oldest is closed.
MOST_CONNECTIONS = 256
#: The most peers asked at a time. The order is random, so that the ranks of a large world do not all ask the
#: same peers.
MOST_ASKED = 512
#: A socket is connected once it can be written to.
_ANYTHING = selectors.EVENT_READ | selectors.EVENT_WRITE
_NONCE_BYTES = 16
_DIGEST_BYTES = 32
_LENGTH_BYTES = 2
#: A longer question is not answered. The longest one describes a call: its text, as JSON, takes a few KiB.
QUESTION_BYTES = 1 << 14
#: A longer answer counts as none, as does one that decompresses to more.
_ANSWER_BYTES = 1 << 22
_STOP_SECONDS = 1.0
#: How long to wait, out of file descriptors, before accepting clients again.
_NO_DESCRIPTOR_SECONDS = 0.1


def _digest(secret: bytes, nonce: bytes, question: bytes) -> bytes:
    return hmac.new(secret, nonce + question, hashlib.sha256).digest()


class _Asker:
    """One client's connection: the bytes received, and those still to be sent."""

    def __init__(self, line: socket.socket, until: float) -> None:
        self.line = line
        self.until = until
        self.nonce = os.urandom(_NONCE_BYTES)
        self.came = b""
        self.answered = False
        self.left = self.nonce

    def question(self, secret: bytes) -> bytes | None:
        """Return the question, or None until it has been received completely.

        Raises ``ValueError`` if the client does not know the secret.
        """
        begins = _DIGEST_BYTES + _LENGTH_BYTES
        if len(self.came) < begins:
            return None
        length = int.from_bytes(self.came[_DIGEST_BYTES:begins], "big")
        asked = self.came[begins:]
        if len(asked) < length:
            return None
        if len(asked) > length or not hmac.compare_digest(
            self.came[:_DIGEST_BYTES], _digest(secret, self.nonce, asked)
        ):
            raise ValueError("it does not know the secret")
        return asked


class Answers:
    """A server that answers questions in a separate thread until it is closed."""

    def __init__(self, address: str, secret: bytes, answer: Callable[[str], Mapping[str, object]]) -> None:
        self._secret = secret
        self._answer = answer
        self._listening = socket.socket(lines.family(address), socket.SOCK_STREAM)
        self._listening.setblocking(False)
        self._listening.bind((address, 0))
        self._listening.listen(socket.SOMAXCONN)
        self.port: int = self._listening.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._askers: dict[socket.socket, _Asker] = {}
        #: the latest answer and its encoding, since the same answer may be sent to hundreds of ranks
        self._latest: tuple[Mapping[str, object], bytes] = {}, b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = host.Thread(target=self._run, name="asynccoll-answers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            now = host.monotonic()
            for late in [one for one in self._askers.values() if one.until <= now]:
                self._drop(late)
            first = min((one.until for one in self._askers.values()), default=None)
            for key, _ in self._selector.select(None if first is None else max(0.0, first - now)):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listening:
                    self._accept()
                elif (asker := self._askers.get(key.data)) is not None:
                    self._serve(asker)

    def _accept(self) -> None:
        try:
            line, _ = self._listening.accept()
        except OSError:  # the client has gone, or no descriptor is free: closing a connection frees one
            if self._askers:
                self._drop_oldest()
            else:
                host.sleep(_NO_DESCRIPTOR_SECONDS)
            return
        line.setblocking(False)
        if len(self._askers) >= MOST_CONNECTIONS:
            self._drop_oldest()
        asker = self._askers[line] = _Asker(line, host.monotonic() + PATIENCE_SECONDS)
        self._selector.register(line, selectors.EVENT_READ, line)
        self._serve(asker)

    def _drop_oldest(self) -> None:
        if self._askers:
            self._drop(next(iter(self._askers.values())))

    def _drop(self, asker: _Asker) -> None:
        del self._askers[asker.line]
        self._selector.unregister(asker.line)
        asker.line.close()

    def _serve(self, asker: _Asker) -> None:
        """Send and receive without blocking, and close the connection once it is over or has failed."""
        try:
            over = self._send(asker) or self._receive(asker)
        except Exception:  # of the ``answer`` function, too: other clients are still served
            over = True
        if over:
            self._drop(asker)
        else:
            waits = selectors.EVENT_READ | (selectors.EVENT_WRITE if asker.left else 0)
            self._selector.modify(asker.line, waits, asker.line)

    def _send(self, asker: _Asker) -> bool:
        with contextlib.suppress(BlockingIOError):
            asker.left = asker.left[asker.line.send(asker.left) :] if asker.left else b""
        return asker.answered and not asker.left

    def _receive(self, asker: _Asker) -> bool:
        if asker.answered:
            return False
        most = _DIGEST_BYTES + _LENGTH_BYTES + QUESTION_BYTES
        try:
            came = asker.line.recv(most + 1)
        except BlockingIOError:
            return False
        asker.came += came
        if not came or len(asker.came) > most:
            return True
        question = asker.question(self._secret)
        if question is not None:
            asker.left += self._told(question.decode(errors="replace"))
            asker.answered = True
            return self._send(asker)
        return False

    def _told(self, question: str) -> bytes:
        """Return the encoded answer to ``question``."""
        answer = self._answer(question)
        if answer is not self._latest[0]:
            text = zlib.compress(json.dumps(answer).encode())
            self._latest = answer, len(text).to_bytes(4, "big") + text
        return self._latest[1]

    def close(self) -> None:
        """Stop answering, and close all connections."""
        self._wake.send(b"x")
        if self._thread is not host.current_thread():
            self._thread.join(_STOP_SECONDS)
        self.disown()

    def disown(self) -> None:
        """Close all sockets; a forked child, which does not have the thread, needs to do no more."""
        for line in (self._listening, self._wake, self._woken, *self._askers):
            line.close()
        self._selector.close()


def ask(
    peers: Mapping[K, tuple[str, int, bytes]],
    question: str,
    seconds: float,
    *,
    reach: float | None = None,
) -> dict[K, dict[str, object] | None]:
    """Ask all ``peers`` (address, port, and the secret that the peer knows). Returns the answer of each.

    The answer is None for a peer that accepts the connection but then sends nothing for ``seconds`` plus
    twice the time that connecting took; each part of an answer restarts that time. Peers without a connection
    after ``reach`` seconds (by default ``seconds``) are left out. The call returns two seconds after
    ``reach`` at the latest.
    """
    with selectors.DefaultSelector() as selector:
        asking = _Asking[K](selector, question.encode(), seconds, seconds if reach is None else reach)
        left = list(peers)
        random.SystemRandom().shuffle(left)
        while left or asking.ends:
            while left and len(asking.ends) < MOST_ASKED and asking.connect(left[-1], *peers[left[-1]]):
                left.pop()
            if asking.look():
                left.clear()
    # Parsed only here, so that parsing one answer does not delay the next.
    return {peer: None if came is None else _parsed(came) for peer, came in asking.found.items()}


class _Asking(Generic[K]):
    """The connections over which one question is asked.

    ``found``: by connected peer, the bytes received; None until reading them is over.
    """

    def __init__(
        self, selector: selectors.BaseSelector, question: bytes, seconds: float, reach: float
    ) -> None:
        self._selector = selector
        self._question = question
        self._seconds = seconds
        self._reach = reach
        self._last = host.monotonic() + reach + PATIENCE_SECONDS
        self.found: dict[K, bytearray | None] = {}
        #: the connections, and until when to wait for each
        self.ends: dict[socket.socket, float] = {}
        self._began: dict[socket.socket, float] = {}
        self._ways: dict[socket.socket, float] = {}

    def connect(self, peer: K, address: str, port: int, secret: bytes) -> bool:
        """Begin to connect to ``peer``. Returns False if it must be tried again once a descriptor is free."""
        try:
            line = socket.socket(lines.family(address), socket.SOCK_STREAM)
        except OSError:
            return not self.ends  # else a connection that ends frees a descriptor
        line.setblocking(False)
        with contextlib.suppress(OSError):
            if line.connect_ex((address, port)) in lines.UNDER_WAY:
                self._selector.register(line, _ANYTHING, (peer, secret, bytearray()))
                self._began[line] = host.monotonic()
                self.ends[line] = self._began[line] + self._reach
                return True
        line.close()
        return True

    def look(self) -> bool:
        """Wait for data, and drop connections that took too long. Returns whether time is up for all."""
        if self.ends:
            wait = min([*self.ends.values(), self._last]) - host.monotonic()
            ready = self._selector.select(max(0.0, wait))
            now = host.monotonic()
            for key, _ in ready:
                self._serve(key.fileobj, *key.data)  # type: ignore[arg-type]  # a socket
            for line in [one for one, end in self.ends.items() if min(end, self._last) <= now]:
                self._leave(line)
        return host.monotonic() >= self._last

    def _serve(self, line: socket.socket, peer: K, secret: bytes, came: bytearray) -> None:
        if line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._leave(line)
            return
        self.found.setdefault(peer, None)
        now = host.monotonic()
        # Connecting took one round trip: allow for two of them.
        self.ends[line] = now + self._seconds + 2 * self._ways.setdefault(line, now - self._began[line])
        self._selector.modify(line, selectors.EVENT_READ, (peer, secret, came))
        if _heard(line, came, secret, self._question):
            self._leave(line)
            self.found[peer] = came

    def _leave(self, line: socket.socket) -> None:
        del self.ends[line]
        self._selector.unregister(line)
        line.close()


def _heard(line: socket.socket, came: bytearray, secret: bytes, asked: bytes) -> bool:
    """Read what has been received, and send the question once the nonce is complete.

    Returns whether reading is over: the answer is complete or too long, or the connection has ended.
    """
    before = len(came)
    try:
        some = line.recv(1 << 16)
        came += some
        if before < _NONCE_BYTES <= len(came):
            nonce = bytes(came[:_NONCE_BYTES])
            line.send(_digest(secret, nonce, asked) + len(asked).to_bytes(_LENGTH_BYTES, "big") + asked)
    except BlockingIOError:
        return False
    except OSError:
        return True
    expected = _NONCE_BYTES + 4 + int.from_bytes(came[_NONCE_BYTES : _NONCE_BYTES + 4], "big")
    complete = len(came) >= _NONCE_BYTES + 4 and len(came) >= expected
    return not some or complete or len(came) > _ANSWER_BYTES


def _parsed(came: bytearray) -> dict[str, object] | None:
    try:
        answer = json.loads(zlib.decompressobj().decompress(came[_NONCE_BYTES + 4 :], _ANSWER_BYTES))
    except (ValueError, zlib.error):
        return None
    return answer if isinstance(answer, dict) else None
