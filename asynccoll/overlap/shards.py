"""Parameters in flat memory of which each rank has a part (its *shard*), and the gradients of that part.

Knows nothing about optimizers, which are in ``sharded``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from asynccoll.errors import InvalidArgumentError, still_pending
from asynccoll.memory.aliasing import has_memory
from asynccoll.ops.collectives import all_gather, reduce_scatter
from asynccoll.overlap.accepted import ids_in
from asynccoll.overlap.arrivals import Arrival
from asynccoll.overlap.buckets import Bucket, Gradients, assign
from asynccoll.overlap.gradients import GradientReducer
from asynccoll.overlap.hooks import no_hook
from asynccoll.overlap.steps import Steps
from asynccoll.overlap.unawaited import BY_OPTIMIZER
from asynccoll.runtime.process import get_rank, get_world_size
from asynccoll.waiting.work import Work

__all__ = ["ShardBucket", "ShardReducer", "waiting_hooks"]


class ShardBucket(Bucket):
    """Parameters and their gradients in flat memory with one part for each rank, and this rank's part.

    The gradient of the part (``shard.grad``) accumulates over several reductions until the parameters' own
    gradients are zeroed, as in torch. ``.grad`` of a parameter has only what backward added on this rank
    since the last reduction. After a reduction it stays a view of the bucket, and is filled with negative
    zeros, to which adding is the same as to positive ones. Only the last element of a parameter that has
    several is positive zero. So a gradient that ``zero_grad`` has zeroed, in which all are positive, can be
    told from one that was scaled, clipped or negated, in which some are negative.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], rank: int, size: int) -> None:
        super().__init__(parameters, parts=size)
        self.rank: int = rank
        self.size: int = size
        self._versions = [view._version for view in self.views]
        self._zeroed = [True] * len(parameters)
        places = list(zip(self.layout.starts, self.layout.counts, strict=True))
        last = [start + count - 1 for start, count in places if count > 1]
        #: the versions that the last reduction left (``_versions`` follows later writes by backward)
        self._left = list(self._versions)
        #: views of the first element of each gradient
        self._firsts = [self.flat[start] if count else None for start, count in places]
        #: the indices in ``flat`` of the elements that a reduction leaves as positive zeros
        self._positive = torch.tensor(last, dtype=torch.int64, device=self.flat.device)
        self.values: torch.Tensor = torch.zeros_like(self.flat)
        for parameter, view in zip(parameters, self.cut(self.values), strict=True):
            parameter.data = view.copy_(parameter.detach())
        self.shard: nn.Parameter = nn.Parameter(self.own(self.values))
        self._reduced = torch.zeros_like(self.shard.detach())
        self._incoming = self._reduced
        self.shard.grad = self._reduced
        self.arrival: Arrival = Arrival(parameters)

    def converted(self) -> torch.Tensor | None:
        """Return a parameter that is no longer a view of this bucket's memory, or None."""
        if not has_memory(self.values):  # no addresses: compare dtype and device, which show most changes
            ours = self.values.dtype, self.values.device
            return next((x for x in self.parameters if (x.dtype, x.device) != ours), None)
        address = self.values.untyped_storage().data_ptr()
        return next((x for x in self.parameters if x.untyped_storage().data_ptr() != address), None)

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor laid out as the bucket."""
        return flat.chunk(self.size)[self.rank]

    def look(self, index: int) -> None:
        """Note whether the gradient at ``index`` was zeroed: it is None, another tensor, or positive zeros.

        Refuses one that was written to in another way after it was reduced.
        """
        view = self.views[index]
        if self.parameters[index].grad is not view:
            self._zeroed[index] = True
        elif (
            not self._zeroed[index]
            and not self._is_scaled(index)
            and (view._version != self._versions[index] or self._written_quietly(index))
        ):
            if not _is_zeroed(view):
                raise InvalidArgumentError(
                    f"the .grad of {self.named(self.parameters[index])} was written to after it had been "
                    "reduced, which does not change the accumulated gradient: that is in "
                    "optimizer.wrapped.param_groups. Clip by `await optimizer.clip_grad_norm_(...)`; or "
                    "zero the gradients"
                )
            self._zeroed[index] = True
        self._versions[index] = view._version

    def _written_quietly(self, index: int) -> bool:
        """Whether a gradient was zeroed without a new version, by ``.grad.data.zero_()``.

        Always False on a device, where reading a number would wait for the device.
        """
        first = self._firsts[index]
        if first is None or first.device.type != "cpu" or self.views[index]._version != self._left[index]:
            return False
        return math.copysign(1.0, first.real.item()) > 0

    def noted(self, index: int) -> None:
        """Note that backward has added to the gradient at ``index``."""
        if self.parameters[index].grad is not self.views[index]:
            self._zeroed[index] = True
        self._versions[index] = self.views[index]._version

    def put(self, index: int, scale: float) -> None:
        super().put(index, scale)
        self._versions[index] = self.views[index]._version

    def look_at_all(self) -> None:
        """``look`` at all gradients that backward has not added to since they were last reduced."""
        for index, has in enumerate(self.has):
            if not has:
                self.look(index)

    def fill(self, scale: float) -> None:
        self.look_at_all()
        super().fill(scale)

    @property
    def touched(self) -> bool:
        """Whether gradients were zeroed since the last reduction."""
        self.look_at_all()
        return any(self._zeroed)

    def target(self) -> torch.Tensor:
        """Return the tensor for this rank's part of the reduction.

        If the result is to be added to earlier gradients, it is a new one, else the one that becomes the
        part's ``.grad``.
        """
        fresh = all(self._zeroed) or self.shard.grad is None
        self._incoming = self._reduced if fresh else torch.empty_like(self._reduced)
        return self._incoming

    def adopt(self) -> None:
        """Make the reduction the part's ``.grad``, or add it there; mark the parameters' own as reduced."""
        earlier, incoming = self.shard.grad, self._incoming
        if earlier is not None and incoming is not self._reduced and incoming is not earlier:
            incoming = earlier.masked_fill(self._zeroed_elements(), 0).add_(incoming)
        # Without a call in between: if Ctrl-C has this run again, nothing is added a second time.
        self._incoming = self.shard.grad = incoming
        self.flat.fill_(-0.0).index_fill_(0, self._positive, 0.0)
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            parameter.grad = view
            self._versions[index] = view._version
        self._left = list(self._versions)
        self._zeroed = [False] * len(self._zeroed)

    def _zeroed_elements(self) -> torch.Tensor:
        """Return, for each element of this rank's part, whether its gradient was zeroed."""
        zeros = torch.zeros_like(self.flat, dtype=torch.bool)
        for view, zeroed in zip(self.cut(zeros), self._zeroed, strict=True):
            view.fill_(zeroed)
        return self.own(zeros)


