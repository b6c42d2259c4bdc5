"""Accounts of what each rank has done, as far as can be known: from its flight recorder, or by asking it.

For a rank on this node the memory of its recorder is read, whatever its process is doing. A rank on another
node is asked, and answers from a separate thread. Only the rank itself can say where its main thread is.
Asking takes a bounded time; there is no cost until then. An account only states facts; ``blame`` judges.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from asynccoll import flight, host
from asynccoll.flight import Flight, Recorder, registry
from asynccoll.host import answering, handing, shared_memory, standing

#: The prefix of a question that is a note, in which another rank announces a call (``confirming``).
NOTE = "call "
#: The prefix of a question for an account; the number of latest calls to report follows.
_ACCOUNT = "account"
#: The environment variable for the job's secret, by which ranks authenticate questions. If the launcher does
#: not set it, each rank has its own secret, which the others find in the store.
SECRET_VARIABLE = "ASYNCCOLL_SECRET"  # noqa: S105  # the variable's name, not a secret
#: How long a rank may take to answer.
ASK_SECONDS = 0.3
#: How long a rank repeats its answer to others that ask the same, if it has made no call since: no longer
#: than a question may be in transit.
KEPT_SECONDS = 0.01
#: The most calls in the answers of all ranks together; each takes some 150 bytes.
_MOST_CALLS = 1 << 16
#: How long connecting to a rank may take: a busy link may lose the first packet, which is resent after 1 s.
REACH_SECONDS = 1.5
#: The recorder memory of at most this many ranks on this node is kept open, to be read after they have ended.
_MOST_HELD = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """What a rank publishes: its beacon's address, its recorder's descriptor, and its port for questions."""

    address: str
    port: int
    host: str
    pid: int
    node: str = ""
    memory: int = -1
    answers: int = 0
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """What is known about one rank. ``state``: its process's state from the kernel, if it is on this node.

    ``now`` is its monotonic clock at the time of the account. ``stacks``: the frames of its main thread
    (under ""), or of its tasks while that thread sleeps in an event loop; innermost first, as
    "function (file:line)". ``stands`` is the innermost frame of user code. ``answers``: whether it answered;
    ``reached``: whether it could be asked.
    """

    rank: int
    flight: Flight | None = None
    now: float = 0.0
    state: str = ""
    near: bool = False
    answers: bool = False
    stands: str = ""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reached: bool = True


class Accounts:
    """The accounts of the ranks of one world. Any thread may ask."""

    def __init__(self, rank: int, recorder: Recorder, secret: str, node: str) -> None:
        """``secret``: the job's, "" if each rank has its own."""
        #: what other ranks have published, as far as this rank has read it
        self.known: Mapping[int, Peer] = {}
        #: answers the notes in which other ranks announce calls (``confirming``)
        self.hear: Callable[[str], Mapping[str, object]] | None = None
        self._rank = rank
        self._recorder = recorder
        self._secret = secret
        self._node = node
        self._answers: answering.Answers | None = None
        #: the recorder memory of ranks on this node, kept open
        self.held: dict[int, memoryview] = {}
        #: held while peers are asked: of the threads that wait for it, the first then asks for all of them;
        #: reentrant, as a signal handler may ask too
        self._asking = host.RLock()
        self._turns = itertools.count()
        self._callers: set[int] = set()
        #: the latest accounts, each with the turn in which it was asked for; kept while any caller waits
        self._kept: dict[int, tuple[int, Account]] = {}
        #: the question and the newest ticket at the time of the latest answer, when that was, and the answer
        self._answered: tuple[tuple[str, int], float, Mapping[str, object]] = ("", 0), 0.0, {}
        #: the thread whose stack is reported in answers
        self.thread: int = host.get_ident()

    def publish(self, address: str, port: int, secret: str, meets: str = "") -> Peer:
        """Start answering questions at ``address`` that prove knowledge of the job's secret or ``secret``.

        ``meets``: the address of the store through which the ranks met. Returns what to publish.
        """
        known = self._secret or secret
        self._answers = answering.Answers(address, known.encode(), self._answer)
        mine = Peer(
            address, port, host.gethostname(), host.getpid(), self._node, self._recorder.descriptor,
            self._answers.port, "" if self._secret else secret,
        )  # fmt: skip
        self._recorder.say(
            host=mine.host, node=mine.node, address=address, port=mine.answers, secret=known, beacon=port,
            meets=meets,
        )  # fmt: skip
        job = os.environ.get(registry.VARIABLE, "")
        registry.register(job, self._rank, asdict(mine))
        handing.hand_over(job, self._rank, mine.memory)
        return mine

    def hold(self, rank: int, peer: Peer) -> None:
        """Keep the memory of ``rank`` open, if it is on this node."""
        if rank not in self.held and len(self.held) < _MOST_HELD:
            found = self._look(peer)
            if found is not None:
                self.held[rank] = found

    def _look(self, peer: Peer) -> memoryview | None:
        """Map the memory that ``peer`` published; None also if its pid is now that of another process."""
        if peer.node != self._node or peer.memory < 0:
            return None
        memory = shared_memory.look(peer.pid, peer.memory)
        is_its = memory is not None and flight.said(memory).get("beacon") == peer.port
        return memory if is_its else None

    def of(self, peers: Mapping[int, Peer], seconds: float = ASK_SECONDS) -> dict[int, Account]:
        """Ask each of ``peers`` for an account; a rank on this node gets one even if it does not answer.

        No account is older than this call, as a rank may meanwhile have made the call that it had not made
        before. But if several works time out together, one of them asks for all that wait behind it.
        """
        came = next(self._turns)
        self._callers.add(came)
        try:
            with self._asking:
                found = {rank: one for rank, (turn, one) in self._kept.items() if turn > came}
                turn = next(self._turns)
                asked = self._ask({rank: peer for rank, peer in peers.items() if rank not in found}, seconds)
                found |= asked
                self._kept = self._kept | {rank: (turn, one) for rank, one in asked.items()}
        finally:
            self._callers.discard(came)
            if not self._callers:
                self._kept = {}
        return {rank: found[rank] for rank in peers}

    def _ask(self, peers: Mapping[int, Peer], seconds: float) -> dict[int, Account]:
        near = {rank: self._read(rank, peer) for rank, peer in peers.items()}
        awake = {rank: peer for rank, peer in peers.items() if near[rank].state not in ("T", "Z")}
        said: dict[int, dict[str, Any] | None] = {}
        # Calls that were read from memory here need not be sent.
        calls = _MOST_CALLS // len(awake) if any(near[rank].flight is None for rank in awake) else 0
        with contextlib.suppress(OSError):  # out of descriptors: accounts come from open memory only
            said = _answers(awake, self._secret, f"{_ACCOUNT} {calls}", seconds, reach=REACH_SECONDS)
        return {
            rank: with_answer(replace(near[rank], reached=rank in said or rank not in awake), said.get(rank))
            for rank in peers
        }

    def heard(self, peers: Mapping[int, Peer], seconds: float = ASK_SECONDS) -> set[int]:
        """Ask ``peers``, and return the ranks that answer at all."""
        return set(self.tell(peers, "here", seconds)) if peers else set()

    def tell(self, peers: Mapping[int, Peer], question: str, seconds: float) -> dict[int, dict[str, Any]]:
        """Put ``question`` to ``peers``; return the answers, by rank."""
        return ask(peers, self._secret, question, seconds)

    def last_seen(self, rank: int, peer: Peer) -> Flight | None:
        """Return the records of ``rank`` if its memory is open, whether or not its process is alive."""
        memory = self.held.get(rank)
        return None if memory is None else _recorded(memory, peer.pid)

    def own(self) -> Flight | None:
        """Return this rank's records."""
        return flight.read(self._recorder.buffer)

    def _read(self, rank: int, peer: Peer) -> Account:
        memory = self.held.get(rank) or self._look(peer)
        if memory is None:
            return Account(rank)
        state = shared_memory.process_state(peer.pid)
        return Account(rank, _recorded(memory, peer.pid), host.monotonic(), state, near=True)

    def _answer(self, question: str) -> Mapping[str, object]:
        """Answer ``account 9`` (latest calls, stacks), ``peers`` (what others have published), or ``here``.

        A note, in which another rank announces a call, is answered by ``hear`` with this rank's call.
        """
        if question == "here":
            return {}
        if question.startswith(NOTE):
            return {} if self.hear is None else self.hear(question)
        if question == "peers":
            known = list(self.known.items())  # a copy, as other threads add peers
            return {"peers": {str(rank): asdict(peer) for rank, peer in known}}
        wanted = question, self._recorder.newest
        said, at, account = self._answered
        if wanted != said or at < host.monotonic() - KEPT_SECONDS:
            calls = question.removeprefix(_ACCOUNT).strip()
            account = self._own_account(int(calls) if calls.isdigit() else None)
            self._answered = wanted, host.monotonic(), account
        return account

    def _own_account(self, calls: int | None) -> Mapping[str, object]:
        found = self.own()
        stacks = standing.stacks(self.thread)
        plain = None if found is None else flight.to_plain(found, calls)
        if plain is not None:
            plain["said"] = {key: value for key, value in plain["said"].items() if key != "secret"}
        return {
            "flight": plain,
            "now": host.monotonic(),
            "stacks": [(one.who, one.frames) for one in stacks],
            "stands": standing.summary(stacks),
        }

    def disown(self) -> None:
        """In a forked child, stop answering: the parent does that."""
        self._asking = host.RLock()
        self._callers = set()  # threads of the parent
        if self._answers is not None:
            self._answers.disown()
            self._answers = None

    def close(self) -> None:
        """Stop answering, and close the memory of other ranks."""
        if self._answers is not None:
            self._answers.close()
            self._answers = None
        self.held.clear()


