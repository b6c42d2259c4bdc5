"""What a collective is inside ``torch.compile``: torch's own functional ops on our registered group.

Dynamo refuses context variables, frames and locks, so the public functions come here before they touch
any. The result's ``wait()`` is what orders the graph; ``await`` is refused there, by dynamo itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asynccoll.errors import UnsupportedOpError

#: The name under which ``runtime`` registers the world's process group for the compiler.
WORLD = "asynccoll_world"


class CompiledWork:
    """The handle inside a compiled graph: ``wait()`` gives the tensor."""

    def __init__(self, tensor: torch.Tensor, dim: int = 0, parts: int = 1) -> None:
        self.tensor = tensor
        self.dim = dim
        self.parts = parts

    def wait(self) -> torch.Tensor:
        done = torch.ops._c10d_functional.wait_tensor(self.tensor)
        if self.dim:
            done = torch.cat(torch.chunk(done, self.parts, dim=0), dim=self.dim)
        return done


def _check(group: Any) -> None:
    if group is not None:
        raise UnsupportedOpError("inside torch.compile collectives run over the world; pass group=None")


def _size() -> int:
    size: int = torch.distributed.distributed_c10d._get_group_size_by_name(WORLD)
    return size


def all_reduce(x: Any, op: Any, group: Any) -> Any:
    _check(group)
    return CompiledWork(torch.ops._c10d_functional.all_reduce(x, str(op).lower(), WORLD))


def broadcast(x: Any, src: int, group: Any) -> Any:
    _check(group)
    return CompiledWork(torch.ops._c10d_functional.broadcast(x, src, WORLD))


def all_gather(x: Any, dim: int, group: Any) -> Any:
    _check(group)
    size = _size()
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, WORLD)
    return CompiledWork(gathered, dim, size)


def reduce_scatter(x: Any, op: Any, dim: int, group: Any) -> Any:
    _check(group)
    size = _size()
    if dim:
        x = torch.cat(torch.chunk(x, size, dim=dim), dim=0)
    return CompiledWork(
        torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), str(op).lower(), size, WORLD)
    )


def all_to_all(
    x: Any, in_splits: Sequence[int] | None, out_splits: Sequence[int] | None, group: Any
) -> Any:
    _check(group)
    size = _size()
    even = [x.shape[0] // size] * size
    return CompiledWork(
        torch.ops._c10d_functional.all_to_all_single(
            x.contiguous(), list(out_splits or even), list(in_splits or even), WORLD
        )
    )
