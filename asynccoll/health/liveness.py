"""Find out which ranks are alive: checked only after a failure or a long wait, with no cost until then.

Each rank keeps a listening socket, its *beacon*, that is never served; its address is in the store. The
kernel accepts connections for a live process (even a stopped one) and refuses them for one that is gone, so a
survivor learns in one connection attempt which ranks are dead, on this host or another. The connection is
kept and checked the next time: an unserved socket takes a limited number of connections, and the kernel
closes them when the process ends.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from asynccoll import host
from asynccoll.flight import Flight
from asynccoll.health.accounts import Account, Accounts, Peer
from asynccoll.health.blame import ending, last_words
from asynccoll.host import lines, network
from asynccoll.host.store import Clients, values

#: How long one connection attempt may take.
PROBE_SECONDS = 0.5
#: In a routine check a missing answer may be a lost packet on a busy network: a rank counts as gone only
#: after it has been asked repeatedly for this long without an answer.
SILENCE_SECONDS = 4.0
#: A rank that was not asked for this long may have been there in between: its silence begins anew.
_LAPSE_SECONDS = 60.0
_AGAIN_SECONDS = 0.01


class Liveness:
    """This rank's beacon, and the addresses of the other ranks' beacons."""

    def __init__(
        self, clients: Clients | None, rank: int, accounts: Accounts, *, one_host: bool = False
    ) -> None:
        """``one_host``: all ranks are known to be on this host, so the beacon listens on 127.0.0.1."""
        self._clients = clients
        self._rank = rank
        self._accounts = accounts
        self._one_host = one_host
        self._beacon: lines.Line | None = None
        self._mine: Peer | None = None
        self._peers: dict[int, Peer] = {}
        self._lines: dict[int, lines.Line] = {}
        #: the ranks that do not answer: since when, and when they were last asked
        self._silent: dict[int, tuple[float, float]] = {}
        #: the ranks that a routine check found gone, and until when that result is used
        self._dead: dict[int, float] = {}
        #: reentrant, as a signal handler may leave the world while its thread asks
        self._asking = host.RLock()
        if clients is not None:
            try:
                self._publish(clients)
            except BaseException:  # peers that have learned of the beacon would take this rank to be alive
                self.close()
                raise

    def _publish(self, clients: Clients) -> None:
        address = (None if self._one_host else network.own_address(clients.host)) or "127.0.0.1"
        self._beacon, port = lines.listen(address)
        mine = self._mine = self._accounts.publish(address, port, secrets.token_hex(16), clients.address)
        self._accounts.known = self._peers
        with clients.borrow() as store:
            store.set(_key(self._rank), json.dumps(asdict(mine)))

    def learn(self, ranks: tuple[int, ...]) -> None:
        """Read what ``ranks`` have published, as long as the store exists: it may end with rank 0."""
        unknown = [rank for rank in ranks if rank != self._rank and rank not in self._peers]
        if self._clients is None or not unknown:
            return
        with contextlib.suppress(RuntimeError), self._clients.borrow() as store:
            if not store.check([_key(rank) for rank in unknown]):
                unknown = [rank for rank in unknown if store.check([_key(rank)])]
            for rank, said in zip(unknown, values(store, [_key(rank) for rank in unknown]), strict=True):
                peer = self._peers[rank] = Peer(**json.loads(said))
                self._accounts.hold(rank, peer)

    def _known(self, ranks: Iterable[int]) -> dict[int, Peer]:
        """Return what those of ``ranks`` have published that this rank has read."""
        return {rank: self._peers[rank] for rank in ranks if rank in self._peers}

    def lost(
        self, ranks: tuple[int, ...], *, patience: float = 0.0, routine: bool = False
    ) -> tuple[int, ...]:
        """Return those of ``ranks`` whose process is gone.

        If none is, keeps asking for ``patience`` seconds: a dying process closes its sockets one by one, and
        its beacon may be closed later than a connection that was lost. In a ``routine`` check nothing has
        failed yet, so a rank that does not answer does not count as gone immediately. While this process is
        out of descriptors it cannot ask any rank, and no rank counts as gone.
        """
        self.learn(ranks)
        asked = self._known(ranks)
        until = host.monotonic() + patience
        gone: tuple[int, ...] = ()
        while True:
            with self._asking, contextlib.suppress(OSError):
                gone = self._gone(asked, routine)
            if gone or host.monotonic() >= until:
                return gone
            host.sleep(_AGAIN_SECONDS)

    def _gone(self, peers: dict[int, Peer], routine: bool) -> tuple[int, ...]:
        """Return those of ``peers`` with no open connection that do not accept a new one.

        A rank that a routine check has found gone counts as gone for ``SILENCE_SECONDS`` without being
        asked: every lane that waits for a silent rank asks in turn, and if each waited for an answer, the
        operations of the last lane would time out before its turn.
        """
        dead = {rank for rank in peers if host.monotonic() < self._dead.get(rank, 0.0)}
        peers = {rank: peer for rank, peer in peers.items() if rank not in dead}
        for rank in [rank for rank in peers if rank in self._lines and not lines.is_open(self._lines[rank])]:
            self._lines.pop(rank).close()
        asked = {rank: (peer.address, peer.port) for rank, peer in peers.items() if rank not in self._lines}
        answered, silent = lines.connect(asked, PROBE_SECONDS)
        self._lines |= answered
        # Any process can fill the backlog of a socket that is never served, so ask the answering thread too.
        heard = self._accounts.heard({one: peers[one] for one in silent})
        silent = [rank for rank in silent if rank not in heard]
        now = host.monotonic()
        recent = {
            rank: since for rank, (since, asked) in self._silent.items() if now - asked < _LAPSE_SECONDS
        }
        # A rank that has answered any thread, or has refused the connection, is no longer silent.
        before = {rank: times for rank, times in self._silent.items() if rank not in peers}
        self._silent = before | {rank: (recent.get(rank, now), now) for rank in silent}
        spared = {rank for rank in silent if routine and now - self._silent[rank][0] < SILENCE_SECONDS}
        there = self._lines.keys() | spared | heard
        gone = peers.keys() - there
        if routine:
            self._dead |= dict.fromkeys(gone, now + SILENCE_SECONDS)
        return tuple(sorted(gone | dead))

    def in_doubt(self, ranks: tuple[int, ...]) -> bool:
        """Whether one of ``ranks`` was silent when last asked: then the store may not answer either."""
        return not self._silent.keys().isdisjoint(ranks)

    def describe(self, rank: int) -> str:
        """Name the rank, with its host and pid if known: ``rank 2 (host n1, pid 71)``."""
        if rank not in self._peers:
            return f"rank {rank}"
        peer = self._peers[rank]
        return f"rank {rank} (host {peer.host}, pid {peer.pid})"

    def nodes(self, ranks: tuple[int, ...]) -> dict[int, int]:
        """Return a number for the node of each of ``ranks``; {} unless all have published where they are."""
        peers = {rank: self._mine if rank == self._rank else self._peers.get(rank) for rank in ranks}
        numbers: dict[str, int] = {}
        found = {rank: numbers.setdefault(one.node, len(numbers)) for rank, one in peers.items() if one}
        return found if len(found) == len(peers) else {}

    def accounts(self, ranks: tuple[int, ...]) -> dict[int, Account]:
        """Ask those of ``ranks`` that have published where they are, and return what is known about each."""
        self.learn(ranks)
        return self._accounts.of(self._known(ranks))

    def lives_here(self) -> None:
        """Make the calling thread the one whose stack is given when peers ask where the program stands."""
        self._accounts.thread = host.get_ident()

    def tell(self, ranks: Collection[int], question: str, seconds: float) -> Mapping[int, Mapping[str, Any]]:
        """Ask those of ``ranks`` that are known; return the answers that arrive within ``seconds``."""
        with contextlib.suppress(OSError):  # no descriptors are left
            return self._accounts.tell(self._known(ranks), question, seconds)
        return {}

    def hear_by(self, hear: Callable[[str], Mapping[str, object]]) -> None:
        """Have ``hear`` answer the notes in which other ranks announce calls (``confirming``)."""
        self._accounts.hear = hear

    def job(self) -> str:
        """Return a name for this world, the same on all ranks: host, pid and port of its first rank."""
        first = self._mine if self._rank == 0 else self._peers.get(0, self._mine)
        return f"{first.host} {first.pid} {first.port}" if first is not None else ""

    def recorded(self) -> dict[int, Flight]:
        """Return the records of this rank, and of ranks on its node whose memory is open, without asking."""
        own = self._accounts.own()
        found = {} if own is None else {self._rank: own}
        for rank, peer in list(self._peers.items()):  # a copy, as other threads add peers
            seen = self._accounts.last_seen(rank, peer)
            if seen is not None:
                found[rank] = seen
        return found

    def seen(self, ranks: tuple[int, ...]) -> dict[int, memoryview]:
        """Return the recorders' memory, as far as it is open, of those of ``ranks`` that are on this node."""
        held = self._accounts.held
        return {rank: held[rank] for rank in ranks if rank in held}

    def leaving(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of ``ranks`` on this node that have begun to leave their world, or have left it."""
        return tuple(rank for rank, one in self._last_seen(ranks).items() if one.ending != "running")

    def killed(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of ``ranks``, all gone, that are known to have ended in the middle of their work."""
        return tuple(rank for rank, one in self._last_seen(ranks).items() if one.was_killed)

    def _last_seen(self, ranks: tuple[int, ...]) -> dict[int, Flight]:
        """Return the records of those of ``ranks`` whose memory is open, whether or not they are alive."""
        seen = {rank: self._accounts.last_seen(rank, peer) for rank, peer in self._known(ranks).items()}
        return {rank: one for rank, one in seen.items() if one is not None}

    def last_words(self, rank: int) -> str:
        """Say how a rank that is gone ended, and ``its last call was ...``; "" if that is not known."""
        found = self._last_seen((rank,)).get(rank)
        if found is None:
            return ""
        now = host.monotonic()
        return "; ".join(filter(None, (ending(found, now), last_words(found, now))))

    def disown(self) -> None:
        """In a forked child, close the copy of the beacon, which would outlive the rank."""
        self._asking = host.RLock()
        self._accounts.disown()
        self.close()

    def close(self) -> None:
        """Close the beacon: from now on this rank counts as gone."""
        self._accounts.close()
        if self._beacon is not None:
            self._beacon.close()
            self._beacon = None
        with self._asking:
            for line in self._lines.values():
                line.close()
            self._lines.clear()


def _key(rank: int) -> str:
    return f"beacon/{rank}"
