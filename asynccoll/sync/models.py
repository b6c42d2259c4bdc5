"""ignite's computation models, as far as programs look at them: their names and backends.

What a model does differently from the others is a column here, if a column can express it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

import asynccoll as ac
from asynccoll.backends.table import others

__all__ = ["MODELS", "Model", "by_backend", "registered_computation_models"]

#: ignite's names of reductions, and ours. AND and OR are bitwise there.
_OPS = {"SUM": "sum", "PRODUCT": "product", "MIN": "min", "MAX": "max", "AND": "band", "OR": "bor"}


@dataclass(frozen=True)
class Model:
    """One computation model."""

    name: str
    available_backends: tuple[str, ...]
    #: reductions by the names that users pass
    ops: dict[str, str] = field(default_factory=lambda: dict(_OPS))
    #: ``all_reduce`` and ``broadcast`` write their result into the tensor that was passed
    in_place: bool = True


def _torch_backends() -> tuple[str, ...]:
    """Return torch's backends in ignite's order; MPI is in mpi-dist, through mpi4py."""
    if not dist.is_available():
        return ()
    found = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
    return tuple(name for name, there in found.items() if there)


def _here(*backends: str) -> tuple[str, ...]:
    available = ac.available_backends()
    return tuple(name for name in backends if name in available)


SERIAL = Model("serial", ())
NATIVE = Model("native-dist", _torch_backends())
XLA = Model("xla-dist", _here("xla-tpu"))
HOROVOD = Model(
    "horovod-dist", _here("horovod"), ops={**_OPS, "AVERAGE": "avg", "ADASUM": "adasum"}, in_place=False
)
MPI = Model("mpi-dist", _here("mpi"))

#: A model for each backend of another package.
OTHERS = tuple(Model(f"{name}-dist", (name,)) for name in others())

MODELS = (SERIAL, NATIVE, XLA, HOROVOD, MPI, *OTHERS)

#: The models that can be used here, as in ``ignite.distributed.registered_computation_models``.
registered_computation_models: tuple[Model, ...] = tuple(
    model for model in MODELS if model is SERIAL or model.available_backends
)

_BY_BACKEND = {"xla-tpu": XLA, "horovod": HOROVOD, "mpi": MPI, "serial": SERIAL}
_BY_BACKEND |= {name: model for model in OTHERS for name in model.available_backends}


def by_backend(backend: str) -> Model:
    """Return the model that a backend belongs to; any other backend of torch is native."""
    return _BY_BACKEND.get(backend.lower(), NATIVE)
