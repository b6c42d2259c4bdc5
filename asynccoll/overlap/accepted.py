"""Checks of the models, groups and options that are passed to this package's helpers, and their errors.

Knows nothing about reducers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from numbers import Real
from typing import Any, NoReturn

import torch
from torch.nn.parameter import is_lazy

from asynccoll.errors import AsyncCollError, InvalidArgumentError
from asynccoll.host.misfits import check_count, misfit, named_type
from asynccoll.host.timeouts import check_timeout
from asynccoll.memory.aliasing import may_overlap
from asynccoll.ops.collectives import refuse
from asynccoll.runtime.process import get_rank, get_world_size
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike

__all__ = [
    "check_arguments",
    "check_initialized",
    "check_norm",
    "check_not_ddp",
    "check_not_unscaled",
    "check_place",
    "check_scaler",
    "check_state",
    "check_step",
    "check_unaliased",
    "check_whole",
    "ddp_models",
    "failed",
    "ids_in",
    "is_part",
    "module_with_buffers",
    "named_in",
    "place_in",
    "refused",
    "replaced_in",
    "scaler_told",
    "share_out",
    "source_of",
    "tensors_of",
    "told_to_peers",
    "unique",
]


@contextmanager
def told_to_peers(name: str, group: GroupLike, lane: str) -> Iterator[None]:
    """Notify the peers of an error in the block, which checks the arguments of ``name``.

    Their arguments may be accepted, and then they wait for this rank on ``lane``.
    """
    try:
        yield
    except AsyncCollError as error:
        refuse(error, group=group, lane=lane, name=name)


def refused(error: AsyncCollError, name: str, group: GroupLike, lane: str) -> Work[Any]:
    """Refuse a call on ``lane`` for which the peers wait, and return a work that fails with ``error``."""
    try:
        refuse(error, group=group, lane=lane, name=name)
    except AsyncCollError as told:
        return failed(told)


def failed(error: AsyncCollError) -> Work[Any]:
    """Return a work that fails with ``error``, in place of that of a call that this rank has refused."""
    error = error.with_traceback(None)  # its frames refer to what keeps the work

    def fail() -> NoReturn:
        raise error

    work: Work[Any] = Work((), fail)
    work.detach()
    return work


#: The DDP models that ``auto_model`` has made. Others are unknown: torch keeps no list.
ddp_models: weakref.WeakSet[torch.nn.parallel.DistributedDataParallel] = weakref.WeakSet()


def check_not_ddp(model: object, parameters: Iterable[torch.Tensor] = ()) -> None:
    """Refuse a model wrapped in DDP, or its parameters: two reductions would write the same gradients."""
    ours = {id(parameter) for parameter in parameters}
    wrapped = any(id(parameter) in ours for ddp in list(ddp_models) for parameter in ddp.parameters())
    if wrapped or isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise InvalidArgumentError(
            "DistributedDataParallel, which auto_model wraps models in, reduces the gradients of its model "
            "itself: use the model without it, or have asynccoll send its buckets (ac.overlap.ddp_hook)"
        )


#: By their ids: this rank's parts of sharded layers (``shard_layers``) and of sharded optimizers, and the own
#: parameters of sharded layers, which are empty now.
_parts: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_emptied: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def share_out(parts: Iterable[torch.Tensor], emptied: Iterable[torch.Tensor] = ()) -> None:
    """Note parts, and what they were made of if that is empty, so that ``check_whole`` refuses them."""
    _parts.update((id(x), x) for x in parts)
    _emptied.update((id(x), x) for x in emptied)


def is_part(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is this rank's part of sharded layers, or of a sharded optimizer."""
    return _parts.get(id(parameter)) is parameter


