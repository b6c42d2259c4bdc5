"""A model and its optimizer on one of many ranks: ``auto_model``, ``auto_optim``, ``async_optim``.

``auto_model`` and ``auto_optim`` follow ignite's rules: on torch's backends DDP reduces the gradients.
On the others (mpi, horovod, xla-tpu) ``auto_optim`` has ``backward`` average them before it returns, as with
DDP, so that clipping, scalers and accumulation work the same everywhere. ``async_optim`` averages them while
other tasks run, on every backend, and its step is awaited.

Built on the public operations alone.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from asynccoll.auto.data import DistributedProxySampler, auto_dataloader
from asynccoll.auto.place import Place, here
from asynccoll.errors import InvalidArgumentError, UnsupportedOpError
from asynccoll.host.misfits import check, check_options, fitting, misfit
from asynccoll.ops.collectives import broadcast_object
from asynccoll.ops.scopes import new_lane
from asynccoll.overlap import broadcast_parameters
from asynccoll.overlap.accepted import check_not_unscaled, check_scaler, check_step, check_whole, ddp_models
from asynccoll.overlap.asking import AskingReducer
from asynccoll.overlap.backward import BackwardReducer, earlier
from asynccoll.overlap.gradients import OPTIONS, check_unreduced
from asynccoll.overlap.pending import Methods, Pending
from asynccoll.overlap.steps import Steps
from asynccoll.overlap.wrapping import Wrapping

__all__ = [
    "AsyncOptimizer",
    "DistributedProxySampler",
    "async_optim",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "load_in_place",
]

#: An option that ``auto_optim`` ignores where backward averages: only Horovod's messages use the names.
_NAMES = "named_parameters"

O = TypeVar("O", bound=Optimizer)  # noqa: E741  # an optimizer


def auto_model(model: nn.Module, sync_bn: bool = False, **kwargs: object) -> nn.Module:
    """Return the model on this rank's device, ready to be trained by all ranks together.

    - gloo, nccl: ``DistributedDataParallel`` around it, after ``SyncBatchNorm`` conversion with
      ``sync_bn=True``.
    - horovod, mpi, xla-tpu: parameters and buffers become those of rank 0; ``auto_optim`` reduces the
      gradients.
    - a world of one with several GPUs: ``DataParallel``.
    - otherwise the model itself.

    Mixed precision is torch's: run the forward pass under ``torch.autocast``. Models of apex are refused.

    Args:
        model: any module.
        sync_bn: batch norm over the batches of all ranks, only on GPUs with torch's backends. Other backends
            warn, and on the CPU torch's ``DistributedDataParallel`` refuses it.
        kwargs: for the class that wraps the model.

    Raises:
        ValueError: ``device_ids`` among ``kwargs`` if this rank's device is a GPU; ``sync_bn`` on the CPU.
        InvalidArgumentError: DDP would be around a model whose gradients ``ac.overlap_gradients``,
            ``ac.async_optim`` or a sharded optimizer reduces already.
        UnsupportedOpError: apex is in the model.
    """
    check("the model of auto_model", model, nn.Module, "a torch.nn.Module", "auto_optim takes the optimizer")
    return model_for(here(), model, sync_bn, kwargs)


def model_for(place: Place, model: nn.Module, sync_bn: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Do what ``auto_model`` does, for a given place."""
    _refuse_apex(model)
    check_whole(model.parameters())
    if place.world_size > 1 and place.training.ddp:
        _check_parallel(place, model, kwargs)
    if not all(parameter.device == place.device for parameter in model.parameters()):
        move(model, place.device)
    if place.world_size == 1:
        if torch.cuda.device_count() > 1 and place.device.type == "cuda":
            place.log.info("Apply torch DataParallel on model")
            return nn.DataParallel(model, **kwargs)
        return model
    if not place.training.ddp:
        if sync_bn and any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
            warnings.warn(
                f"sync_bn=True has no effect on {place.backend}: SyncBatchNorm needs DistributedDataParallel "
                "on a torch backend (gloo, nccl); each rank normalises by its own batches",
                RuntimeWarning,
                stacklevel=3,
            )
        place.log.info("Broadcast the initial variable states from rank 0 to all other processes")
        broadcast_parameters(model).wait()
        return model
    return _parallel(place, model, sync_bn, kwargs)


