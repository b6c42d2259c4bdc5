"""The types of users' code, as mypy and pyright infer them (`make types`); this file is never run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import assert_type

import asynccoll as ac


async def tensors(x: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    assert_type(ac.all_reduce(x), ac.Work[torch.Tensor])
    assert_type(await ac.all_reduce(x, op="avg", group=process_group), torch.Tensor)
    assert_type(await ac.all_reduce(x, op=dist.ReduceOp.MAX, group=[0, 1], lane="side"), torch.Tensor)
    assert_type(await ac.reduce(x, dst=1), torch.Tensor | None)
    assert_type(await ac.broadcast(x, src=0), torch.Tensor)
    assert_type(await ac.all_gather(x, dim=1), torch.Tensor)
    assert_type(await ac.all_gather(x, uneven=True, timeout=3.0), list[torch.Tensor])
    assert_type(await ac.gather(x), torch.Tensor | None)
    assert_type(await ac.reduce_scatter(x), torch.Tensor)
    assert_type(await ac.all_to_all(x), torch.Tensor)
    assert_type(await ac.permute(x, [(0, 1)]), torch.Tensor)
    assert_type(ac.all_reduce(x).wait(), torch.Tensor)


async def values() -> None:
    assert_type(await ac.all_reduce(3), int)
    assert_type(await ac.all_reduce({"loss": 1.0}), dict[str, float])
    assert_type(await ac.all_gather("s"), list[str])
    assert_type(await ac.all_gather(1, lane="side"), list[int])
    assert_type(await ac.gather(0.5, dst=1), list[float] | None)
    assert_type(await ac.all_gather_object(torch.Size([1])), list[torch.Size])
    assert_type(await ac.barrier(), None)


async def several(x: torch.Tensor) -> None:
    assert_type(await ac.wait_all((ac.all_reduce(x), ac.all_gather("s"))), tuple[torch.Tensor, list[str]])
    assert_type(await ac.wait_all([ac.all_reduce(x) for _ in range(3)]), tuple[torch.Tensor, ...])
    assert_type(ac.wait_all((ac.all_reduce(x), ac.all_gather("s"))).wait(), tuple[torch.Tensor, list[str]])
    async for work in ac.as_completed([ac.all_reduce(1)]):
        assert_type(work.result(), int)
    async for source, y in ac.recv_any(x, sources=[1, 2]):
        assert_type(source, int)
        assert_type(y, torch.Tensor)


async def evaluate(model: torch.nn.Module, step: int) -> None: ...


async def children(model: torch.nn.Module) -> None:
    async with ac.create_task_group() as group:
        group.start_soon(evaluate, model, 3, name="evaluation")
        group.start_soon(evaluate, model)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # no step
        group.start_soon(evaluate, model, "3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # no number


def mistakes(x: torch.Tensor) -> None:
    ac.all_reduce(x, op="summ")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ac.all_reduce(x, group="world")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ac.all_reduce(x) + 1  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]  # not awaited
    ac.rank()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # Horovod's


def training(model: torch.nn.Module) -> Any:
    return ac.overlap_gradients(model)
