"""One layer whose parameters are shared out: its parts, the whole of it, and the way back of its gradients.

Knows one layer at a time; the loop over them is ``layers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from asynccoll.ops import all_gather, reduce_scatter
from asynccoll.work import Work

__all__ = ["GatheredLayer", "Layer", "Pass", "Scattering", "Shard"]

Tensors = dict[str, torch.Tensor]


class Shard:
    """This rank's part of the parameters of one layer that have one dtype: a flat tensor and its plan."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], rank: int, size: int) -> None:
        first = named[0][1]
        self.rank, self.size = rank, size
        self.names = [name for name, _ in named]
        self.shapes = [parameter.shape for _, parameter in named]
        self.counts = [parameter.numel() for _, parameter in named]
        whole = self.join([parameter.detach() for _, parameter in named])
        self.own = nn.Parameter(self.part(whole).clone(), requires_grad=first.requires_grad)

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The flat tensor of all ranks' parts that holds ``tensors``, one for each parameter."""
        padding = tensors[0].new_zeros(-sum(self.counts) % self.size)
        return torch.cat([*(x.reshape(-1) for x in tensors), padding])

    def join_like(self) -> torch.Tensor:
        """A flat tensor of all ranks' parts, of zeros."""
        return self.own.new_zeros(self.own.numel() * self.size)

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor."""
        return flat.chunk(self.size)[self.rank]

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter, as a view of all ranks' parts."""
        parts = torch.split(flat[: sum(self.counts)], self.counts)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Layer:
    """One module without its parameters, and the shards that they are in."""

    def __init__(self, name: str, module: nn.Module, rank: int, size: int) -> None:
        self.name = name
        self.module = module
        kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for own_name, parameter in module.named_parameters():
            kind = (parameter.dtype, parameter.device, parameter.requires_grad)
            kinds.setdefault(kind, []).append((own_name, parameter))
        self.shards = [Shard(named, rank, size) for named in kinds.values()]
        first = {id(parameter): own_name for own_name, parameter in module.named_parameters()}
        #: every name of a parameter, and the one that it goes by here: tied ones have several
        self.names = {name: first[id(x)] for name, x in module.named_parameters(remove_duplicate=False)}
        for parameter in module.parameters():
            parameter.data = parameter.new_empty(0)  # its memory is what sharding is to save

    def filled(
        self,
        flats: list[torch.Tensor],
        scattering: Scattering,
        regather: Callable[[], list[torch.Tensor]] | None,
    ) -> GatheredLayer:
        """The layer with the parameters that ``flats`` hold, whose gradients go back to the shards."""
        tensors: Tensors = {}
        for shard, flat in zip(self.shards, flats, strict=True):
            tensors |= zip(shard.names, shard.cut(scattering.of(shard, flat)), strict=True)
        saving = nullcontext() if regather is None else Resharding(flats, regather).saving()
        return GatheredLayer(self.module, tensors, saving)


class GatheredLayer:
    """A layer of ``ShardedLayers`` with all of its parameters, for as long as it is held: call it."""

    def __init__(
        self, module: nn.Module, parameters: Tensors, saving: AbstractContextManager[object]
    ) -> None:
        self.module = module
        self.parameters = parameters
        self._saving = saving

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._saving:
            return functional_call(self.module, self.parameters, args, kwargs)


class Scattering:
    """The gradients that one backward has started to send back to the shards.

    Backward goes on meanwhile; autograd calls at its end, before ``backward()`` returns.
    """

    def __init__(self, call: dict[str, Any]) -> None:
        self._call = call
        #: by the backward that has sent them: one that raised never comes to its end
        self._out: dict[int, list[tuple[Shard, Work[torch.Tensor]]]] = {}

    def of(self, shard: Shard, flat: torch.Tensor) -> torch.Tensor:
        """``flat``, whose gradient will go back to ``shard``."""
        if not (torch.is_grad_enabled() and shard.own.requires_grad):
            return flat
        whole: torch.Tensor = _Scatter.apply(shard.own, flat, shard, self)  # type: ignore[no-untyped-call]
        return whole

    def send(self, shard: Shard, gradient: torch.Tensor) -> None:
        """Start reducing the gradient of a whole flat tensor; the shard gets its part at the end."""
        work = reduce_scatter(gradient.contiguous(), **self._call)
        work.detach()  # should backward raise
        backward = torch._C._current_graph_task_id()
        if backward not in self._out:
            self._out[backward] = []
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, backward))
        self._out[backward].append((shard, work))

    def now(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part, with a graph of its own, for a gradient that is to be differentiated again."""
        part: torch.Tensor = reduce_scatter(gradient, **self._call).wait()
        return part

    def _end(self, backward: int) -> None:
        with torch.no_grad():
            for shard, work in self._out.pop(backward, ()):
                part = work.wait()
                if shard.own.grad is None:
                    shard.own.grad = part
                else:
                    shard.own.grad += part

    def forget(self) -> None:
        """Leave aside what a backward that raised had sent."""
        self._out.clear()


class _Scatter(torch.autograd.Function):
    """The gathered parameters of a shard; their gradient goes back to where the shards are."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, flat: torch.Tensor, shard: Shard, scattering: Scattering
    ) -> torch.Tensor:
        ctx.shard, ctx.scattering = shard, scattering
        return flat.view_as(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return ctx.scattering.now(grads[0]), None, None, None
        ctx.scattering.send(ctx.shard, grads[0])
        return None, None, None, None


class Pass:
    """One loop over the layers, forward or backward: which comes after which."""

    def __init__(self, layers: list[Layer], start: Callable[[Layer, Pass], Work[Any]]) -> None:
        self._layers = layers
        self._start = start
        self._under_way: dict[str, Work[Any]] = {}

    def starts(self) -> Iterator[Callable[[], Work[Any]]]:
        """What gathers each layer."""
        return (partial(self._start, layer, self) for layer in self._layers)

    def again(self, layer: Layer, call: dict[str, Any]) -> list[torch.Tensor]:
        """The parameters of ``layer`` once more, for its backward; that of the layer before comes next."""
        index = self._layers.index(layer)
        for wanted in self._layers[max(0, index - 1) : index + 1][::-1]:
            if wanted.name not in self._under_way:
                parts = {f"layer {wanted.name}": [shard.own.detach() for shard in wanted.shards]}
                self._under_way[wanted.name] = all_gather(parts, **call)
                self._under_way[wanted.name].detach()
        flats: list[torch.Tensor]
        (flats,) = self._under_way.pop(layer.name).wait().values()
        return flats


#: Index of a flat tensor, and shape, strides and offset there.
_Where = tuple[int, torch.Size, tuple[int, ...], int | torch.SymInt]


class Resharding:
    """Saves where in a flat tensor something was instead of saving it; backward gathers the tensor again."""

    def __init__(self, flats: list[torch.Tensor], regather: Callable[[], list[torch.Tensor]]) -> None:
        self._addresses = {flat.untyped_storage().data_ptr(): index for index, flat in enumerate(flats)}
        self._regather = regather
        self._again: list[torch.Tensor] = []

    def saving(self) -> saved_tensors_hooks:
        """The block in which what autograd saves of the flat tensors is not kept."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: torch.Tensor) -> torch.Tensor | _Where:
        index = self._addresses.get(x.untyped_storage().data_ptr())
        return x if index is None else (index, x.shape, x.stride(), x.storage_offset())

    def _unpack(self, packed: torch.Tensor | _Where) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        index, shape, stride, offset = packed
        if not self._again:
            self._again = self._regather()
        return self._again[index].as_strided(shape, stride, offset)
