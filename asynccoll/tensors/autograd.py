"""The differentiable collectives: each starts in forward and is waited for later.

Gradients are those of the sum of all ranks' losses, so the backward of each collective is its adjoint over
ranks: all_reduce for all_reduce, reduce_scatter for all_gather, and so on. The output tensor exists before it
is filled, but can only be reached through the ``Work``. Backward calls the same functions (so they can be
differentiated twice) on the lane ``<lane>/backward``, where it cannot get out of order with a forward pass
that is still being issued.

Source: the adjoints of torch.distributed._functional_collectives and of jax.lax.psum et al.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from asynccoll import tensors
from asynccoll.errors import InvalidArgumentError, UnsupportedOpError
from asynccoll.order.lane import Lane
from asynccoll.plan.spec import ReduceOp, dtype_name
from asynccoll.tensors import Call
from asynccoll.tensors.fusing import Fuse
from asynccoll.waiting.started import Started
from asynccoll.waiting.work import waited_for

_requires_grad = attrgetter("requires_grad")


def tracked(x: torch.Tensor) -> bool:
    """Whether autograd records operations on ``x``."""
    return x.requires_grad and torch.is_grad_enabled()


def any_tracked(xs: Sequence[torch.Tensor]) -> bool:
    """Whether autograd records operations on any of ``xs``."""
    return torch.is_grad_enabled() and any(map(_requires_grad, xs))


def records(name: str, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None) -> bool:
    """Return whether the results for ``xs`` have a gradient; refuse that with ``out=``, which has none."""
    filled = [out for out in outs or () if isinstance(out, torch.Tensor)]  # other types are refused elsewhere
    if not any_tracked([*xs, *filled] if filled else xs):
        return False
    for number, x in enumerate(xs, 1):
        if x.layout is not torch.strided:
            which = f" ({dtype_name(x.dtype)}{list(x.shape)}, tensor {number} of {len(xs)})"
            raise UnsupportedOpError(
                f"{name} of a sparse tensor{which * (len(xs) > 1)} has no gradient here, and autograd is "
                "recording it: pass x.to_dense(), or x.detach() if none is wanted"
            )
    if outs is None:
        return True
    raise InvalidArgumentError(
        f"{name}: out= cannot carry a gradient, and autograd is recording its input, or out itself: "
        "omit out=, detach both, or call it under torch.no_grad()"
    )


def _untracked(x: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Whether there is nothing that autograd could record, so that ``records`` need not be called."""
    return not (
        x.requires_grad or (out is not None and out is not x and getattr(out, "requires_grad", False))
    )


