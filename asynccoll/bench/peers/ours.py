"""This library: ``await ac.all_reduce(x)`` and its like."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import asynccoll as ac
from asynccoll.bench.operations import Case
from asynccoll.bench.peers.api import IN, OUT, Library, Way, Ways


def _pair(
    call: Callable[..., ac.Work[Any]],
    case: Case,
    *,
    own: bool = False,
    sends: bool = True,
    receives: bool = True,
    **options: object,
) -> dict[str, Way]:
    """Return ``call(x)`` and ``call(x, out=...)`` as ways; with ``own`` the latter is in the input itself.

    ``sends``, ``receives``: whether this rank has an input, and memory for a result.
    """
    x, again = (case.input(), case.input()) if sends else (None, None)
    out = again if own else case.output() if receives else None

    async def fresh() -> object:
        return await call(x, **options)

    async def filled() -> object:
        return await call(again, out=out, **options)

    return {OUT: fresh, IN: filled}


def _ring(case: Case) -> dict[str, Way]:
    pairs = [(rank, (rank + 1) % case.ranks) for rank in range(case.ranks)]
    return _pair(lambda x, **options: ac.permute(x, pairs, **options), case)


WAYS: Ways = {
    "all_reduce": lambda case: _pair(ac.all_reduce, case, own=True, op=case.reduction),
    "all_gather": partial(_pair, ac.all_gather),
    "reduce_scatter": lambda case: _pair(ac.reduce_scatter, case, op=case.reduction),
    "all_to_all": partial(_pair, ac.all_to_all),
    "broadcast": partial(_pair, ac.broadcast, own=True),
    "reduce": lambda case: _pair(
        ac.reduce, case, receives=case.rank == case.root, dst=case.root, op=case.reduction
    ),
    "gather": lambda case: _pair(ac.gather, case, receives=case.rank == case.root, dst=case.root),
    "scatter": lambda case: _pair(ac.scatter, case, sends=case.rank == case.root, src=case.root),
    "sendrecv": _ring,
}

LIBRARY = Library("asynccoll", lambda: "", WAYS)
