"""Checkpoints of sharded layers: whole parameters by name, which any number of ranks can load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import check
from asynccoll.ops.collectives import all_gather, broadcast, broadcast_object
from asynccoll.overlap.accepted import check_state
from asynccoll.overlap.gathering import Layer, Shard
from asynccoll.overlap.states import State, loaded, options_of, parts_of, saved_states, whole_of
from asynccoll.overlap.steps import Steps
from asynccoll.runtime.process import get_rank

__all__ = ["load_optimizer_state", "load_parameters", "optimizer_state", "parameters"]


def _named(layers: Sequence[Layer]) -> Iterator[tuple[Shard, list[str]]]:
    """Yield each shard with the full names of its parameters."""
    for layer in layers:
        for shard in layer.shards:
            yield shard, [f"{layer.name}.{name}" for name in shard.names]


def _others(layer: Layer) -> dict[str, Any]:
    """Return the state other than parameters, by its names in the layer: buffers and extra state."""
    with layer.unsaved.lifted():
        return {name: x for name, x in layer.module.state_dict().items() if name not in layer.names}


def _is_buffer(name: str, x: object) -> bool:
    """Whether ``x`` is a buffer. What a module's ``get_extra_state`` returns may be a tensor of any shape."""
    return isinstance(x, torch.Tensor) and name.rpartition(".")[2] != "_extra_state"


def _shapes(layers: Sequence[Layer]) -> Iterator[tuple[str, torch.Size | None]]:
    """Yield the full name of each parameter, buffer and extra state, and the shape of the first two."""
    for shard, names in _named(layers):
        yield from zip(names, shard.shapes, strict=True)
    for layer in layers:
        for name, x in _others(layer).items():
            yield f"{layer.name}.{name}", x.shape if _is_buffer(name, x) else None


def parameters(layers: Sequence[Layer], **call: Any) -> Steps[dict[str, Any]]:
    """Gather the whole parameters, and broadcast the other state of the group's first rank, all by name.

    Ranks may have different buffers, and different extra state.
    """
    found: dict[str, Any] = {}
    for shard, names in _named(layers):
        flat = yield all_gather(shard.own.detach(), **call)
        found |= {name: x.clone() for name, x in zip(names, shard.cut(flat), strict=True)}
    others = {f"{layer.name}.{name}": x for layer in layers for name, x in _others(layer).items()}
    buffers = {name: x for name, x in others.items() if _is_buffer(name, x)}
    first = 0 if call.get("group") is None or not others else (yield all_gather(get_rank(), **call))[0]
    if buffers:
        found |= yield broadcast(buffers, src=first, **call)
    if extra := {name: x for name, x in others.items() if name not in buffers}:
        found |= yield broadcast_object(extra, src=first, **call)
    for layer in layers:
        found |= {f"{layer.name}.{name}": found[f"{layer.name}.{own}"] for name, own in layer.names.items()}
    return found


def load_parameters(layers: Sequence[Layer], state_dict: Mapping[str, Any]) -> None:
    """Set this rank's parts of the parameters, and the other state, from ``state_dict``."""
    check_state(state_dict)
    for name, shape in _shapes(layers):  # checks all of them before anything is written
        if name not in state_dict:
            raise InvalidArgumentError(f"{name!r} is missing from the state")
        if shape is not None and state_dict[name].shape != shape:
            said = f"{name!r} has shape {list(state_dict[name].shape)} in the state"
            raise InvalidArgumentError(f"{said}; expected shape {list(shape)}")
    with torch.no_grad():
        for shard, names in _named(layers):
            shard.own.copy_(shard.part(shard.join([state_dict[name] for name in names], shard.zeros())))
        for layer in layers:
            others = {name: state_dict[f"{layer.name}.{name}"] for name in _others(layer)}
            with layer.unsaved.lifted():
                layer.module.load_state_dict(others, strict=False)  # does not touch the emptied parameters


def optimizer_state(
    layers: Sequence[Layer], optimizer: Optimizer, **call: object
) -> Steps[dict[str, object]]:
    """Gather the state of whole parameters by name; returns it with the options of the parameter groups."""
    of = {id(shard.own): (shard, names) for shard, names in _named(layers)}
    states: dict[str, State] = {}
    groups: list[dict[str, Any]] = []
    for given in optimizer.param_groups:
        groups.append({**options_of(given), "params": []})
        for own in given["params"]:
            shard, names = _ours(of, own)
            groups[-1]["params"] += names
            whole = yield from whole_of(optimizer.state.get(own, {}), shard.cut, shard.zeros(), **call)
            states |= {name: state for name, state in zip(names, whole, strict=True) if state}
    return {"state": states, "param_groups": groups}


def load_optimizer_state(layers: Sequence[Layer], optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give the optimizer this rank's part of ``state``, and the options of its groups."""
    check("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    check_state(state, "param_groups")
    of = {id(shard.own): (shard, names) for shard, names in _named(layers)}
    listed = [
        [name for own in given["params"] for name in _ours(of, own)[1]] for given in optimizer.param_groups
    ]
    saved = [list(given["params"]) for given in state["param_groups"]]
    if listed != saved:
        raise InvalidArgumentError(
            f"the state has parameter groups of {saved}; expected {listed}, as in the optimizer"
        )
    parts: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for given, kept in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for own in given["params"]:
            shard, names = _ours(of, own)
            whole = [loaded(saved_states(state).get(name, {}), own, kept) for name in names]
            if any(whole):
                named = [f"the parameter {name!r}" for name in names].__getitem__
                parts[own] = parts_of(whole, shard.cut, shard.zeros(), shard.rank, shard.size, named, kept)
    optimizer.state = parts
    for given, kept in zip(optimizer.param_groups, state["param_groups"], strict=True):
        given.update(options_of(kept))


def _ours(of: Mapping[int, tuple[Shard, list[str]]], own: torch.Tensor) -> tuple[Shard, list[str]]:
    found = of.get(id(own))
    if found is None:
        raise InvalidArgumentError(
            f"the optimizer has a parameter of shape {list(own.shape)} that is not a part of these layers: "
            "pass an optimizer of `layers.parameters()` only, and save the others as usual"
        )
    return found
