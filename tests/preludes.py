"""The names that code blocks of the pages use without defining, and the program that runs the blocks.

A page shows ``await gradients`` without repeating how ``gradients`` was made. Here, each name that a block
uses but does not define is an attribute of its page's class, made when the block first looks it up. Run as a
program, under a launcher or not, this file runs the blocks whose names it is given (see `test_blocks`).
"""

from __future__ import annotations

import ast
import asyncio
import copy
import functools
import inspect
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import format_utils
from torch.nn.parallel import DistributedDataParallel

import asynccoll as ac
import asynccoll.sync as idist
from pages import BLOCKS, Block


def train_alone(local_rank: int, config: dict[str, int]) -> None:
    """The ``train`` of spawned ranks, which have to import it."""
    assert ac.all_reduce(1).wait() == ac.get_world_size()
    assert config == {"x": 2}


class Given:
    """The names used on every page, and ``close``, called after each block."""

    ac = ac
    idist = idist
    asyncio = asyncio
    torch = torch
    copy = copy
    config = {"x": 2}  # noqa: RUF012 - never changed
    train = staticmethod(train_alone)

    @cached_property
    def x(self) -> Tensor:
        return torch.ones(4) + ac.get_rank()

    def close(self) -> None:
        """Do what the rest of the page would do."""


class Training(Given):
    """A small model, and batches for it."""

    @cached_property
    def x(self) -> Tensor:
        return torch.randn(8, 4)

    @cached_property
    def y(self) -> Tensor:
        return torch.randn(8, 4)

    @cached_property
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    @cached_property
    def loss_fn(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.MSELoss()

    @cached_property
    def optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    @cached_property
    def loader(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(3)]

    @cached_property
    def gradients(self) -> Any:
        return ac.overlap_gradients(self.model)

    @cached_property
    def loss(self) -> Tensor:
        assert self.gradients  # registers the hooks before backward
        return self.loss_fn(self.model(self.x), self.y)

    @cached_property
    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu")

    @staticmethod
    def Net() -> nn.Module:  # noqa: N802 - a class on the pages
        return nn.Sequential(nn.Linear(4, 4))


class Tasks(Training):
    """Two tasks that call collectives; the pages pass them a model or nothing."""

    score = 1.0

    async def train(self, *_: nn.Module) -> None:
        for _ in range(3):
            await ac.all_reduce(1)

    async def validate(self, *_: nn.Module) -> None:
        with torch.no_grad():
            await ac.all_reduce(2)

    evaluate = validate
    main = validate


class Concepts(Tasks):
    @cached_property
    def batch(self) -> Tensor:
        return torch.randn(8, 4)


class Guide(Tasks):
    @cached_property
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model(torch.ones(4)).sum().backward()
        return model

    @cached_property
    def x(self) -> Tensor:
        return torch.zeros(4)

    batches = range(3)

    def gradient(self, batch: int) -> Tensor:
        return torch.full((4,), float(batch))


class Index(Training):
    @cached_property
    def gradients(self) -> Tensor:
        return torch.ones(4)

    next_batch = torch.ones(4)


class Overlap(Training):
    functools, partial = functools, partial
    checkpoint, format_utils = checkpoint, format_utils
    DistributedDataParallel = DistributedDataParallel

    x1 = x2 = property(lambda _: torch.randn(8, 4))
    y1 = y2 = x1
    shards = tensors = property(lambda _: [torch.ones(2) for _ in range(5)])

    def use(self, full: Tensor, _x: Tensor) -> Tensor:
        assert full.tolist() == [1.0] * 4
        return full


class ShardedOptimizers(Overlap):
    @cached_property
    def optimizer(self) -> Any:
        """A sharded optimizer that has taken a step."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        sharded = ac.overlap.shard_optimizer(self.model, optimizer)
        self.model(self.x).sum().backward()
        sharded.step().wait()
        sharded.zero_grad()
        return sharded

    gradients = property(lambda self: self.optimizer)
    path = property(lambda _: f"state-{ac.get_rank()}.pt")
    directory = "state"

    def close(self) -> None:
        if "optimizer" in vars(self):  # otherwise the block has made its own
            self.optimizer.gathered().wait()


class Blocks(nn.Module):
    """A model whose middle layers can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


class ShardedLayers(Overlap):
    model = cached_property(lambda _: Blocks())
    succeeded = True

    @cached_property
    def layers(self) -> Any:
        """Sharded layers, the second of which fails on one rank."""

        def refuse(*_: Any) -> None:
            raise ValueError("no such token")

        if ac.get_rank() == 1:
            self.model.blocks[1].register_forward_pre_hook(refuse)
        return ac.overlap.shard_layers(self.model.blocks)


class Tracing(Training):
    batches = property(lambda self: iter(self.loader))
    first_batches = property(lambda self: self.loader)

    @cached_property
    def histogram(self) -> Any:
        from unittest.mock import Mock

        return Mock()


class Sync(Training):
    @cached_property
    def dataset(self) -> torch.utils.data.TensorDataset:
        return torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 4))


