"""A model and its optimizer for one rank of many: ``auto_model``, ``auto_optim``, ``async_optim``.

``auto_model`` and ``auto_optim`` follow ignite's rules: on torch's backends DDP reduces the gradients, on
horovod its DistributedOptimizer. Where a backend has nothing that fits (mpi, xla-tpu), the step waits for
gradients that ``overlap`` reduces. ``async_optim`` does that on every backend, awaited.

Built on the public operations alone.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from asynccoll.autodata import XLA, DistributedProxySampler, auto_dataloader
from asynccoll.autoplace import Place, here
from asynccoll.errors import InvalidArgumentError, UnsupportedOpError
from asynccoll.overlap import GradientReducer, broadcast_parameters, overlap_gradients

__all__ = [
    "AsyncOptimizer",
    "DistributedProxySampler",
    "async_optim",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
]

HOROVOD = "horovod"
#: Backends whose gradients the step itself reduces, for want of another means. (torch_xla's own
#: ``optimizer_step`` reduces outside of our order, and aborts where replicas are threads.)
_REDUCED_BY_STEP = frozenset({"mpi", XLA})

O = TypeVar("O", bound=Optimizer)  # noqa: E741  # an optimizer


def auto_model(model: nn.Module, sync_bn: bool = False, **kwargs: Any) -> nn.Module:
    """The model on this rank's device, ready to be trained by all ranks together.

    - gloo, nccl: ``DistributedDataParallel`` around it, after ``SyncBatchNorm`` conversion with
      ``sync_bn=True``.
    - horovod, mpi, xla-tpu: parameters and buffers become those of rank 0; the gradients are
      ``auto_optim``'s matter.
    - a world of one with several GPUs: ``DataParallel``.
    - otherwise the model itself.

    Mixed precision is torch's: run the forward pass under ``torch.autocast``. Models of apex are refused.

    Args:
        model: any module.
        sync_bn: batch norm over the batches of all ranks; on torch's backends only.
        kwargs: for the class that wraps the model.

    Raises:
        ValueError: ``device_ids`` among ``kwargs`` where this rank's device is a GPU.
        UnsupportedOpError: apex is in the model.
    """
    return model_for(here(), model, sync_bn, kwargs)


def model_for(place: Place, model: nn.Module, sync_bn: bool, kwargs: dict[str, Any]) -> nn.Module:
    """The same for a given place."""
    _refuse_apex(model)
    if not all(parameter.device == place.device for parameter in model.parameters()):
        model.to(place.device)
    if place.world_size == 1:
        if torch.cuda.device_count() > 1 and place.device.type == "cuda":
            place.log.info("Apply torch DataParallel on model")
            return nn.DataParallel(model, **kwargs)
        return model
    if place.backend == HOROVOD or place.backend in _REDUCED_BY_STEP:
        place.log.info("Broadcast the initial variable states from rank 0 to all other processes")
        broadcast_parameters(model).wait()
        return model
    return _parallel(place, model, sync_bn, kwargs)


def _parallel(place: Place, model: nn.Module, sync_bn: bool, kwargs: dict[str, Any]) -> nn.Module:
    """The model in torch's DistributedDataParallel."""
    if sync_bn:
        place.log.info("Convert batch norm to sync batch norm")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
    if place.device.type == "cuda":
        if "device_ids" in kwargs:
            raise InvalidArgumentError(f"Argument kwargs should not contain 'device_ids', but got {kwargs}")
        place.log.info("Apply torch DistributedDataParallel on model, device id: %s", place.device.index)
        kwargs["device_ids"] = [place.device.index]
    else:
        place.log.info("Apply torch DistributedDataParallel on model")
    return nn.parallel.DistributedDataParallel(model, **kwargs)


def auto_optim(optimizer: O, **kwargs: Any) -> O:
    """The optimizer, ready to step on gradients of all ranks.

    - gloo, nccl, a world of one: as it is (``auto_model``'s DDP reduces the gradients).
    - horovod: Horovod's ``DistributedOptimizer`` around it (``kwargs`` are its), its state that of rank 0.
    - mpi, xla-tpu: buckets of gradients leave while backward runs, and ``step`` waits for their average
      (``kwargs`` are those of ``ac.overlap_gradients``); on xla-tpu it then executes what was recorded.

    Raises:
        UnsupportedOpError: an optimizer of apex.
    """
    return optim_for(here(), optimizer, kwargs)


