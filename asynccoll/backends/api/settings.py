"""What all ranks of a world must have been told alike, and the refusal if they have not.

Ranks that differ would call different things, or meet in different places, and wait for each other. Each
hears of it where they come together, by name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from time import monotonic, sleep

import torch.distributed as dist

from asynccoll.backends.api.assembly import Member
from asynccoll.errors import InvalidArgumentError, LaunchEnvironmentError

__all__ = ["own_version", "refuse_differences"]

#: How long the first rank, which may serve the store, stays for those that have yet to hear of it.
_STAY_SECONDS = 5.0
_PAUSE_SECONDS = 0.005


def own_version() -> str:
    """Of this library; from the package itself, which may not be installed."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def refuse_differences(store: dist.Store, rank: int, members: Sequence[Member]) -> None:
    """Raise on every rank if the members of a world are not alike; ``store`` is the world's own.

    Raises:
        LaunchEnvironmentError: they run different versions of this library.
        InvalidArgumentError: they were told different things.
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
                f"ASYNCCOLL_{name.upper()} alike for all of them)"
            )
    return None


def _by_value(said: Sequence[str]) -> str:
    """Which ranks say what, by the first rank that does."""
    return "; ".join(
        f"{value} on rank{'s' * (said.count(value) > 1)} "
        + ", ".join(str(rank) for rank, one in enumerate(said) if one == value)
        for value in dict.fromkeys(said)
    )


def _part_together(store: dist.Store, rank: int, size: int) -> None:
    """Say that this rank knows; the first one stays until all do."""
    with contextlib.suppress(RuntimeError):  # the store is gone: so is the first rank
        store.set(f"differs/{rank}", "")
        if rank > 0:
            return
        deadline = monotonic() + _STAY_SECONDS
        keys = [f"differs/{other}" for other in range(1, size)]
        while keys and not store.check(keys) and monotonic() < deadline:
            sleep(_PAUSE_SECONDS)
