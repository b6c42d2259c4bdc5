"""Connections to the store, lent out: a client serves one request at a time, and a new one is dear.

Each connection costs a descriptor at both ends and a reverse look-up of the peer's name inside the
store's only thread, which serves nobody meanwhile: where a name server loses one packet, that is five
seconds for everybody. So there are as many connections as are in use at once, not one per lane.

Nobody waits inside the store. A native wait cannot be called off, and a thread that comes back from one
while the interpreter ends aborts the process; so waiting is asking again, and can be given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep

import torch.distributed as dist

from asynccoll.errors import AbortedError, CollectiveTimeoutError

__all__ = ["Clients"]

_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.02


class Clients:
    """The connections of one rank to one store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store  # the user's or the rendezvous' own; others may block on it
        self._free: list[dist.Store] = []
        self._gone: dist.DistNetworkError | None = None

    def take(self) -> dist.Store:
        """A connection for good, for a library that goes on using it."""
        if self._gone is not None:  # a new one would try to connect until the timeout
            raise self._gone.with_traceback(None)
        try:
            return self._free.pop()
        except IndexError:
            made: dist.Store = self._store.clone()  # type: ignore[attr-defined]  # missing in the stub
            return made

    @contextmanager
    def borrow(self) -> Iterator[dist.Store]:
        """A connection for the block, to be used by nobody else; one that failed does not come back.

        Raises ``torch.distributed.DistNetworkError`` once the store has gone.
        """
        client = self.take()
        try:
            yield client
        except dist.DistNetworkError as error:
            self._gone = error
            raise
        self._free.append(client)

    def close(self) -> None:
        """Disconnect; what asks from now on is told that the store is gone."""
        self._gone = dist.DistNetworkError("this rank has left its world")
        self._free.clear()
        del self._store

    def meet(self, name: str, index: int, size: int, seconds: float, given_up: Callable[[], bool]) -> None:
        """Return once all ``size`` members have come to ``name``; this one is number ``index``.

        Raises:
            CollectiveTimeoutError: somebody did not come within ``seconds``; says who.
            AbortedError: ``given_up()`` turned true.
        """
        keys = [f"{name}/here/{member}" for member in range(size)]
        with self.borrow() as client:
            client.set(keys[index], "")
            missing = _missing(client, keys, seconds, given_up)
        if missing and given_up():
            raise AbortedError(f"meeting the other ranks for {name} was given up")
        if missing:
            absent = ", ".join(key.rpartition("/")[2] for key in missing)
            raise CollectiveTimeoutError(
                f"after {seconds} s member {absent} of {size} had not come to {name}"
            )


def _missing(client: dist.Store, keys: list[str], seconds: float, given_up: Callable[[], bool]) -> list[str]:
    """The keys that are not set when waiting ends: none, or those that did not come in time."""
    deadline = monotonic() + seconds
    pause = _FIRST_PAUSE_SECONDS
    while not client.check(keys):
        if given_up() or monotonic() >= deadline:
            return [key for key in keys if not client.check([key])]
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return []
