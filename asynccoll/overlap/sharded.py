"""An optimizer of which each rank does its part: gradients scattered, parameters gathered ahead of use.

    optimizer = ac.overlap.shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()    # buckets leave, and each rank gets its n-th of their average
        await optimizer.step()             # updates that part, and sends it to the others
                                           # ... each module's forward waits for its own parameters

A step costs the bytes of one all_reduce, and an n-th of the optimizer's state and arithmetic.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
(stage 1). Built on the public operations alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from asynccoll.errors import InvalidArgumentError
from asynccoll.ops import all_gather, all_reduce, reduce_scatter
from asynccoll.overlap.buckets import Bucket, assign
from asynccoll.overlap.gradients import GradientReducer, check_not_ddp
from asynccoll.overlap.lanes import backward_lane
from asynccoll.runtime import get_rank, get_world_size
from asynccoll.work import Work

__all__ = ["ShardedOptimizer", "shard_optimizer"]


class ShardBucket(Bucket):
    """Parameters and their gradients in flat memory that divides by the ranks, and this rank's part of it."""

    def __init__(self, parameters: Sequence[torch.Tensor], rank: int, size: int) -> None:
        super().__init__(parameters, tail=-sum(parameter.numel() for parameter in parameters) % size)
        self.values = torch.zeros_like(self.flat)
        for parameter, view in zip(parameters, self.cut(self.values), strict=True):
            parameter.data = view.copy_(parameter.detach())
        self.shard = nn.Parameter(self.values.chunk(size)[rank])
        self.reduced = torch.zeros_like(self.shard)
        self.gathering: Work[torch.Tensor] | None = None
        #: indices of the parameters that nobody has waited for since they were sent
        self.stale: set[int] = set()

    def adopt(self) -> None:
        self.shard.grad = self.reduced

    def gathered(self) -> Iterator[Work[torch.Tensor]]:
        """What is to be waited for before the parameters are those of the last step."""
        if self.gathering is not None:
            yield self.gathering
            self.gathering = None


class ShardReducer(GradientReducer):
    """Gradients reduced to each rank's part as backward makes them."""

    def __init__(self, optimizer: Optimizer, **options: Any) -> None:
        self._of = {
            id(x): index for index, given in enumerate(optimizer.param_groups) for x in given["params"]
        }
        super().__init__([x for given in optimizer.param_groups for x in given["params"]], **options)

    def _assigned(self, parameters: list[torch.Tensor], first: int, limit: int) -> Sequence[ShardBucket]:
        """Apart by the optimizer's parameter groups, whose options differ."""
        rank, size = get_rank(self._group), get_world_size(self._group)
        members = assign(parameters, first, limit, apart=lambda parameter: self._of[id(parameter)])
        self.buckets = [ShardBucket(together, rank, size) for together in members]
        return self.buckets

    def shards_of(self, group: int) -> list[nn.Parameter]:
        """This rank's parts of the optimizer's parameter group of that index."""
        return [bucket.shard for bucket in self.buckets if self._of[id(bucket.parameters[0])] == group]

    def _reduce(self, flat: torch.Tensor, bucket: Bucket) -> Work[torch.Tensor]:
        assert isinstance(bucket, ShardBucket)
        return reduce_scatter(
            flat, out=bucket.reduced, group=self._group, lane=self._lane, timeout=self._timeout
        )

    def _arrived(self, bucket: Bucket, index: int) -> None:
        if isinstance(bucket, ShardBucket) and index in bucket.stale:
            raise InvalidArgumentError(
                f"a parameter of shape {list(bucket.parameters[index].shape)} took part in the loss before "
                "it had come back from the last step. The forward of the module that it belongs to waits for "
                "it, and was not called: call the module, or `await optimizer.gathered()` after the step"
            )
        super()._arrived(bucket, index)


