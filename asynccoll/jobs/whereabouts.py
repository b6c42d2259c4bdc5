"""Where the ranks of a job are, asked from outside: by its directory, a process, or where its ranks have met.

The ranks of this host are read from their flight recorders, whatever state they are in. Those of other hosts
are found through a rank here that answers, and are then asked. Only the ranks themselves can report stacks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asynccoll import flight, host
from asynccoll.errors import InvalidArgumentError
from asynccoll.flight import Flight, Hang, Parting, hang_of, partings, registry
from asynccoll.flight.reading import plain_call
from asynccoll.health.accounts import SECRET_VARIABLE, Account, Peer, ask, with_answer
from asynccoll.health.blame import ending
from asynccoll.host import shared_memory
from asynccoll.jobs.live import STATES, check_running, command_of, snapshot

#: How long a rank may take to answer: longer than when a collective waits for the answer.
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """One rank: what it recorded, the state of its process where that is known, and where it stands."""

    rank: int
    peer: Peer
    account: Account

    @property
    def state(self) -> str:
        """``running``, ``stopped``, ``gone`` ...; how it ended; or that it does not answer."""
        one = self.account
        if one.flight is not None and (ended := ending(one.flight, one.now, advice=False)):
            return ended.removeprefix("it ")
        if one.near and one.state in STATES:
            return STATES[one.state]
        if one.answers:
            return "running"
        return "does not answer (native code?)" if one.near else "does not answer"

    def to_dict(self, calls: int) -> dict[str, object]:
        """Return a form for programs, with its last ``calls`` calls and all that are in flight."""
        one = self.account
        return {
            "rank": self.rank,
            "host": self.peer.host,
            "pid": self.peer.pid,
            "state": self.state,
            "calls": [plain_call(call, one.now) for call in self.last(calls)],
            "stands": one.stands,
            "stacks": [
                {"of": who or "main thread", "frames": list(frames)} for who, frames in one.stacks.items()
            ],
        }

    def last(self, calls: int) -> list[flight.Call]:
        """Return its last ``calls`` calls, and all earlier ones that are in flight."""
        made = () if self.account.flight is None else self.account.flight.calls
        early = [call for call in made[: max(0, len(made) - calls)] if call.is_open]
        return [*early, *made[max(0, len(made) - calls) :]]


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of one world, in order. ``partings``: where they part, as far as that is recorded."""

    world_size: int
    meets: str
    ranks: tuple[Whereabouts, ...]

    @property
    def partings(self) -> list[Parting]:
        """See ``flight.partings``."""
        return partings(self.recorded)

    @property
    def hang(self) -> Hang | None:
        """See ``flight.hang_of``."""
        known = [one.account for one in self.ranks if one.account.flight is not None]
        clocks_are_known = all(one.now for one in known)
        return hang_of(self.recorded, {one.rank: one.now for one in known} if clocks_are_known else None)

    @property
    def command(self) -> str:
        """The program, as one of its ranks on this host was started; "" if unknown."""
        told = (command_of(one.peer.pid) for one in self.ranks if one.account.near)
        return next(filter(None, told), "")

    @property
    def recorded(self) -> dict[int, Flight]:
        """The flight recorders that could be read, by rank."""
        return {one.rank: one.account.flight for one in self.ranks if one.account.flight is not None}

    def to_dict(self, calls: int) -> dict[str, object]:
        """Return a form for programs."""
        hang = self.hang
        return {
            "world_size": self.world_size,
            "meets": self.meets,
            "command": self.command,
            "ranks": [one.to_dict(calls) for one in self.ranks],
            "hang": asdict(hang) if hang else None,
            "partings": [one.to_dict() for one in self.partings],
        }


