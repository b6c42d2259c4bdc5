"""A call that one rank refuses must not leave the others waiting for it.

Protocol, over the store, per lane and place in its order (the sequence number, never reset):

- A rank whose call is refused publishes *refused* with the reason, and uses up the sequence number.
- A rank that has waited on the lane for a second looks; for every place that a peer refused and that
  it has issued itself, it publishes *issued*, its work raises ``PeerRefusedError``, and it reopens
  the lane in the next epoch. What it has in flight behind that place is withdrawn: to the others
  that is a refusal like any other.
- A rank that refused learns, before it issues again, what the others did at that place: if all
  refused, nothing was sent and the lane goes on; if somebody issued, it reopens the lane, too.

The epoch of a lane is thus the number of places where some refused and some issued: every rank
counts the same ones, so all meet in the same new communicator.
"""

from __future__ import annotations

import contextlib
import json
import threading
from contextlib import AbstractContextManager
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from asynccoll.completion import Completion, Promise
from asynccoll.errors import CollectiveTimeoutError, PeerRefusedError

if TYPE_CHECKING:
    import torch.distributed as dist

    from asynccoll.lane import Lane
    from asynccoll.store import Clients

__all__ = ["Refusals"]

#: Asking the store is cheap; this only bounds how late a rank learns that the last peer answered.
_POLL_SECONDS = 0.02
_CLOSE_SECONDS = 1.0


class _Ledger:
    """What this rank knows of the refusals on one lane."""

    __slots__ = ("known", "mine", "seen", "theirs", "unsettled")

    def __init__(self) -> None:
        self.mine: set[int] = set()  # places refused by this rank
        self.seen = 0  # how many published refusals were read
        self.unsettled: set[int] = set()  # those where the others' side is not known yet
        self.known: set[int] = set()  # places that peers refused, each acted upon once
        self.theirs: dict[int, PeerRefusedError] = {}  # those not acted upon yet


