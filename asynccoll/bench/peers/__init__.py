"""This library and its peers: a file each, which knows how the library is joined and how it is called.

A peer says why it cannot take part (``missing``), joins the existing world (``join``), and returns for a case
its ways to do it, ``OUT`` of place and ``IN`` place. The order here is that of the tables.
"""

from __future__ import annotations

from asynccoll.bench.peers import functional, horovod, ignite, mpi4py, ours, raw
from asynccoll.bench.peers.api import IN, OUT, Library, Way

__all__ = ["ALL", "IN", "OUT", "Library", "Way"]

ALL: tuple[Library, ...] = (
    ours.LIBRARY,
    raw.LIBRARY,
    functional.LIBRARY,
    ignite.LIBRARY,
    horovod.LIBRARY,
    mpi4py.LIBRARY,
)