class _Start(torch.autograd.Function):
    """The autograd node of a collective: ``start(x, out)`` issues it, ``adjoint(grad)`` is its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shape: Sequence[int] | None,
        start: Callable[[torch.Tensor, torch.Tensor], Started[object]],
        adjoint: Callable[[torch.Tensor], torch.Tensor],
        started: list[Started[object]],
    ) -> torch.Tensor:
        ctx.adjoint = adjoint
        out = torch.empty_like(x) if shape is None else torch.empty(shape, dtype=x.dtype, device=x.device)
        started.append(start(x.detach(), out.detach()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: object) -> object:
        return ctx.adjoint(grads[0]), None, None, None, None


def _begun(
    lane: Lane,
    name: str,
    x: torch.Tensor,
    out: torch.Tensor | None,
    make: Callable[[torch.Tensor, torch.Tensor | None], Call],
    adjoint: Callable[[torch.Tensor], torch.Tensor],
    timeout: float | None,
    shape: Sequence[int] | None = None,
) -> Started[torch.Tensor]:
    """Begin ``make(x, out)``; if autograd records ``x``, record it with ``adjoint`` as its backward.

    A recorded result has ``shape``, or if that is None, the shape and strides of ``x``.
    """
    if not records(name, (x,), None if out is None else (out,)):
        return make(x, out).begin(lane, timeout)
    started: list[Started[object]] = []
    start = lambda x, out: make(x, out).begin(lane, timeout)  # noqa: E731
    result: torch.Tensor = _Start.apply(x, shape, start, adjoint, started)  # type: ignore[no-untyped-call]
    return started[0].then(lambda _: result)


def all_reduce(
    lane: Lane, x: torch.Tensor, op: ReduceOp, out: torch.Tensor | None, timeout: float | None
) -> Started[torch.Tensor]:
    """Start an all_reduce. Backward: the same all_reduce of the gradients (sum and avg are self-adjoint)."""
    if _untracked(x, out):
        return tensors.all_reduce_call(lane, x, op, out).begin(lane, timeout)

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        _check_adjoint("all_reduce", op)
        return waited_for(all_reduce(lane.of_gradients(), grad, op, None, timeout))

    return _begun(
        lane, "all_reduce", x, out, lambda x, out: tensors.all_reduce_call(lane, x, op, out), adjoint, timeout
    )


def _check_adjoint(name: str, op: ReduceOp) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedOpError(
            f"{name} with {op.value} has no gradient here; sum and avg do (detach the input if "
            "none is wanted)"
        )


def all_gather(
    lane: Lane,
    x: torch.Tensor,
    out: torch.Tensor | None,
    timeout: float | None,
    shape: tuple[int, ...] | None = None,
) -> Started[torch.Tensor]:
    """Start an all_gather into rows (n, *x.shape), or into ``shape``, which has as many elements.

    Backward: reduce_scatter of the gradients.
    """
    if _untracked(x, out):
        return tensors.all_gather_call(lane, x, out, shape).begin(lane, timeout)
    rows = (lane.group.size, *x.shape)

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        grads = grad.reshape(rows)
        return waited_for(reduce_scatter(lane.of_gradients(), grads, ReduceOp.SUM, None, timeout))

    make = lambda x, out: tensors.all_gather_call(lane, x, out, shape)  # noqa: E731
    return _begun(lane, "all_gather", x, out, make, adjoint, timeout, shape or rows)


def reduce_scatter(
    lane: Lane, rows: torch.Tensor, op: ReduceOp, out: torch.Tensor | None, timeout: float | None
) -> Started[torch.Tensor]:
    """Start a reduce_scatter; the result is row ``rank``. Backward: all_gather of the gradients."""
    if _untracked(rows, out):
        return tensors.reduce_scatter_call(lane, rows, op, out).begin(lane, timeout)

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        _check_adjoint("reduce_scatter", op)
        share = grad / lane.group.size if op is ReduceOp.AVG else grad
        return waited_for(all_gather(lane.of_gradients(), share, None, timeout))

    make = lambda x, out: tensors.reduce_scatter_call(lane, x, op, out)  # noqa: E731
    return _begun(lane, "reduce_scatter", rows, out, make, adjoint, timeout, rows.shape[1:])


def all_to_all(
    lane: Lane,
    x: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    out: torch.Tensor | None,
    timeout: float | None,
    *,
    even: bool = False,
) -> Started[torch.Tensor]:
    """Start an all_to_all. Backward: the reverse exchange. ``even``: the user has passed no split sizes."""
    if _untracked(x, out):
        return tensors.all_to_all_call(lane, x, in_splits, out_splits, out, even=even).begin(lane, timeout)

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        return waited_for(
            all_to_all(lane.of_gradients(), grad, out_splits, in_splits, None, timeout, even=even)
        )

    make = lambda x, out: tensors.all_to_all_call(lane, x, in_splits, out_splits, out, even=even)  # noqa: E731
    return _begun(lane, "all_to_all", x, out, make, adjoint, timeout, (sum(out_splits), *x.shape[1:]))


def broadcast(
    lane: Lane, x: torch.Tensor, src: int, out: torch.Tensor | None, timeout: float | None
) -> Started[torch.Tensor]:
    """Start a broadcast. Backward: the sum of the gradients on ``src``, zeros elsewhere."""
    if _untracked(x, out):
        return tensors.broadcast_call(lane, x, src, out).begin(lane, timeout)

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        total = waited_for(all_reduce(lane.of_gradients(), grad, ReduceOp.SUM, None, timeout))
        return _on_root(lane, total, src)

    make = lambda x, out: tensors.broadcast_call(lane, x, src, out)  # noqa: E731
    return _begun(lane, "broadcast", x, out, make, adjoint, timeout)


def _on_root(lane: Lane, total: torch.Tensor, src: int) -> torch.Tensor:
    if lane.group.rank == src:
        return total
    # Zeros that still depend on the total, since every rank has to take part in a second backward.
    return total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)


def permute(
    lane: Lane,
    x: torch.Tensor,
    pairs: Sequence[tuple[int, int]],
    out: torch.Tensor | None,
    timeout: float | None,
) -> Started[torch.Tensor]:
    """Start a permute along ``pairs``: sorted indices in the group. Backward: each pair reversed."""

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        back = sorted((target, source) for source, target in pairs)
        return waited_for(permute(lane.of_gradients(), grad, back, None, timeout))

    make = lambda x, out: tensors.permute_call(lane, x, pairs, out)  # noqa: E731
    return _begun(lane, "permute", x, out, make, adjoint, timeout)


class _StartMany(torch.autograd.Function):
    """``_Start`` for many tensors that are sent together, including those that have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Callable[[list[torch.Tensor], list[torch.Tensor]], Started[object]],
        adjoint: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        started: list[Started[object]],
        *xs: torch.Tensor,
    ) -> object:
        ctx.adjoint = adjoint
        ctx.floating = [x.is_floating_point() or x.is_complex() for x in xs]
        outs = tuple(map(torch.empty_like, xs))
        ctx.mark_non_differentiable(*(y for x, y in zip(xs, outs, strict=True) if not x.requires_grad))
        started.append(start([x.detach() for x in xs], [y.detach() for y in outs]))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: object) -> object:
        # For all floating-point and complex tensors, tracked or not, so that every rank sends the same.
        found = iter(ctx.adjoint([grad for grad, floats in zip(grads, ctx.floating, strict=True) if floats]))
        return None, None, None, *(next(found) if floats else None for floats in ctx.floating)


