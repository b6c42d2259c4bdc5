"""Layers whose parameters are divided among the ranks, and gathered while the previous layer computes.

    layers = ac.overlap.shard_layers(model.blocks, ahead=1)
    async for layer in layers:
        x = layer(x)

Each of n ranks keeps an n-th of every layer (its *part*). A loop over the layers gathers the next ones while
one computes. Gradients are sent back to the parts while backward continues with earlier layers.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
(stage 3). Built on the public operations alone.
"""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from asynccoll import host
from asynccoll.errors import CollectiveMismatchError, InvalidArgumentError, InvalidCallError
from asynccoll.host.call_site import caller
from asynccoll.host.misfits import check, check_count, fitting, named_type
from asynccoll.host.uncopied import Uncopied
from asynccoll.memory.aliasing import has_memory
from asynccoll.ops.collectives import refuse
from asynccoll.ops.scopes import backward_lane, new_lane
from asynccoll.overlap import layerstates, norms
from asynccoll.overlap.accepted import (
    check_norm,
    check_not_ddp,
    check_place,
    check_scaler,
    check_unaliased,
    check_whole,
    ids_in,
    is_part,
    place_in,
    share_out,
    told_to_peers,
)
from asynccoll.overlap.elementwise import look_at_steps
from asynccoll.overlap.gathering import SAME_FROZEN, SAME_LOOPS, GatheredLayer, Layer, Pass, Scattering
from asynccoll.overlap.gradients import check_unreduced
from asynccoll.overlap.hyperparameters import hyperparameters_of, states_of
from asynccoll.overlap.pending import Methods, Pending
from asynccoll.overlap.prefetch import prefetch
from asynccoll.overlap.rows import check_dense
from asynccoll.overlap.scaling import agreed, scaled_together
from asynccoll.overlap.states import gathered_apart
from asynccoll.overlap.steps import Steps
from asynccoll.overlap.turns import SAME_STEPS, Turns
from asynccoll.overlap.unsaved import Unsaved
from asynccoll.runtime.process import get_rank
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike

__all__ = ["GatheredLayer", "ShardedLayers", "shard_layers"]

#: The lane of layers for which none is given.
_LANE = "layers"
_LOOP = (
    "sharded layers have their parameters only in a loop over them, which fetches each while those before "
    "it compute: `async for layer in layers: x = layer(x)` (or a plain `for`)"
)
#: The objects in use: two on one lane could gather parts of different layers in one call.
_live: weakref.WeakKeyDictionary[ShardedLayers, None] = host.per_process(weakref.WeakKeyDictionary)


