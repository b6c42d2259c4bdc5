"""Bare mpi4py on NumPy views: the non-blocking call, then ``Wait()``; only if mpiexec started the ranks."""

from __future__ import annotations

from functools import partial

import torch

import asynccoll as ac
from asynccoll.bench.operations import Case
from asynccoll.bench.peers.api import Library, Way, Ways, not_installed, own_memory, with_output


def _missing() -> str:
    if why := not_installed("mpi4py", "pip install mpi4py mpich"):
        return why
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != ac.get_world_size():
        return "these ranks were not started by mpiexec: mpiexec -n 2 asynccoll bench"
    return ""


def _ways(name: str, case: Case) -> dict[str, Way]:
    """Return the ways of an operation; none if MPI has no such reduction, or NumPy no such dtype."""
    from mpi4py import MPI

    if case.dtype is torch.bfloat16 or (case.operation.reduces and case.reduction == "avg"):
        return {}
    comm, op = MPI.COMM_WORLD, getattr(MPI, case.reduction.upper(), None)
    in_place = {
        "all_reduce": lambda view: comm.Iallreduce(MPI.IN_PLACE, view, op).Wait(),
        "broadcast": lambda view: comm.Ibcast(view, case.root).Wait(),
    }
    if name in in_place:
        return own_memory(in_place[name], case, given=torch.Tensor.numpy)
    to_output = {
        "all_gather": lambda out, x: comm.Iallgather(x, out).Wait(),
        "reduce_scatter": lambda out, x: comm.Ireduce_scatter_block(x, out, op).Wait(),
        "all_to_all": lambda out, x: comm.Ialltoall(x, out).Wait(),
        "reduce": lambda out, x: comm.Ireduce(x, out, op, case.root).Wait(),
    }
    return with_output(to_output[name], case, given=torch.Tensor.numpy)


_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
WAYS: Ways = {name: partial(_ways, name) for name in _NAMES}

LIBRARY = Library("mpi4py", _missing, WAYS)
