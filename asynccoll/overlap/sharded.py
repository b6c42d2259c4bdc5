"""An optimizer whose work is divided among the ranks: gradients scattered, parameters gathered before use.

    optimizer = ac.overlap.shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()    # sends buckets; each of n ranks gets an n-th of their average
        await optimizer.step()             # updates that part, and sends it to the others
                                           # ... each module's forward waits for its own parameters

A step sends the bytes of one all_reduce, and needs an n-th of the optimizer's state and arithmetic.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
(stage 1). Built on the public operations alone.
"""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from asynccoll.errors import CollectiveMismatchError, InvalidArgumentError, still_pending
from asynccoll.host.call_site import Spot, caller
from asynccoll.host.misfits import check, check_options, fitting
from asynccoll.ops.collectives import all_gather
from asynccoll.ops.scopes import backward_lane
from asynccoll.overlap import norms
from asynccoll.overlap.accepted import (
    check_initialized,
    check_norm,
    check_not_ddp,
    check_not_unscaled,
    check_scaler,
    check_state,
    check_step,
    check_unaliased,
    check_whole,
    named_in,
    refused,
    replaced_in,
    share_out,
    told_to_peers,
    unique,
)
from asynccoll.overlap.arrivals import Arrival
from asynccoll.overlap.divergence import checksum_text
from asynccoll.overlap.elementwise import check_elementwise
from asynccoll.overlap.gradients import OPTIONS
from asynccoll.overlap.hyperparameters import hyperparameters_of, states_of
from asynccoll.overlap.parameters import first_that_differs, start_alike
from asynccoll.overlap.pending import Methods, Pending
from asynccoll.overlap.rows import check_dense
from asynccoll.overlap.shards import ShardBucket, ShardReducer, waiting_hooks
from asynccoll.overlap.states import (
    State,
    gathered_apart,
    loaded,
    options_of,
    parts_of,
    saved_states,
    whole_of,
)
from asynccoll.overlap.steps import Steps, run, run_blocking
from asynccoll.overlap.wrapping import Wrapping
from asynccoll.waiting.forgotten import warn

__all__ = ["ShardedOptimizer", "shard_optimizer"]