class ShardedLayers(Uncopied, nn.Module):
    """Layers whose parameters are divided among the ranks; made by ``shard_layers``.

    ``async for layer in layers:`` (or ``for``) yields the layers in order, each with all of its parameters,
    while the next ``ahead`` are gathered; ``reversed(layers)`` yields them in reverse order. ``parameters()``
    are this rank's parts, for an optimizer that treats every element alone (SGD, Adam, AdamW; not LAMB);
    buffers stay in the layers. ``train()``, ``eval()``, ``to()``, ``double()`` and the like apply to the
    layers as well.

    - ``backward()`` sends each layer's gradients while it continues with earlier layers, and returns when the
      gradients of this rank's parts are complete. They are those of the sum of all ranks' losses.
    - ``await clip_grad_norm_(max_norm)`` clips by the norm over all ranks.
    - **Checkpoints**: ``await full_state_dict()`` (parameters and buffers, named as in an ``nn.ModuleList``)
      and ``await full_optimizer_state(optimizer)`` are the same on every rank, and any number of ranks can
      load them. ``state_dict()`` and ``load_state_dict()`` raise ``InvalidArgumentError``, here, in the
      layers that were passed, and in modules that contain either.
    - **Ranks must run the same loops** over the layers. Each gather sends the number of the layer: ranks
      that are at different layers get ``CollectiveMismatchError`` (on the CPU; on a device, where this check
      would have to wait, only with ``check="full"``). A rank whose loop ended early, by ``break`` or an
      exception, calls ``await finish_loop()``, which gathers the remaining layers, so that the ranks are
      in step again. Then either all ranks have to run backward, or none (agree on it with
      ``await ac.all_reduce(succeeded, op="and")``).
    - **A layer that a rank does not call** (LayerDrop, an early exit) has a gradient of zeros from that rank.
      The rank's backward has to reach at least one layer of the loop: a loop that ends without calling any,
      or only frozen ones, raises ``InvalidArgumentError``, unless under ``torch.no_grad()``. A rank without
      data calls one on an empty batch (``loss = layer(x[:0]).sum()``). If a rank's loss does not depend on
      the loop, or its backward raised, the others wait in theirs. Within seconds after that rank waits for
      something, too, they get a ``PeerRefusedError`` that names it, and it gets one in its next loop. (There
      is one exception: if it waits elsewhere and keeps the output of the loop, backward might still reach the
      loop. Then the others' timeout error names it.)

    Without an event loop, call ``wait()`` instead of ``await``: ``layers.clip_grad_norm_(1.0).wait()``.
    """

    _instead = (
        "save `await layers.full_state_dict()`, and load it with load_full_state_dict into newly sharded "
        "layers"
    )

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        ahead: int,
        group: GroupLike,
        lane: str | None,
        reshard_after_forward: bool,
    ) -> None:
        super().__init__()
        self._place = rank, size = place_in(group, "part of layers")
        with told_to_peers("shard_layers", group, _LANE if lane is None else lane):
            check_count("ahead", ahead, least=0)
            modules = _listed(layers)
            _check_unshared(modules)
            whole = nn.ModuleList(modules)
            emptied = list(whole.parameters())
            check_dense(whole, emptied)
            check_not_ddp(None, emptied)
            check_unreduced(emptied)
            if reshard_after_forward:
                _check_addresses(emptied)
        # The modules are not registered as submodules: their parameters are empty, and ours are the parts.
        # Objects for which no lane is given share one lane for gathering, where ``owner`` tells them apart.
        # Each has its own lane for backward, whose order autograd decides.
        of_backward = lane if lane is not None else new_lane(_LANE)
        owner = 0 if lane is not None else int(of_backward.removeprefix(_LANE))
        self._identity = get_rank(), lane
        self._check_lane(group)
        self._layers = [Layer(index, module, rank, size, owner) for index, module in enumerate(modules)]
        self.shards: nn.ParameterList = nn.ParameterList(
            [shard.own for layer in self._layers for shard in layer.shards]
        )
        self._size = size
        self._share_out(emptied)
        for module in modules:
            module.register_forward_pre_hook(_refuse_empty)
        look_at_steps()
        _look_at_steps()
        self._ahead = ahead
        self._call: dict[str, Any] = {"group": group, "lane": _LANE if lane is None else lane}
        self._backward: dict[str, object] = {"group": group, "lane": backward_lane(of_backward)}
        self._gathered_apart = partial(gathered_apart, of_backward, group=group)
        again: dict[str, Any] = {"group": group, "lane": backward_lane(f"{of_backward}/again")}
        self._again = again if reshard_after_forward else None
        self._turns = Turns(group, self._call["lane"], [backward_lane(of_backward), again["lane"]])
        self._scattering = Scattering(self._backward, self._turns, caller(1))
        self._loop: Iterator[Callable[[], Work[object]]] = iter(())
        self._methods = Methods("ShardedLayers", "layers", "these layers")
        Unsaved().refuse(self)
        _live[self] = None

    def _check_lane(self, group: GroupLike) -> None:
        """Refuse a lane that other layers of this rank use. Tells peers, which may have dropped theirs."""

        def taken() -> bool:
            return any(other._identity == self._identity for other in list(_live))

        _, lane = self._identity
        if lane is None or not taken():
            return
        gc.collect()  # others that were dropped may still be in a reference cycle, on some ranks only
        if taken():
            told = (
                f"other layers are sharded on the lane {lane!r}, where the gradients of both could cross "
                "between ranks: pass another lane, or none, and drop those others if they are no longer "
                "needed"
            )
            refuse(InvalidArgumentError(told), group=group, lane=lane, name="shard_layers")

    def train(self, mode: bool = True) -> ShardedLayers:
        """Switch the layers to training or, with ``mode=False``, to evaluation."""
        for layer in self._layers:
            layer.module.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ShardedLayers:
        """Apply ``fn`` (of ``to``, ``double`` and the like) to the parts and to the layers' buffers."""
        for layer in self._layers:
            layer.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        parts = iter(self.shards)
        for layer in self._layers:
            for shard in layer.shards:
                shard.own = next(parts)
        self._share_out()
        return self

    def _share_out(self, emptied: Iterable[torch.Tensor] = ()) -> None:
        """Register the parts for the checks of other helpers, and of gradient scalers."""
        share_out(self.shards, emptied)
        if self._size > 1:
            scaled_together(self.shards)

    def forward(self, *_: object, **__: object) -> NoReturn:
        """Refused: loop over the layers, and call each.

        Raises:
            InvalidCallError: always; it shows the loop.
        """
        raise InvalidCallError(_LOOP)

    if not TYPE_CHECKING:  # so that type checkers report indexing

        def __getitem__(self, index: object) -> NoReturn:
            raise InvalidCallError(_LOOP)

    def __len__(self) -> int:
        return len(self._layers)

    def __aiter__(self) -> AsyncIterator[GatheredLayer]:
        return self._gathered(self._layers).__aiter__()

    def __iter__(self) -> Iterator[GatheredLayer]:
        return iter(self._gathered(self._layers))

    def __reversed__(self) -> prefetch[GatheredLayer]:
        return self._gathered(self._layers[::-1])

    def _gathered(self, layers: list[Layer]) -> prefetch[GatheredLayer]:
        self._methods.check_complete("a loop over the layers")
        check_place(self._place, self._call["group"], "the sharding of these layers")
        wrong = self._wrong(layers)
        one = Pass(layers, partial(_start, self._call, self._scattering, wrong), self._again, self._turns)
        self._loop = one.starts()
        return _Loop(one, self._loop, ahead=self._ahead)

    def _wrong(self, layers: list[Layer]) -> InvalidArgumentError | None:
        """Return why no loop can begin here, if so: its first call is refused, since peers may wait in it."""
        shards = [shard for layer in layers for shard in layer.shards]
        try:
            for shard in shards:
                shard.follow()
            if torch.is_grad_enabled():
                _check_unhooked(self.shards)
                _check_unhooked(x for shard in shards for x in shard.emptied)
        except InvalidArgumentError as error:
            return error
        return None

    def finish_loop(self) -> Pending[None]:
        """Gather the layers that remain of a loop which ended early, as the other ranks do."""
        return self._methods.pending("finish_loop", self._finish_loop)

    def _finish_loop(self) -> Steps[None]:
        for start in self._loop:
            yield start()

    # Gradients

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Pending[torch.Tensor]:
        """Scale the gradients down so that their norm over all parameters is at most ``max_norm``.

        Returns the norm before that. If it is not finite, the gradients become NaN on every rank.
        """
        check_norm(max_norm, norm_type)
        given = ("clip_grad_norm_", max_norm, norm_type)
        shards = list(self.shards)
        return self._methods.resumed(given, lambda: norms.clip(shards, max_norm, norm_type, **self._backward))

    def unscale_(self, scaler: object, optimizer: torch.optim.Optimizer) -> Pending[None]:
        """Call ``scaler.unscale_(optimizer)`` after all ranks have agreed on whether one of them overflowed.

        Each rank sees only its part of the gradients, so call this before each ``scaler.step(optimizer)``:
        once, even if the optimizer has the parts of several such objects.
        """
        check_scaler(scaler)
        check("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        return self._methods.resumed(
            ("unscale_", scaler, optimizer), lambda: self._unscale(scaler, optimizer)
        )

    def _unscale(self, scaler: Any, optimizer: torch.optim.Optimizer) -> Steps[None]:
        own = [x for given in optimizer.param_groups for x in given["params"] if is_part(x)]
        yield from norms.agree_on_overflow(own, **self._backward)
        agreed(optimizer)
        scaler.unscale_(optimizer)

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step of ``optimizer``, if it has our parts, while a call cut short has not completed.

        Also warn of one that has the layers' own parameters, which are empty, in place of the parts: another
        optimizer may train these.
        """
        stepped = ids_in(optimizer)
        if not stepped.isdisjoint(map(id, self.shards)):
            self._methods.check_finished("a step of the optimizer")
        for shard in (shard for layer in self._layers for shard in layer.shards):
            left_out = shard.own.grad is not None and id(shard.own) not in stepped
            if left_out and not stepped.isdisjoint(map(id, shard.emptied)):
                warnings.warn(
                    f"this optimizer does not train layer {shard.place[0]}: it has the layer's own "
                    "parameters, which are empty since shard_layers, and not this rank's part of them. Make "
                    "it after shard_layers, of `layers.parameters()`, or leave out empty parameters",
                    RuntimeWarning,
                    stacklevel=4,  # who calls the optimizer's step, whose hook this is
                )
                return

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that ``optimizer`` has made, if it has our parts; the next loop compares it."""
        own = {id(x) for x in self.shards}
        stepped = ids_in(optimizer)
        if parts := [index for index, x in enumerate(self.shards) if id(x) in stepped]:
            self._turns.stepped(parts, [*hyperparameters_of(optimizer, own), *states_of(optimizer, own)])

    # Checkpoints

    def full_state_dict(self) -> Pending[dict[str, Any]]:
        """Return the state of the whole layers, the same on every rank; all ranks call it together.

        It is what an ``nn.ModuleList`` of the layers would return, and can load: parameters, and buffers and
        extra state (``get_extra_state``) of the group's first rank. The latter has to be plain data.
        """
        return self._methods.resumed(
            ("full_state_dict",),
            lambda: self._gathered_apart(partial(layerstates.parameters, self._layers)),
        )

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's parts of the parameters, buffers and extra state of whole layers. Nothing is sent.

        Raises:
            InvalidArgumentError: one of them is missing, or has another shape; nothing is loaded.
        """
        layerstates.load_parameters(self._layers, state_dict)

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer) -> Pending[dict[str, object]]:
        """Return the state of ``optimizer``, which has our ``parameters()``, for whole parameters by name.

        It is the same on every rank; all ranks call it together.
        """
        check("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        return self._methods.resumed(
            ("full_optimizer_state", id(optimizer)),
            lambda: self._gathered_apart(partial(layerstates.optimizer_state, self._layers, optimizer)),
        )

    def load_full_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
        """Give ``optimizer`` this rank's part of a state from ``full_optimizer_state``. Nothing is sent."""
        layerstates.load_optimizer_state(self._layers, optimizer, state)


