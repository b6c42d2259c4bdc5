"""The thread that answers peers' questions: it answers those with the secret; others can affect nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from asynccoll.flight import Recorder
from asynccoll.health import accounts
from asynccoll.host import answering, lines
from asynccoll.host.answering import QUESTION_BYTES, Answers, ask
from patience import patient, until

SECRET = b"the job's"


@pytest.fixture
def answers() -> Iterator[Answers]:
    long = os.urandom(150_000).hex()
    one = Answers("127.0.0.1", SECRET, lambda question: {"asked": question, "long": long})
    yield one
    one.close()


def at(answers: Answers, secret: bytes = SECRET) -> tuple[str, int, bytes]:
    return "127.0.0.1", answers.port, secret


def still_answers(answers: Answers) -> None:
    assert said({1: at(answers)})[1]["asked"] == "who"


def said(peers: dict[int, tuple[str, int, bytes]], question: str = "who") -> dict[int, dict[str, object]]:
    """Return the answers of the peers that answered."""
    found = ask(peers, question, patient(2.0))
    return {rank: one for rank, one in found.items() if one is not None}


def closed(line: socket.socket) -> bytes:
    """Return all bytes received until the other end closes the connection."""
    line.settimeout(patient(10))
    came = b""
    try:
        while some := line.recv(1 << 16):
            came += some
    except ConnectionResetError:
        pass
    return came


def test_who_knows_the_secret_is_answered(answers: Answers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peers = {1: at(answers), 2: at(answers), 3: (*silent.getsockname(), SECRET)}
        found = ask(peers, "account", patient(0.5))
    assert found.pop(3) is None  # it has accepted the connection and sends nothing
    assert {rank: (one["asked"], len(str(one["long"]))) for rank, one in found.items() if one} == {
        1: ("account", 300_000),
        2: ("account", 300_000),
    }


def test_a_question_may_be_as_long_as_the_longest_note_and_no_longer(answers: Answers) -> None:
    longest = "q" * QUESTION_BYTES
    assert said({1: at(answers)}, longest)[1]["asked"] == longest
    assert ask({1: at(answers)}, longest + "q", patient(2.0)) == {1: None}
    still_answers(answers)


def test_of_many_peers_a_few_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a rank of a large world would run out of descriptors and report that it cannot ask others."""
    monkeypatch.setattr(answering, "MOST_ASKED", 3)
    open_at_once: list[int] = []

    def answer(_: str) -> dict[str, object]:
        open_at_once.append(len(one._askers))
        return {}

    one = Answers("127.0.0.1", SECRET, answer)
    try:
        assert said({rank: at(one) for rank in range(20)}) == {rank: {} for rank in range(20)}
    finally:
        one.close()
    assert max(open_at_once) <= 3


def test_who_has_few_descriptors_left_asks_with_these(
    monkeypatch: pytest.MonkeyPatch, answers: Answers
) -> None:
    most = 2

    class Few(socket.socket):
        """Limit only the sockets that ask: accepted ones have a descriptor already."""

        asking: ClassVar[list[Few]] = []

        def __init__(self, *how: int, **more: Any) -> None:
            if not more and len(self.asking) >= most:
                raise OSError(errno.EMFILE, "too many open files")
            super().__init__(*how, **more)
            self.asking.extend([self] * (not more))

        def close(self) -> None:
            super().close()
            if self in self.asking:
                self.asking.remove(self)

    monkeypatch.setattr(socket, "socket", Few)
    assert len(said({rank: at(answers) for rank in range(5)})) == 5
    most = 0
    assert ask({1: at(answers)}, "who", patient(2.0)) == {}