def optim_for(place: Place, optimizer: O, kwargs: dict[str, Any]) -> O:
    """The same for a given place."""
    _refuse_apex(optimizer)
    if place.backend == HOROVOD:
        return _of_horovod(optimizer, kwargs)
    if place.backend in _REDUCED_BY_STEP and place.world_size > 1:
        _wait_in_step(optimizer, overlap_gradients(_parameters(optimizer), **kwargs))
    if place.backend == XLA:
        optimizer.register_step_post_hook(_execute)
    return optimizer


def _execute(*_: Any) -> None:
    """Have XLA run what the step has recorded, as its own ``optimizer_step`` does."""
    import torch_xla

    torch_xla.sync()


def _of_horovod(optimizer: O, kwargs: dict[str, Any]) -> O:
    import horovod.torch as hvd

    distributed: O = hvd.DistributedOptimizer(optimizer, **kwargs)
    hvd.broadcast_optimizer_state(distributed, root_rank=0)
    return distributed


def _wait_in_step(optimizer: Optimizer, gradients: GradientReducer) -> None:
    """Have ``step`` wait for the gradients: before it, and after a closure that made them anew."""

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The arguments of ``step`` with the optimizer before them, as torch hands them to a hook.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            gradients.wait()
            return None

        def reduced() -> Any:
            loss = closure()
            gradients.wait()
            return loss

        if len(args) > 1:
            return (args[0], reduced, *args[2:]), kwargs
        return args, {**kwargs, "closure": reduced}

    optimizer.register_step_pre_hook(before)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# Awaited


class AsyncOptimizer:
    """An optimizer whose step awaits gradients that leave while backward runs; ``async_optim`` makes it.

    ``await optimizer.step()``. Everything else is the wrapped optimizer's: ``zero_grad``, ``state_dict``,
    ``param_groups``; schedulers take ``optimizer.wrapped``. ``close()`` (or leaving a ``with`` block)
    takes the hooks away.
    """

    def __init__(self, optimizer: Optimizer, gradients: GradientReducer) -> None:
        self.wrapped = optimizer
        self.gradients = gradients

    def __repr__(self) -> str:
        return f"<AsyncOptimizer of {type(self.wrapped).__name__}: {self.gradients!r}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    async def step(self) -> None:
        """Update the parameters once the gradients of all ranks are averaged."""
        await self.gradients
        self.wrapped.step()

    def no_sync(self) -> Any:
        """A block in which backward accumulates and sends nothing, as ``GradientReducer.no_sync``."""
        return self.gradients.no_sync()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self.gradients.close()

    def __enter__(self) -> AsyncOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def async_optim(optimizer: Optimizer, **kwargs: Any) -> AsyncOptimizer:
    """An optimizer whose ``step`` is awaited: it updates with the average of all ranks' gradients.

    >>> model = Net()
    >>> await ac.overlap.broadcast_parameters(model)
    >>> optimizer = ac.async_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> loss_fn(model(x), y).backward()     # buckets of gradients leave meanwhile
    >>> await optimizer.step()              # other tasks run until they are here

    For a plain model, on any backend; not for one that ``auto_model`` wrapped in DDP, which reduces the
    gradients itself.

    Args:
        optimizer: an optimizer of torch; its parameters' gradients are reduced.
        kwargs: those of ``ac.overlap_gradients`` (``op``, ``bucket_bytes``, ``group``, ``lane``, ...).
    """
    _refuse_apex(optimizer)
    return AsyncOptimizer(optimizer, overlap_gradients(_parameters(optimizer), **kwargs))


# apex


def _refuse_apex(subject: nn.Module | Optimizer) -> None:
    """apex patches models and optimizers in ways that fit none of these wrappers: say so at once."""
    parts = [subject, *(subject.modules() if isinstance(subject, nn.Module) else ())]
    found = next((type(part) for part in parts if type(part).__module__.partition(".")[0] == "apex"), None)
    state = getattr(sys.modules.get("apex.amp._amp_state"), "_amp_state", None)
    active = getattr(getattr(state, "opt_properties", None), "enabled", False)
    if found is None and not active and not hasattr(subject, "_amp_stash"):
        return
    what = f"{found.__module__}.{found.__qualname__}" if found is not None else "apex.amp"
    raise UnsupportedOpError(
        f"{what} is not supported: apex's mixed precision and wrappers are given up upstream. Use "
        "torch.autocast around the forward pass and torch.amp.GradScaler (CUDA), torch.nn.SyncBatchNorm "
        "by auto_model(model, sync_bn=True), and torch's own optimizers"
    )