def _refuse_empty(module: nn.Module, _: object) -> None:
    """Refuse a call of a layer outside of a loop, where its parameters are empty (a hook)."""
    if not torch.compiler.is_compiling():
        check_whole(itertools.islice(module.parameters(), 1))


@fitting
def shard_layers(
    layers: Iterable[nn.Module],
    *,
    ahead: int = 1,
    group: GroupLike = None,
    lane: str | None = None,
    reshard_after_forward: bool = False,
) -> ShardedLayers:
    """Divide the parameters of ``layers`` among the ranks; a loop over the layers gathers ahead of use.

    >>> layers = ac.overlap.shard_layers(model.blocks, ahead=1)
    >>> optimizer = torch.optim.AdamW(layers.parameters())       # of this rank's parts
    >>> async for layer in layers:                               # or: for layer in layers
    ...     x = layer(x)                                         # the next layer is on its way
    >>> (loss_fn(x, y) / ac.get_world_size()).backward()

    The ranks have to start from the same parameters (``broadcast_parameters``). Afterwards the layers' own
    parameters are empty. Gradients are those of the sum of all ranks' losses, so divide by the
    number of ranks for a mean. In training a layer's full parameters live until its backward; without
    gradients (``torch.no_grad()``), and with ``reshard_after_forward``, only until the loop continues, which
    bounds memory to ``ahead + 1`` layers.

    Args:
        layers: modules that share no parameters.
        ahead: how many layers are gathered while one is used.
        group: as in every operation.
        lane: backward communicates on ``<lane>/backward``. Without ``lane`` each object gets its own lane for
            backward; ranks have to make such objects in the same order.
        reshard_after_forward: do not keep a layer's full parameters for its backward, but gather them again
            there, on ``<lane>/again/backward``: less memory for half as much more communication.

    Raises:
        InvalidArgumentError: two layers share a parameter or memory; a parameter is sharded already, or has
            sparse gradients; ``ahead`` is invalid; this rank is not in ``group``; other layers have this
            lane.
    """
    return ShardedLayers(
        layers, ahead=ahead, group=group, lane=lane, reshard_after_forward=reshard_after_forward
    )


