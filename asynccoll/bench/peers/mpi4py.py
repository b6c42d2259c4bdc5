"""Bare mpi4py on NumPy views: the non-blocking call, then ``Wait()``; only if mpiexec started the ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import asynccoll as ac
from asynccoll.bench.operations import Case
from asynccoll.bench.peers.api import Library, Way, Ways, own_memory, with_output

__all__ = ["LIBRARY"]

_own_memory = partial(own_memory, given=torch.Tensor.numpy)
_with_output = partial(with_output, given=torch.Tensor.numpy)


def _missing() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "not installed: pip install mpi4py mpich"
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != ac.get_world_size():
        return "these ranks were not started by mpiexec: mpiexec -n 2 asynccoll bench"
    return ""


def _comm() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def _op(case: Case) -> Any:
    from mpi4py import MPI

    return getattr(MPI, case.reduction.upper())


def _can(case: Case) -> bool:
    """Whether MPI has the reduction, and NumPy the dtype."""
    return case.dtype is not torch.bfloat16 and not (case.operation.reduces and case.reduction == "avg")


def _all_reduce(case: Case) -> dict[str, Way]:
    from mpi4py import MPI

    return _own_memory(lambda view: _comm().Iallreduce(MPI.IN_PLACE, view, _op(case)).Wait(), case)


def _reduce_scatter(case: Case) -> dict[str, Way]:
    return _with_output(lambda out, x: _comm().Ireduce_scatter_block(x, out, _op(case)).Wait(), case)


def _reduce(case: Case) -> dict[str, Way]:
    return _with_output(lambda out, x: _comm().Ireduce(x, out, _op(case), case.root).Wait(), case)


def _all_gather(case: Case) -> dict[str, Way]:
    return _with_output(lambda out, x: _comm().Iallgather(x, out).Wait(), case)


def _all_to_all(case: Case) -> dict[str, Way]:
    return _with_output(lambda out, x: _comm().Ialltoall(x, out).Wait(), case)


def _broadcast(case: Case) -> dict[str, Way]:
    return _own_memory(lambda view: _comm().Ibcast(view, case.root).Wait(), case)


def _where_possible(ways: Callable[[Case], dict[str, Way]]) -> Callable[[Case], dict[str, Way]]:
    return lambda case: ways(case) if _can(case) else {}


WAYS: Ways = {
    "all_reduce": _where_possible(_all_reduce),
    "all_gather": _where_possible(_all_gather),
    "reduce_scatter": _where_possible(_reduce_scatter),
    "all_to_all": _where_possible(_all_to_all),
    "broadcast": _where_possible(_broadcast),
    "reduce": _where_possible(_reduce),
}

LIBRARY = Library("mpi4py", _missing, WAYS)
