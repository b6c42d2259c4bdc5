"""Conversion of an optimizer's state for whole parameters to that for this rank's parts, and back.

A state for whole parameters is what ``torch.optim.Optimizer.state_dict`` has; it does not depend on the
number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from asynccoll.errors import InvalidArgumentError
from asynccoll.flight import FULL_STATE
from asynccoll.ops.collectives import all_gather
from asynccoll.ops.scopes import backward_lane, close_lane
from asynccoll.overlap.steps import Steps

__all__ = [
    "State",
    "gathered_apart",
    "is_of",
    "is_shared",
    "loaded",
    "options_of",
    "parts_of",
    "saved_states",
    "whole_of",
]

T = TypeVar("T")

State = dict[str, object]
#: The names of such states in torch's optimizers. In others they may be vectors.
_SHARED = frozenset({"step", "mu_product", "eta", "mu"})
#: States of torch's optimizers (Rprop) whose elements begin with a hyperparameter, not with zero.
_BEGINS = {"step_size": "lr"}
#: Returns the parameters' views of a flat tensor, in their shapes.
Cut = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def gathered_apart(of: str, begin: Callable[..., Steps[T]], **call: Any) -> Steps[T]:
    """Run the steps of ``begin(**call)`` on a separate lane, named after the lane ``of``; then close it.

    If only one rank calls this, it waits there; from the lane's name errors can tell what the others did not
    call.
    """
    name = of + FULL_STATE
    result = yield from begin(**{**call, "lane": backward_lane(name)})
    close_lane(name, group=call.get("group"))
    return result


def options_of(group: Mapping[str, Any]) -> State:
    """Return a deep copy of a group's options: schedulers write to a learning rate that is a tensor."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def saved_states(state: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the saved states by parameter. torch.distributed.checkpoint leaves out an empty dict of them."""
    return state.get("state", {})  # type: ignore[no-any-return]  # of a file


def loaded(state: Mapping[str, object], parameter: torch.Tensor, options: Mapping[str, object]) -> State:
    """Return a saved state of ``parameter``, of a group with ``options``, in its dtype and on its device.

    As in torch's ``Optimizer.load_state_dict``, the number of steps is not converted, unless the optimizer
    keeps it on the parameter's device.
    """
    dtype = parameter.dtype if parameter.is_floating_point() else None
    kinds: dict[str, torch.dtype | None] = {"step": torch.float32}
    stays = not (options.get("fused") or options.get("capturable"))
    return {
        name: value.to(parameter.device, kinds.get(name, dtype))
        if isinstance(value, torch.Tensor) and not (name == "step" and stays)
        else value
        for name, value in state.items()
    }


def parts_of(
    states: Sequence[Mapping[str, Any]],
    cut: Cut,
    like: torch.Tensor,
    rank: int,
    size: int,
    named: Callable[[int], str],
    options: Mapping[str, Any],
) -> State:
    """Return this rank's part of the ``states`` of the parameters in a flat tensor laid out as ``like``.

    Parameters without a state (they never had a gradient) count as zeros, or as what a step begins with by
    the ``options`` of their group. ``named`` describes a parameter for errors, by its index.

    Raises:
        InvalidArgumentError: a state has another shape than its parameter, as that of another model.
    """
    shapes = [view.shape for view in cut(like)]
    part: State = {}
    for name in sorted({name for state in states for name in state}):
        values = [state.get(name) for state in states]
        fitting = [is_of(name, value, shape) for value, shape in zip(values, shapes, strict=True)]
        for index, value in enumerate(values):
            if not isinstance(value, torch.Tensor) or value.shape == shapes[index]:
                continue
            if value.dim() or any(fitting):  # else it is a number, which all elements share
                raise InvalidArgumentError(
                    f"{name!r} of {named(index)} has shape {list(value.shape)} in the state; expected shape "
                    f"{list(shapes[index])}: load the state of an optimizer of this model"
                )
        if any(fitting):
            dtype = next(value.dtype for value in values if isinstance(value, torch.Tensor))
            flat = torch.full_like(like, float(options.get(_BEGINS.get(name, ""), 0.0)), dtype=dtype)
            for view, value in zip(cut(flat), values, strict=True):
                if value is not None:
                    view.copy_(value)
            part[name] = flat.chunk(size)[rank].clone()
        else:
            part[name] = _copy(max(states, key=lambda state: _age(state, name)).get(name))
    return part


def is_of(name: str, value: object, shape: torch.Size) -> bool:
    """Whether a state has an element for each element of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == shape and not is_shared(name, value)


def is_shared(name: str, value: object) -> bool:
    """Whether a state is known to be one number for all elements, even if the parameter has only one."""
    return name in _SHARED and not (isinstance(value, torch.Tensor) and value.dim())


def _age(state: Mapping[str, Any], name: str) -> tuple[bool, float]:
    """Return whether there is a state of this name, and its steps: fewer if a parameter was not always used.

    All numbers are taken from the oldest state, because some grow with the steps and some fall.
    """
    return state.get(name) is not None, float(state.get("step", 0))


def whole_of(part: Mapping[str, object], cut: Cut, like: torch.Tensor, **call: Any) -> Steps[list[State]]:
    """Gather the parts of all ranks; returns the state of each parameter in the flat tensor ``like``."""
    states: list[State] = [{} for _ in cut(like)]
    for name in sorted(part):
        value = part[name]
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            flat = yield all_gather(value, **call)
            for state, view in zip(states, cut(flat), strict=True):
                state[name] = view.clone()
        else:
            for state in states:
                state[name] = _copy(value)
    return states


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value