class Launch(Given):
    rank = node = property(lambda _: int(os.environ["NODE"]))


class Horovod(Training):
    batches = property(lambda _: range(2 + ac.get_rank()))

    def loss_gradient(self, batch: int) -> Tensor:
        return torch.full((2,), float(batch))


#: By page, and by section if that needs names that its page does not.
PRELUDES: dict[str, type[Given]] = {
    "concepts.md": Concepts,
    "guide.md": Guide,
    "index.md": Index,
    "overlap.md": Overlap,
    "overlap.md#Sharded optimizers": ShardedOptimizers,
    "overlap.md#Sharded layers": ShardedLayers,
    "tracing.md": Tracing,
    "sync.md": Sync,
    "launch.md": Launch,
    "backends/horovod.md": Horovod,
    "backends/xla.md": Training,
}


#: Numbers and addresses of the pages, and their replacements here.
REPLACED = {
    "10.0.0.1:29400": f"127.0.0.1:{os.environ.get('PORT')}",
    '"host0"': '"127.0.0.1"',
    "master_port=29400": f"master_port={os.environ.get('ANOTHER_PORT')}",
    "nproc_per_node=8": "nproc_per_node=1",
    "nproc_per_node=4": "nproc_per_node=2",
}


class Names(dict[str, Any]):
    """The names of a block: its own, and the given ones once it looks them up."""

    def __init__(self, given: Given) -> None:
        super().__init__(__name__="__main__")
        self._given = given

    def __missing__(self, name: str) -> Any:
        if not hasattr(type(self._given), name):
            raise KeyError(name)
        value = self[name] = getattr(self._given, name)
        return value


def source(block: Block) -> str:
    """Return a block's code, at the same line as on the page, for tracebacks."""
    code, above = block.code, block.line - 1
    for shown, used in REPLACED.items():
        code = code.replace(shown, used)
    if re.search(r"^( {4})?continue$", code, re.MULTILINE):  # it is the body of a loop
        code, above = "for _ in range(1):\n" + textwrap.indent(code, "    "), above - 1
    return "\n" * above + code


def run(block: Block) -> None:
    """Run one block in a separate world: as a program or, if it awaits, as the body of a coroutine."""
    joins = re.search(r"ac\.initialize\(|Parallel\(|\.spawn\(|elastic\.", block.code)
    if not joins:
        ac.initialize()
    given = PRELUDES.get(f"{block.page}#{block.heading}", PRELUDES.get(block.page, Given))()
    compiled = compile(source(block), str(block.path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = Names(given)
    if "spawn(" in block.code:  # functions are sent with the names that they use
        inner = [code for code in compiled.co_consts if inspect.iscode(code)]
        names.update({name: names[name] for code in inner for name in code.co_names if hasattr(given, name)})
    waiting = eval(compiled, names)
    if waiting is not None:
        asyncio.run(waiting)
    if not joins:
        given.close()
        ac.barrier().wait()
    if ac.is_initialized():
        ac.finalize()


def main() -> None:
    """Run the named blocks, one after the other."""
    for category in (ac.UnawaitedWorkWarning, ac.DiscardedResultWarning):
        warnings.simplefilter("error", category)
    for name in sys.argv[1:]:
        run(BLOCKS[name])
        print("done:", name, flush=True)


if __name__ == "__main__":
    main()
