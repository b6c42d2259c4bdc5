"""Short questions and answers between the ranks of a job, which share a secret.

A question is a line of text, an answer one JSON object, compressed: it may have to share a link with the data
that the ranks wait for. A client that connects is sent a nonce, and has two seconds to send the question with
a digest of both under the secret. A client that sends anything else, too much, or nothing, is disconnected,
and nothing of it is kept. This module must not know what is asked.

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

__all__ = ["QUESTION_BYTES", "Answers", "ask"]

K = TypeVar("K", bound=Hashable)

#: How long one connection may take.
PATIENCE_SECONDS = 2.0
#: How many connections there may be at once; for a further one the oldest is closed.
MOST_CONNECTIONS = 256
#: How many peers are asked at once, in any order, so that not all ranks of a large world ask the same ones.
MOST_ASKED = 512
#: A socket is connected once it can be written to.
_ANYTHING = selectors.EVENT_READ | selectors.EVENT_WRITE
_NONCE_BYTES = 16
_DIGEST_BYTES = 32
_LENGTH_BYTES = 2
#: A longer question is not answered. The longest is a note of a call: its text, as JSON, takes a few KiB.
QUESTION_BYTES = 1 << 14
#: A longer answer counts as none, and so does one that inflates to more.
_ANSWER_BYTES = 1 << 22
_STOP_SECONDS = 1.0
#: Until the next look whether there is a descriptor for who asks.
_NO_DESCRIPTOR_SECONDS = 0.1


def _digest(secret: bytes, nonce: bytes, question: bytes) -> bytes:
    return hmac.new(secret, nonce + question, hashlib.sha256).digest()


class _Asker:
    """One client's connection: what has been received, and what is still to be sent."""

    def __init__(self, line: socket.socket, until: float) -> None:
        self.line = line
        self.until = until
        self.nonce = os.urandom(_NONCE_BYTES)
        self.came = b""
        self.answered = False
        self.left = self.nonce

    def question(self, secret: bytes) -> bytes | None:
        """The question, or None until all of it has come.

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
    """Answers questions in a thread of its own, until it is closed."""

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
        #: the latest answer, and how it is sent, since the same one may be given to hundreds of ranks
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
        except OSError:  # the client has gone, or no descriptor is left: closing a connection frees one
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
        """Send and receive what is possible now, and close the connection once it is over or has failed."""
        try:
            over = self._send(asker) or self._receive(asker)
        except (OSError, ValueError):
            over = True
        except Exception:  # the function that answers has failed: other clients are still served
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
        """The answer, as it is sent."""
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
        """Close all sockets; in a forked child, which does not have the thread, there is no more to do."""
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
    """Ask all of ``peers`` (address, port, the secret that it knows); return the answer of each.

    The answer is None for a peer that takes the connection but then sends nothing for ``seconds`` and twice
    the time that connecting took; each part of an answer starts that time anew. Peers with which there is no
    connection within ``reach`` seconds (by default ``seconds``) are left out. The call ends two seconds after
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
    # Parsed only here, so that no answer is late because those before it took long.
    return {peer: None if came is None else _parsed(came) for peer, came in asking.found.items()}


class _Asking(Generic[K]):
    """The connections over which one question is asked. ``found``: what has come, of a peer that answered."""

    def __init__(
        self, selector: selectors.BaseSelector, question: bytes, seconds: float, reach: float
    ) -> None:
        self._selector = selector
        self._question = question
        self._seconds = seconds
        self._reach = reach
        self._last = host.monotonic() + reach + PATIENCE_SECONDS
        self.found: dict[K, bytearray | None] = {}
        #: the connections, and until when each is waited for
        self.ends: dict[socket.socket, float] = {}
        self._began: dict[socket.socket, float] = {}
        self._ways: dict[socket.socket, float] = {}

    def connect(self, peer: K, address: str, port: int, secret: bytes) -> bool:
        """Begin to connect to ``peer``; returns whether it is done with, as long as descriptors are left."""
        try:
            line = socket.socket(lines.family(address), socket.SOCK_STREAM)
        except OSError:
            return not self.ends  # else one that ends gives a descriptor back
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
        """Wait for what comes, and leave those that took too long; returns whether time is up for all."""
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
        # Connecting took one round trip: that and one more are allowed for.
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
    """Read what has come, and send the question once the nonce is complete.

    Returns whether nothing more is to be read: the answer is complete, too long, or the connection has ended.
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