def check_whole(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse what was sharded: it is empty, or a part, which differs between ranks."""
    for parameter in parameters:
        if is_part(parameter):
            raise InvalidArgumentError(
                f"a parameter of shape {list(parameter.shape)} is this rank's part of sharded layers "
                "(shard_layers) or of a sharded optimizer (shard_optimizer); other ranks have other parts, "
                "which must not be broadcast, averaged or compared, and its gradient is already reduced: "
                "pass only the other modules or parameters"
            )
        if _emptied.get(id(parameter)) is parameter and not parameter.numel():
            raise InvalidArgumentError(
                "a parameter is empty, because its layers are sharded (shard_layers): call them in a loop "
                "over what shard_layers returned, and train the parameters of that; layers that share a "
                "parameter belong in one module"
            )


def check_initialized(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parameters of lazy modules that have no shape yet."""
    if any(is_lazy(parameter) for parameter in parameters):
        raise InvalidArgumentError(
            "a parameter of a lazy module has no shape yet: run one forward with an example first"
        )


def check_arguments(
    parameters: list[torch.Tensor],
    op: str,
    bucket_bytes: int,
    first_bucket_bytes: int,
    reduce_dtype: torch.dtype | None,
    timeout: float | None,
) -> None:
    """Refuse parameters and options that ``overlap_gradients`` cannot use."""
    if not parameters:
        raise InvalidArgumentError("there is no parameter with requires_grad=True, so nothing to reduce")
    if computed := [list(x.shape) for x in parameters if not x.is_leaf]:
        raise InvalidArgumentError(
            f"a tensor of shape {computed[0]} was computed from others (as by .to()), so backward leaves no "
            "gradient in it: pass the original parameters, or x.detach().requires_grad_()"
        )
    if op not in ("avg", "sum"):
        raise InvalidArgumentError(f"op must be 'avg' or 'sum' for gradients, got {op!r}")
    check_count("bucket_bytes", bucket_bytes)
    check_count("first_bucket_bytes", first_bucket_bytes)
    _check_reduce_dtype(reduce_dtype)
    check_timeout(timeout)


def place_in(group: GroupLike, what: str) -> tuple[int, int]:
    """Return this rank's index in ``group`` and the group's size; refuse a non-member: it has no ``what``."""
    rank, size = get_rank(group), get_world_size(group)
    if size < 1:
        raise InvalidArgumentError(
            f"rank {get_rank()} is not in {group!r}, so it has no {what} there; guard the call "
            "with `ac.get_rank(group) >= 0`"
        )
    return rank, size


def check_place(made: tuple[int, int], group: GroupLike, what: str) -> None:
    """Refuse to use ``what`` in a world it was not ``made`` for: averages, or parts, would be wrong."""
    now = get_rank(group), get_world_size(group)
    if now != made:
        raise InvalidArgumentError(
            f"{what} was made on rank {made[0]} of {made[1]}, but this is rank {now[0]} of {now[1]}: make "
            "it after ac.initialize(), and make a new one (after close()) in another world"
        )


def source_of(
    model: torch.nn.Module | Iterable[torch.Tensor] | Callable[[], Iterable[torch.Tensor]],
) -> Callable[[], Iterable[torch.Tensor]]:
    """Return a function that returns the current parameters of ``model``, frozen ones too."""
    if isinstance(model, torch.nn.Module):
        return model.parameters
    if callable(model) and not isinstance(model, type):
        return lambda: unique(tensors_of(model()))
    parameters = unique(tensors_of(model))  # type: ignore[arg-type]  # refuses a class
    return lambda: parameters


def tensors_of(model: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters that were passed in place of a model; refuse anything else."""
    found = [] if _is_one(model) else [*model]
    if _is_one(model) or not all(isinstance(x, torch.Tensor) for x in found):
        told = (
            "pass the model, or its parameters (model.parameters()); to wrap an optimizer, use "
            "ac.async_optim(optimizer), whose step is awaited"
            if isinstance(model, torch.optim.Optimizer)
            else "pass the model itself, or a list of parameters (model.parameters())"
        )
        raise InvalidArgumentError(f"expected a torch.nn.Module, got {named_type(model)}: {told}")
    return found


def _is_one(given: object) -> bool:
    """Whether ``given`` is not a collection of parameters. A tensor is none, though it can be iterated."""
    return isinstance(given, (torch.Tensor, torch.optim.Optimizer)) or not isinstance(given, Iterable)


def unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each tensor once, as ``Module.parameters()`` does: a list may have tied parameters twice."""
    return list({id(x): x for x in tensors}.values())


def named_in(model: object) -> Callable[[torch.Tensor], str]:
    """Return a function that describes a parameter for errors: its name, if it has one, and its shape."""
    module = weakref.ref(model) if isinstance(model, torch.nn.Module) else None

    def named(parameter: torch.Tensor) -> str:
        whole = module() if module is not None else None
        names = [name for name, x in whole.named_parameters() if x is parameter] if whole is not None else []
        told = f"the parameter {names[0]!r}" if names else "a parameter"
        return f"{told} of shape {list(parameter.shape)}"

    return named


def ids_in(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ``id`` of each tensor that ``optimizer`` steps."""
    return {id(x) for given in optimizer.param_groups for x in given["params"]}


def replaced_in(model: object, parameters: Iterable[torch.Tensor]) -> Callable[[], str]:
    """Return a function that names one of ``parameters`` that the model has replaced by a new one, or "".

    ``load_state_dict(assign=True)`` replaces them, and so does ``model.to(...)`` to another kind of device.
    ``lm_head.weight = embedding.weight`` does not: it ties two of them.
    """
    mine = {id(x) for x in parameters}
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    places = [
        (weakref.ref(module), own, f"{prefix}.{own}".lstrip("."), x)
        for prefix, module in modules
        if not isinstance(module, torch.jit.ScriptModule)
        for own, x in module._parameters.items()
        if id(x) in mine
    ]

    def replaced() -> str:
        for module, own, name, x in places:
            there = module()
            now = x if there is None else there._parameters.get(own)
            if now is not None and id(now) not in mine:
                return name
        return ""

    return replaced


def module_with_buffers(model: object, given: object) -> torch.nn.Module | None:
    """Return the module whose buffers are broadcast, or None. ``given``: the option ``broadcast_buffers``."""
    if isinstance(given, torch.nn.Module):
        return given
    if not given:
        return None
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            "broadcast_buffers=True needs the module that has the buffers, but got only parameters: pass "
            "broadcast_buffers=model"
        )
    return model


def check_unaliased(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse different parameters that share memory: each would get its own memory, or be changed twice.

    ``a.weight.data = b.weight.data`` does this; ``a.weight = b.weight`` makes one parameter, which is fine.
    """
    there = [(name, x.detach()) for name, x in named if x.numel()]
    there.sort(key=lambda one: one[1].data_ptr())
    for (first, x), (second, y) in pairwise(there):
        if may_overlap(x, y):
            raise InvalidArgumentError(
                f"the parameters {first!r} and {second!r} share memory (by .data = ...) but are two "
                "parameters, and nothing keeps them shared: tie them as one parameter (a.weight = b.weight)"
            )


def check_step(closure: object, scaler: object = None) -> None:
    """Check the arguments of ``optimizer.step``: a closure, or None, and a gradient scaler, or None."""
    if closure is not None and not callable(closure):
        instead = "write step(scaler=scaler)" if _is_scaler(closure) else ""
        raise misfit("closure", "None or a function that returns the loss", closure, instead)
    if scaler is not None:
        check_scaler(scaler)


def check_scaler(scaler: object) -> None:
    if not _is_scaler(scaler):
        raise misfit("scaler", "a gradient scaler, such as torch.amp.GradScaler()", scaler)


def _is_scaler(given: object) -> bool:
    return hasattr(given, "unscale_") and hasattr(given, "step")


def check_norm(max_norm: object, norm_type: object) -> None:
    """Check the arguments of clipping: each is a number, or a tensor of one element."""
    for name, given in (("max_norm", max_norm), ("norm_type", norm_type)):
        is_number = isinstance(given, Real) or (isinstance(given, torch.Tensor) and given.numel() == 1)
        if not is_number:
            raise misfit(name, "a number", given)


def check_state(state: object, entry: str = "") -> None:
    """Check that ``state`` is a dict, as from ``state_dict()``, and has this ``entry``, if one is named."""
    if not (isinstance(state, Mapping) and (not entry or entry in state)):
        has = f"a dict with an entry {entry!r}" if entry else "a dict of tensors by name"
        raise misfit("the state", has, state)


def check_not_unscaled(optimizer: object, scaler: object) -> None:
    """Refuse a scaler on which ``unscale_`` was called with ``optimizer`` instead of the one it wraps.

    ``scaler.step`` gets the wrapped one, and would not know that its gradients are unscaled.
    """
    own = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    if own.get("found_inf_per_device"):  # which ``unscale_`` has written
        raise InvalidArgumentError(
            "scaler.unscale_(optimizer) has not waited for the gradients, and step would unscale them again: "
            "write `await optimizer.unscale_(scaler)` instead, and `await optimizer.step(scaler=scaler)`"
        )


def scaler_told(optimizer: str) -> str:
    """Return the text of the error for a scaler that would call ``step`` without awaiting it."""
    return (
        f"scaler.step({optimizer}) would call step() without awaiting it: write `await "
        f"{optimizer}.step(scaler=scaler)` instead, then scaler.update()"
    )


def _check_reduce_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidArgumentError(f"reduce_dtype must be a floating point dtype of torch, got {dtype!r}")
