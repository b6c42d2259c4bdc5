"""MPI's error codes as our typed errors."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerLostError

__all__ = ["typed"]

#: MPI's error classes, by what they mean to a user; the others become plain ``CollectiveError``s.
_LOST = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_PROC_ABORTED", "ERR_REVOKED")
_CLASSES: dict[int, Callable[[str], CollectiveError]] = {
    MPI.ERR_TRUNCATE: lambda text: CollectiveMismatchError(
        f"{text}: a rank sent more than another expects; pass the same shapes and dtypes on every rank "
        "(check='full' tells which differ)"
    ),
    **{
        getattr(MPI, name): PeerLostError
        for name in _LOST
        if getattr(MPI, name, MPI.ERR_UNKNOWN) != MPI.ERR_UNKNOWN
    },
}


def typed(error: MPI.Exception) -> CollectiveError:
    """Return our error for one that MPI raised."""
    text = f"MPI reports {error.Get_error_string().split(',')[0].strip()}"
    ours = _CLASSES.get(error.Get_error_class(), CollectiveError)(text)
    ours.__cause__ = error
    return ours
