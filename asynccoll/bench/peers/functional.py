"""torch's functional collectives, which ``torch.compile`` traces; always out of place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from asynccoll.bench.operations import Case
from asynccoll.bench.peers import raw
from asynccoll.bench.peers.api import OUT, Library, Way, Ways, blocking

_ALL_GATHER = raw.newest(functional, "all_gather_single", "all_gather_tensor")
_REDUCE_SCATTER = raw.newest(functional, "reduce_scatter_single", "reduce_scatter_tensor")


def _fresh(call: Callable[[Case, torch.Tensor, Any], torch.Tensor], case: Case) -> dict[str, Way]:
    x, group = case.input(), dist.group.WORLD
    wait: Callable[[torch.Tensor], torch.Tensor] = functional.wait_tensor
    return {OUT: blocking(lambda: wait(call(case, x, group)))}


def _op(case: Case) -> str:
    return {"prod": "product"}.get(case.reduction, case.reduction)


WAYS: Ways = {
    "all_reduce": partial(_fresh, lambda case, x, group: functional.all_reduce(x, _op(case), group)),
    "all_gather": partial(_fresh, lambda _, x, group: _ALL_GATHER(x, 0, group)),
    "reduce_scatter": partial(_fresh, lambda case, x, group: _REDUCE_SCATTER(x, _op(case), 0, group)),
    "all_to_all": partial(_fresh, lambda _, x, group: functional.all_to_all_single(x, None, None, group)),
    "broadcast": partial(_fresh, lambda case, x, group: functional.broadcast(x, case.root, group)),
}

LIBRARY = Library("functional", raw.LIBRARY.missing, WAYS)
