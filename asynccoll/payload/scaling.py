"""all_reduce with factors before and after it, and with compression of what is sent.

Both are applied here, around the plain operation, so that they mean the same on every backend and have
gradients. If a factor or a conversion makes a new tensor from a single one, and autograd does not record it,
the new tensor is reduced in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch

from asynccoll.errors import InvalidArgumentError, PayloadTypeError, UnsupportedOpError
from asynccoll.memory.plain import plain_tensor
from asynccoll.order.lane import Lane
from asynccoll.payload.common import check_filled, leaves_of, no_out, of_each
from asynccoll.payload.reducing import all_reduce
from asynccoll.plan.spec import ReduceOp, ReduceOpLike, dtype_name, reduce_op
from asynccoll.plan.trees import flatten, is_tree, unflatten
from asynccoll.tensors import autograd, check_out, deliver
from asynccoll.waiting.started import Started

#: The dtype that is sent instead of wider floats, by Horovod's name for the compression.
_COMPRESSIONS = {"fp16": torch.float16}


def is_one(factor: object) -> bool:
    """Whether ``factor`` is a number that changes nothing. ``Scaling`` refuses what is not a number."""
    return factor == 1 if isinstance(factor, (int, float)) else False


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factors and the compression around an all_reduce, checked, and applied tensor by tensor."""

    prescale: float = 1.0
    postscale: float = 1.0
    compression: str | None = None

    def __post_init__(self) -> None:
        for name, factor in (("prescale", self.prescale), ("postscale", self.postscale)):
            if isinstance(factor, bool) or not isinstance(factor, Real):
                raise PayloadTypeError(f"{name} must be a number, got {factor!r}")
        if self.compression is not None and (
            not isinstance(self.compression, str) or self.compression not in _COMPRESSIONS
        ):
            known = ", ".join(map(repr, _COMPRESSIONS))
            raise InvalidArgumentError(f"compression must be None or {known}, got {self.compression!r}")

    def check(self, x: object) -> torch.Tensor:
        """Return ``x``; refuse what is not a tensor of floats or complex numbers."""
        if not isinstance(x, torch.Tensor):
            raise PayloadTypeError(
                f"prescale, postscale and compression are for tensors, got a {type(x).__name__}; multiply "
                "numbers before and after"
            )
        if not (x.is_floating_point() or x.is_complex()):
            raise PayloadTypeError(
                f"prescale, postscale and compression are for floats, got {dtype_name(x.dtype)}; convert "
                "the tensor first"
            )
        if x.element_size() == 1 and not (self.prescale == self.postscale == 1):
            raise UnsupportedOpError(
                f"{dtype_name(x.dtype)} cannot be multiplied, as prescale and postscale do; convert it to "
                "float32 first"
            )
        return x

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor that is reduced instead of ``x``; this is ``x`` itself if nothing changes it."""
        if self.prescale != 1:
            x = x * self.prescale
        if self.compression is not None and x.is_floating_point():
            narrow = _COMPRESSIONS[self.compression]
            if x.element_size() > narrow.itemsize:
                x = x.to(narrow)
        return x

    def after(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Return the result for ``x``, from ``total``, the reduction of what ``before`` returned for it."""
        total = total.to(x.dtype)
        return total * self.postscale if self.postscale != 1 else total


def all_reduce_scaled(
    lane: Lane,
    x: object,
    op: ReduceOpLike,
    factors: tuple[float, float, str | None],
    out: torch.Tensor | None,
    timeout: float | None,
) -> Started[Any]:
    """Start an all_reduce of a tensor or a tree of tensors.

    ``factors`` are prescale, postscale and compression.
    """
    op = reduce_op(op)
    scaling = Scaling(*factors)
    if scaling.compression is not None and op is ReduceOp.AVG:
        # Divide before the conversion to the narrow dtype, so that the sum cannot overflow it.
        scaling, op = replace(scaling, prescale=scaling.prescale / lane.group.size), ReduceOp.SUM
    if not is_tree(x):
        return _of_tensor(lane, scaling.check(x), op, out, scaling, timeout)
    no_out("all_reduce", out)
    leaves, spec = leaves_of("all_reduce", x)
    given = of_each(spec, range(len(leaves)), lambda i: scaling.check(leaves[i]))
    started = all_reduce(lane, unflatten(spec, [scaling.before(leaf) for leaf in given]), op, None, timeout)
    return started.then(partial(_leaves_after, scaling, given))


def _leaves_after(scaling: Scaling, given: list[torch.Tensor], tree: object) -> object:
    totals, spec = flatten(tree)
    return unflatten(spec, [scaling.after(x, total) for x, total in zip(given, totals, strict=True)])


def _of_tensor(
    lane: Lane,
    x: torch.Tensor,
    op: ReduceOpLike,
    out: torch.Tensor | None,
    scaling: Scaling,
    timeout: float | None,
) -> Started[torch.Tensor]:
    x = plain_tensor("all_reduce", x)
    check_filled("all_reduce", out)
    if out is not None:
        autograd.records("all_reduce", (x,), (out,))
    check_out(out, x, x.shape)
    sent = scaling.before(x)
    own = sent is not x and sent.layout is torch.strided and not autograd.tracked(sent)
    total = all_reduce(lane, sent, op, sent if own else None, timeout).then(partial(scaling.after, x))
    return total if out is None else total.then(lambda result: deliver(result, out))
