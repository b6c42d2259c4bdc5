"""``ignite.distributed``, which waits in each call; only if pytorch-ignite is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asynccoll.bench.operations import Case
from asynccoll.bench.peers import raw
from asynccoll.bench.peers.api import IN, OUT, Library, Way, Ways, blocking, not_installed, nothing


def _missing() -> str:
    return not_installed("ignite", "pip install pytorch-ignite") or raw.LIBRARY.missing()


def _join() -> Callable[[], object]:
    """Have ignite find torch's group, on which it works."""
    import ignite.distributed as idist

    idist.sync()
    return nothing


def _all_reduce(case: Case) -> dict[str, Way]:
    """Return the only way, which is in place: ignite reduces in the tensor it is given."""
    op = {"prod": "PRODUCT"}.get(case.reduction, case.reduction.upper())
    return {} if case.reduction == "avg" else _way(IN, "all_reduce", case, op=op)


def _way(place: str, name: str, case: Case, **options: object) -> dict[str, Way]:
    import ignite.distributed as idist

    call, x = getattr(idist, name), case.input()
    return {place: blocking(lambda: call(x, **options))}


WAYS: Ways = {
    "all_reduce": _all_reduce,
    "all_gather": partial(_way, OUT, "all_gather"),
    "broadcast": lambda case: _way(IN, "broadcast", case, src=case.root),
}

LIBRARY = Library("ignite", _missing, WAYS, _join)