def test_what_many_ask_at_once_is_found_out_and_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of ranks whose calls time out together ask for the account and for some calls of each."""
    written: list[int] = []
    compress = zlib.compress
    monkeypatch.setattr(answering.zlib, "compress", lambda text: written.append(1) or compress(text))
    monkeypatch.setattr(accounts, "KEPT_SECONDS", patient(60.0))
    recorder = Recorder(1, 3)
    mine, its = (accounts.Accounts(rank, recorder, "the job's", "") for rank in range(2))
    its._node = "another"
    peer = replace(its.publish("127.0.0.1", 1, ""), node="another")
    try:
        for _ in range(3):
            assert len(said(dict.fromkeys(range(9), ("127.0.0.1", peer.answers, SECRET)), "account 5")) == 9
        assert len(written) == 1
        before = mine.of({1: peer}, patient(2.0))[1].flight
        text = recorder.learn("sum", ("world", "default", "default", "all_reduce", "", "a.py:1"), None)
        ticket = recorder.note(text, -1, 1, 1, -1, 4, 1.0, 1.0)
        after = mine.of({1: peer}, patient(2.0))[1].flight
        assert before is not None
        assert after is not None
        assert ([one.ticket for one in before.calls], [one.ticket for one in after.calls]) == ([], [ticket])
    finally:
        its.close()
        recorder.close()


def test_ranks_whose_calls_are_read_from_memory_are_not_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        accounts, "_answers", lambda _, _secret, question, *_a, **_k: asked.append(question) or {}
    )
    with contextlib.closing(Recorder(1, 3)) as recorder:
        mine = accounts.Accounts(0, recorder, "the job's", "")
        mine.held[1] = recorder.buffer
        peers = {rank: accounts.Peer("127.0.0.1", 1, "", os.getpid()) for rank in (1, 2)}
        mine.of({1: peers[1]})
        mine.of(peers)
        mine.held.clear()
    assert asked == ["account 0", "account 32768"]


def test_of_works_that_time_out_together_one_asks_for_all_that_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer that an earlier one got may be older than the calls of the later ones."""
    recorder = Recorder(1, 3)
    mine = accounts.Accounts(0, recorder, "the job's", "")
    peers = {1: accounts.Peer("127.0.0.1", 1, "", 1)}
    asked: list[threading.Event] = []
    begun, go = threading.Event(), threading.Event()

    def ask(those: dict[int, accounts.Peer], _: float) -> dict[int, accounts.Account]:
        if those:
            asked.append(begun)
            begun.set()
            assert go.wait(patient(10.0))
        return {rank: accounts.Account(rank, now=len(asked)) for rank in those}

    monkeypatch.setattr(mine, "_ask", ask)
    with ThreadPoolExecutor(5) as threads:
        first = threads.submit(mine.of, peers)
        assert begun.wait(patient(10.0))
        others = [threads.submit(mine.of, peers) for _ in range(4)]
        assert until(lambda: len(mine._callers) == 5, patient(10.0))
        go.set()
    assert first.result()[1].now == 1
    assert {one.result()[1].now for one in others} == {2}
    assert not mine._kept
    recorder.close()


def test_another_secret_is_told_nothing(answers: Answers) -> None:
    assert ask({1: at(answers, b"a guess")}, "account", patient(2.0)) == {1: None}
    still_answers(answers)


def test_ranks_with_secrets_of_their_own_are_asked_at_once() -> None:
    """This applies if no launcher sets a secret: the first answers only once the second has been asked."""
    asked = threading.Event()

    def answer_later(_: str) -> dict[str, object]:
        return {"second": asked.wait(patient(10))}

    def answer(_: str) -> dict[str, object]:
        asked.set()
        return {}

    first, second = Answers("127.0.0.1", b"one", answer_later), Answers("127.0.0.1", b"other", answer)
    peers = {
        rank: accounts.Peer("127.0.0.1", 1, "here", 1, answers=one.port, secret=secret)
        for rank, one, secret in ((0, first, "one"), (1, second, "other"))
    }
    try:
        assert accounts.ask(peers, "", "who", patient(2.0)) == {0: {"second": True}, 1: {}}
    finally:
        asked.set()
        first.close()
        second.close()


def test_who_answers_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example over a link that is busy with the ranks' own data: the peer is alive, not stuck."""
    monkeypatch.setattr(answering, "PATIENCE_SECONDS", patient(10.0))
    seconds = patient(1.0)
    answer = zlib.compress(json.dumps({"here": True}).encode())
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def say() -> None:
            line, _ = listening.accept()
            with line:
                for part in (b"n" * 16, len(answer).to_bytes(4, "big"), answer[:5], answer[5:]):
                    time.sleep(0.4 * seconds)
                    line.sendall(part)
                line.recv(1 << 12)  # read the question: closing with unread data resets the connection

        slow = threading.Thread(target=say)
        slow.start()
        found = ask({1: (*listening.getsockname(), SECRET)}, "who", seconds)
        slow.join()
    assert found == {1: {"here": True}}


