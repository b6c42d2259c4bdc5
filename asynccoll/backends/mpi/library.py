"""The MPI library of this process: how it is loaded, what it can do, and how it ends.

mpi4py initializes MPI when it is imported, as ``mpi4py.rc`` says; if it did, it also finalizes MPI when the
process ends. So in a job that uses mpi4py both are taken care of. We initialize and finalize MPI ourselves
only if the user told mpi4py not to, and has not done it either. We never communicate on ``COMM_WORLD``, only
on a duplicate.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from asynccoll.backends.api import locks, progress
from asynccoll.errors import BackendNotFoundError, InvalidArgumentError

T = TypeVar("T")

INSTALL = "pip install mpi4py mpich"
_INT_MAX = 2**31 - 1
_COUNT_MAX = 2**63 - 1


@dataclass(frozen=True)
class Library:
    """The loaded library: what it is, and what it can do."""

    MPI: ModuleType
    name: str
    #: held during every call if the library takes one at a time (MPI_THREAD_SERIALIZED), else None
    gate: locks.Lock | None
    #: whether it can make a communicator from a group and a name (MPI-4)
    by_name: bool
    #: the largest count of a call
    limit: int
    highest_tag: int
    cuda_aware: bool

    def call(self, call: Callable[..., T], *arguments: object) -> T:
        """Return ``call(*arguments)``; the gate is held meanwhile, if there is one."""
        if self.gate is not None:
            with self.gate:
                return call(*arguments)
        return call(*arguments)


def load() -> Library:
    """Return the library, initialized.

    Raises:
        BackendNotFoundError: mpi4py or an MPI library is missing.
        InvalidArgumentError: MPI was finalized, after which a process cannot initialize it again; or it was
            initialized below ``MPI_THREAD_SERIALIZED``, and takes calls from one thread only.
    """
    mpi = _import()
    if mpi.Is_finalized():
        raise InvalidArgumentError(
            "MPI was finalized in this process and cannot be initialised again; call "
            "ac.initialize('mpi') before MPI.Finalize()"
        )
    return _examine(mpi)


@lru_cache(maxsize=1)
def _examine(mpi: ModuleType) -> Library:
    """Find out what the library can do, and register what is to run when the process ends."""
    if not mpi.Is_initialized():  # mpi4py.rc.initialize is False, so it is left to us
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        atexit.register(_finalize, mpi, os.getpid())
        atexit.unregister(progress.stop)
        atexit.register(progress.stop)  # runs before _finalize, since the thread may be in the library
    _check_level(mpi)
    atexit.register(_end_job_if_died, mpi, os.getpid())
    return Library(
        mpi,
        _name(mpi),
        gate=locks.Lock() if mpi.Query_thread() == mpi.THREAD_SERIALIZED else None,
        by_name=mpi.Get_version() >= (4, 0),
        limit=_COUNT_MAX if mpi.Get_version() >= (4, 0) else _INT_MAX,
        highest_tag=mpi.COMM_WORLD.Get_attr(mpi.TAG_UB),
        cuda_aware=_cuda_aware(mpi),
    )


def _import() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendNotFoundError(
            f"backend 'mpi' needs mpi4py and an MPI library, and {error}; {INSTALL}"
        ) from error
    except RuntimeError as error:  # mpi4py is installed, but no MPI library
        raise BackendNotFoundError(
            f"backend 'mpi' needs an MPI library for mpi4py: {str(error).strip().splitlines()[0]}; {INSTALL}"
        ) from error
    return MPI


def _name(mpi: ModuleType) -> str:
    """Return ``Open MPI v5.0.11``, say, from the page of text that the library returns."""
    text = " ".join(mpi.Get_library_version().split("\n")[0].split()).rstrip("\0")
    return text.split(",")[0].replace("MPICH Version:", "MPICH")


def _check_level(mpi: ModuleType) -> None:
    """Raise unless MPI takes calls from several threads.

    The progress thread, lanes that open, and waiters in threads all call it, as does the main thread.
    """
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        name = "MPI_THREAD_SINGLE" if level == mpi.THREAD_SINGLE else "MPI_THREAD_FUNNELED"
        raise InvalidArgumentError(
            f"backend 'mpi' needs MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE, but MPI was initialised with "
            f"{name}, which allows calls from one thread only; leave mpi4py.rc.thread_level at its default "
            "('multiple'), or call MPI.Init_thread(MPI.THREAD_MULTIPLE)"
        )


def _cuda_aware(mpi: ModuleType) -> bool:
    """Whether MPI calls take device memory, as the library says by the standard or by its own function."""
    if not torch.cuda.is_available():
        return False
    kinds = mpi.COMM_SELF.Get_info().Get("mpi_memory_alloc_kinds") or ""
    # "cuda" is any of its memory; "cuda:host:device" lists kinds of it (MPI 4.1).
    restricted = [kind.strip().split(":") for kind in kinds.split(",")]
    if any(kind == "cuda" and (not only or "device" in only) for kind, *only in restricted):
        return True
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(_path_of_library()).MPIX_Query_cuda_support())
    return False


def _path_of_library() -> str | None:
    """Return the path of the libmpi that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if Path(path).name.startswith("libmpi.so"):
            return path
    return None


def _finalize(mpi: ModuleType, pid: int) -> None:
    if os.getpid() == pid and not mpi.Is_finalized():
        mpi.Finalize()


def _end_job_if_died(mpi: ModuleType, pid: int) -> None:
    """After an uncaught exception, end the job as MPI does when a rank has died.

    The other ranks wait for this one, and MPI_Finalize would wait for them.
    """
    died = os.getpid() == pid and getattr(sys, "last_value", None) is not None
    if died and mpi.COMM_WORLD.Get_size() > 1:
        mpi._set_abort_status(1)  # aborted instead of finalized
