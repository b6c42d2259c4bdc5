"""The differentiable collectives: each starts in forward and is waited for later.

Gradients are those of the sum of all ranks' losses, so that the backward of each collective is its
adjoint over ranks: all_reduce for all_reduce, reduce_scatter for all_gather, and so on. A function
returns its output tensor before it is filled; nobody can see it but through the ``Work``. Backward
runs the same functions again (so they can be differentiated twice) on the lane
``<lane>/backward``, where it cannot cross a forward pass that is still being issued.

Source: the adjoints of torch.distributed._functional_collectives and of jax.lax.psum et al.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from asynccoll import tensors
from asynccoll.errors import UnsupportedOpError
from asynccoll.lane import BACKWARD, Lane
from asynccoll.spec import ReduceOp
from asynccoll.work import Work

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "permute", "reduce_scatter", "tracked"]


_requires_grad = attrgetter("requires_grad")


def tracked(x: torch.Tensor) -> bool:
    """Whether autograd is recording what happens to ``x``."""
    return x.requires_grad and torch.is_grad_enabled()


def any_tracked(xs: list[torch.Tensor]) -> bool:
    """Whether autograd is recording what happens to one of ``xs``."""
    return torch.is_grad_enabled() and any(map(_requires_grad, xs))


def _backward(lane: Lane) -> Lane:
    """The lane of the gradients; gradients of gradients stay on it."""
    if lane.name.endswith(BACKWARD):
        return lane
    return lane.group.lane(lane.name + BACKWARD)


class _Start(torch.autograd.Function):
    """One node for all of them: ``start(x, out)`` issues, ``adjoint(grad)`` is the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shape: Sequence[int],
        start: Callable[[torch.Tensor, torch.Tensor], Work[Any]],
        adjoint: Callable[[torch.Tensor], torch.Tensor],
        started: list[Work[Any]],
    ) -> torch.Tensor:
        ctx.adjoint = adjoint
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        started.append(start(x.detach(), out.detach()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.adjoint(grads[0]), None, None, None, None


def _record(
    x: torch.Tensor,
    shape: Sequence[int],
    start: Callable[[torch.Tensor, torch.Tensor], Work[Any]],
    adjoint: Callable[[torch.Tensor], torch.Tensor],
) -> Work[torch.Tensor]:
    started: list[Work[Any]] = []
    out: torch.Tensor = _Start.apply(x, shape, start, adjoint, started)  # type: ignore[no-untyped-call]
    return started[0].map(lambda _: out)


def all_reduce(lane: Lane, x: torch.Tensor, op: ReduceOp, timeout: float | None) -> Work[torch.Tensor]:
    """Backward: the same all_reduce of the gradients (sum and avg are their own adjoints)."""

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        _check_adjoint(op)
        return _all_reduce(_backward(lane), grad, op, timeout).wait()

    return _record(x, x.shape, lambda x, out: tensors.start_all_reduce(lane, x, op, out, timeout), adjoint)


def _check_adjoint(op: ReduceOp) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedOpError(
            f"all_reduce with {op.value} has no gradient here; sum and avg do (detach the input if "
            "none is wanted)"
        )


def _all_reduce(lane: Lane, x: torch.Tensor, op: ReduceOp, timeout: float | None) -> Work[torch.Tensor]:
    if tracked(x):
        return all_reduce(lane, x, op, timeout)
    return tensors.start_all_reduce(lane, x, op, None, timeout)


def all_gather(lane: Lane, x: torch.Tensor, timeout: float | None) -> Work[torch.Tensor]:
    """Rows (n, *x.shape). Backward: reduce_scatter of the gradients."""

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        return _reduce_scatter(_backward(lane), grad, ReduceOp.SUM, timeout).wait()

    shape = (lane.group.size, *x.shape)
    return _record(x, shape, lambda x, out: tensors.start_all_gather(lane, x, out, timeout), adjoint)


def reduce_scatter(lane: Lane, rows: torch.Tensor, op: ReduceOp, timeout: float | None) -> Work[torch.Tensor]:
    """Row ``rank`` of the reduction. Backward: all_gather of the gradients."""

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise UnsupportedOpError(f"reduce_scatter with {op.value} has no gradient; sum and avg do")
        share = grad / lane.group.size if op is ReduceOp.AVG else grad
        return _all_gather(_backward(lane), share, timeout).wait()

    return _record(
        rows,
        rows.shape[1:],
        lambda x, out: tensors.start_reduce_scatter(lane, x, op, out, timeout),
        adjoint,
    )


def _reduce_scatter(
    lane: Lane, rows: torch.Tensor, op: ReduceOp, timeout: float | None
) -> Work[torch.Tensor]:
    if tracked(rows):
        return reduce_scatter(lane, rows, op, timeout)
    return tensors.start_reduce_scatter(lane, rows, op, None, timeout)


def _all_gather(lane: Lane, x: torch.Tensor, timeout: float | None) -> Work[torch.Tensor]:
    if tracked(x):
        return all_gather(lane, x, timeout)
    return tensors.start_all_gather(lane, x, None, timeout)


def all_to_all(
    lane: Lane,
    x: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    timeout: float | None,
) -> Work[torch.Tensor]:
    """Backward: the exchange in the other direction."""

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        lane_ = _backward(lane)
        if tracked(grad):
            return all_to_all(lane_, grad, out_splits, in_splits, timeout).wait()
        return tensors.start_all_to_all(lane_, grad, out_splits, in_splits, timeout).wait()

    return _record(
        x,
        (sum(out_splits), *x.shape[1:]),
        lambda x, out: tensors.start_all_to_all(lane, x, in_splits, out_splits, timeout, out),
        adjoint,
    )


def broadcast(lane: Lane, x: torch.Tensor, src: int, timeout: float | None) -> Work[torch.Tensor]:
    """Backward: the sum of the gradients on ``src``, zeros elsewhere."""

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        total = _all_reduce(_backward(lane), grad, ReduceOp.SUM, timeout).wait()
        return _on_root(lane, total, src)

    return _record(x, x.shape, lambda x, out: tensors.start_broadcast(lane, x, src, out, timeout), adjoint)


def _on_root(lane: Lane, total: torch.Tensor, src: int) -> torch.Tensor:
    if lane.group.rank == src:
        return total
    # Zeros that still hang on the total: every rank must join a second backward.
    return total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)


def permute(
    lane: Lane, x: torch.Tensor, to: int | None, source: int | None, timeout: float | None
) -> Work[torch.Tensor]:
    """Backward: the pairs the other way round."""

    def adjoint(grad: torch.Tensor) -> torch.Tensor:
        lane_ = _backward(lane)
        if tracked(grad):
            return permute(lane_, grad, source, to, timeout).wait()
        return tensors.start_permute(lane_, grad, source, to, None, timeout).wait()

    return _record(
        x,
        x.shape,
        lambda x, out: tensors.start_permute(lane, x, to, source, out, timeout),
        adjoint,
    )


class _StartMany(torch.autograd.Function):
    """``_Start`` for many tensors that travel together; those that have no gradient come along."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Callable[[list[torch.Tensor], list[torch.Tensor]], Work[Any]],
        adjoint: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        started: list[Work[Any]],
        *xs: torch.Tensor,
    ) -> Any:
        ctx.adjoint = adjoint
        ctx.floating = [x.is_floating_point() or x.is_complex() for x in xs]
        outs = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs)
        ctx.mark_non_differentiable(*(y for x, y in zip(xs, outs, strict=True) if not x.requires_grad))
        started.append(start([x.detach() for x in xs], [y.detach() for y in outs]))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # All floating ones, whether they are tracked here or not: the same on every rank.
        found = iter(ctx.adjoint([grad for grad, floats in zip(grads, ctx.floating, strict=True) if floats]))
        return None, None, None, *(next(found) if floats else None for floats in ctx.floating)


def _record_many(
    xs: list[torch.Tensor],
    start: Callable[[list[torch.Tensor], list[torch.Tensor]], Work[Any]],
    adjoint: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Work[list[torch.Tensor]]:
    started: list[Work[Any]] = []
    outs = _StartMany.apply(start, adjoint, started, *xs)  # type: ignore[no-untyped-call]
    return started[0].map(lambda _: list(outs))


def all_reduce_fused(
    lane: Lane, xs: list[torch.Tensor], op: ReduceOp, timeout: float | None
) -> Work[list[torch.Tensor]]:
    """Of many tensors. Backward: the same of their gradients, together."""

    def adjoint(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        _check_adjoint(op)
        return _all_reduce_fused(_backward(lane), grads, op, timeout).wait()

    fuse = tensors.all_reduce_fuse(lane, op)
    return _record_many(xs, lambda xs, outs: tensors.fused(lane, fuse, xs, outs, timeout), adjoint)


def _all_reduce_fused(
    lane: Lane, xs: list[torch.Tensor], op: ReduceOp, timeout: float | None
) -> Work[list[torch.Tensor]]:
    if any_tracked(xs):
        return all_reduce_fused(lane, xs, op, timeout)
    return tensors.fused(lane, tensors.all_reduce_fuse(lane, op), xs, None, timeout)


def broadcast_fused(
    lane: Lane, xs: list[torch.Tensor], src: int, timeout: float | None
) -> Work[list[torch.Tensor]]:
    """Of many tensors. Backward: the sums of the gradients on ``src``, zeros elsewhere."""

    def adjoint(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        totals = _all_reduce_fused(_backward(lane), grads, ReduceOp.SUM, timeout).wait()
        return [_on_root(lane, total, src) for total in totals]

    fuse = tensors.broadcast_fuse(lane, src)
    return _record_many(xs, lambda xs, outs: tensors.fused(lane, fuse, xs, outs, timeout), adjoint)


class _NoGradient(torch.autograd.Function):
    """The identity, for results of collectives that have no gradient: says so in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, instead: str) -> torch.Tensor:
        ctx.text = f"{name} has no gradient here; use {instead}, or detach the input if none is wanted"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedOpError(ctx.text)


def without_gradient(x: torch.Tensor, name: str, instead: str) -> torch.Tensor:
    """``x``, whose backward raises: a gradient that is not there must not be silently zero."""
    leaf = x.detach().requires_grad_(x.is_floating_point() or x.is_complex())
    result: torch.Tensor = _NoGradient.apply(leaf, name, instead)  # type: ignore[no-untyped-call]
    return result
