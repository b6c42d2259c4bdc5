"""Ways to average the gradients of a training program, one class each, and one class that does not.

This module must not know what is trained (``training_models``), nor when (``training_loops``).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import anyio
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import asynccoll as ac
from asynccoll.auto.models import optim_for
from asynccoll.auto.place import Place, here
from asynccoll.backends.api import Training
from overlapping import SMALL
from ranks import raising
from training_models import Dropping, Small, Stack


class WithoutDDP(Training):
    """Training as on the backends without DDP."""

    ddp = False


def without_ddp(place: Place) -> Place:
    """Return `place` without DDP, so `auto_optim` averages the gradients, as it does on other backends."""
    return replace(place, training=WithoutDDP()) if place.training.ddp else place


class Helper:
    """The base class: one process, nothing to average. Subclasses override what they do differently."""

    #: the factor by which the loss is multiplied before backward
    scale = 1.0
    #: whether it must recover if backward raises on one rank, or creates a graph
    recovers = False
    #: whether this is one rank of many, which has only its own data
    is_rank = True

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        self.model, self.optimizer, self.lane = model, optimizer, lane

    def loss(self, x: Tensor) -> Tensor:
        return self.model.loss(x)

    async def reduced(self) -> None:
        """Wait for the gradients: after each backward, and before gradients are read."""

    async def last_reduced(self) -> None:
        """Wait for the gradients before a step, unless the step does so itself."""
        await self.reduced()

    async def cut_short(self) -> None:
        """Wait for the gradients, cancel the wait as soon as it blocks, and wait again."""
        await patiently(self.reduced)

    async def step(self, step: Callable[[], Any]) -> None:
        step()

    async def saved(self, waits: Waits) -> None:
        """Save and reload the whole state if the helper only holds a part of it; `waits` does the waiting."""

    def trained(self) -> list[Tensor]:
        """Return the tensors that hold the gradients."""
        return list(self.model.parameters())

    def halve(self, replaced: bool) -> None:
        """Halve the reduced gradients, in place or in new tensors."""
        for parameter in self.trained():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5 if replaced else parameter.grad.mul_(0.5)

    async def touch(self, x: Tensor) -> None:
        """Write to gradients when that is refused, and recover, so that the step can be repeated."""

    async def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    async def unscale(self, scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(self.optimizer)

    async def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        await self.step(lambda: scaler.step(self.optimizer))

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    async def interrupted(self, x: Tensor, here: bool) -> None:
        """Run a backward that raises on one rank after most gradients have been sent, and recover."""
        trained = [x for x in self.model.parameters() if x.requires_grad]
        loss = self.loss(x) * self.scale
        with (
            contextlib.ExitStack() as failing,
            raising(ZeroDivisionError) if here else contextlib.nullcontext(),
        ):
            if here:  # in the first layer, or the second: ranks may leave one out
                may_drop = isinstance(self.model, Dropping)
                for first in trained[:3:2] if may_drop else trained[:1]:
                    failing.enter_context(first.register_hook(_raise))
            loss.backward()
        await self.recovered()

    async def graphed(self, x: Tensor) -> None:
        """Run a backward that keeps the graph of the gradients, which is refused, and recover."""
        loss = self.loss(x)
        with raising(ac.InvalidArgumentError, "create_graph"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about reference cycles
            loss.backward(create_graph=True)
        await self.recovered()

    async def recovered(self) -> None:
        await self.reduced()

    async def closed(self) -> None:
        pass

    def result(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


#: Waits for what a function starts, in one attempt or in two.
Waits = Callable[[Callable[[], Any]], Any]


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError("of this rank alone")


async def patiently(wait: Callable[[], Any]) -> Any:
    """Wait, cancel the wait as soon as it blocks, and wait again."""
    with anyio.move_on_after(0) as limit:
        return await wait()
    assert limit.cancelled_caught
    return await wait()


async def touched_on_the_way(helper: Helper) -> None:
    """Check that writing to gradients while they are in flight is refused."""
    for parameter in helper.trained():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    with raising(ac.InvalidArgumentError, "between backward and the await"):
        await helper.reduced()


class Alone(Helper):
    """One process that has the data of all ranks."""

    is_rank = False


class Overlapped(Helper):
    options: ClassVar[dict[str, Any]] = {}
    recovers = True

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        self.gradients = ac.overlap_gradients(model, lane=lane, **SMALL, **self.options)
        self.no_sync = self.gradients.no_sync  # type: ignore[method-assign]

    async def reduced(self) -> None:
        await self.gradients

    async def touch(self, x: Tensor) -> None:
        """Before the await."""
        (self.loss(x) * self.scale).backward()
        await touched_on_the_way(self)

    async def closed(self) -> None:
        self.gradients.close()


class Summed(Overlapped):
    options: ClassVar[dict[str, Any]] = {"op": "sum"}

    @property
    def scale(self) -> float:  # type: ignore[override]
        return 1 / ac.get_world_size()

    def halve(self, replaced: bool) -> None:
        """Halve in place, and check that the next backward refuses replaced gradients."""
        if replaced and ac.get_world_size() > 1:
            kept = [parameter.grad for parameter in self.trained()]
            super().halve(replaced)
            found = [x for x in self.trained() if x.grad is not None and x.grad.any()]
            if found:
                with raising(ac.InvalidArgumentError, "op='sum'"):
                    found[0].abs().sum().backward()
            for parameter, gradient in zip(self.trained(), kept, strict=True):
                parameter.grad = gradient
        super().halve(replaced=False)


class Bounded(Overlapped):
    options: ClassVar[dict[str, Any]] = {"max_in_flight_bytes": 200, "broadcast_buffers": True}


class InFloat32(Overlapped):
    options: ClassVar[dict[str, Any]] = {"reduce_dtype": torch.float32}


class Auto(Helper):
    recovers = True

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        optim_for(without_ddp(here()), optimizer, {"lane": lane, **SMALL})
        self.no_sync = getattr(optimizer, "no_sync", self.no_sync)  # type: ignore[method-assign]
        self.recovers = hasattr(optimizer, "synchronize")  # not in a world of one

    async def recovered(self) -> None:
        self.optimizer.synchronize()  # type: ignore[attr-defined]

    async def closed(self) -> None:
        self.optimizer = None  # type: ignore[assignment]
        gc.collect()  # this also destroys its reducer


class AutoModel(Helper):
    """As in a script that runs on any backend: DDP where it is available."""

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        ddp = here().backend == "gloo" and ac.get_world_size() > 1
        self.wrapped = ac.auto_model(model, **({"find_unused_parameters": True} if ddp else {}))
        ac.auto_optim(optimizer, **({} if ddp or ac.get_world_size() == 1 else {"lane": lane}))
        ours = self.wrapped if ddp else optimizer
        self.no_sync = getattr(ours, "no_sync", self.no_sync)  # type: ignore[method-assign]

    def loss(self, x: Tensor) -> Tensor:
        return self.wrapped(x).square().mean()

    async def closed(self) -> None:
        self.optimizer = None  # type: ignore[assignment]
        gc.collect()


class Awaited(Helper):
    recovers = True

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        self.own = ac.async_optim(optimizer, lane=lane, **SMALL)
        self.no_sync = self.own.no_sync  # type: ignore[method-assign]

    async def reduced(self) -> None:
        await self.own.reduced()

    async def last_reduced(self) -> None:
        pass

    async def unscale(self, scaler: torch.amp.GradScaler) -> None:
        await self.own.unscale_(scaler)

    async def step(self, step: Callable[[], Any]) -> None:
        await self.own.step()

    async def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        await self.own.step(scaler=scaler)

    async def touch(self, x: Tensor) -> None:
        """Before the await."""
        (self.loss(x) * self.scale).backward()
        await touched_on_the_way(self)

    async def closed(self) -> None:
        self.own.close()


class Hooked(Helper):
    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        self.ddp = DistributedDataParallel(model, find_unused_parameters=True)
        self.ddp.register_comm_hook(ac.overlap.DDPState(lane=lane), ac.overlap.ddp_hook)
        self.no_sync = self.ddp.no_sync  # type: ignore[method-assign]

    def loss(self, x: Tensor) -> Tensor:
        return self.ddp(x).square().mean()


class Averaged(Helper):
    """Local steps; all averages, including the last, may be waited for in two attempts."""

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        ac.overlap.broadcast_parameters(model, lane=lane).wait()
        self.averaging = ac.overlap.average_parameters(model, every=1, lane=lane)

    async def _wait(self) -> None:
        await self.averaging

    async def step(self, step: Callable[[], Any]) -> None:
        step()
        await patiently(self._wait)

    async def closed(self) -> None:
        await patiently(self.averaging.finish)


class Sharded(Helper):
    recovers = True

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        self.own: Any = ac.overlap.shard_optimizer(model, optimizer, lane=lane, **SMALL)
        self.optimizer = self.own

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.own.no_sync()

    async def reduced(self) -> None:
        await self.own.reduced()

    async def clip(self, max_norm: float) -> None:
        await self.own.clip_grad_norm_(max_norm)

    async def unscale(self, scaler: torch.amp.GradScaler) -> None:
        await self.own.unscale_(scaler)

    async def step(self, step: Callable[[], Any]) -> None:
        await self.own.step()

    async def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        await self.own.step(scaler=scaler)

    async def last_reduced(self) -> None:
        pass

    def trained(self) -> list[Tensor]:
        return [part for group in self.own.wrapped.param_groups for part in group["params"]]

    def halve(self, replaced: bool) -> None:
        super().halve(replaced=False)

    async def touch(self, x: Tensor) -> None:
        """Write to the gradients of the parameters, which have already been reduced into other tensors."""
        (self.loss(x) * self.scale).backward()
        await self.own.reduced()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        with raising(ac.InvalidArgumentError, "after it had been reduced"):
            await self.own.reduced()

    async def saved(self, waits: Waits) -> None:
        self.own.load_full_state_dict(await waits(self.own.full_state_dict))

    async def closed(self) -> None:
        await self.own.aclose()


class Dropped(Sharded):
    """Never closed: the last parameters in flight arrive when the model is read."""

    async def closed(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ac.UnawaitedWorkWarning)
            self.optimizer = self.own = None  # type: ignore[assignment]
            gc.collect()

    def result(self) -> list[Tensor]:
        self.model.state_dict()
        return super().result()


class Layered(Helper):
    """Shards each layer of a `Stack`, with the parameterless layers after it; other models are one layer."""

    options: ClassVar[dict[str, Any]] = {}
    recovers = True

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        ac.overlap.broadcast_parameters(model, lane=lane).wait()
        self.parts: list[nn.Module] = []
        for layer in model.layers if isinstance(model, Stack) else (model,):
            if any(True for _ in layer.parameters()):
                self.parts.append(nn.Sequential(layer))
            else:
                self.parts[-1].append(layer)  # type: ignore[operator]
        self.layers, *self.others = self.shared_out(lane)
        taken = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in taken}
        own = type(optimizer)([part for layers in self.sets for part in layers.parameters()], **options)
        super().__init__(model, own, lane)

    #: backward raises in the layer that is this many layers ahead
    raises_behind: int | None = None
    interruptions = 0

    def shared_out(self, lane: str) -> list[ac.overlap.ShardedLayers]:
        return [ac.overlap.shard_layers(self.parts, lane=lane, **self.options)]

    @property
    def sets(self) -> list[ac.overlap.ShardedLayers]:
        return [self.layers, *self.others]

    def trained(self) -> list[Tensor]:
        return [part for layers in self.sets for part in layers.parameters()]

    async def saved(self, waits: Waits) -> None:
        for layers in self.sets:
            layers.load_full_state_dict(await waits(layers.full_state_dict))
        if not self.others:
            state = await waits(lambda: self.layers.full_optimizer_state(self.optimizer))
            self.layers.load_full_optimizer_state(self.optimizer, state)

    async def unscale(self, scaler: torch.amp.GradScaler) -> None:
        await self.layers.unscale_(scaler, self.optimizer)

    async def clip(self, max_norm: float) -> None:
        await self.layers.clip_grad_norm_(max_norm)

    @property
    def scale(self) -> float:  # type: ignore[override]
        return 1 / ac.get_world_size()

    def loss(self, x: Tensor) -> Tensor:
        rank = x.rank  # type: ignore[attr-defined]
        for index, layer in enumerate(itertools.chain(*self.sets)):
            if isinstance(self.model, Dropping):
                x = x if self.model.drops(index, rank) else self._through(layer, x).tanh()
            else:
                x = self._through(layer, x)
        return x.square().mean()

    def _through(self, layer: Any, x: Tensor) -> Tensor:
        x = checkpoint(layer, x, use_reentrant=False) if self.model.recomputed else layer(x)
        if self.raises_behind == 0:
            x.register_hook(_raise)
        if self.raises_behind is not None:
            self.raises_behind -= 1
        return x

    async def interrupted(self, x: Tensor, here: bool) -> None:
        """Leave a loop early on one rank, with no rank running backward; later, raise in backward on one."""
        before = x
        with raising(ZeroDivisionError) if here else contextlib.nullcontext():
            async for layer in self.layers:
                x = self._through(layer, x)
                if here:  # in the first layer, with the second in flight
                    _raise(x)
        if here:
            await self.layers.finish_loop()
        self.interruptions += 1
        if self.interruptions == 2:  # only once, since it takes seconds until the others get the error
            await self._backward_raises(before, here)

    async def _backward_raises(self, x: Tensor, here: bool) -> None:
        """Raise in backward in one layer of one rank; others get an error, unless they need nothing more."""
        came, self.raises_behind = True, len(self.parts) // 2 if here else None
        loss = self.loss(x) * self.scale
        self.raises_behind = None
        try:
            loss.backward()
        except ZeroDivisionError:
            came = not here
        except ac.PeerRefusedError:
            came = here
        del loss
        assert not await ac.all_reduce(came, op="and", lane=f"{self.lane} agreed")

    async def graphed(self, x: Tensor) -> None:
        """Run such a backward, which is not refused here: the shards' gradients have their own graph."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (self.loss(x) * self.scale).backward(create_graph=True)

    async def _crossed(self) -> None:
        """Check that loops that differ between ranks, over layers of one shape, fail at the first layer."""
        other = ac.get_world_size() > 1 and ac.get_rank() == 0
        with raising(ac.CollectiveMismatchError) if ac.get_world_size() > 1 else contextlib.nullcontext():
            async for _ in reversed(self.layers) if other else self.layers:
                pass
        # The prefetched layers differ as well, and may be refused only now, with the next call.
        with contextlib.suppress(ac.PeerRefusedError):
            await ac.barrier(lane=self.lane)

    async def closed(self) -> None:
        if len(self.parts) > 1 and len({shard.numel() for shard in self.layers.parameters()}) == 1:
            await self._crossed()
        parts = iter(self.parts)
        for layers in self.sets:
            whole = await layers.full_state_dict()
            for index, part in enumerate(itertools.islice(parts, len(layers))):
                for name, parameter in part.named_parameters():
                    parameter.data = whole[f"{index}.{name}"]


