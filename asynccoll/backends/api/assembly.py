"""How the ranks of a world meet at a store that earlier worlds may have used.

Each rank writes an entry with a random word of its own, used for this meeting only. Rank 0 reads all entries,
numbers the world, and tells each rank the number, under the rank's word. A rank that finds its word agrees to
that number; when all have agreed, rank 0 releases them. So it does not matter what earlier worlds left in the
store, how many ranks they had, or how often each process has met there: a stale entry is never agreed to, and
the rank that takes its place overwrites it.

A waiter polls instead of blocking inside the store, so that Ctrl-C is handled.

Ranks with different settings would make different calls, or meet in different places, and wait for each
other. So once they have met every rank raises, with an error that names the setting and the ranks.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

import torch.distributed as dist

from asynccoll.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    LaunchEnvironmentError,
    PeerLostError,
)
from asynccoll.host.looks import looks
from asynccoll.host.store import values
from asynccoll.host.words import listed

_GO = "go"


@dataclass(frozen=True, slots=True)
class Member:
    """What a rank tells the others: its host, its node according to the launcher, its user's settings.

    ``memory``, ``check`` and ``version`` must be the same on all ranks (``settings``).
    """

    host: str
    node: int | None = None
    by_node: bool | None = None
    memory: bool = True
    check: str = "local"
    version: str = ""

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Member:
        """Read what a rank has written. That rank may run another version of this library."""
        known = {name: value for name, value in told.items() if name in cls.__slots__}
        return cls(**{"host": "", "version": "an unknown one", **known})


def assemble(
    store: dist.Store, rank: int, world_size: int, me: Member, seconds: float
) -> tuple[dist.Store, list[Member]]:
    """Return the part of ``store`` that only this world uses, and what each rank says of itself.

    Raises:
        CollectiveTimeoutError: a rank did not join within ``seconds``; says which.
        PeerLostError: the process that serves the store has ended.
    """
    word = secrets.token_hex(8)
    assembly = _Assembly(dist.PrefixStore("asynccoll", store), rank, world_size, seconds)
    try:
        assembly.set({f"here/{rank}": json.dumps([word, asdict(me)])})
        world = assembly.lead() if rank == 0 else assembly.follow(word)
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"rank {rank} of {world_size} lost the connection to the store while it waited for the others: "
            f"{error}"
        ) from error
    part = dist.PrefixStore(world, assembly.store)
    return part, [Member.read(told) for told in json.loads(part.get("members"))]


class _Assembly:
    """One rank's side of the meeting."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
        self.store = store
        self._rank = rank
        self._size = world_size
        self._seconds = seconds
        self._deadline = monotonic() + seconds
        self._here = [f"here/{index}" for index in range(world_size)]

    def set(self, entries: Mapping[str, str]) -> None:
        """Write ``entries``, in one request if the store can."""
        if self.store.has_extended_api():  # type: ignore[attr-defined]  # missing in the stub
            self.store.multi_set(list(entries), list(entries.values()))  # type: ignore[attr-defined]  # as above
            return
        for key, value in entries.items():
            self.store.set(key, value)

    def follow(self, word: str) -> str:
        """Agree to each world that rank 0 proposes until it says go; return the prefix of the last one."""
        world = ""
        for number in range(1 << 30):
            key = f"{word}/{number}"
            for _ in self._looks(lambda: self._absent() or [0]):
                if self.store.check([key]):
                    break
            said = self.store.get(key).decode()
            if said == _GO:
                return world
            world = said
            self.store.set(f"{world}/agreed/{self._rank}", "")
        raise AssertionError("rank 0 never stops")

    def lead(self) -> str:
        """Propose worlds until all ranks agree to one; return the prefix of that one."""
        told: dict[str, int] = {}  # by word: how many messages its rank was sent
        for _ in self._looks(self._absent):
            if self._all_are_here():
                break
        while True:
            entries = values(self.store, self._here)
            words = [json.loads(entry)[0] for entry in entries]
            world = f"world/{self.store.add('worlds', 1)}"
            members = json.dumps([json.loads(entry)[1] for entry in entries])
            self.store.set(f"{world}/members", members)
            self._tell(told, words, world)
            if self._agreed(world, entries):
                # Emptied so that a rank that is absent next time is noticed; one request, unlike deletions.
                self.set(dict.fromkeys(self._here, ""))
                self._tell(told, words, _GO)
                return world

    def _tell(self, told: dict[str, int], words: list[str], what: str) -> None:
        self.set({f"{word}/{told.get(word, 0)}": what for word in words[1:]})
        told.update({word: told.get(word, 0) + 1 for word in words})

    def _agreed(self, world: str, entries: list[bytes]) -> bool:
        """Return whether all ranks agree before another process takes the place of one of them."""
        agreed = [f"{world}/agreed/{index}" for index in range(1, self._size)]

        def absent() -> list[int]:
            return [index for index, key in enumerate(agreed, 1) if not self.store.check([key])]

        for _ in self._looks(absent):
            if not agreed or self.store.check(agreed):
                return True
            if values(self.store, self._here) != entries:
                return False
        raise AssertionError("looking ends with an error")

    def _all_are_here(self) -> bool:
        return self.store.check(self._here) and all(values(self.store, self._here))

    def _absent(self) -> list[int]:
        """Return the ranks whose entry is missing, or was emptied when an earlier world was complete."""
        return [
            index
            for index, key in enumerate(self._here)
            if not (self.store.check([key]) and self.store.get(key))
        ]

    def _looks(self, absent: Callable[[], list[int]]) -> Iterator[None]:
        """Yield now and then until the deadline; then raise an error that names the absent ranks."""
        for _ in looks(self._deadline - monotonic()):
            yield
        who = listed(absent())
        raise CollectiveTimeoutError(
            f"rank {self._rank} timed out waiting for {who} of {self._size} to join within "
            f"{self._seconds:g} s: start every rank, with the same address to meet at, or pass a "
            "longer timeout= to ac.initialize"
        )


