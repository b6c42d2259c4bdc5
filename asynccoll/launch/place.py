"""The environment of ranks without the place that a launcher gave this process: theirs is another."""

from __future__ import annotations

from collections.abc import Mapping

from asynccoll.environment.detection import PLACE

__all__ = ["without_place"]

#: What the libraries themselves read, beside what we do.
_OF_LIBRARIES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "PRTE_", "HOROVOD_GLOO_RENDEZVOUS_", "TORCHELASTIC_")


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what any launcher has said of this process's place."""
    return {k: v for k, v in environ.items() if k not in PLACE and not k.startswith(_OF_LIBRARIES)}
