"""Horovod's errors as ours. This module must not need Horovod: a simulated world has none."""

from __future__ import annotations

import re

from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerLostError, collective_error

_MISMATCH = re.compile(r"mismatched|same name as another", re.IGNORECASE)
#: If a rank does not answer, Horovod's thread ends on all other ranks, and its process sets end with it.
_SHUT_DOWN = re.compile(
    r"has been shut down|is shutting down|not been initialized|timed out waiting"
    r"|process set provided does not exist",
    re.IGNORECASE,
)


def typed(error: Exception, what: str = "Horovod's operation") -> CollectiveError:
    """Return our error for one that Horovod raised; ``what`` names the operation that failed."""
    text = str(error).strip().split("\n")[0]
    ours: CollectiveError
    if _MISMATCH.search(text):
        ours = CollectiveMismatchError(f"Horovod reports: {text} (check='full' tells which ranks differ)")
    elif _SHUT_DOWN.search(text):
        ours = PeerLostError(
            "Horovod was shut down: a rank has ended, failed, or not answered for "
            "HOROVOD_GLOO_TIMEOUT_SECONDS (30 where hvd.init() was called before ac.initialize)"
        )
    else:
        return collective_error(error, what)
    ours.__cause__ = error
    return ours
