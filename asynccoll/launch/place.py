"""The environment for ranks without the place that a launcher gave this process: theirs is different."""

from __future__ import annotations

from collections.abc import Mapping

from asynccoll.environment.detection import PLACE

__all__ = ["without_place"]

#: What the libraries themselves read, in addition to what we read.
_OF_LIBRARIES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "PRTE_", "HOROVOD_GLOO_RENDEZVOUS_", "TORCHELASTIC_")


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without what any launcher has said about this process's place."""
    return {k: v for k, v in environ.items() if k not in PLACE and not k.startswith(_OF_LIBRARIES)}