def test_an_answer_that_inflates_to_too_much_is_none(
    monkeypatch: pytest.MonkeyPatch, answers: Answers
) -> None:
    monkeypatch.setattr(answering, "_ANSWER_BYTES", 250_000)  # 150,000 on the wire
    assert ask({1: at(answers)}, "who", patient(2.0)) == {1: None}


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100, b"\0" * 33, os.urandom(64), b"x" * 10_000_000],
    ids=["http", "no question", "random", "endless"],
)
def test_garbage_is_hung_up_on(answers: Answers, noise: bytes) -> None:
    with socket.create_connection(at(answers)[:2]) as line:
        line.settimeout(patient(5))
        with contextlib.suppress(OSError):
            line.sendall(noise)
        assert len(closed(line)) <= 16  # at most the nonce
    still_answers(answers)


def test_who_says_nothing_is_hung_up_on_and_keeps_nobody(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow and however many such connections are, they do not delay answers to others."""
    monkeypatch.setattr(answering, "PATIENCE_SECONDS", 0.5)
    began = time.monotonic()
    lines = [socket.create_connection(at(answers)[:2]) for _ in range(20)]
    for line in lines[::2]:
        line.send(b"s")
    still_answers(answers)
    for line in lines:
        assert len(closed(line)) == 16
        line.close()
    assert time.monotonic() - began < patient(5)


def test_a_port_scan_changes_nothing(answers: Answers) -> None:
    threads = threading.active_count()
    for _ in range(3 * answering.MOST_CONNECTIONS):
        socket.create_connection(at(answers)[:2]).close()
    held = [socket.create_connection(at(answers)[:2]) for _ in range(2 * answering.MOST_CONNECTIONS)]
    still_answers(answers)
    assert len(answers._askers) <= answering.MOST_CONNECTIONS
    assert threading.active_count() == threads
    for line in held:
        line.close()


def test_a_replayed_question_is_not_answered(answers: Answers) -> None:
    """The digest covers this connection's nonce."""
    with socket.create_connection(at(answers)[:2]) as line:
        nonce = line.recv(16)
        asked = answering._digest(SECRET, nonce, b"who") + b"\0\3who"
        line.sendall(asked)
        assert len(closed(line)) > 100_000
    with socket.create_connection(at(answers)[:2]) as line:
        line.recv(16)
        line.sendall(asked)
        assert closed(line) == b""


def test_an_answer_that_cannot_be_found_out_leaves_the_others() -> None:
    def fail(question: str) -> dict[str, str]:
        if question == "fail":
            raise RuntimeError
        return {"asked": question}

    one = Answers("127.0.0.1", SECRET, fail)
    assert ask({1: at(one)}, "fail", patient(2.0)) == {1: None}
    still_answers(one)
    one.close()
    assert ask({1: at(one)}, "who", 0.5) == {}


def test_without_descriptors_it_does_not_spin(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> None:
    """The asking peer stays in the backlog, and there is no other connection to close in its favor."""

    class Listening:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

    accepting = answers._listening
    slept: list[float] = []
    monkeypatch.setattr(answering.host, "sleep", lambda seconds: (slept.append(seconds), time.sleep(seconds)))
    monkeypatch.setattr(answers, "_listening", Listening())
    answers._accept()
    assert slept == [answering._NO_DESCRIPTOR_SECONDS]
    monkeypatch.setattr(answers, "_listening", accepting)
    still_answers(answers)


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.EHOSTUNREACH])
def test_a_peer_to_which_there_is_no_way_has_not_been_reached(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The socket itself does not record that error."""
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, at: number)
    assert ask({1: ("127.0.0.1", 9, SECRET)}, "who", 0.2) == {}
    assert lines.connect({1: ("127.0.0.1", 9)}, 0.2) == ({}, [1])


def test_a_peer_that_cannot_be_connected_to_from_here_has_not_been_reached() -> None:
    """Here the host has several links, and the address does not say which one to use."""
    there = ("fe80::1", 9)
    with socket.socket(socket.AF_INET6) as refused:
        assert refused.connect_ex(there) == errno.EINVAL
    assert ask({1: (*there, SECRET)}, "who", 0.2) == {}
    assert lines.connect({1: there}, 0.2) == ({}, [1])


def test_a_peer_that_refuses_at_once_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems refuse immediately if the peer is on the same host."""
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, at: errno.ECONNREFUSED)
    assert lines.connect({1: ("127.0.0.1", 9)}, 0.2) == ({}, [])
