"""torch.distributed itself: the call with ``async_op=True``, then ``wait()``. Ratios are to this one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from asynccoll.bench.operations import Case
from asynccoll.bench.peers.api import Library, Way, Ways, own_memory, with_output

NAME = "torch"


def newest(module: object, name: str, before: str) -> Any:
    """Return a function of torch by its name since 2.13, else by the name that it had before."""
    return getattr(module, name, None) or getattr(module, before)


_ALL_GATHER = newest(dist, "all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTER = newest(dist, "reduce_scatter_single", "reduce_scatter_tensor")


def reduce_op(case: Case) -> object:
    """Return torch's name for the case's reduction."""
    return getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(case.reduction, case.reduction.upper()))


def _missing() -> str:
    return (
        ""
        if dist.is_available() and dist.is_initialized()
        else "torch.distributed has no group in this world"
    )


def _all_reduce(case: Case) -> dict[str, Way]:
    op = reduce_op(case)
    return own_memory(lambda x: dist.all_reduce(x, op, async_op=True).wait(), case)


def _reduce_scatter(case: Case) -> dict[str, Way]:
    op = reduce_op(case)
    return with_output(lambda out, x: _REDUCE_SCATTER(out, x, op, async_op=True).wait(), case)


def _reduce(case: Case) -> dict[str, Way]:
    op = reduce_op(case)
    return own_memory(lambda x: dist.reduce(x, case.root, op, async_op=True).wait(), case)


def _parts(case: Case, whole: torch.Tensor) -> list[torch.Tensor] | None:
    return list(whole.chunk(case.ranks)) if case.rank == case.root else None


def _ring(case: Case) -> dict[str, Way]:
    after, before = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks

    def exchange(out: torch.Tensor, x: torch.Tensor) -> None:
        if case.ranks == 1:
            out.copy_(x)
            return
        calls = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)]
        for request in dist.batch_isend_irecv(calls):
            request.wait()

    return with_output(exchange, case)


WAYS: Ways = {
    "all_reduce": _all_reduce,
    "all_gather": partial(with_output, lambda out, x: _ALL_GATHER(out, x, async_op=True).wait()),
    "reduce_scatter": _reduce_scatter,
    "all_to_all": partial(with_output, lambda out, x: dist.all_to_all_single(out, x, async_op=True).wait()),
    "broadcast": lambda case: own_memory(lambda x: dist.broadcast(x, case.root, async_op=True).wait(), case),
    "reduce": _reduce,
    "gather": lambda case: with_output(
        lambda out, x: dist.gather(x, _parts(case, out), case.root, async_op=True).wait(), case
    ),
    "scatter": lambda case: with_output(
        lambda out, x: dist.scatter(out, _parts(case, x), case.root, async_op=True).wait(), case
    ),
    "sendrecv": _ring,
}

LIBRARY = Library(NAME, _missing, WAYS)
