"""How the ranks of one torch elastic agent meet without the agent's store.

That store has one thread, which asks a name server about every connection. If the name server is slow, so is
the start of a job. Ranks that all have the same agent share a host, and a directory that the agent makes for
each attempt. So rank 0 serves a store of its own on the loopback address, and writes its port to a file in
that directory. The file also says whether look-ups are quick on this host, which only rank 0 has to find out.
"""

from __future__ import annotations

import contextlib
import json
import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from asynccoll.backends.api.resolver import names_are_quick
from asynccoll.backends.api.tcpstore import LOOPBACK, connect
from asynccoll.host.looks import looks


def is_agents(host: str, port: int) -> bool:
    """Whether torch elastic's agent serves the store at this address."""
    environ = os.environ
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (
        (host, str(port)) == (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT"))
    )


def meet_under_one_agent(rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore | None:
    """Return a store of the ranks' own; None if several agents started them, or the directory is missing.

    Raises:
        OSError: rank 0 had not served its store within ``timeout``.
    """
    note = _note(world_size)
    if note is None:
        return None
    if rank > 0:
        found = _await(note, timeout.total_seconds())
        # The note is written once the store is up. So no rank has to probe it, which would cost the store's
        # one thread another connection for each rank.
        return connect(
            LOOPBACK[0],
            found["port"],
            serve=False,
            timeout=timeout,
            knock=False,
            names_are_quick=bool(found["quick"]),
        )
    earlier = _read(note)
    port = earlier["port"] if earlier is not None and earlier["pid"] == os.getpid() else 0
    store = connect(LOOPBACK[0], port, serve=True, timeout=timeout)
    if store.port != port:
        unfinished = note.with_suffix(".made")
        told = {"pid": os.getpid(), "port": store.port, "quick": names_are_quick(LOOPBACK[0])}
        unfinished.write_text(json.dumps(told))
        unfinished.replace(note)
    return store


def _note(world_size: int) -> Path | None:
    """Return the path of the file for the port, in the directory of this attempt."""
    file, here = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("LOCAL_WORLD_SIZE")
    if not file or here != str(world_size):
        return None
    directory = Path(file).parent.parent
    # Named by the agent's port: ranks may themselves be agents, whose own ranks form another world.
    return directory / f"asynccoll-{os.environ['MASTER_PORT']}" if directory.is_dir() else None


def _await(note: Path, seconds: float) -> dict[str, int]:
    for _ in looks(seconds):
        if (found := _read(note)) is not None:
            return found
    raise TimeoutError(f"rank 0 did not leave the port of its store in {note}")


def _read(note: Path) -> dict[str, int] | None:
    with contextlib.suppress(OSError):
        found: dict[str, int] = json.loads(note.read_text())
        return found
    return None