class ShardReducer(GradientReducer):
    """Reduces gradients as backward computes them, and gives each rank its part of the result.

    Parameters of different ``groups`` are in different buckets.
    """

    #: ``.grad`` of a parameter may be None when the reduction is awaited: the shard has the reduced one
    _may_be_gone = True
    _calls = BY_OPTIMIZER

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], **options: Any) -> None:
        self._of = {id(x): index for index, group in enumerate(groups) for x in group}
        self.buckets: list[ShardBucket] = []
        super().__init__([x for group in groups for x in group], **options)

    def _assigned(self, parameters: list[torch.Tensor], first: int, limit: int) -> Sequence[ShardBucket]:
        if self._reduce_dtype is not None:
            raise InvalidArgumentError("sharded optimizers do not take reduce_dtype: leave it out")
        rank, size = get_rank(self._group), get_world_size(self._group)
        members = assign(parameters, first, limit, apart=lambda parameter: self._of[id(parameter)])
        self.buckets = [ShardBucket(together, rank, size) for together in members]
        return self.buckets

    def _add_new_parameters(self) -> None:
        """Add none: no rank has a part of them. A step after some were unfrozen is refused (``sharded``)."""

    def look_at_all(self) -> None:
        """Note which gradients were zeroed, before any is sent; refuse others that were written to."""
        for bucket in self.buckets:
            bucket.look_at_all()

    def of_group(self, index: int) -> list[ShardBucket]:
        """Return the buckets of the parameter group with that index."""
        return [bucket for bucket in self.buckets if self._of[id(bucket.parameters[0])] == index]

    @property
    def touched(self) -> bool:
        """Whether gradients were added to or zeroed since they were last reduced."""
        return (
            super().touched
            or bool(self._works)
            or any(bucket.touched or any(bucket.has) for bucket in self.buckets)
        )

    @property
    def written(self) -> bool:
        """Whether other code has written to parameters since the last step."""
        return any(bucket.arrival.written for bucket in self.buckets)

    def check_awaited(self, optimizer: torch.optim.Optimizer) -> None:
        """Also refuse a step, or a scaler, if this step's gradients have not been sent yet."""
        super().check_awaited(optimizer)
        if not self.rounds and self._has_parameters_of(optimizer):
            raise InvalidArgumentError(f"{self!r}: {self._calls.stepped_too_early}")

    def _has_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return not ids_in(optimizer).isdisjoint(id(bucket.shard) for bucket in self.buckets)

    def _reduce(self, flat: torch.Tensor, bucket: Gradients) -> Work[torch.Tensor]:
        assert isinstance(bucket, ShardBucket)
        return reduce_scatter(
            flat, out=bucket.target(), group=self._group, lane=self._lane, timeout=self._timeout
        )

    def _coming(self, bucket: Gradients, index: int) -> None:
        assert isinstance(bucket, ShardBucket)
        super()._coming(bucket, index)
        bucket.look(index)

    def _arrived(self, bucket: Gradients, index: int) -> None:
        assert isinstance(bucket, ShardBucket)
        bucket.noted(index)
        if index in bucket.arrival.stale:
            raise InvalidArgumentError(
                f"a parameter of shape {list(bucket.parameters[index].shape)} was used in the loss before "
                "the last step had gathered it. The forward of its module waits for it, but was not "
                "called: call the module, or `await optimizer.gathered()` after the step (also if "
                "torch.compile reuses a graph of another model, without hooks)"
            )
        super()._arrived(bucket, index)

    # Parameters

    def gather(self, **call: Any) -> None:
        """Start sending each rank's parts of the parameters to the others.

        The buckets are in the order of backward; the next forward needs the last one first.
        """
        for bucket in reversed(self.buckets):
            own = bucket.shard.detach().clone()  # a copy: the part itself is in the memory that is filled
            bucket.arrival.expect(all_gather(own, out=bucket.values, **call))

    def gathered(self) -> Steps[None]:
        """Wait until every parameter has arrived, or failed to; then raise the first error."""
        first: Exception | None = None
        for bucket in reversed(self.buckets):
            try:
                yield from bucket.arrival.steps()
            except Exception as error:
                if still_pending(error):
                    raise
                first = first or error
        if first is not None:
            raise first


