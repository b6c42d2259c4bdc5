"""The environment of ranks without the place that a launcher gave this process: theirs is another."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["without_place"]

_OF_TORCH = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
_OF_MPI = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "PRTE_")
_OF_HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_GLOO_RENDEZVOUS_")


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what torchrun, mpiexec or horovodrun have said of this process's place."""
    said = (*_OF_MPI, *_OF_HOROVOD)
    return {k: v for k, v in environ.items() if not k.startswith(said) and k not in _OF_TORCH}