class Resharded(Layered):
    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": True, "ahead": 2}


class InTwoSets(Layered):
    """Two sets of sharded layers, like an encoder's and a decoder's, on no lane of their own."""

    def shared_out(self, lane: str) -> list[ac.overlap.ShardedLayers]:
        half = len(self.parts) // 2
        return [ac.overlap.shard_layers(parts) for parts in (self.parts[:half], self.parts[half:])]


class ByHand(Helper):
    """Two tasks, each with half of the parameters and its own lane, which try to share a window."""

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        ac.overlap.broadcast_parameters(model, lane=lane).wait()

    async def reduced(self) -> None:
        window = ac.overlap.InFlight(max_in_flight_bytes=1)
        found = [x for x in self.model.parameters() if x.requires_grad]
        halves = {f"{self.lane} even": found[::2], f"{self.lane} odd": found[1::2]}
        async with ac.create_task_group() as tasks:
            # The ranks may start in a different order.
            for lane in sorted(halves, reverse=ac.get_rank() % 2 == 0):
                tasks.start_soon(self._average, window, lane, halves[lane], name=f"averaging on {lane}")

    async def _average(self, window: Any, lane: str, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            call = {"op": "avg", "lane": lane, "out": parameter.grad}
            await anyio.lowlevel.checkpoint()
            try:
                await window.start(ac.all_reduce, parameter.grad, **call)
            except ac.InvalidArgumentError:  # the window belongs to the other task
                window = ac.overlap.InFlight(max_in_flight_bytes=1)
                await window.start(ac.all_reduce, parameter.grad, **call)
        await window.drain()

    async def cut_short(self) -> None:
        await self.reduced()

    async def recovered(self) -> None:
        pass


class Prepared(Helper):
    """All gradients in one tensor, reduced by an operation that is prepared once."""

    def __init__(self, model: Small, optimizer: Optimizer, lane: str) -> None:
        super().__init__(model, optimizer, lane)
        ac.overlap.broadcast_parameters(model, lane=lane).wait()
        first, count = next(model.parameters()), sum(x.numel() for x in model.parameters())
        self.flat = torch.zeros(count, dtype=first.dtype, device=first.device)
        self.averaging: Any = ac.prepare("all_reduce", like=self.flat, op="avg", lane=lane)

    def _gathered(self) -> list[Tensor]:
        grads = []
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
        return grads

    async def reduced(self) -> None:
        grads = self._gathered()
        torch.cat([x.reshape(-1) for x in grads], out=self.flat)
        await self._averaged()

    async def _averaged(self) -> None:
        average, grads = await self.averaging.start(), self._gathered()
        for x, part in zip(grads, average.split([x.numel() for x in grads]), strict=True):
            x.copy_(part.view(x.shape))

    async def cut_short(self) -> None:
        """Start twice on every rank, on some before the first has completed."""
        torch.cat([x.reshape(-1) for x in self._gathered()], out=self.flat)
        with anyio.move_on_after(0):
            await self.averaging.start()
        await self._averaged()


HELPERS: dict[str, type[Helper]] = {
    "overlap_gradients": Overlapped,
    "overlap_gradients(op='sum')": Summed,
    "overlap_gradients(max_in_flight_bytes, broadcast_buffers)": Bounded,
    "overlap_gradients(reduce_dtype)": InFloat32,
    "auto_optim": Auto,
    "auto_model": AutoModel,
    "async_optim": Awaited,
    "ddp_hook": Hooked,
    "average_parameters": Averaged,
    "shard_optimizer": Sharded,
    "shard_optimizer, dropped": Dropped,
    "shard_layers": Layered,
    "shard_layers(reshard_after_forward)": Resharded,
    "shard_layers, two sets": InTwoSets,
    "InFlight": ByHand,
    "prepare": Prepared,
}