def _is_zeroed(x: torch.Tensor) -> bool:
    """Whether all elements of ``x`` are positive zeros."""
    real = torch.view_as_real(x) if x.is_complex() else x
    return not bool(((real != 0) | real.signbit()).any())


def waiting_hooks(model: nn.Module, buckets: Sequence[ShardBucket]) -> Iterator[object]:
    """Have every module wait for the parameters that its forward, or its ``state_dict``, reads."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # graphs compiled before would run without the hooks
    where = {id(x): (bucket.arrival, i) for bucket in buckets for i, x in enumerate(bucket.parameters)}
    for module in model.modules():
        own: dict[Arrival, list[int]] = {}
        for arrival, index in (where[id(x)] for x in _read_by(module) if id(x) in where):
            own.setdefault(arrival, []).append(index)
        if own:
            wait = _Waiting(own)
            # Before the hooks that read parameters, such as those of weight_norm and spectral_norm.
            yield module.register_forward_pre_hook(wait, prepend=True)
            yield module.register_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
            yield module.register_load_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that the forward of ``module`` reads without calling another module's forward."""
    # Attention reads the weight of its output projection, whose own forward it never calls.
    yield from module.parameters(recurse=isinstance(module, nn.MultiheadAttention))
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield from child.parameters()


class _Waiting:
    """The hook of one module, which waits for the module's ``own`` parameters.

    A copy of the module, or an unpickled one, has other parameters, and gets a hook that does nothing.
    """

    def __init__(self, own: dict[Arrival, list[int]]) -> None:
        self._own = own

    def __call__(self, *_: object) -> None:
        if is_compiling():
            _wait_uncompiled(self._own)
        else:
            _wait_for(self._own)

    def __reduce__(self) -> Any:
        if any(arrival.stale for arrival in self._own):
            raise InvalidArgumentError(
                "the model was copied or pickled while the last step was still gathering its parameters: "
                "`await optimizer.gathered()` first (or model.state_dict(), which waits)"
            )
        return no_hook, ()


def _wait_for(own: dict[Arrival, list[int]]) -> None:
    for arrival, indices in own.items():
        if arrival.stale:
            arrival.wait(indices)


#: For ``torch.compile``, which breaks its graph here: inside the graph only the first run would wait.
_wait_uncompiled = torch._disable_dynamo(_wait_for)