def fused(
    lane: Lane,
    fuse: Fuse,
    xs: list[torch.Tensor],
    outs: list[torch.Tensor] | None,
    timeout: float | None,
) -> Started[list[torch.Tensor]]:
    """Start the collective of many tensors; its backward is that of one, for all gradients together."""
    if not records(fuse.name, xs, outs):
        return tensors.fused(lane, fuse, xs, outs, timeout)

    def adjoint(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        op = fuse.op or ReduceOp.SUM
        _check_adjoint(fuse.name, op)
        backward = lane.of_gradients()
        totals = waited_for(fused(backward, tensors.all_reduce_fuse(backward, op), grads, None, timeout))
        return totals if fuse.src is None else [_on_root(lane, total, fuse.src) for total in totals]

    started: list[Started[object]] = []
    start = lambda xs, outs: tensors.fused(lane, fuse, xs, outs, timeout)  # noqa: E731
    results = _StartMany.apply(start, adjoint, started, *xs)  # type: ignore[no-untyped-call]
    return started[0].then(lambda _: list(results))


class _NoGradient(torch.autograd.Function):
    """The identity, for results of collectives that have no gradient; its backward raises and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, instead: str) -> torch.Tensor:
        ctx.text = f"{name} has no gradient here; use {instead}, or detach the input if none is wanted"
        return x.data  # no view: that could not be written to in place

    @staticmethod
    def backward(ctx: Any, *grads: object) -> object:
        raise UnsupportedOpError(ctx.text)


def without_gradient(x: torch.Tensor, name: str, instead: str) -> torch.Tensor:
    """Return ``x`` with a backward that raises: a missing gradient must not silently be zero."""
    leaf = x.detach().requires_grad_(x.is_floating_point() or x.is_complex())
    result: torch.Tensor = _NoGradient.apply(leaf, name, instead)  # type: ignore[no-untyped-call]
    return result
