"""A rank's one connection to the store, shared by all of its lanes and lent for one request at a time.

A connection serves one request at a time, and a new one is expensive: it costs a descriptor at both ends, and
at both ends a reverse lookup of the other end's name, on the server in its only serving thread. If a name
server loses one packet, that lookup takes five seconds.

No thread waits inside the store. A native wait would occupy the connection, cannot be canceled, and aborts
the process if it returns while the interpreter ends. So waiting is polling, and can be given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from asynccoll import host
from asynccoll.errors import AbortedError, CollectiveTimeoutError
from asynccoll.host.looks import looks


def host_of(store: dist.Store) -> str | None:
    """Return the host that serves ``store``; None if it is not a store that a host serves."""
    served = _served(store)
    return None if served is None else served.host


def _served(store: dist.Store) -> dist.TCPStore | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def is_of_store(error: BaseException | None) -> bool:
    """Whether ``error`` says that a store cannot be reached."""
    return isinstance(error, dist.DistNetworkError)


class Clients:
    """The connection of one rank to one store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store  # the user's or the rendezvous' own connection; other code may block on it
        served = _served(store)
        self.host: str | None = None if served is None else served.host
        #: ``host:port``; "" if it is not a store that a host serves.
        self.address: str = "" if served is None else f"{served.host}:{served.port}"
        self._client: dist.Store | None = None
        self._gone: dist.DistNetworkError | None = None
        self._lock = host.RLock()

    def take(self) -> dist.Store:
        """Open a new connection for a library that keeps using it; raises once the store is gone."""
        if self._gone is not None:  # a new connection would be attempted until the timeout
            raise self._gone.with_traceback(None)
        made: dist.Store = self._store.clone()  # type: ignore[attr-defined]  # missing in the stub
        return made

    @property
    def is_gone(self) -> bool:
        """Whether the store could not be reached, or this rank has disconnected."""
        return self._gone is not None

    @contextmanager
    def borrow(self) -> Iterator[dist.Store]:
        """Lend the connection to a block, which must not wait inside the store.

        Raises ``torch.distributed.DistNetworkError`` once the store is gone.
        """
        with self._lock:
            if self._client is None:
                self._client = self.take()
            try:
                yield self._client
            except dist.DistNetworkError as error:
                self._gone, self._client = error, None
                raise

    def close(self) -> None:
        """Disconnect; later requests fail as if the store were gone."""
        with self._lock:
            self._gone = dist.DistNetworkError("this rank has left its world")
            self._client = None
            del self._store

    def meet(self, name: str, index: int, size: int, seconds: float, given_up: Callable[[], bool]) -> None:
        """Wait until all ``size`` members have called this with ``name``; this member is number ``index``.

        Raises:
            CollectiveTimeoutError: a member did not call within ``seconds``; the message says which.
            AbortedError: ``given_up()`` became true.
        """
        keys = [f"{name}/here/{member}" for member in range(size)]
        with self.borrow() as client:
            client.set(keys[index], "")
        missing = self.await_keys(keys, seconds, given_up)
        if missing and given_up():
            raise AbortedError(f"the rendezvous for {name} was given up")
        if missing:
            absent = ", ".join(key.rpartition("/")[2] for key in missing)
            raise CollectiveTimeoutError(f"after {seconds} s member {absent} of {size} had not joined {name}")

    def await_keys(self, keys: list[str], seconds: float, given_up: Callable[[], bool]) -> list[str]:
        """Wait up to ``seconds``, or until ``given_up()``, for ``keys`` to be set. Returns those missing."""
        for _ in looks(seconds):
            with self.borrow() as client:
                if client.check(keys):
                    return []
            if given_up():
                break
        with self.borrow() as client:
            return [key for key in keys if not client.check([key])]


class Waiting(dist.Store):
    """The store for a library that waits in it: waits use the shared connection and can be given up."""

    def __init__(self, clients: Clients, seconds: float, given_up: Callable[[], bool]) -> None:
        super().__init__()
        self._clients = clients
        self._seconds = seconds
        self._given_up = given_up

    def set(self, key: str, value: str) -> None:
        with self._clients.borrow() as client:
            client.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._clients.borrow() as client:
            return client.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._clients.borrow() as client:
            return client.check(keys)

    def add(self, key: str, amount: int) -> int:
        with self._clients.borrow() as client:
            return client.add(key, amount)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self._clients.borrow() as client:
            return client.compare_set(key, expected, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        missing = self._clients.await_keys(keys, seconds, self._given_up)
        if missing:
            raise CollectiveTimeoutError(f"after {seconds} s {missing[0]} had not been set in the store")


class Exchange(Waiting):
    """The store for gloo while a group's members exchange addresses, each set once under a member's number.

    gloo requests them one by one, twice: a thousand sequential requests in a world of some hundred ranks. So
    all addresses are fetched together as soon as all of them are set.
    """

    def __init__(self, clients: Clients, seconds: float, given_up: Callable[[], bool], size: int) -> None:
        super().__init__(clients, seconds, given_up)
        self._size = size
        self._told: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        return self._told[key] if key in self._told else super().get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if all(key in self._told for key in keys):
            return
        super().wait(keys, timeout)
        before = keys[0].rpartition("/")[0]
        together = [f"{before}/{member}" for member in range(self._size)]
        with self._clients.borrow() as client:
            if client.check(together):
                self._told = dict(zip(together, values(client, together), strict=True))


def values(store: dist.Store, keys: list[str]) -> list[bytes]:
    """Return the values of ``keys``, in one request if the store can, since it serves a whole world."""
    if keys and store.has_extended_api():  # type: ignore[attr-defined]  # missing in the stub
        return store.multi_get(keys)
    return [store.get(key) for key in keys]


def enlist(store: dist.Store, key: str, rank: int) -> None:
    """Add ``rank`` to the list under ``key`` of ranks that have written a value for ``values_of_listed``."""
    if store.has_extended_api():  # type: ignore[attr-defined]  # missing in the stub
        store.append(key, f"{rank} ")  # type: ignore[attr-defined]  # missing in the stub
    else:
        store.set(key, "")


def values_of_listed(store: dist.Store, key: str, keys: Mapping[int, str]) -> list[bytes]:
    """Return the values of those of ``keys`` (by rank) that are written, which are nearly always few or none.

    ``key`` is the key of the list of ranks (``enlist``). Without that list, each rank of a large world would
    ask for the key of every other rank.
    """
    if not store.check([key]):
        return []
    if not store.has_extended_api():  # type: ignore[attr-defined]  # missing in the stub
        return [store.get(one) for one in keys.values() if store.check([one])]
    ranks = set(map(int, store.get(key).split()))
    return values(store, [one for rank, one in keys.items() if rank in ranks])
