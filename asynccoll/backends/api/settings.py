"""The settings that must be the same on all ranks of a world, and the error if they are not.

Ranks with different settings would make different calls, or meet in different places, and wait for each
other. So every rank raises when the ranks meet, with an error that names the setting and the ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from time import monotonic, sleep

import torch.distributed as dist

from asynccoll.backends.api.assembly import Member
from asynccoll.errors import InvalidArgumentError, LaunchEnvironmentError

#: How long rank 0, which may serve the store, waits for ranks that have yet to learn of the difference.
_STAY_SECONDS = 5.0
_PAUSE_SECONDS = 0.005


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
        deadline = monotonic() + _STAY_SECONDS
        keys = [f"differs/{other}" for other in range(1, size)]
        while keys and not store.check(keys) and monotonic() < deadline:
            sleep(_PAUSE_SECONDS)