def find_jobs(what: str | None) -> list[Job]:
    """Return the jobs named by ``what``: a job's directory, a process, ``host:port``; None: all of this host.

    Ranks of other hosts are asked with the secret of the job, which ``ASYNCCOLL_SECRET`` may say.

    Raises:
        InvalidArgumentError: ``what`` is none of these, or a process that does not exist.
    """
    known = os.environ.get(SECRET_VARIABLE, "")
    if what is not None and _is_directory(what):
        return _of_directory(Path(what), known)
    flights: Iterable[Flight]
    if what is not None and what.isdecimal():
        check_running(int(what))
    if what is None or what.isdecimal():
        flights = snapshot(None if what is None else int(what)).flights.values()
    elif re.fullmatch(r".+:\d+", what):
        flights = [one for one in snapshot().flights.values() if one.said.get("meets") == what]
    else:
        raise InvalidArgumentError(
            f"{what!r} is not a job: expected its directory, a process number, or host:port, where its "
            "ranks met"
        )
    return [_asked(near, known) for near in _jobs(flights)]


def _is_directory(what: str) -> bool:
    with contextlib.suppress(OSError):  # no permission, or not a file name
        return Path(what).is_dir()
    return False


def _of_directory(directory: Path, secret: str) -> list[Job]:
    near = {rank: _read(rank, peer) for rank, peer in _peers(registry.registered(directory)).items()}
    if not near:
        raise InvalidArgumentError(
            f"no rank has registered in {str(directory)!r}; for the dumps of a failure there is "
            "asynccoll trace diff"
        )
    return [_asked(near, secret)]


def _peers(told: Mapping[Any, Mapping[str, Any]]) -> dict[int, Peer]:
    """Return the peers described in ``told``, without those that another version described."""
    found = {}
    for rank, said in told.items():
        with contextlib.suppress(TypeError):
            found[int(rank)] = Peer(**said)
    return found


def _jobs(flights: Iterable[Flight]) -> list[dict[int, tuple[Peer, Account]]]:
    """Return ranks of this host by job: those that have met in one place."""
    jobs: dict[tuple[str, int], dict[int, tuple[Peer, Account]]] = {}
    for one in flights:
        alone = "" if one.said.get("meets") else str(one.pid)
        key = (one.said.get("meets") or alone, one.world_size)
        jobs.setdefault(key, {})[one.rank] = _near(one)
    return [jobs[key] for key in sorted(jobs)]


def _near(one: Flight) -> tuple[Peer, Account]:
    said = one.said
    peer = Peer(
        said.get("address", ""), said.get("beacon", 0), said.get("host", host.gethostname()), one.pid,
        said.get("node", ""), -1, said.get("port", 0), said.get("secret", ""),
    )  # fmt: skip
    state = shared_memory.process_state(one.pid)
    return peer, Account(one.rank, one, host.monotonic(), state, near=True)


def _read(rank: int, peer: Peer) -> tuple[Peer, Account]:
    """Return a rank of this host that has left a note; its process may be gone."""
    memory = shared_memory.look(peer.pid, peer.memory)
    found = None if memory is None else flight.read(memory)
    if found is None:
        return peer, Account(rank, None, host.monotonic(), shared_memory.process_state(peer.pid), near=True)
    return replace(peer, secret=found.said.get("secret", peer.secret)), _near(found)[1]


def _asked(near: Mapping[int, tuple[Peer, Account]], secret: str) -> Job:
    """Return the job of the ranks ``near`` and those of other hosts, after asking each where it stands."""
    peers = {rank: peer for rank, (peer, _) in near.items()}
    awake = {rank: peer for rank, peer in peers.items() if near[rank][1].state not in ("T", "Z", "")}
    known = secret or next((peer.secret for peer in peers.values()), "")
    for answer in ask(awake, "", "peers", _SECONDS).values():
        for rank, far in _peers(answer.get("peers", {})).items():
            if rank not in peers:
                peers[rank] = awake[rank] = replace(far, secret=far.secret or known)
    said = ask(awake, "", "account", _SECONDS)
    accounts = {
        rank: with_answer(near[rank][1] if rank in near else Account(rank), said.get(rank)) for rank in peers
    }
    recorded: Sequence[Flight] = [one.flight for one in accounts.values() if one.flight is not None]
    return Job(
        max((one.world_size for one in recorded), default=len(peers)),
        next((one.said["meets"] for one in recorded if one.said.get("meets")), ""),
        tuple(Whereabouts(rank, peers[rank], accounts[rank]) for rank in sorted(peers)),
    )