def _recorded(memory: memoryview, pid: int) -> Flight | None:
    """Return the records in the memory of process ``pid``; with its exit code until that is reaped."""
    found = flight.read(memory)
    if found is not None and found.ending != "exited" and (code := shared_memory.exit_code(pid)) is not None:
        return replace(found, ending="exited", code=code)
    return found


def ask(
    peers: Mapping[int, Peer], secret: str, question: str, seconds: float = ASK_SECONDS
) -> dict[int, dict[str, Any]]:
    """Put ``question`` to ``peers``; return the answers that arrive within ``seconds``.

    ``secret``: the job's, "" if each rank has its own.
    """
    said = _answers(peers, secret, question, seconds)
    return {rank: one for rank, one in said.items() if one is not None}


def _answers(
    peers: Mapping[int, Peer], secret: str, question: str, seconds: float, *, reach: float | None = None
) -> dict[int, dict[str, Any] | None]:
    """Ask those of ``peers`` that take questions, as ``answering.ask`` does."""
    asked = {
        rank: (peer.address, peer.answers, (secret or peer.secret).encode())
        for rank, peer in peers.items()
        if peer.answers
    }
    return answering.ask(asked, question, seconds, reach=reach)


def with_answer(account: Account, said: Mapping[str, Any] | None) -> Account:
    if said is None:
        return account
    try:
        found = account.flight or (flight.from_plain(said["flight"]) if said["flight"] else None)
        now = account.now or float(said["now"])
        stacks = {str(who): tuple(map(str, frames)) for who, frames in said["stacks"]}
        return Account(
            account.rank, found, now, account.state, account.near, True, str(said["stands"]), stacks
        )
    except (KeyError, TypeError, ValueError):  # from another version
        return account