class ShardedOptimizer(Wrapping):
    """An optimizer whose state and arithmetic are divided among the ranks; made by ``shard_optimizer``.

    Without an event loop, call ``wait()`` on what is awaited here: ``optimizer.step().wait()``.

    - ``await step()`` waits for this rank's part of the gradients, updates its part of the parameters and
      starts sending it. Each module's forward, and its ``state_dict()``, wait for the module's parameters.
      Before other code reads them (a weight used without its module's forward),
      ``await optimizer.gathered()``.
    - ``await step(closure)`` runs ``closure`` (zero_grad, forward, backward) first and returns its loss.
    - ``await clip_grad_norm_(max_norm)`` before the step clips by the norm over all ranks.
    - With a gradient scaler: ``scaler.scale(loss).backward()``, ``await unscale_(scaler)`` if you clip,
      ``await step(scaler=scaler)``, ``scaler.update()``. An overflow on one rank skips the step on all.
    - Gradients accumulate until ``zero_grad()`` (or the model's), as in torch. To skip a step after
      ``reduced()`` or ``clip_grad_norm_()``, zero the gradients, or call ``skip()``, in the same way on
      every rank.
    - A step is ``await reduced()``, ``wrapped.step()`` and ``gather()``: call these yourself to run code
      in between. Once reduced, the gradients are in ``wrapped.param_groups``, and ``.grad`` of the model's
      parameters is zero.
    - ``wrapped`` is the optimizer. Its parameters are flat parts, one per bucket, and its
      ``state_dict()`` is that of this rank's parts; ``await full_state_dict()`` is that of the whole
      optimizer, which any number of ranks can load.
    - A parameter that no rank used has a gradient of zeros here, not None.

    ``close()`` (or leaving a ``with`` or ``async with`` block) removes the hooks; the parameters are complete
    afterwards.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        lane = options.setdefault("lane", "sharded")
        with told_to_peers("shard_optimizer", options.get("group"), backward_lane(lane)):
            check_options("shard_optimizer", options, OPTIONS)
            names = _check(model, optimizer)
        self.wrapped = optimizer
        #: the optimizer's original parameters, by group; a whole state numbers them in this order
        self._groups = [list(given["params"]) for given in optimizer.param_groups]
        self._parameters = list(chain.from_iterable(self._groups))
        if options.pop("init_sync", True):
            tail = {"group": options.get("group"), "timeout": options.get("timeout")}
            start_alike(model, lane=backward_lane(lane), **tail)
        if options.get("broadcast_buffers") is True:
            options["broadcast_buffers"] = model
        self.gradients: ShardReducer = ShardReducer(self._groups, init_sync=False, **options)
        share_out(self._shards)
        gradients = self.gradients
        self._methods = Methods(
            "ShardedOptimizer",
            "optimizer",
            f"this optimizer ({type(optimizer).__name__}, sharded)",
            lambda: gradients.news,
            gradients.forgotten,
        )
        self._named = {names[id(x)]: (x, x.requires_grad) for x in self._parameters}
        self._describe = named_in(model)
        self._replaced = replaced_in(model, self._parameters)
        self._agreed = False  # whether the ranks have agreed on whether a gradient overflowed
        self._loaded = False  # whether a state was loaded since they last compared what they follow in a step
        self._tail: dict[str, Any] = {
            "group": options.get("group"),
            "lane": backward_lane(f"{lane}/parameters"),
            "timeout": options.get("timeout"),
        }
        self._lane = lane
        self._take_over(dict(optimizer.state), optimizer.param_groups)
        hooks = list(waiting_hooks(model, self.gradients.buckets))
        arrivals = [bucket.arrival for bucket in self.gradients.buckets]
        self._unhook = weakref.finalize(self, _dropped, hooks, arrivals, caller(1))
        self._unhook.atexit = False

    def _take_over(self, states: dict[Any, State], groups: Sequence[Mapping[str, object]]) -> None:
        """Replace the optimizer's parameters by this rank's parts, and its state by that of the parts.

        ``states``: the state of whole parameters, by parameter. ``groups``: the options of each group.
        """
        parts: defaultdict[Any, State] = defaultdict(dict)
        for index, given in enumerate(self.wrapped.param_groups):
            buckets = self.gradients.of_group(index)
            given["params"] = [bucket.shard for bucket in buckets]
            for bucket in buckets:
                own = [states.get(parameter, {}) for parameter in bucket.parameters]
                if any(own):
                    named = partial(self._named_of, bucket)
                    parts[bucket.shard] = parts_of(
                        own, bucket.cut, bucket.values, bucket.rank, bucket.size, named, groups[index]
                    )
        self._of_frozen = {x: state for x, state in states.items() if not x.requires_grad}
        self.wrapped.state = parts

    def _named_of(self, bucket: ShardBucket, index: int) -> str:
        return self._describe(bucket.parameters[index])

    def __repr__(self) -> str:
        return f"<ShardedOptimizer of {type(self.wrapped).__name__}: {self.gradients!r}>"

    # Once per step

    def step(self, closure: Callable[[], object] | None = None, *, scaler: object = None) -> Pending[Any]:
        """Wait for the gradients of this rank's part, update it, and start sending it.

        After an await that was cut short, call it with the same ``closure``: another one begins a new step.
        """
        check_step(closure, scaler)
        return self._methods.resumed(("step", closure), lambda: self._step(closure, scaler))

    def _step(self, closure: Callable[[], object] | None, scaler: Any) -> Steps[object]:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_not_unscaled(self, scaler)
        yield from self._reduce()
        if scaler is None:
            self.wrapped.step()
        else:
            yield from self._agree()
            scaler.step(self.wrapped)
        self._gather()
        return loss

    def reduced(self) -> Pending[None]:
        """Wait until this rank's part of the gradients is reduced. Call it equally often on every rank."""
        return self._methods.resumed(("reduced",), self._reduce)

    def _reduce(self) -> Steps[None]:
        """Wait until the gradients are reduced, and refuse a step in which the ranks would not step alike.

        A rank without new gradients cannot know whether others have some, so after a reduction the ranks ask
        each other, by the small message on the lane of the parameters by which they compare what their steps
        follow from. (On the lane of the gradients some may have sent their next buckets already.)

        If this rank refuses the step, perhaps alone, the others hear of it in the calls for which they wait.
        """
        gradients, wrong = self.gradients, self._wrong()
        compares = wrong is None and gradients.buckets[0].size > 1
        followed = self._followed(f"parameters written to: {gradients.written}") if compares else ""
        digest = zlib.crc32(followed.encode()) if followed else -1
        heard = all_gather(2 * digest + (wrong is not None or gradients.touched), **self._tail)
        heard.detach()  # it is not looked at if the gradients cannot be reduced
        if not gradients.rounds or any(said % 2 for said in (yield heard)):
            self._agreed = False
            told = wrong is not None and gradients.refuse_rest(wrong)
            try:
                yield gradients
            except InvalidArgumentError:
                if wrong is None or told:
                    raise
        if wrong is not None:  # the others have not heard of it, and hear that they differ
            yield refused(wrong, "reduced", self._tail["group"], self._tail["lane"])
        yield from gradients.gathered()  # for parameters that no forward has waited for
        if len({said // 2 for said in (yield heard)}) > 1:
            yield from self._compare()
        self._loaded = False

    def _followed(self, *parameters: str) -> str:
        """Return what the next step follows from, which must be the same on all ranks, in lines."""
        loaded = f"load_full_state_dict() called since the last step: {self._loaded}"
        return "\n".join([*hyperparameters_of(self.wrapped), loaded, *parameters, *states_of(self.wrapped)])

    def _compare(self) -> Steps[None]:
        """Refuse a step that would follow from different things on the ranks, and name the first of them.

        Parameters that were written to on some ranks only may be the same nevertheless: those of a checkpoint
        that one rank has loaded, and sent to the others.
        """
        sums = [
            f"the parameter {name!r} of the checksum {checksum_text(x)}"
            for name, (x, trained) in self._named.items()
            if trained
        ]
        if differing := first_that_differs((yield all_gather(self._followed(*sums), **self._tail))):
            raise CollectiveMismatchError(
                "the ranks would not step alike, and each one updates a part of the parameters: "
                f"{differing}. Have the same hyperparameters on every rank (step schedulers everywhere), and "
                "load the same checkpoint of model and optimizer; then call step() again"
            )

    def _wrong(self) -> InvalidArgumentError | None:
        """Return the error for what no step can use, or None; note which gradients were zeroed."""
        try:
            self._check_parameters()
            self.gradients.look_at_all()
        except InvalidArgumentError as error:
            return error
        return None

    def _check_parameters(self) -> None:
        """Refuse parameters changed since sharding: they would not be trained, or trained though frozen."""
        for name, (parameter, trained) in self._named.items():
            if parameter.requires_grad is not trained:
                was, change = ("frozen", "unfreeze") if parameter.requires_grad else ("trained", "freeze")
                raise InvalidArgumentError(
                    f"the parameter {name!r} was {was} when the optimizer was sharded, which its flat parts "
                    f"cannot follow: {change} it before sharding, or close() this optimizer and shard a new "
                    "one (full_state_dict() and load_full_state_dict() carry the state over)"
                )
        if name := self._replaced():
            raise InvalidArgumentError(
                f"the parameter {name!r} of the model was replaced after the optimizer was sharded (by "
                "load_state_dict(assign=True), say), and no step would reach the new one: load without "
                "assign=True, or before sharding"
            )
        for bucket in self.gradients.buckets:
            converted = bucket.converted()
            if converted is not None:
                raise InvalidArgumentError(
                    f"a parameter of shape {list(converted.shape)} has other memory than when the optimizer "
                    "was sharded (by model.to(...) or .data = ...), which no step would reach: convert the "
                    "model first, then shard the optimizer"
                )
        for index, given in enumerate(self.wrapped.param_groups):
            known = {id(bucket.shard) for bucket in self.gradients.of_group(index)}
            strange = [x for x in given["params"] if id(x) not in known]
            if strange:
                raise _added(self._describe(strange[0]))

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: the parameters are divided among the ranks once, when the optimizer is sharded."""
        check("param_group", param_group, Mapping, "a dict")
        given = param_group.get("params", [])
        first = given if isinstance(given, torch.Tensor) else next(iter(given), torch.empty(0, device="cpu"))
        # torch takes pairs of a name and a parameter, too.
        raise _added(self._describe(first[1] if isinstance(first, tuple) else first))

    def skip(self) -> None:
        """Skip this step, after ``reduced()`` or ``clip_grad_norm_()``; do so on every rank."""
        if not self.gradients.rounds:
            raise InvalidArgumentError(
                "skip() was called before the gradients were reduced: `await optimizer.reduced()` first, "
                "or other ranks would wait for this rank's"
            )
        self._methods.check_complete("skip()")
        self.zero_grad()
        self.gradients.stepped()

    def gather(self) -> None:
        """Start sending this rank's parts of the parameters, those of the first layers first."""
        self._methods.check_complete("gather()")
        self._gather()

    def _gather(self) -> None:
        self.gradients.gather(**self._tail)
        self.gradients.stepped()

    def gathered(self) -> Pending[None]:
        """Wait until every parameter has the value of the last step."""
        return self._methods.pending("gathered", self.gradients.gathered)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to None, or to zeros.

        Refused after a step whose wait was cut short: complete it first.
        """
        self._methods.check_finished("zero_grad()")
        self.gradients.news += 1
        for bucket in self.gradients.buckets:
            for parameter in bucket.parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    # Clipping and scaling

    @property
    def _shards(self) -> list[nn.Parameter]:
        return [bucket.shard for bucket in self.gradients.buckets]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Pending[torch.Tensor]:
        """Scale the gradients down so that their norm over all parameters is at most ``max_norm``.

        Returns the norm before that. If it is not finite, the gradients become NaN on every rank, so that a
        gradient scaler skips the step on all of them.
        """
        check_norm(max_norm, norm_type)
        given = ("clip_grad_norm_", max_norm, norm_type)
        return self._methods.resumed(given, lambda: self._clip(max_norm, norm_type))

    def _clip(self, max_norm: float, norm_type: float) -> Steps[torch.Tensor]:
        yield from self._reduce()
        norm = yield from norms.clip(self._shards, max_norm, norm_type, **self._tail)
        self._agreed = True
        return norm

    def unscale_(self, scaler: object) -> Pending[None]:
        """Call ``scaler.unscale_`` for this rank's parts, once all ranks agreed on whether one overflowed."""
        check_scaler(scaler)
        return self._methods.resumed(("unscale_", scaler), lambda: self._unscale(scaler))

    def _unscale(self, scaler: Any) -> Steps[None]:
        check_not_unscaled(self, scaler)
        yield from self._reduce()
        yield from self._agree()
        scaler.unscale_(self.wrapped)

    def _agree(self) -> Steps[None]:
        if not self._agreed:
            yield from norms.agree_on_overflow(self._shards, **self._tail)
            self._agreed = True

    # Checkpoints

    def full_state_dict(self) -> Pending[dict[str, object]]:
        """Return the state of the whole optimizer, the same on every rank; all of them call it together.

        It is what the optimizer's own ``state_dict()`` would be without sharding: one process, or any number
        of ranks, can load it. ``torch.save`` it on one rank, or ``torch.distributed.checkpoint.save`` it on
        all; ``format_utils.dcp_to_torch_save`` converts the latter to a file for ``torch.load``. (The
        ``load`` of ``torch.distributed.checkpoint`` fills only existing entries, and a new optimizer has no
        state.)
        """
        return self._methods.resumed(
            ("full_state_dict",), lambda: gathered_apart(self._lane, self._full_state_dict, **self._tail)
        )

    def _full_state_dict(self, **tail: object) -> Steps[dict[str, object]]:
        numbers = {id(x): number for number, x in enumerate(self._parameters)}
        states = {numbers[id(x)]: dict(state) for x, state in self._of_frozen.items()}
        for bucket in self.gradients.buckets:
            part = self.wrapped.state.get(bucket.shard)
            if part:
                whole = yield from whole_of(part, bucket.cut, bucket.values, **tail)
                states |= {numbers[id(x)]: state for x, state in zip(bucket.parameters, whole, strict=True)}
        groups = [
            {**options_of(given), "params": listed}
            for given, listed in zip(self.wrapped.param_groups, self._numbered(), strict=True)
        ]
        return {"state": dict(sorted(states.items())), "param_groups": groups}

    def _numbered(self) -> list[list[int]]:
        numbers = count()
        return [[next(numbers) for _ in group] for group in self._groups]

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole optimizer's state, from ``full_state_dict`` or torch's own.

        Nothing is sent. Load the parameters into the model, as usual. If parameters of one part have made
        different numbers of steps, all of them get the largest.

        Raises:
            InvalidArgumentError: the state has other parameter groups, parameters that are in no group, or
                other shapes; nothing is loaded.
        """
        check_state(state_dict, "param_groups")
        counts = [len(given["params"]) for given in state_dict["param_groups"]]
        expected = [len(group) for group in self._groups]
        if counts != expected:
            raise InvalidArgumentError(
                f"the state has parameter groups of {counts} parameters; expected {expected}, as in the "
                "optimizer that was sharded"
            )
        # torch.distributed.checkpoint turns the numbers into strings.
        found = {str(number): state for number, state in saved_states(state_dict).items()}
        states: dict[object, State] = {}
        for group, given in zip(self._groups, state_dict["param_groups"], strict=True):
            numbered = zip(group, map(str, given["params"]), strict=True)
            states |= {x: loaded(found.pop(number), x, given) for x, number in numbered if number in found}
        if found:
            raise InvalidArgumentError(
                f"the state has entries for parameters {sorted(found)}, which are in none of its groups: "
                "they would be lost"
            )
        self._take_over(states, state_dict["param_groups"])
        for given, saved in zip(self.wrapped.param_groups, state_dict["param_groups"], strict=True):
            given.update(options_of(saved))
        self._loaded = True

    def state_dict(self) -> NoReturn:
        """Refused: this rank has only the state of its parts of the parameters.

        Raises:
            InvalidArgumentError: always; it names the method to call instead.
        """
        raise InvalidArgumentError(
            "each rank has the state of its part of the parameters, which is of no use on another rank or "
            "to another number of ranks: save `await optimizer.full_state_dict()` (this part is "
            "optimizer.wrapped.state_dict())"
        )

    def load_state_dict(self, state_dict: object) -> NoReturn:
        """Refused, as ``state_dict`` is."""
        raise InvalidArgumentError(
            "load what full_state_dict() returned, or the state of a torch optimizer, with "
            "optimizer.load_full_state_dict(state)"
        )

    # Leaving

    def close(self) -> None:
        """Complete methods whose wait was cut short, wait for the parameters, and remove the hooks.

        If that fails, the hooks are removed anyway, unless the wait timed out while parameters are in flight
        (``pending`` of the error): then call ``close`` again.
        """
        run_blocking(self._closing())

    async def aclose(self) -> None:
        """Do what ``close`` does, without blocking the event loop."""
        await run(self._closing())

    def _closing(self) -> Steps[None]:
        try:
            yield from self._methods.rest()
            yield self.gathered()
        except Exception as error:
            if not still_pending(error):
                self._remove_hooks()
            raise
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        self._unhook()
        self._methods.close()
        self.gradients.close()

    def __enter__(self) -> ShardedOptimizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the block has raised: wait for nothing
            self._remove_hooks()

    async def __aenter__(self) -> ShardedOptimizer:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.aclose()
        else:
            self._remove_hooks()


@fitting
def shard_optimizer(model: nn.Module, optimizer: Optimizer, **options: object) -> ShardedOptimizer:
    """Divide the work of ``optimizer``: each of n ranks updates an n-th of the parameters of ``model``.

    >>> optimizer = ac.overlap.shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    >>> loss_fn(model(x), y).backward()     # gradients are sent during this
    >>> await optimizer.step()              # the parameters come back while the next forward runs

    For optimizers that treat every element alone (SGD, Adam, AdamW, Adagrad; not LAMB, LARS, Adafactor or
    Muon, which are refused after a trial): the parts are flat, and cross the boundaries of parameters.
    Parameter groups stay separate. All ranks start from the parameters of the group's first rank.

    Args:
        model: the module whose forward uses the parameters.
        optimizer: one that has parameters of ``model``. Its existing state is divided as well.
        options: those of ``ac.overlap_gradients`` (``op``, ``bucket_bytes``, ``group``, ``lane``, ...).

    Raises:
        InvalidArgumentError: the optimizer is not elementwise, or has parameters that are not the
            model's, or whose gradients are sparse; also as ``ac.overlap_gradients``. From backward, if it
            used a parameter that nothing had waited for. From ``step``, if a parameter was added, frozen or
            unfrozen since.
        CollectiveMismatchError: the ranks do not have the same parameters. From ``step``, on every rank: they
            have different hyperparameters, or only some have loaded a checkpoint. No rank has stepped then.

    Source: Rajbhandari et al., 2020; ``torch.distributed.optim.ZeroRedundancyOptimizer``.
    """
    return ShardedOptimizer(model, optimizer, **options)


# Making one


def _check(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """Refuse a model or an optimizer that cannot be sharded; returns the names of the parameters, by id."""
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            "shard_optimizer takes the module whose forward waits for the parameters, got "
            f"{type(model).__name__}: pass it even if the optimizer has only some of its parameters (two "
            "optimizers of one module need a lane each)"
        )
    check("the optimizer of shard_optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    check_initialized(model.parameters())
    check_whole(model.parameters())
    check_not_ddp(model, model.parameters())
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    for index, given in enumerate(optimizer.param_groups):
        if len(unique(given["params"])) < len(given["params"]):
            raise InvalidArgumentError(
                f"parameter group {index} has a parameter twice, which would be updated twice a step (a tied "
                "one?): pass model.parameters(), or leave it out of one of the lists"
            )
        for parameter in given["params"]:
            if id(parameter) not in known:
                raise InvalidArgumentError(
                    f"parameter group {index} has a parameter of shape {list(parameter.shape)} that is not "
                    "in the model, so no forward would wait for it: pass the module that has all of them"
                )
    check_dense(model, chain.from_iterable(given["params"] for given in optimizer.param_groups))
    check_unaliased(model.named_parameters())
    check_elementwise(optimizer)
    return known


def _added(parameter: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{parameter} was added after the optimizer was sharded, so no rank would "
        "train it: give the optimizer all of its parameters first, then shard it (full_state_dict() and "
        "load_full_state_dict() carry the state over)"
    )


def _dropped(hooks: list[Any], arrivals: list[Arrival], made: Spot) -> None:
    """Remove the hooks, unless parameters are being sent, for which the model's next forward has to wait.

    Waits for nothing, since the garbage collector may call this anywhere.
    """
    if any(arrival.work is not None and not arrival.has_failed for arrival in arrivals):
        warn(
            "a ShardedOptimizer was dropped while parameters were in flight: the model's forward and "
            "state_dict() wait for them, but other code may read old values. `await optimizer.gathered()` "
            "after the last step, or use it in a `with` or `async with` block",
            made.place,  # not the line that runs now: the garbage collector may drop it anywhere
        )
        return
    for arrival in arrivals:
        arrival.forget()
    for hook in hooks:
        hook.remove()
