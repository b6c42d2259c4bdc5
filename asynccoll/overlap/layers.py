"""Layers whose parameters are shared out over the ranks, and fetched while the layer before computes.

    layers = ac.overlap.shard_layers(model.blocks, ahead=1)
    async for layer in layers:
        x = layer(x)

Each rank keeps the n-th part of every layer. A loop over the layers gathers one while those before it
compute. Gradients arrive where the parts are: the backward of an all_gather is a reduce_scatter.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
(stage 3). Built on the public operations alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from asynccoll.errors import InvalidArgumentError
from asynccoll.ops import all_gather
from asynccoll.overlap.prefetch import check_ahead, prefetch
from asynccoll.runtime import get_rank, get_world_size
from asynccoll.work import Work

__all__ = ["GatheredLayer", "ShardedLayers", "shard_layers"]

_Tensors = dict[str, torch.Tensor]


class _Shard:
    """This rank's part of the parameters of one layer that have one dtype: a flat tensor and its plan."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], rank: int, size: int) -> None:
        first = named[0][1]
        self.shapes = {name: parameter.shape for name, parameter in named}
        self.counts = [parameter.numel() for _, parameter in named]
        padding = -sum(self.counts) % size
        flat = torch.cat([*(x.detach().reshape(-1) for _, x in named), first.new_zeros(padding).detach()])
        self.own = nn.Parameter(flat.chunk(size)[rank].clone(), requires_grad=first.requires_grad)

    def parameters(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each by name, as a view of all ranks' parts."""
        parts = torch.split(flat[: sum(self.counts)], self.counts)
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            yield name, part.view(shape)


class _Layer:
    """One module without its parameters, and the shards that they are in."""

    def __init__(self, module: nn.Module, rank: int, size: int) -> None:
        self.module = module
        kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module.named_parameters():
            kind = (parameter.dtype, parameter.device, parameter.requires_grad)
            kinds.setdefault(kind, []).append((name, parameter))
        self.shards = [_Shard(named, rank, size) for named in kinds.values()]
        for parameter in module.parameters():
            parameter.data = parameter.new_empty(0)  # its memory is what sharding is to save

    def fill(self, flats: list[torch.Tensor]) -> _Tensors:
        pairs = zip(self.shards, flats, strict=True)
        return dict(named for shard, flat in pairs for named in shard.parameters(flat))


class GatheredLayer:
    """A layer of ``ShardedLayers`` with all of its parameters, for as long as it is held: call it."""

    def __init__(self, module: nn.Module, parameters: _Tensors) -> None:
        self.module = module
        self.parameters = parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.module, self.parameters, args, kwargs)


class ShardedLayers(nn.Module):
    """Layers of which each rank keeps a part; ``shard_layers`` makes it.

    ``async for layer in layers:`` (or ``for``) yields each with all of its parameters, in order, while the
    next ``ahead`` are gathered; ``reversed(layers)`` goes from the last to the first. ``parameters()`` are
    this rank's parts, for an optimizer that treats every element alone (SGD, Adam, AdamW; not LAMB), and
    for ``state_dict()``; buffers stay in the layers. ``train()`` and ``eval()`` are the layers' as well.
    """

    def __init__(self, layers: Iterable[nn.Module], *, ahead: int, group: Any, lane: str) -> None:
        super().__init__()
        check_ahead(ahead)
        rank, size = get_rank(group), get_world_size(group)
        if size < 1:
            raise InvalidArgumentError(f"rank {get_rank()} is not in {group!r}, so it has no part of layers")
        modules = list(layers)
        _check_unshared(modules)
        # Not as submodules: their parameters are empty, and ours are the parts.
        self._layers = [_Layer(module, rank, size) for module in modules]
        self.shards = nn.ParameterList([shard.own for layer in self._layers for shard in layer.shards])
        self._ahead, self._group, self._lane = ahead, group, lane

    def train(self, mode: bool = True) -> ShardedLayers:
        """Switch the layers to training or, with ``mode=False``, to evaluation."""
        for layer in self._layers:
            layer.module.train(mode)
        return super().train(mode)

    def __len__(self) -> int:
        return len(self._layers)

    def __aiter__(self) -> AsyncIterator[GatheredLayer]:
        return self._gathered(self._layers).__aiter__()

    def __iter__(self) -> Iterator[GatheredLayer]:
        return iter(self._gathered(self._layers))

    def __reversed__(self) -> prefetch[GatheredLayer]:
        return self._gathered(self._layers[::-1])

    def _gathered(self, layers: list[_Layer]) -> prefetch[GatheredLayer]:
        return prefetch((partial(self._start, layer) for layer in layers), ahead=self._ahead)

    def _start(self, layer: _Layer) -> Work[GatheredLayer]:
        parts = [shard.own for shard in layer.shards]
        work = all_gather(parts, group=self._group, lane=self._lane)
        return work.map(lambda flats: GatheredLayer(layer.module, layer.fill(flats)))


def shard_layers(
    layers: Iterable[nn.Module], *, ahead: int = 1, group: Any = None, lane: str = "layers"
) -> ShardedLayers:
    """Share the parameters of ``layers`` out over the ranks; a loop over them fetches ahead.

    >>> layers = ac.overlap.shard_layers(model.blocks, ahead=1)
    >>> optimizer = torch.optim.AdamW(layers.parameters())       # of this rank's parts
    >>> async for layer in layers:                               # or: for layer in layers
    ...     x = layer(x)                                         # the next layer is on its way
    >>> (loss_fn(x, y) / ac.get_world_size()).backward()

    The ranks start from the same parameters (``broadcast_parameters``). The layers are taken over: their own
    parameters are empty afterwards. Gradients are those of the sum of all ranks' losses, so divide by the
    number of ranks for a mean. In training a layer's full parameters live until its backward; without
    gradients (``torch.no_grad()``) until the loop goes on, which bounds memory to ``ahead + 1`` layers.

    Args:
        layers: modules that share no parameters.
        ahead: how many layers are gathered while one is used.
        group, lane: as in every operation; backward communicates on ``<lane>/backward``.

    Raises:
        InvalidArgumentError: two layers share a parameter; ``ahead`` cannot be; this rank is not in
            ``group``.
    """
    return ShardedLayers(layers, ahead=ahead, group=group, lane=lane)


def _check_unshared(modules: list[nn.Module]) -> None:
    seen: dict[int, int] = {}
    for index, module in enumerate(modules):
        if not any(True for _ in module.parameters()):
            raise InvalidArgumentError(
                f"layer {index} ({type(module).__name__}) has no parameters to share out"
            )
        for parameter in module.parameters():
            other = seen.setdefault(id(parameter), index)
            if other != index:
                raise InvalidArgumentError(
                    f"layers {other} and {index} share a parameter, which would become two: leave the tied "
                    "layers out, or make one layer of both"
                )
