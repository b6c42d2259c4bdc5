"""How communicators come to be: each among its members only, in an order that all ranks agree on.

MPI makes a communicator in a call that waits for all members, and libraries differ in what happens
when two such calls cross. So a rank first says in the store that it is ready for a name; the last
member to say so writes the name into a journal; and every rank makes the communicators it is a
member of in the journal's order. Whoever is made to wait waits in the store, off the processor, and
once a name is in the journal all of its members come at once.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from asynccoll.backends.mpi_library import Library

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Opener"]

#: MPI bounds names (256 bytes in MPICH); longer ones are shortened with a digest.
_LONGEST_NAME = 200


class Opener:
    """This rank's side: its place in the journal."""

    def __init__(self, library: Library, base: Any, store: dist.Store | None, prefix: str) -> None:
        self._library = library
        self._base = base
        self._rank: int = base.Get_rank()
        self._world = base.Get_group()
        self._store = store
        self._prefix = prefix
        self._turn = threading.Lock()
        self._read = 0
        self._made: dict[str, Any] = {}

    def open(self, name: str, ranks: tuple[int, ...]) -> Any:
        """The communicator of ``ranks`` called ``name``; waits for all of them."""
        if len(ranks) == 1 or self._store is None:
            return self._gated(self._library.MPI.COMM_SELF.Dup)
        self._announce(self._store.clone(), name, ranks)
        with self._turn:
            store = self._store
            while name not in self._made:
                entry, members = json.loads(store.get(f"journal/{self._read + 1}"))
                self._read += 1
                if self._rank in members:
                    self._made[entry] = self._make(entry, members)
            return self._made.pop(name)

    def _announce(self, store: dist.Store, name: str, ranks: tuple[int, ...]) -> None:
        if store.add(f"ready/{name}", 1) == len(ranks):
            place = store.add("journal", 1)
            store.set(f"journal/{place}", json.dumps([name, ranks]))

    def _make(self, name: str, ranks: list[int]) -> Any:
        mpi = self._library.MPI
        group = self._world.Incl(ranks)
        try:
            if self._library.by_name:
                made = self._gated(
                    mpi.Intracomm.Create_from_group,
                    group,
                    self._prefix + _short(name),
                    mpi.INFO_NULL,
                    mpi.ERRORS_RETURN,
                )
            else:
                made = self._gated(self._base.Create_group, group, 0)
        finally:
            group.Free()
        made.Set_errhandler(mpi.ERRORS_RETURN)
        return made

    def _gated(self, call: Any, *arguments: Any) -> Any:
        if self._library.gate is None:
            return call(*arguments)
        with self._library.gate:
            return call(*arguments)

    def close(self) -> None:
        self._world.Free()


def _short(name: str) -> str:
    """``name`` as MPI takes it: ASCII, of bounded length, different for different names."""
    plain = name.encode("ascii", "backslashreplace").decode()
    if len(plain) <= _LONGEST_NAME:
        return plain
    import hashlib

    return f"{plain[: _LONGEST_NAME - 41]}#{hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()}"