class Refusals:
    """This rank's side of the protocol, for all of its lanes."""

    def __init__(self, clients: Clients | None, rank: int) -> None:
        self._clients = clients
        self._rank = rank
        self._ledgers: dict[Lane, _Ledger] = {}
        self._settling: set[threading.Thread] = set()

    def _key(self, lane: Lane, *parts: object) -> str:
        return "/".join(map(str, ("asynccoll/refused", lane.group.key, lane.name, *parts)))

    def _store(self) -> AbstractContextManager[dist.Store]:
        assert self._clients is not None
        return self._clients.borrow()

    def _ledger(self, lane: Lane) -> _Ledger:
        return self._ledgers.setdefault(lane, _Ledger())

    # The rank that refuses

    def refuse(self, lane: Lane, reason: BaseException) -> None:
        """Publish that this rank's next call on ``lane`` is refused for ``reason``."""
        if self._clients is None or lane.group.size == 1 or lane.broken is not None:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the peers
            self._publish(lane, lane.take_place(), f"{type(reason).__name__}: {reason}")

    def _publish(self, lane: Lane, sequence: int, why: str) -> None:
        """Tell the others, and let the lane go on only when they have told what they did there."""
        entry = json.dumps({"rank": self._rank, "sequence": sequence, "why": why})
        ledger = self._ledger(lane)
        ledger.mine.add(sequence)
        ledger.unsettled.add(sequence)
        with self._store() as store:
            store.set(self._key(lane, "did", sequence, self._rank), "refused")
            place = store.add(self._key(lane, "count"), 1)
            store.set(self._key(lane, "entry", place), entry)
        lane.pause(lambda: self._settle(lane, sequence))

    def _settle(self, lane: Lane, sequence: int) -> Completion:
        """Learn what the others did at a place that this rank refused; done once it is known."""
        known = Promise()

        def ask() -> None:
            try:
                if self._somebody_issued(lane, sequence):
                    lane.reopen()
            except Exception as error:  # the store is gone, or a peer never came
                text = f"{lane}: after a refused call the other ranks were not heard of ({error})"
                lane.break_off(CollectiveTimeoutError(text))
            self._ledger(lane).unsettled.discard(sequence)
            known.settle()
            self._settling.discard(threading.current_thread())

        thread = threading.Thread(target=ask, name="asynccoll-settle", daemon=True)
        self._settling.add(thread)
        thread.start()
        return known

    def _somebody_issued(self, lane: Lane, sequence: int) -> bool:
        issued = False
        deadline = monotonic() + lane.group.context.timeout
        for rank in lane.group.ranks:
            key = self._key(lane, "did", sequence, rank)
            while not self._answered(key):
                if monotonic() > deadline or lane.group.context.closed or lane.broken is not None:
                    raise TimeoutError(f"nothing from rank {rank} about call #{sequence}")
                sleep(_POLL_SECONDS)
            with self._store() as store:
                issued |= store.get(key) == b"issued"
        return issued

    def _answered(self, key: str) -> bool:
        with self._store() as store:
            return bool(store.check([key]))

    # The ranks that wait for it

    def look(self, lane: Lane) -> None:
        """Act on what peers refused on ``lane`` since the last look."""
        ledger = self._read(lane)
        for sequence in sorted(ledger.theirs):
            if sequence > lane.sequence:
                return  # not there yet: this rank may refuse it, too
            if sequence not in ledger.mine:
                before = {op.sequence for op in lane.outstanding()} | ledger.unsettled
                if any(0 < place < sequence for place in before):
                    return  # what is before it comes first, and decides the epoch it ran in
                self._give_up(lane, sequence, ledger.theirs[sequence])
            del ledger.theirs[sequence]

    def _read(self, lane: Lane) -> _Ledger:
        """This rank's knowledge, brought up to date."""
        ledger = self._ledger(lane)
        if self._clients is None:
            return ledger
        with self._store() as store:
            counter = self._key(lane, "count")
            published = int(store.get(counter)) if store.check([counter]) else 0
            while ledger.seen < published:
                ledger.seen += 1
                entry = json.loads(store.get(self._key(lane, "entry", ledger.seen)))
                sequence = entry["sequence"]
                if entry["rank"] != self._rank and sequence not in ledger.known:
                    ledger.known.add(sequence)
                    ledger.theirs[sequence] = self._error(lane, entry)
        return ledger

    def _error(self, lane: Lane, entry: dict[str, Any]) -> PeerRefusedError:
        return PeerRefusedError(
            f"rank {entry['rank']} refused its side of call #{entry['sequence']} on {lane}: {entry['why']}"
        )

    def _give_up(self, lane: Lane, sequence: int, error: PeerRefusedError) -> None:
        """This rank issued what a peer refused: their communicator is no longer in step."""
        with self._store() as store:
            store.set(self._key(lane, "did", sequence, self._rank), "issued")
        reached = lane.sequence
        out = [op for op in lane.outstanding() if op.sequence >= sequence]
        lane.restart()
        for operation in out:
            if operation.sequence == sequence:
                operation.fail(error)
        for behind in range(sequence + 1, reached + 1):
            self._withdraw(lane, behind, [op for op in out if op.sequence == behind])

    def _withdraw(self, lane: Lane, sequence: int, operations: list[Any]) -> None:
        """What was issued behind a refused call is lost; to the peers it is a refusal of ours."""
        ledger = self._ledger(lane)
        if sequence in ledger.mine:
            return
        why = f"call #{sequence} on {lane} was in flight behind one that a peer refused; issue it again"
        self._publish(lane, sequence, why)
        for operation in operations:
            operation.fail(PeerRefusedError(why))

    def published(self, lane: Lane) -> PeerRefusedError | None:
        """The refusal that explains a connection that closed, if there is one."""
        try:
            ledger = self._read(lane)
        except RuntimeError:  # the store went with rank 0: then a lost peer explains it
            return None
        reached = [sequence for sequence in ledger.theirs if sequence <= lane.sequence]
        return ledger.theirs[min(reached)] if reached else None

    def close(self) -> None:
        """Stop asking the store; the context says that it is closed, which the threads here look at."""
        for thread in list(self._settling):
            thread.join(_CLOSE_SECONDS)