def move(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` in place, and keep parameters tied: on XLA torch would make two of a shared one."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    model.to(device)
    for (first, name), *others in places.values():
        for module, other in others:
            setattr(module, other, getattr(first, name))


def _check_parallel(place: Place, model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what ``_parallel`` could not wrap, before the model is moved or its layers are replaced."""
    check_unreduced(model.parameters())
    if place.device.type == "cuda" and "device_ids" in kwargs:
        raise InvalidArgumentError(f"Argument kwargs should not contain 'device_ids', but got {kwargs}")


def _parallel(place: Place, model: nn.Module, sync_bn: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Return the model in torch's ``DistributedDataParallel``."""
    if sync_bn:
        place.log.info("Convert batch norm to sync batch norm")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
    if place.device.type == "cuda":
        place.log.info("Apply torch DistributedDataParallel on model, device id: %s", place.device.index)
        kwargs["device_ids"] = [place.device.index]
    else:
        place.log.info("Apply torch DistributedDataParallel on model")
    wrapped = nn.parallel.DistributedDataParallel(model, **kwargs)
    ddp_models.add(wrapped)
    return wrapped


def auto_optim(optimizer: O, **kwargs: object) -> O:
    """Return the optimizer, ready to step on the gradients of all ranks.

    - gloo, nccl, a world of one: unchanged (``auto_model``'s DDP reduces the gradients).
    - mpi, horovod, xla-tpu: buckets of gradients are sent while backward runs, and when ``backward`` returns
      every ``.grad`` is the average of all ranks', as with DDP (``kwargs`` are those of
      ``ac.overlap_gradients``). On xla-tpu the step then executes what was recorded; on horovod the
      optimizer's state becomes that of rank 0.
    - horovod, with Horovod's own options (``compression``, ``backward_passes_per_step``, ...): wrapped in its
      ``DistributedOptimizer``, whose rules apply: gradients are averaged in ``step``, or by
      ``optimizer.synchronize()`` before you read them.

    An optimizer that averages gradients has two additional methods: ``no_sync()``, a block in which backward
    accumulates on this rank only, and ``synchronize()``, which takes part in a step's average on a rank whose
    backward has not, because it has no data or raised. ``step`` does so by itself. Every optimizer has its
    own lane; ranks must make their optimizers in the same order.

    Raises:
        UnsupportedOpError: an optimizer of apex.
        InvalidArgumentError: another optimizer has some of the parameters, and has others, too. (If all of
            its parameters are in this optimizer, this one takes over.)
        CollectiveMismatchError: the ranks do not have the same parameters; from backward, a rank has run more
            backwards for a step than others.
    """
    if not hasattr(optimizer, "param_groups"):  # one of another library need not be torch's
        raise misfit(
            "the optimizer of auto_optim", "a torch.optim.Optimizer", optimizer, "auto_model takes the model"
        )
    return optim_for(here(), optimizer, kwargs)


def optim_for(place: Place, optimizer: O, kwargs: dict[str, object]) -> O:
    """Do what ``auto_optim`` does, for a given place."""
    _refuse_apex(optimizer)
    training = place.training
    replaced = earlier(_parameters_of(optimizer)())
    own = None
    if not kwargs.keys() <= {*OPTIONS, _NAMES}:
        own = cast("O | None", training.own_optimizer(optimizer, kwargs))
    if own is None:
        if not training.ddp and place.world_size > 1:
            _average_in_backward(optimizer, {name: value for name, value in kwargs.items() if name != _NAMES})
        training.adopt(optimizer)
    for other in replaced:
        other.close()
    if training.starts_as_first and place.world_size > 1:  # last: the ranks' parameters are compared above
        _take_over(optimizer if own is None else own)
    return optimizer if own is None else own


def _take_over(optimizer: Optimizer) -> None:
    """Give every rank the options and the state that ``optimizer`` has on rank 0.

    Horovod's function makes a step on ranks that have no state yet, and that decays their weights.
    """
    load_in_place(optimizer, broadcast_object(optimizer.state_dict()).wait())


def load_in_place(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state, and keep the dicts of the groups, which a scheduler writes to.

    Horovod's optimizer shares them with the one that it was made of. The list is that of a wrapped optimizer.
    """
    groups = optimizer.param_groups
    optimizer.load_state_dict(state)
    for group, taken in zip(groups, optimizer.param_groups, strict=True):
        group.update(taken)
    optimizer.param_groups[:] = groups


def _average_in_backward(optimizer: Optimizer, kwargs: dict[str, object]) -> None:
    """Have backward average the gradients of the optimizer's parameters, or ``step`` if none has run."""
    check_options("auto_optim", kwargs, OPTIONS)
    kwargs = {"lane": new_lane("auto_optim"), **kwargs}
    gradients = BackwardReducer(_parameters_of(optimizer), **kwargs)

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The arguments of ``step``, with the optimizer first, as torch passes them to a hook.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            gradients.synchronize()
            return None

        def averaged() -> Any:
            loss = closure()
            gradients.synchronize()
            return loss

        if len(args) > 1:
            return (args[0], averaged, *args[2:]), kwargs
        return args, {**kwargs, "closure": averaged}

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: gradients.stepped())
    # ``skip_synchronize`` is Horovod's, for programs that were written for its optimizer.
    methods = {"no_sync": gradients.no_sync, "synchronize": gradients.synchronize}
    vars(optimizer).update(methods, skip_synchronize=nullcontext)


def _parameters_of(optimizer: Optimizer) -> Callable[[], list[torch.Tensor]]:
    """Return a function that returns the parameters that the optimizer has now; none once it is gone.

    ``add_param_group`` may add some.
    """
    alive = weakref.ref(optimizer)

    def parameters() -> list[torch.Tensor]:
        found = alive()
        return [x for given in found.param_groups for x in given["params"]] if found is not None else []

    return parameters


# Awaited


class AsyncOptimizer(Wrapping):
    """An optimizer whose step awaits gradients that are sent while backward runs; made by ``async_optim``.

    Call ``await optimizer.step()``. Everything else is the wrapped optimizer's: ``zero_grad``,
    ``state_dict``, ``param_groups``; torch's schedulers accept it. ``close()`` (or leaving a ``with`` or
    ``async with`` block) removes the hooks. To read gradients before the step, as clipping does,
    ``await optimizer.reduced()``, on all ranks, even those without data. After that ``step`` asks all ranks
    whether any has run another backward since. With a gradient scaler: ``await optimizer.unscale_(scaler)``
    if you clip, ``await optimizer.step(scaler=scaler)``.
    """

    gradients: AskingReducer

    def __init__(self, optimizer: Optimizer, gradients: AskingReducer) -> None:
        self.wrapped = optimizer
        self.gradients = gradients
        whose = f"this optimizer ({type(optimizer).__name__}, awaited)"
        self._methods = Methods(
            "AsyncOptimizer", "optimizer", whose, lambda: gradients.news, gradients.forgotten
        )

    def __repr__(self) -> str:
        return f"<AsyncOptimizer of {type(self.wrapped).__name__}: {self.gradients!r}>"

    def step(self, closure: Callable[[], object] | None = None, *, scaler: object = None) -> Pending[Any]:
        """Update the parameters once the gradients of all ranks are averaged.

        ``closure`` recomputes the gradients and returns the loss, which the step returns. With a gradient
        ``scaler`` the step is skipped if gradients overflowed: on all ranks, since they have the same ones.

        Raises:
            UnsupportedOpError: a closure for an optimizer that calls it more than once (LBFGS): each call
                would have to be awaited. ``ac.auto_optim`` supports those.
        """
        check_step(closure, scaler)
        return self._methods.resumed(("step", closure), lambda: self._step(closure, scaler))

    def _step(self, closure: Callable[[], object] | None, scaler: Any) -> Steps[object]:
        loss = None
        if closure is not None:
            _refuse_many_closures(self.wrapped)
            with torch.enable_grad():
                loss = closure()
        check_not_unscaled(self, scaler)
        yield from self._reduce()
        if scaler is None:
            self.wrapped.step()
        else:
            scaler.step(self.wrapped)
        self.gradients.stepped()
        return loss

    def reduced(self) -> Pending[None]:
        """Wait until the gradients are the average of all ranks'. Call it equally often on every rank."""
        return self._methods.resumed(("reduced",), self._reduce)

    def unscale_(self, scaler: Any) -> Pending[None]:
        """Call ``scaler.unscale_`` on the averaged gradients, for clipping before ``step(scaler=scaler)``."""
        check_scaler(scaler)
        return self._methods.resumed(("unscale_", scaler), lambda: self._unscale(scaler))

    def _unscale(self, scaler: Any) -> Steps[None]:
        yield from self._reduce()
        scaler.unscale_(self.wrapped)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zeros. Refused after a step whose wait was cut short."""
        self._methods.check_finished("zero_grad()")
        self.gradients.news += 1
        self.wrapped.zero_grad(set_to_none)

    def _reduce(self) -> Steps[None]:
        if (yield from self.gradients.needed()):
            yield self.gradients

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._methods.close()
        self.gradients.close()

    def __enter__(self) -> AsyncOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AsyncOptimizer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


@fitting
def async_optim(optimizer: Optimizer, **kwargs: Any) -> AsyncOptimizer:
    """Return an optimizer whose ``step`` is awaited, and updates with the average of all ranks' gradients.

    >>> model = Net()
    >>> optimizer = ac.async_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> loss_fn(model(x), y).backward()     # sends gradients in buckets meanwhile
    >>> await optimizer.step()              # other tasks run until they are reduced

    For a plain model, on any backend; not for one that ``auto_model`` wrapped in DDP, which reduces the
    gradients itself.

    Args:
        optimizer: an optimizer of torch; its parameters' gradients are reduced.
        kwargs: those of ``ac.overlap_gradients`` (``op``, ``bucket_bytes``, ``group``, ``lane``, ...).
            Without a ``lane`` every optimizer has its own; ranks must make optimizers in the same order.

    Raises:
        InvalidArgumentError: ``optimizer`` is not an optimizer; also as ``ac.overlap_gradients``.
        UnsupportedOpError: an optimizer of apex.
    """
    check(
        "the optimizer of async_optim",
        optimizer,
        Optimizer,
        "a torch.optim.Optimizer",
        "pass torch.optim.AdamW(model.parameters()), say (for a model, use ac.overlap_gradients)",
    )
    check_options("async_optim", kwargs, OPTIONS)
    _refuse_apex(optimizer)
    kwargs = {"lane": new_lane("async_optim"), **kwargs}
    return AsyncOptimizer(optimizer, AskingReducer(_parameters_of(optimizer), **kwargs))


def _refuse_many_closures(optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOpError(
            "LBFGS calls its closure several times a step, and each call's gradients would have to be "
            "awaited: use DDP, or ac.auto_optim, where backward waits (on mpi, horovod and xla-tpu)"
        )


# apex


def _refuse_apex(subject: nn.Module | Optimizer) -> None:
    """Refuse apex, which patches models and optimizers in ways that fit none of these wrappers."""
    parts = [subject, *(subject.modules() if isinstance(subject, nn.Module) else ())]
    found = next((type(part) for part in parts if type(part).__module__.partition(".")[0] == "apex"), None)
    state = getattr(sys.modules.get("apex.amp._amp_state"), "_amp_state", None)
    active = getattr(getattr(state, "opt_properties", None), "enabled", False)
    if found is None and not active and not hasattr(subject, "_amp_stash"):
        return
    what = f"{found.__module__}.{found.__qualname__}" if found is not None else "apex.amp"
    raise UnsupportedOpError(
        f"{what} is not supported: apex's mixed precision and wrappers were abandoned upstream. Use "
        "torch.autocast around the forward pass and torch.amp.GradScaler (CUDA), torch.nn.SyncBatchNorm "
        "with auto_model(model, sync_bn=True), and torch's own optimizers"
    )