#: How long rank 0, which may serve the store, waits for ranks that have yet to learn of the difference.
_STAY_SECONDS = 5.0


def own_version() -> str:
    """Return the version of this library, from the package itself, which may not be installed."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def refuse_differences(store: dist.Store, rank: int, members: Sequence[Member]) -> None:
    """Raise on every rank if the members of a world differ; ``store`` is the world's own.

    Raises:
        LaunchEnvironmentError: they run different versions of this library.
        InvalidArgumentError: they have different settings.
    """
    error = _difference(members)
    if error is None:
        return
    _part_together(store, rank, len(members))
    raise error


def _difference(members: Sequence[Member]) -> LaunchEnvironmentError | InvalidArgumentError | None:
    versions = [one.version for one in members]
    if len(set(versions)) > 1:
        return LaunchEnvironmentError(
            f"the ranks run different versions of asynccoll: {_by_value(versions)}; install the "
            "same one everywhere"
        )
    told: dict[str, list[object]] = {
        "memory": [one.memory for one in members],
        "check": [one.check for one in members],
    }
    for name, said in told.items():
        if len(set(said)) > 1:
            return InvalidArgumentError(
                f"the ranks have different values for {name}=: {_by_value(list(map(repr, said)))}; "
                "pass the same to ac.initialize on every rank (or set "
                f"ASYNCCOLL_{name.upper()} to the same value for all of them)"
            )
    return None


def _by_value(said: Sequence[str]) -> str:
    """Return which ranks have which value, in the order of the first rank that has it."""
    return "; ".join(
        f"{value} on rank{'s' * (said.count(value) > 1)} "
        + ", ".join(str(rank) for rank, one in enumerate(said) if one == value)
        for value in dict.fromkeys(said)
    )


def _part_together(store: dist.Store, rank: int, size: int) -> None:
    """Write that this rank has learned of the difference; on rank 0, wait until all ranks have."""
    with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 with it
        store.set(f"differs/{rank}", "")
        if rank > 0:
            return
        keys = [f"differs/{other}" for other in range(1, size)]
        for _ in looks(_STAY_SECONDS):
            if not keys or store.check(keys):
                return
