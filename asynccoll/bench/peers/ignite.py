"""``ignite.distributed``, which waits in each call; only if pytorch-ignite is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from asynccoll.bench.operations import Case
from asynccoll.bench.peers import raw
from asynccoll.bench.peers.api import IN, OUT, Library, Way, Ways, blocking, nothing

__all__ = ["LIBRARY"]


def _missing() -> str:
    if importlib.util.find_spec("ignite") is None:
        return "not installed: pip install pytorch-ignite"
    return raw.LIBRARY.missing()


def _join() -> Callable[[], object]:
    """Have ignite find torch's group, on which it works."""
    import ignite.distributed as idist

    idist.sync()
    return nothing


def _all_reduce(case: Case) -> dict[str, Way]:
    """Return the only way, which is in place: ignite reduces in the tensor it is given."""
    import ignite.distributed as idist

    x, op = case.input(), {"prod": "PRODUCT"}.get(case.reduction, case.reduction.upper())
    if case.reduction == "avg":
        return {}
    return {IN: blocking(lambda: idist.all_reduce(x, op))}


def _all_gather(case: Case) -> dict[str, Way]:
    import ignite.distributed as idist

    x = case.input()
    return {OUT: blocking(lambda: idist.all_gather(x))}


def _broadcast(case: Case) -> dict[str, Way]:
    import ignite.distributed as idist

    x = case.input()
    return {IN: blocking(lambda: idist.broadcast(x, src=case.root))}


WAYS: Ways = {"all_reduce": _all_reduce, "all_gather": _all_gather, "broadcast": _broadcast}

LIBRARY = Library("ignite", _missing, WAYS, _join)
