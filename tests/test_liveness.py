"""Which ranks count as gone: those that refuse a connection, and those that stay silent for long."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from asynccoll.flight import Recorder
from asynccoll.health import liveness
from asynccoll.health.accounts import Accounts, Peer
from asynccoll.health.liveness import Liveness
from asynccoll.host import lines
from asynccoll.host.answering import Answers
from patience import patient

RANK = 1


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A beacon whose queue one connection fills."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as one:
        yield one


@pytest.fixture
def asker(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Liveness]:
    """Rank 0, which knows the address of rank 1."""
    monkeypatch.setattr(liveness, "PROBE_SECONDS", 0.1)
    recorder = Recorder(0, 2)
    one = Liveness(None, 0, Accounts(0, recorder, "the job's", "here"))
    one._peers[RANK] = Peer("127.0.0.1", listening.getsockname()[1], "here", 1)
    yield one
    one.close()
    recorder.close()


def test_who_answers_is_there(asker: Liveness) -> None:
    """It is alive for a routine question and for any other."""
    assert asker.lost((RANK,)) == ()
    assert asker.lost((RANK,), routine=True) == ()


def test_who_refuses_is_gone(asker: Liveness, listening: socket.socket) -> None:
    """It is gone immediately: its kernel says that there is no such process."""
    listening.close()
    assert asker.lost((RANK,), routine=True) == (RANK,)


def test_silence_is_no_death_in_a_routine_question(
    asker: Liveness, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packet may be lost. After a failure, or for long, silence is enough; an answer resets it."""
    address = listening.getsockname()
    with socket.create_connection(address):  # the queue is full: further connections are dropped
        assert asker.lost((RANK,), routine=True) == ()
        assert asker.in_doubt((RANK,))
        assert asker.lost((RANK,)) == (RANK,)
        monkeypatch.setattr(liveness, "SILENCE_SECONDS", 0.0)
        assert asker.lost((RANK,), routine=True) == (RANK,)
        listening.accept()[0].close()
        assert asker.lost((RANK,), routine=True) == ()
        assert not asker.in_doubt((RANK,))


def test_a_beacon_that_strangers_have_filled_is_no_death(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers can fill a queue that is never served; the rank still answers with the job's secret."""
    monkeypatch.setattr(liveness, "PROBE_SECONDS", 0.1)
    recorder = Recorder(0, 2)
    accounts = Accounts(0, recorder, "the job's", "here")
    asker = Liveness(None, 0, accounts)
    answers = Answers("127.0.0.1", b"the job's", lambda question: {})
    asker._peers[RANK] = Peer("127.0.0.1", listening.getsockname()[1], "here", 1, answers=answers.port)
    with socket.create_connection(listening.getsockname()):
        assert asker.lost((RANK,)) == ()
        assert not asker.in_doubt((RANK,))
        answers.close()
        assert asker.lost((RANK,)) == (RANK,)
    asker.close()
    recorder.close()


def test_who_was_heard_is_silent_no_more(
    asker: Liveness, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answering thread has answered, so a packet lost much later counts as the first one again."""
    monkeypatch.setattr(asker, "_accounts", Hearing())
    with socket.create_connection(listening.getsockname()):
        assert asker.lost((RANK,), routine=True) == ()
        assert asker.in_doubt((RANK,))
        Hearing.answers = {RANK}
        assert asker.lost((RANK,), routine=True) == ()
        assert not asker.in_doubt((RANK,))
        Hearing.answers = set()
        pass_by(liveness.SILENCE_SECONDS, monkeypatch)
        assert asker.lost((RANK,), routine=True) == ()


def test_a_silence_of_long_ago_does_not_count(
    asker: Liveness, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has asked since, and the rank may have been there: it is silent from now on."""
    with socket.create_connection(listening.getsockname()):
        assert asker.lost((RANK,), routine=True) == ()
        pass_by(3600, monkeypatch)
        assert asker.lost((RANK,), routine=True) == ()
        assert asker.in_doubt((RANK,))
        pass_by(liveness.SILENCE_SECONDS, monkeypatch)
        assert asker.lost((RANK,), routine=True) == (RANK,)


def pass_by(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock forward."""
    before = liveness.host.monotonic
    monkeypatch.setattr(liveness.host, "monotonic", lambda: before() + seconds)


class Hearing:
    """Answering threads, of which only those of the ranks in ``answers`` answer."""

    answers: ClassVar[set[int]] = set()

    def heard(self, _: object) -> set[int]:
        return self.answers

    def close(self) -> None:
        pass


def test_a_signal_handler_leaves_the_world_while_its_thread_asks_who_is_gone(
    asker: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher stops the ranks that are left just when they find out which rank is gone."""
    real, handlers = lines.connect, [asker.close]

    def connect(*given: Any) -> Any:
        if handlers:
            handlers.pop()()
        return real(*given)

    monkeypatch.setattr(lines, "connect", connect)
    asking = threading.Thread(target=asker.lost, args=((RANK,),), daemon=True)
    asking.start()
    asking.join(patient(5))
    assert not asking.is_alive()


def test_nobody_is_gone_where_nobody_can_be_asked(asker: Liveness, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this process is out of descriptors, that is its own failure, and another error will report it."""

    def connect(*_given: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(lines, "connect", connect)
    assert asker.lost((RANK,)) == ()
    assert asker.lost((RANK,), routine=True) == ()
    assert asker.lost((RANK,), patience=0.05) == ()


def test_peers_may_be_read_while_they_are_told_to_another_rank() -> None:
    """``peers`` is answered on a thread of its own, and lists the peers that were known as it was asked."""
    recorder = Recorder(0, 3)
    accounts = Accounts(0, recorder, "the job's", "here")
    known: dict[int, Peer] = {}
    accounts.known = known

    class Address(str):
        """The address of a rank; another rank's beacon becomes known as it is copied into the answer."""

        __slots__ = ()

        def __deepcopy__(self, memo: object) -> str:
            known[2] = Peer("127.0.0.3", 2, "here", 2)
            return str(self)

    known[RANK] = Peer(Address("127.0.0.2"), 1, "here", 1)
    answer: Any = accounts._answer("peers")
    assert [one["address"] for one in answer["peers"].values()] == ["127.0.0.2"]
    accounts.close()
    recorder.close()