class ShardedOptimizer:
    """An optimizer whose state and arithmetic are shared out over the ranks; ``shard_optimizer`` makes it.

    - ``await step()`` waits for this rank's part of the gradients, updates its part of the parameters and
      starts sending it. Each module's forward waits for the parameters that it has. What reads them
      elsewhere (``state_dict``, a weight used without its module's forward) comes after
      ``await optimizer.gathered()``.
    - Its parts, for code of yours between them: ``await optimizer.reduced()``, ``optimizer.wrapped.step()``,
      ``optimizer.gather()``. ``wait_step()``, ``wait_reduced()`` and ``wait_gathered()`` are the same
      without an event loop.
    - ``await clip_grad_norm_(max_norm)`` before it clips by the norm over all ranks.
    - ``wrapped`` is the optimizer, of flat parts: one parameter per bucket. Schedulers and gradient
      scalers take it, and its ``state_dict()`` is this rank's part.
    - A parameter that no rank used has a gradient of zeros here, not None.

    ``close()`` (or leaving a ``with`` block) takes the hooks away; the parameters stay complete.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        _check(model, optimizer)
        lane = options.setdefault("lane", "sharded")
        self.wrapped = optimizer
        self.gradients = ShardReducer(optimizer, **options)
        self._reduced = False  # for the step that is to come
        self._tail: dict[str, Any] = {
            "group": options.get("group"),
            "lane": backward_lane(f"{lane}/parameters"),
            "timeout": options.get("timeout"),
        }
        for index, given in enumerate(optimizer.param_groups):
            given["params"] = self.gradients.shards_of(index)
        hooks = list(_hooks(model, self.gradients.buckets))
        self._unhook = weakref.finalize(self, _remove, hooks)

    def __repr__(self) -> str:
        return f"<ShardedOptimizer of {type(self.wrapped).__name__}: {self.gradients!r}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    # Once a step

    async def step(self) -> None:
        """Update this rank's part once its gradients are there, and start sending it."""
        await self.reduced()
        self.wrapped.step()
        self.gather()

    def wait_step(self) -> None:
        """The same without an event loop."""
        self.wait_reduced()
        self.wrapped.step()
        self.gather()

    async def reduced(self) -> None:
        """Wait until this rank's part of the gradients is the average of all ranks'; once a step."""
        if not self._reduced:
            await self.gradients
            await self.gathered()  # what no forward has waited for
            self._reduced = True

    def wait_reduced(self) -> None:
        """The same without an event loop."""
        if not self._reduced:
            self.gradients.wait()
            self.wait_gathered()
            self._reduced = True

    def gather(self) -> None:
        """Start sending this rank's part of the parameters, those of the first layers first."""
        for bucket in reversed(self.gradients.buckets):
            own = bucket.shard.detach().clone()  # not of the memory that is written to
            bucket.gathering = all_gather(own, out=bucket.values, **self._tail)
            bucket.gathering.detach()  # after the last step nobody need wait
            bucket.stale = set(range(len(bucket.parameters)))
        self._reduced = False

    async def gathered(self) -> None:
        """Wait until every parameter is that of the last step."""
        for bucket in reversed(self.gradients.buckets):
            for work in bucket.gathered():
                await work
            bucket.stale.clear()

    def wait_gathered(self) -> None:
        """The same without an event loop."""
        for bucket in reversed(self.gradients.buckets):
            _wait(bucket)
            bucket.stale.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, or make them zeros."""
        for bucket in self.gradients.buckets:
            for parameter in bucket.parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    async def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down so that their norm over all parameters is at most ``max_norm``.

        Returns the norm before. If it is not finite, the gradients become NaN on every rank, so that a
        gradient scaler skips the step on all of them: with one, clip to ``max_norm * scaler.get_scale()``
        before ``scaler.unscale_``.
        """
        await self.reduced()
        own = [bucket.reduced for bucket in self.gradients.buckets]
        squares = torch.stack([part.norm(dtype=torch.float32).square() for part in own]).sum()
        norm = (await all_reduce(squares, **self._tail)).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if norm.isfinite() else norm * torch.nan
        for part in own:
            part.mul_(factor.to(part.dtype))
        return norm

    def no_sync(self) -> AbstractContextManager[None]:
        """A block in which backward accumulates and sends nothing, as ``GradientReducer.no_sync``."""
        return self.gradients.no_sync()

    # Leaving

    def close(self) -> None:
        """Take the hooks away, once the parameters are there."""
        self.wait_gathered()
        self._unhook()
        self.gradients.close()

    def __enter__(self) -> ShardedOptimizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._unhook()  # the block has an error of its own: wait for nothing
        self.gradients.close()


def shard_optimizer(model: nn.Module, optimizer: Optimizer, **options: Any) -> ShardedOptimizer:
    """``optimizer`` with its work shared out: each rank updates an n-th of the parameters of ``model``.

    >>> await ac.overlap.broadcast_parameters(model)
    >>> optimizer = ac.overlap.shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    >>> loss_fn(model(x), y).backward()     # gradients leave meanwhile
    >>> await optimizer.step()              # the parameters come back while the next forward runs

    For optimizers that treat every element alone (SGD, Adam, AdamW; not LAMB, LARS or Muon): the parts are
    flat, and cross the borders of parameters. Parameter groups with options of their own stay apart.

    Args:
        model: the module whose forward uses the parameters.
        optimizer: a new one, of parameters of ``model``.
        options: those of ``ac.overlap_gradients`` (``op``, ``bucket_bytes``, ``group``, ``lane``, ...).

    Raises:
        InvalidArgumentError: the optimizer has stepped before, or has parameters that are not the
            model's; as ``ac.overlap_gradients``. From backward, if a parameter took part that nobody has
            waited for.

    Source: Rajbhandari et al., 2020; ``torch.distributed.optim.ZeroRedundancyOptimizer``.
    """
    return ShardedOptimizer(model, optimizer, **options)


# Making one


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    check_not_ddp(model)
    if optimizer.state:
        raise InvalidArgumentError(
            "the optimizer has state already, of whole parameters: shard it before its first step"
        )
    known = {id(parameter) for parameter in model.parameters()}
    for index, given in enumerate(optimizer.param_groups):
        for parameter in given["params"]:
            if id(parameter) not in known:
                raise InvalidArgumentError(
                    f"parameter group {index} has one of shape {list(parameter.shape)} that is not the "
                    "model's, so no forward would wait for it: pass the module that has all of them"
                )


def _hooks(model: nn.Module, buckets: Sequence[ShardBucket]) -> Iterator[Any]:
    """Have the forward of every module wait for the buckets that the parameters it reads are in."""
    where = {id(x): (bucket, index) for bucket in buckets for index, x in enumerate(bucket.parameters)}
    for module in model.modules():
        # Attention reads the weight of its output projection, whose own forward it never calls.
        reads = module.parameters(recurse=isinstance(module, nn.MultiheadAttention))
        own = [where[id(x)] for x in reads if id(x) in where]
        if own:
            yield module.register_forward_pre_hook(_waiting(own))


def _waiting(own: list[tuple[ShardBucket, int]]) -> Callable[..., None]:
    def before_forward(*_: Any) -> None:
        for bucket, index in own:
            _wait(bucket)
            bucket.stale.discard(index)

    return before_forward


def _wait(bucket: ShardBucket) -> None:
    for work in bucket.gathered():
        work.wait()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