class _Loop(prefetch[GatheredLayer]):
    """Yields the layers of one loop; at its end checks that one was called (``Pass.check_used``)."""

    def __init__(self, one: Pass, starts: Iterator[Callable[[], Work[GatheredLayer]]], *, ahead: int) -> None:
        super().__init__(starts, ahead=ahead)
        self._pass = one

    def _next(self) -> tuple[Work[GatheredLayer]] | None:
        work = super()._next()
        if work is None:
            self._pass.check_used()
        return work

    def _explain(self, error: CollectiveMismatchError) -> None:
        """Add the advice to the error of a backend that compares calls, which knows nothing about layers."""
        if not any(advice in str(error) for advice in (SAME_FROZEN, SAME_LOOPS, SAME_STEPS)):
            error.args = (f"{error}\n{SAME_LOOPS}",)


@functools.cache
def _look_at_steps() -> None:
    """Have the layers look at each optimizer that steps from now on."""
    register_optimizer_step_pre_hook(_check_step)
    register_optimizer_step_post_hook(_note_step)


def _check_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for layers in list(_live):
        layers.check_step(optimizer)


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for layers in list(_live):
        layers.stepped(optimizer)


def _start(
    call: dict[str, Any],
    scattering: Scattering,
    wrong: InvalidArgumentError | None,
    layer: Layer,
    loop: Pass,
) -> Work[GatheredLayer]:
    """Start to gather the next layer of a loop. If it is refused, the one after it follows on every rank.

    ``wrong``: why the first one is.
    """
    compared = loop.compared()
    try:
        if compared is not None and wrong is not None:
            refuse(wrong, name="all_gather", **call)
        work = layer.gathered(compared, **call)
    except Exception:
        loop.expect(layer, scattering.lane)
        raise
    loop.expect(layer, scattering.lane)
    return work.map(lambda flats: layer.filled(flats, loop, scattering))


