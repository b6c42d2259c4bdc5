"""One layer whose parameters are divided among the ranks: its parts, gathering them, returning gradients.

A *shard* holds the parameters of one layer that share a dtype and device and are all trained or all frozen,
as a flat tensor that is cut into one *part* per rank. A *pass* is one loop over the layers. ``layers`` has
the loop itself, and ``turns`` finds out which backward will never reach a loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from asynccoll.errors import CollectiveMismatchError, InvalidArgumentError
from asynccoll.host.call_site import Spot, on_behalf_of
from asynccoll.memory.aligned import Layout
from asynccoll.ops.collectives import all_gather, reduce_scatter
from asynccoll.overlap.hooks import is_returned_at
from asynccoll.overlap.turns import Standing, Turn, Turns
from asynccoll.overlap.unsaved import Unsaved
from asynccoll.waiting.work import Work

__all__ = ["GatheredLayer", "Layer", "Pass", "Scattering", "Shard"]

Tensors = dict[str, torch.Tensor]

SAME_LOOPS = (
    "Every rank has to run the same loops over the layers; one whose loop ended early calls "
    "`await layers.finish_loop()`"
)
SAME_FROZEN = "Freeze and unfreeze the same layers on every rank"


class Shard:
    """This rank's part (``own``) of one shard of a layer, and the layout of the whole."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], rank: int, size: int, place: tuple[int, int]
    ) -> None:
        first = named[0][1]
        self.rank: int = rank
        self.size: int = size
        #: the layer's number, and the shard's number in the layer
        self.place = place
        self.names: list[str] = [name for name, _ in named]
        self.shapes: list[torch.Size] = [parameter.shape for _, parameter in named]
        self.layout: Layout = Layout(
            [parameter.numel() for _, parameter in named], first.element_size(), size
        )
        #: the layer's own parameters, which have no elements while the layers are sharded
        self.emptied: list[nn.Parameter] = [parameter for _, parameter in named]
        self._trained = first.requires_grad
        zeros = first.detach().new_zeros(self.layout.elements)
        whole = self.join([parameter.detach() for _, parameter in named], zeros)
        self.own: nn.Parameter = nn.Parameter(self.part(whole).clone(), requires_grad=first.requires_grad)

    def follow(self) -> None:
        """Freeze or unfreeze the part, if all the layer's own parameters were; refuse if only some were."""
        changed = [x.requires_grad is not self._trained for x in self.emptied]
        if not any(changed):
            return
        if not all(changed):
            name, how = self.names[changed.index(True)], "frozen" if self._trained else "unfrozen"
            raise InvalidArgumentError(
                f"the parameter {name!r} of layer {self.place[0]} was {how}, but others of that layer, "
                f"which share a part with it, were not ({self.names[changed.index(False)]!r}): change all "
                "of them, or do so before shard_layers"
            )
        self._trained = not self._trained
        self.own.requires_grad_(self._trained)

    def join(self, tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> torch.Tensor:
        """Copy ``tensors``, one per parameter, into ``flat``, which has all ranks' parts; return it."""
        for place, x in zip(self.layout.cut(flat), tensors, strict=True):
            place.copy_(x.reshape(-1))
        return flat

    def zeros(self) -> torch.Tensor:
        """Return a flat tensor of zeros, for all ranks' parts."""
        return self.own.new_zeros(self.own.numel() * self.size)

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a flat tensor of all parts."""
        return flat.chunk(self.size)[self.rank]

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of ``flat``, which has all ranks' parts, for each parameter."""
        places = self.layout.cut(flat)
        return [place.view(shape) for place, shape in zip(places, self.shapes, strict=True)]


class Layer:
    """One module whose parameters were emptied, and the shards that have them now."""

    def __init__(self, index: int, module: nn.Module, rank: int, size: int, owner: int = 0) -> None:
        """``owner``: the number of the ``ShardedLayers``, if several of them are gathered on one lane."""
        self.index = index
        self.owner = owner
        self.module = module
        kinds: dict[object, list[tuple[str, nn.Parameter]]] = {}
        for own_name, parameter in module.named_parameters():
            kind = (parameter.dtype, parameter.device, parameter.requires_grad)
            kinds.setdefault(kind, []).append((own_name, parameter))
        self.shards: list[Shard] = [
            Shard(x, rank, size, (index, place)) for place, x in enumerate(kinds.values())
        ]
        first = {id(parameter): own_name for own_name, parameter in module.named_parameters()}
        #: for each name of a parameter, the first of its names: tied ones have several
        self.names: dict[str, str] = {
            name: first[id(x)] for name, x in module.named_parameters(remove_duplicate=False)
        }
        for parameter in module.parameters():
            parameter.data = parameter.new_empty(0)  # frees the memory that sharding is to save
        self.unsaved: Unsaved = Unsaved()
        for one in module.modules():
            if any(True for _ in one.parameters(recurse=False)):
                self.unsaved.refuse(one)
        self._recurrent = [one for one in module.modules() if isinstance(one, nn.RNNBase)]

    @property
    def name(self) -> str:
        """Its name in an ``nn.ModuleList`` of the layers."""
        return str(self.index)

    def versions(self) -> list[int]:
        """Return a number for each shard that changes when its part is written to."""
        return [shard.own._version for shard in self.shards]

    def let_go(self) -> None:
        """Have torch's recurrent layers forget the weights with which ``functional_call`` has called them.

        They keep a list of these, which would keep alive the whole layer and the graph that gathered it.
        """
        for one in self._recurrent:
            for name, parameter in one.named_parameters(recurse=False):
                setattr(one, name, parameter)

    def gathered(self, turns: Turns | None = None, **call: Any) -> Work[list[torch.Tensor]]:
        """Start to gather all ranks' parts; the result is a flat tensor for each shard.

        Each rank also sends the number of the layer, since parts of different layers could have one shape,
        and which of its shards are trained, since only those have gradients to send.
        ``turns``: given for the first layer of a loop, where ranks compare how far their backwards have got.
        """
        standing = Standing() if turns is None else turns.standing()
        trained = sum(shard.own.requires_grad << place for place, shard in enumerate(self.shards))
        numbers = [[self.owner, self.index, trained, *standing]]
        number = torch.tensor(numbers, device=self.shards[0].own.device)
        parts = {f"layer {self.name}": [number, *(shard.own.detach() for shard in self.shards)]}
        return all_gather(parts, **call).map(partial(self._checked, turns))

    def _checked(self, turns: Turns | None, found: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
        ((numbers, *flats),) = found.values()
        # Checked on the CPU only: reading a number from a device waits for the device.
        rows = numbers.tolist() if numbers.device.type == "cpu" else []
        self._check([row[:2] for row in rows])
        self._check_trained([row[2] for row in rows])
        if turns is not None:
            turns.compare([Standing(*row[3:]) for row in rows])
        return flats

    def _check(self, of_ranks: list[list[int]]) -> None:
        if any(one != [self.owner, self.index] for one in of_ranks):
            owners = {owner for owner, _ in of_ranks}
            told = ", ".join(
                f"rank {rank} layer {index}" + (f" of shard_layers number {owner}" if len(owners) > 1 else "")
                for rank, (owner, index) in enumerate(of_ranks)
            )
            raise CollectiveMismatchError(
                f"the ranks (of the group) gathered different layers at the same time: {told}. {SAME_LOOPS}"
            )

    def _check_trained(self, of_ranks: list[int]) -> None:
        """Refuse a layer that is frozen on some ranks only, given which shards each rank trains, as bits."""
        for place, shard in enumerate(self.shards):
            frozen = [rank for rank, trained in enumerate(of_ranks) if not trained >> place & 1]
            if 0 < len(frozen) < len(of_ranks):
                raise CollectiveMismatchError(
                    f"the parameter {shard.names[0]!r} of layer {self.name} is frozen on ranks {frozen} (of "
                    "the group) and trained on the others, and gradients of different layers would be added "
                    f"up. {SAME_FROZEN}"
                )

    def filled(
        self,
        flats: list[torch.Tensor],
        loop: Pass,
        scattering: Scattering,
    ) -> GatheredLayer:
        """Return the layer with the parameters in ``flats``. Their gradients will be sent to the shards."""
        tensors: Tensors = {}
        for shard, flat in zip(self.shards, flats, strict=True):
            tensors |= zip(shard.names, shard.cut(scattering.of(shard, flat, loop)), strict=True)
        regather = loop.regathering(self, scattering)
        saving = nullcontext() if regather is None else Resharding(flats, regather).saving()
        return GatheredLayer(self, tensors, saving, loop)


class GatheredLayer:
    """A layer of ``ShardedLayers`` that has all of its parameters while you hold it. Call it."""

    def __init__(
        self, layer: Layer, parameters: Tensors, saving: AbstractContextManager[object], loop: Pass
    ) -> None:
        self.module: nn.Module = layer.module
        self._layer = layer
        self._parameters = parameters
        self._saving = saving
        self._loop = loop
        loop.held.add(self)

    @property
    def parameters(self) -> Tensors:
        """All of its parameters by name."""
        if torch.is_grad_enabled():
            self._loop.use(self._layer)
        return self._parameters

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            with self._saving:
                return functional_call(self.module, self.parameters, args, kwargs)
        finally:
            self._layer.let_go()


class _Returning:
    """Sends the gradients of one loop's layers, in the loop's reverse order on every rank.

    A gradient that autograd computes earlier than that is held back. For a layer that autograd does not reach
    (this rank has skipped it, or left the loop before it), zeros are sent at the end. So ranks that used
    different layers of one loop still make the same calls in the same order.
    """

    def __init__(self, loop: Pass, call: dict[str, Any]) -> None:
        self.loop = loop
        self._call = call
        self._expected = list(reversed(loop.expected))
        self._arrived: dict[Shard, torch.Tensor] = {}
        self.sent: list[tuple[Shard, Work[torch.Tensor]]] = []

    def bring(self, shard: Shard, gradient: torch.Tensor) -> None:
        """Take the gradient of a shard that backward has reached."""
        self._arrived[shard] = gradient

    def send(self) -> bool:
        """Send the gradients that have arrived and are next in order; returns whether all are sent."""
        for shard in self._expected[len(self.sent) :]:
            if shard not in self._arrived:
                return False
            self._send(shard, self._arrived.pop(shard))
        return True

    def send_all(self) -> None:
        """Send the rest at the end of backward, with zeros for shards that it has not reached."""
        for shard in self._expected[len(self.sent) :]:
            there = self._arrived.pop(shard, None)
            self._send(shard, shard.zeros() if there is None else there)

    def _send(self, shard: Shard, gradient: torch.Tensor) -> None:
        work = reduce_scatter(gradient.contiguous(), **self._call)
        work.detach()  # no warning if backward raises, in which case nothing waits
        self.sent.append((shard, work))
        self.loop.turn.owes[self._call["lane"]] -= 1


class _Running(dict["Pass", _Returning]):
    """The loops whose gradients one backward sends, in the order in which it reached them.

    ``loops`` and ``turns``: these, and the loops whose layers it has gathered again, such as frozen ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[Pass] = []
        self.turns: list[Turn] = []

    def reached(self, loop: Pass, lane: str) -> None:
        """Note that backward has reached ``loop``, whose gradients are sent on ``lane``."""
        if loop.turn not in self.turns:
            loop.turn.reached(self, loop.owed(lane))
            self.loops.append(loop)
            self.turns.append(loop.turn)


class Scattering:
    """Sends gradients back to the shards while backward is running.

    At the end of each backward, before ``backward()`` returns, autograd calls ``_end``, which waits for them.
    """

    def __init__(self, call: dict[str, Any], turns: Turns, spot: Spot) -> None:
        """``spot``: the line that made the layers."""
        self._call = call
        self.spot = spot
        self._turns = turns
        #: what each backward sends, by autograd's number of it. Only autograd's callback keeps the values
        #: alive, until backward ends or raises.
        self._running: WeakValueDictionary[int, _Running] = WeakValueDictionary()

    def of(self, shard: Shard, flat: torch.Tensor, loop: Pass) -> torch.Tensor:
        """Return ``flat`` with a graph that sends its gradient back to ``shard``, if the loop trains that."""
        if shard not in loop.trained:
            return flat
        with torch.enable_grad():
            whole: torch.Tensor = _Scatter.apply(shard.own, flat, shard, loop, self)  # type: ignore[no-untyped-call]
        return whole

    @property
    def lane(self) -> str:
        """The lane on which gradients are sent back."""
        return str(self._call["lane"])

    def send(self, shard: Shard, loop: Pass, gradient: torch.Tensor) -> None:
        """Send the gradient of a whole flat tensor, in order; ``_end`` gives the shard its part."""
        running = self.reached(loop)
        if loop not in running:
            running[loop] = _Returning(loop, self._call)
        running[loop].bring(shard, gradient)
        for returning in running.values():  # a loop sends nothing before earlier ones have sent everything
            if not returning.send():
                break

    def reached(self, loop: Pass) -> _Running:
        """Note that the running backward has reached ``loop``; returns what that backward sends.

        The first call in a backward refuses the remaining calls of earlier ones that raised, and has
        ``_end`` called at the end.
        """
        backward = torch._C._current_graph_task_id()
        running = self._running.get(backward)
        if running is None:
            self._turns.give_up_raised()
            running = self._running[backward] = _Running()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, running))
        running.reached(loop, self.lane)
        return running

    def now(self, shard: Shard, loop: Pass, gradient: torch.Tensor) -> torch.Tensor:
        """Wait for this rank's part of a gradient that is returned, or that keeps its graph, and return it.

        Before that, the ranks compare which layers they have called. A rank that skipped a layer would
        otherwise be a layer ahead of the others, or wait in another set of layers than they do.
        """
        own = torch.tensor([[*shard.place, *loop.uses()]], device=gradient.device)
        rows = all_gather(own, **self._call).wait().tolist()
        if any(row != rows[0] for row in rows):
            told = ", ".join(
                f"rank {rank} reached layer {layer} and has called {[i for i, one in enumerate(used) if one]}"
                for rank, (layer, _, *used) in enumerate(rows)
            )
            raise CollectiveMismatchError(
                f"the ranks (of the group) use different layers in one backward: {told}. Where gradients "
                "are returned (torch.autograd.grad) or keep their graph (create_graph=True), every rank has "
                "to call each layer"
            )
        return reduce_scatter(gradient, **self._call).wait()

    def _end(self, running: _Running) -> None:
        with torch.no_grad(), on_behalf_of(self.spot):
            for returning in running.values():
                returning.send_all()
                _end_loop(returning.loop)
            for loop in running.loops:
                if loop not in running:  # all of its layers that this rank has called are frozen
                    _end_loop(loop)
            for turn in running.turns:
                turn.ended()
            for loop, returning in running.items():
                with self._turns.waiting(loop.turn, self._call["lane"], running.turns):
                    for shard, work in returning.sent:
                        _accumulate(shard.own, work.wait())


def _end_loop(loop: Pass) -> None:
    loop.gather_rest()
    loop.turn.is_over = True


def _accumulate(own: nn.Parameter, part: torch.Tensor) -> None:
    if own.grad is None:
        own.grad = part
    else:
        own.grad += part


class _Scatter(torch.autograd.Function):
    """Passes on the gathered parameters of a shard; backward sends their gradient to the ranks' parts."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, flat: torch.Tensor, shard: Shard, loop: Pass, scattering: Scattering
    ) -> torch.Tensor:
        ctx.shard, ctx.loop, ctx.scattering = shard, loop, scattering
        return flat.view_as(flat)

    @staticmethod
    def backward(ctx: Any, *grads: object) -> object:
        with on_behalf_of(ctx.scattering.spot):
            # With create_graph=True, or in torch.autograd.grad: the gradient is needed immediately.
            if torch.is_grad_enabled() or is_returned_at(ctx.next_functions[0][0]):
                ctx.loop.turn.is_over = True
                return ctx.scattering.now(ctx.shard, ctx.loop, grads[0]), None, None, None, None
            ctx.scattering.send(ctx.shard, ctx.loop, grads[0])
        return None, None, None, None, None


class Pass:
    """One loop over the layers, in order or in reverse."""

    def __init__(
        self,
        layers: list[Layer],
        start: Callable[[Layer, Pass], Work[Any]],
        again: dict[str, Any] | None,
        turns: Turns,
    ) -> None:
        """``again``: group and lane on which backward gathers the layers again; None if it does not."""
        self._layers = layers
        #: Whether autograd records the loop, and the shards that get gradients. Decided once, by the mode in
        #: which the loop begins: each rank gathers a layer at another place in its program.
        self._records = torch.is_grad_enabled()
        self.trained: frozenset[Shard] = frozenset(
            shard for layer in layers for shard in layer.shards if self._records and shard.own.requires_grad
        )
        self._start = start
        self._call = again
        self._turns = turns
        self._turn: Turn | None = None
        #: the layers that were gathered, in order, and their shards for which gradients are expected
        self._gathered: list[Layer] = []
        self.expected: list[Shard] = []
        #: the layers that were called here with gradients enabled, which backward may therefore reach
        self.used: set[Layer] = set()
        #: its gathered layers that are still referenced, and may be called later
        self.held: WeakSet[GatheredLayer] = WeakSet()
        #: how many layers backward has gathered again, last layer first, and those of them not used yet
        self._again = 0
        self._under_way: dict[Layer, Work[list[torch.Tensor]]] = {}

    def starts(self) -> Iterator[Callable[[], Work[Any]]]:
        """Yield, for each layer, a function that starts to gather it; again, if Ctrl-C interrupted that."""
        while len(self._gathered) < len(self._layers):
            yield partial(self._start, self._layers[len(self._gathered)], self)

    @property
    def turn(self) -> Turn:
        """The loop as peers see it. It begins when the first layer is gathered."""
        # Not a cached_property: before Python 3.12, all ranks that are threads would share its lock, and
        # one that refuses calls here may wait for the others.
        if self._turn is None:
            self._turn = self._turns.begin(self)
        return self._turn

    def compared(self) -> Turns | None:
        """Return the loops' ``Turns`` before the first layer, where the ranks compare them; else None.

        Refuses what backwards that raised still owe, so that ranks compare what they have done after that.
        """
        _ = self.turn
        return None if self._gathered else self._turns

    def expect(self, layer: Layer, lane: str) -> None:
        """Note that ``layer`` is being gathered; if autograd records, expect its gradients on ``lane``."""
        if not self._gathered:
            self._turns.sent()
        self._gathered.append(layer)
        self.expected += [shard for shard in layer.shards if shard in self.trained]
        if self._records:
            self.turn.owes = self.owed(lane)

    def use(self, layer: Layer) -> None:
        """Note that ``layer`` is used with gradients enabled; refuse that if they would be lost."""
        if any(shard.own.requires_grad and shard not in self.trained for shard in layer.shards):
            raise InvalidArgumentError(
                f"layer {layer.name} is used with gradients enabled, but its loop began without them, and "
                "its parameters would silently get none: begin the loop with gradients enabled, or use the "
                "layer under torch.no_grad(), or freeze it (requires_grad_(False)) before the loop"
            )
        self.used.add(layer)

    def uses(self) -> list[bool]:
        """Return, for each layer by its number, whether it was called here with gradients enabled."""
        used = {layer.index for layer in self.used}
        return [index in used for index in range(len(self._layers))]

    def check_used(self) -> None:
        """Refuse a loop that ends without calling a trained layer: other ranks may wait for it in backward.

        The loop variable holds the last layer. If more layers are held, they may be called later.
        """
        kept = len(self.held) > 1 or len(self._gathered) == 1
        # Backward passes through a frozen layer without reaching the loop, unless it gathers it again.
        reaches = any(self._call or not self.trained.isdisjoint(layer.shards) for layer in self.used)
        if self.expected and not (reaches or kept) and self.expected[0].size > 1:
            raise InvalidArgumentError(
                "this rank has called no layer of the loop, or only frozen ones, so its backward does not "
                "reach the loop, and the other ranks would wait there for its zeros: call at least one that "
                "is trained, and let the loss depend on it (without data, on an empty batch: loss = "
                "layer(x[:0]).sum()); or, where no rank runs backward, loop under torch.no_grad()"
            )

    def regathering(self, layer: Layer, scattering: Scattering) -> Callable[[], list[torch.Tensor]] | None:
        """Return a function that gathers the parameters of ``layer`` again, or None if they are kept."""
        if self._call is None:
            return None
        return partial(self._regather, layer, self._call, scattering, layer.versions())

    def _regather(
        self, layer: Layer, call: dict[str, Any], scattering: Scattering, versions: list[int]
    ) -> list[torch.Tensor]:
        """Gather the parameters of ``layer`` again for its backward, and return them.

        Refuses to if they have changed since ``versions``: the gradient would be that of other parameters.

        Also starts to gather the layer before it, which backward needs next, and those after it that this
        rank has not needed, since other ranks may need them.
        """
        together = scattering.reached(self).turns
        if layer.versions() != versions:
            raise InvalidArgumentError(
                f"the parameters of layer {layer.name} have changed since its forward, as by an optimizer's "
                "step, and reshard_after_forward=True keeps no copy for this backward: run backward before "
                "the step, or leave that option out"
            )
        with on_behalf_of(scattering.spot):
            self._gather_down_to(self._gathered.index(layer) - 1, call)
            # If it was taken already, this is a second backward of the same graph.
            work = self._under_way.pop(layer) if layer in self._under_way else layer.gathered(**call)
        with self._turns.waiting(self.turn, call["lane"], together):
            return work.wait()

    def owed(self, lane: str) -> Counter[str]:
        """Return how many calls a backward that begins now will make, by lane; ``lane`` is for gradients."""
        gathers = {} if self._call is None else {self._call["lane"]: len(self._gathered) - self._again}
        return Counter({lane: len(self.expected), **gathers})

    def gather_rest(self) -> None:
        """At the end of backward, gather the layers not needed here, in step with ranks that needed them."""
        if self._call is not None:
            self._gather_down_to(0, self._call)
            self._under_way.clear()

    def _gather_down_to(self, index: int, call: dict[str, Any]) -> None:
        for wanted in self._gathered[::-1][self._again : len(self._gathered) - max(0, index)]:
            self._under_way[wanted] = wanted.gathered(**call)
            self._under_way[wanted].detach()
            self._again += 1
            self.turn.owes[call["lane"]] -= 1


#: The index of a flat tensor, and a view of it: shape, strides and offset.
_Where = tuple[int, torch.Size, tuple[int, ...], int | torch.SymInt]
#: Another tensor, and its version: with hooks, autograd itself does not notice that a tensor has changed.
_Kept = tuple[torch.Tensor, int]


class Resharding:
    """Has autograd save places in flat tensors, not views of them: backward gathers the tensors again."""

    def __init__(self, flats: list[torch.Tensor], regather: Callable[[], list[torch.Tensor]]) -> None:
        self._flats = {
            flat.untyped_storage().data_ptr(): (index, flat.dtype) for index, flat in enumerate(flats)
        }
        self._regather = regather
        self._again: list[torch.Tensor] = []

    def saving(self) -> saved_tensors_hooks:
        """Return the block in which autograd keeps no view of the flat tensors."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: torch.Tensor) -> _Kept | _Where:
        # A sparse tensor has no address. One that is conjugated or negated lazily, or of another dtype (the
        # real part of a complex parameter), takes more than a place in a flat tensor to describe.
        plain = x.layout is torch.strided and not (x.is_conj() or x.is_neg())
        found = self._flats.get(x.untyped_storage().data_ptr()) if plain else None
        if found is None or x.dtype is not found[1]:
            # Detached: an operation that saves its own result would keep itself, and all before it, alive.
            return x.detach(), x._version
        return found[0], x.shape, x.stride(), x.storage_offset()

    def _unpack(self, packed: _Kept | _Where) -> torch.Tensor:
        if len(packed) == 2:
            x, version = packed
            if x._version != version:
                raise InvalidArgumentError(
                    f"a tensor of shape {list(x.shape)} that backward of a layer needs was changed in place "
                    "after the layer's forward (as by x += y or x.relu_()): write x = x + y"
                )
            return x
        index, shape, stride, offset = packed
        if not self._again:
            self._again = self._regather()
        return self._again[index].as_strided(shape, stride, offset)
