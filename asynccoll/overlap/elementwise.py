"""Checks that an optimizer treats every element alone, so that it can be given parts of flat tensors.

Its class does not tell, so the optimizer is tried out on a few numbers, as whole parameters and as flat
parts, each part alone, as a rank has it. The distances that the numbers move are compared, not the numbers:
with a small learning rate all of them stay near where they were.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asynccoll import host
from asynccoll.errors import InvalidArgumentError
from asynccoll.overlap.accepted import is_part
from asynccoll.overlap.states import State, is_of

__all__ = ["check_elementwise", "look_at_steps"]

_SHAPES = ((3, 4), (4,))
_TRIES = 2
#: The learning rate of a trial: with 0, as at the start of a schedule, nothing would move.
_RATE = 0.1


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose steps on flat parts differ from those on whole parameters."""
    kind = type(optimizer).__name__
    try:
        try:
            alike = _moves_alike(optimizer, torch.float64, 1e-12)
        except Exception:  # some have float32 state, whatever dtype their parameters have
            alike = _moves_alike(optimizer, torch.float32, 1e-6)
    except Exception as error:  # some optimizers refuse vectors, or a step without a closure
        raise InvalidArgumentError(
            f"{kind} cannot be sharded over the ranks: tried on flat parts of parameters, it raised "
            f"{type(error).__name__}: {error}. Shard an elementwise optimizer (SGD, Adam, AdamW, Adagrad, "
            "...), or use ac.overlap_gradients with this one"
        ) from error
    if not alike:
        raise InvalidArgumentError(
            f"{kind} is not elementwise (its results on flat parts of the parameters differ from those on "
            "whole ones), so it cannot be sharded over the ranks: shard an elementwise one (SGD, Adam, "
            "AdamW, Adagrad, ...), or use ac.overlap_gradients with this one"
        )


def _moves_alike(optimizer: Optimizer, dtype: torch.dtype, atol: float) -> bool:
    """Whether steps in ``dtype`` move flat parts as they move whole parameters, up to rounding."""
    whole, parts = _twins(dtype)
    start = _flat(whole)
    for given in optimizer.param_groups:
        states = (_pattern(optimizer.state[x], x) for x in given["params"] if x in optimizer.state)
        pattern = next(states, {})
        _try_out(optimizer, given, pattern, whole)
        for part in parts:
            _try_out(optimizer, given, pattern, [part])
    return torch.allclose(_flat(whole) - start, _flat(parts) - start, rtol=1e-3, atol=atol)


#: The optimizers that were checked before a step, with the number of parameters that they had then.
_seen: weakref.WeakKeyDictionary[Optimizer, int] = host.per_process(weakref.WeakKeyDictionary)


@functools.cache
def look_at_steps() -> None:
    """From now on, check each optimizer that has parts of sharded layers before its first step."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: object) -> None:
    count = sum(len(given["params"]) for given in optimizer.param_groups)
    if _seen.get(optimizer) == count:
        return
    if any(is_part(x) for given in optimizer.param_groups for x in given["params"]):
        check_elementwise(optimizer)
    _seen[optimizer] = count


def _flat(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.detach().reshape(-1) for x in parameters])


def _twins(dtype: torch.dtype) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the same values and gradients as whole parameters and as flat parts across their boundaries."""
    generator = torch.Generator().manual_seed(1)
    count = sum(torch.Size(shape).numel() for shape in _SHAPES)
    values, gradients = torch.randn((2, count), generator=generator, device="cpu", dtype=dtype)
    sizes = [torch.Size(shape).numel() for shape in _SHAPES]
    half = count // 2
    whole = _with_gradients(values.split(sizes), gradients.split(sizes), _SHAPES)
    parts = _with_gradients(values.split(half), gradients.split(half), ((half,), (half,)))
    return whole, parts


def _with_gradients(
    values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[nn.Parameter]:
    made = []
    for value, gradient, shape in zip(values, gradients, shapes, strict=True):
        parameter = nn.Parameter(value.clone().view(shape))
        parameter.grad = gradient.clone().view(shape)
        made.append(parameter)
    return made


def _try_out(
    optimizer: Optimizer,
    given: Mapping[str, object],
    pattern: Mapping[str, object],
    parameters: list[nn.Parameter],
) -> None:
    """Make steps of a copy of ``optimizer`` on ``parameters``, with the options of the group ``given``.

    ``pattern`` is the state of one of the group's parameters, or empty; the copy gets states like it.
    """
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # set by a scheduler, to a function that steps ``optimizer`` itself
    options = {name: _here(value) for name, value in given.items() if name not in {"params", "param_names"}}
    if "lr" in options:
        lr = options["lr"]
        options["lr"] = torch.full_like(lr, _RATE) if isinstance(lr, torch.Tensor) else _RATE
    if "capturable" in options:
        options["capturable"] = False  # it is for device graphs, and the copy steps on the CPU
    twin.param_groups = [{**options, "params": parameters}]
    twin.state = defaultdict(dict)
    for hooks in [name for name in vars(twin) if name.endswith("_hooks")]:
        setattr(twin, hooks, OrderedDict())
    for parameter in parameters:
        if pattern:
            twin.state[parameter] = {name: _alike(value, parameter) for name, value in pattern.items()}
    for _ in range(_TRIES):
        twin.step()


def _pattern(state: Mapping[str, object], parameter: torch.Tensor) -> State:
    """Return the state, with each value of the parameter's shape, which may be 0-d, as a vector."""
    return {
        name: value.reshape(-1)
        if isinstance(value, torch.Tensor) and is_of(name, value, parameter.shape)
        else value
        for name, value in state.items()
    }


def _alike(value: object, parameter: torch.Tensor) -> object:
    """Return a state for ``parameter`` like ``value``: a number, or a tensor of the parameter's shape."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return _here(value)
    return torch.full_like(parameter, value.flatten()[0].real.item() if value.numel() else 0.0)


def _here(value: object) -> object:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