def _listed(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers as a list; refuse anything else, such as the model that has them."""
    iterable = isinstance(layers, Iterable) and not isinstance(layers, (torch.Tensor, torch.optim.Optimizer))
    modules = list(layers) if iterable else []
    if not iterable or not all(isinstance(one, nn.Module) for one in modules):
        raise InvalidArgumentError(
            f"shard_layers takes the layers that a loop calls one after the other, got {named_type(layers)}: "
            "pass those of the model, shard_layers(model.blocks), say"
        )
    return modules


def _check_unhooked(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse hooks on parts, and on the layers' own parameters.

    Autograd calls the former when it reaches a layer, before its gradient is reduced, and the latter never.
    """
    if any(x._backward_hooks or x._post_accumulate_grad_hooks for x in parameters):
        raise InvalidArgumentError(
            "a parameter of the sharded layers has a hook (register_hook, or "
            "register_post_accumulate_grad_hook, as for an optimizer that steps in backward), which would "
            "run before its gradient is there, or never, if the parameter is the layer's own: remove it, and "
            "use the gradients of `layers.parameters()` after backward()"
        )


def _check_addresses(parameters: Sequence[torch.Tensor]) -> None:
    """Refuse parameters without addresses, by which saved views of a layer's parameters are recognized."""
    if not all(map(has_memory, parameters)):
        raise InvalidArgumentError(
            "reshard_after_forward=True identifies parameters in backward by their addresses, and tensors "
            "on an XLA device have no addresses: leave it out"
        )


def _check_unshared(modules: list[nn.Module]) -> None:
    seen: dict[int, int] = {}
    for index, module in enumerate(modules):
        if not any(True for _ in module.parameters()):
            raise InvalidArgumentError(f"layer {index} ({type(module).__name__}) has no parameters to shard")
        for parameter in module.parameters():
            other = seen.setdefault(id(parameter), index)
            if other != index:
                raise InvalidArgumentError(
                    f"layers {other} and {index} share a parameter, which would become two: leave the tied "
                    "layers out, or make one layer of both"
                )
    check_whole(nn.ModuleList(modules).parameters())
    check_unaliased(nn.ModuleList(modules).named_parameters())
