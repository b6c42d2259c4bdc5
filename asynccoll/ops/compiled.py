"""The collectives inside ``torch.compile``: torch's own functional ops on the world's process group.

In a world of one rank, which has no such group, they return a copy, so that a compiled program runs unchanged
on a laptop.

Dynamo does not support context variables, frames and locks, so the public functions call this module before
they use any. Everything that has to be looked up is looked up while the graph is traced, and is a constant in
it. The result's ``wait()`` is part of the graph and orders it; dynamo itself refuses ``await`` there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

from asynccoll import host
from asynccoll.errors import AsyncCollError, UnsupportedOpError
from asynccoll.health.refusals import leaves_its_call
from asynccoll.ops.scopes import lane_of
from asynccoll.payload.common import normal_dim
from asynccoll.payload.exchanging import check_splits, splits_of
from asynccoll.payload.reducing import even_dim
from asynccoll.plan.dispatch import refuse_meaningless
from asynccoll.plan.spec import HALF, Op, ReduceOp, ReduceOpLike, TensorSpec, Wire
from asynccoll.plan.wire import ON_BOOL, arithmetic
from asynccoll.runtime.process import current, when_joined
from asynccoll.waiting.work import Work
from asynccoll.world.context import Context
from asynccoll.world.group import Group, GroupLike

#: The reductions that torch's functional ops support, under the same names.
_REDUCTIONS = frozenset(op for op in ReduceOp if op not in {ReduceOp.AND, ReduceOp.OR, ReduceOp.ADASUM})

#: The functional ops whose gradient is used.
_WITH_GRADIENT = (
    "wait_tensor",
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)


F = TypeVar("F", bound=Callable[..., object])


def constant_in_graphs(function: F) -> F:
    """Mark ``function`` as ``torch.compiler.assume_constant_result`` does, without importing the compiler.

    That import takes seconds. An ``AsyncCollError`` that ``function`` raises reaches the user with its type.
    """

    @wraps(function)
    def constant(*args: object, **given: object) -> object:
        try:
            return function(*args, **given)
        except AsyncCollError as error:
            twin = _passed_on(type(error))
            passed = twin.__new__(twin, *error.args)
            passed.__dict__.update(error.__dict__)
            raise passed from error.__cause__

    constant._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by dynamo, since 2.0
    return cast("F", constant)


def _passed_on(kind: type[AsyncCollError]) -> type[AsyncCollError]:
    """Return a subclass of ``kind`` whose errors dynamo passes on to the user, as it does an AssertionError.

    Dynamo replaces other errors by an ``InternalTorchDynamoError`` with their text.
    """
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    # Pickled as ``kind``, and without what dynamo has attached.
    return type(kind.__name__, (kind, AssertionError), {**names, "__reduce__": lambda e: (kind, e.args)})


@cache
def have_gradients() -> bool:
    """Whether torch's functional ops have gradients. Up to 2.9 they do not: backward is silently wrong."""
    import torch.distributed._functional_collectives  # registers them

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(has_kernel(f"_c10d_functional::{name}", "Autograd") for name in _WITH_GRADIENT)


class _Graphs:
    """Rank and number of ranks, which are constants in the graphs that this process has traced."""

    place: tuple[int, int] | None = None


_graphs = host.per_process(_Graphs)


def _renew(context: Context) -> None:
    """After ``initialize``, recreate the group that graphs of an earlier world refer to by name.

    If rank or world size differ, those graphs would compute wrong results: they are discarded, to be traced
    anew.
    """
    if _graphs.place not in (None, (context.rank, context.world_size)):
        torch.compiler.reset()
        _graphs.place = None
    elif _graphs.place is not None and context.world_size > 1:
        context.world.process_group()


when_joined(_renew)


def traced_at(rank: int, size: int) -> None:
    """Note that a graph is being traced for this place: in a world with another one it is discarded."""
    _graphs.place = (rank, size)


@constant_in_graphs
def _world() -> str:
    """Return the registered name of the world's process group. The first graph creates the group."""
    return str(current().world.process_group().group_name)


@constant_in_graphs
def _require_world(name: str, group: GroupLike, lane: str | None) -> None:
    """Refuse a call of ``name`` if torch has no process group for it.

    The other ranks are notified on ``lane`` of ``group``, since they may be making the call outside a graph.
    Inside a graph, every rank refuses it.
    """
    context = current()
    if context.world_size == 1:
        return
    try:
        context.world.process_group()
    except UnsupportedOpError as error:
        refused = UnsupportedOpError(
            f"{name} cannot be part of a torch.compile graph here ({error}): call it outside the compiled "
            "code, or in a separate function under @torch.compiler.disable, without fullgraph=True"
        )
        with suppress(AsyncCollError):  # no such group or lane, so no rank to notify
            context.refusals.refuse(lane_of(context, _untraced(group), lane), refused, name=name)
            leaves_its_call(refused)
        raise refused from None


def _untraced(group: GroupLike) -> GroupLike:
    """Return the mesh or process group that dynamo passes as a stand-in; anything else as it is."""
    return cast("GroupLike", getattr(group, "real_obj", group))


@constant_in_graphs
def _size() -> int:
    """Return the number of ranks. Every collective calls this, to record which values are graph constants."""
    context = current()
    if context.world_size == 1 or not context.thread_rank:  # otherwise no graph has collectives (``_world``)
        traced_at(context.rank, context.world_size)
    return context.world_size


def _world_size() -> int:
    return current().world_size


@constant_in_graphs
def _reduction(name: str, op: ReduceOpLike, dtype: torch.dtype, device: str) -> tuple[str, int, torch.dtype]:
    """Return torch's name for the reduction, the divisor of the result, and the dtype that is sent.

    Refuses an unsupported ``op``.
    """
    parsed = ReduceOp.parse(op)
    if parsed not in _REDUCTIONS:
        known = ", ".join(sorted(op.value for op in _REDUCTIONS))
        raise UnsupportedOpError(f"op={op!r} is not supported inside torch.compile; expected one of {known}")
    refuse_meaningless(Op.parse(name), TensorSpec(dtype), parsed)
    if dtype is torch.bool:  # a sum would produce bytes of 2
        parsed = ON_BOOL[parsed]
    if parsed is not ReduceOp.AVG:
        return parsed.value, 1, _sent(dtype, device, parsed)
    # As a sum and a division, since torch's avg has no gradient. A sum in half precision could overflow.
    divisor = _world_size()
    sent = torch.float32 if divisor > 1 and dtype in HALF else _sent(dtype, device, ReduceOp.SUM)
    return ReduceOp.SUM.value, divisor, sent


@constant_in_graphs
def _sent(dtype: torch.dtype, device: str, reduce: ReduceOp | None = None) -> torch.dtype:
    """Return the dtype in which elements are sent: a wider one if torch's group does not support theirs."""
    known = current().backend.capabilities(device)
    native = dtype in known.move if reduce is None else known.reduces(dtype, reduce)
    if native or dtype is torch.bool or _world_size() == 1:
        return dtype
    wire, wider, *_ = arithmetic(dtype, reduce or ReduceOp.SUM, known)
    return wider if wire is Wire.CAST else dtype  # torch itself sends complex numbers as pairs of reals


@constant_in_graphs
def _is_source(src: Any) -> bool:
    world = current().world
    return world.index(src, "src") == world.rank


@constant_in_graphs
def _require_plain(plain: bool, tracked: bool) -> None:
    """Refuse calls that torch's functional ops do not support.

    ``plain`` says that the arguments are supported, ``tracked`` that the call needs a gradient.
    """
    if tracked and not have_gradients():
        raise UnsupportedOpError(
            f"the collectives of torch {torch.__version__} have no gradient inside torch.compile: call them "
            "outside of the graph, detach the input, or use a newer torch"
        )
    if not plain:
        raise UnsupportedOpError(
            "inside torch.compile collectives run over the world (group=None) and return a new tensor: "
            "leave out group=, out=, uneven=, safe_mode=, factors and compression=, or call them outside of "
            "the graph"
        )


def _require(name: str, group: GroupLike, lane: str | None, plain: bool, tracked: bool) -> None:
    # Dynamo passes no object of ours to a function that is constant in a graph, and lets nobody ask a mesh or
    # a process group for attributes that torch has not listed.
    _require_world(name, group.ranks if isinstance(group, Group) else group, lane)
    _require_plain(group is None and plain, tracked)


def _tracked(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


@constant_in_graphs
def _refuse_dim(name: str, shape: Sequence[int], dim: int) -> None:
    normal_dim(name, torch.empty(shape, device="meta"), dim)


@constant_in_graphs
def _refuse_uneven(shape: Sequence[int], dtype: torch.dtype, dim: int) -> None:
    even_dim(torch.empty(shape, dtype=dtype, device="meta"), dim, _world_size())


@constant_in_graphs
def _refuse_splits(shape: Sequence[int], splits: Sequence[int] | None) -> None:
    splits_of(shape, splits, _world_size())


@constant_in_graphs
def _refuse_counted() -> None:
    raise UnsupportedOpError(
        "all_to_all: inside torch.compile, output_split_sizes is needed with input_split_sizes, since a "
        "graph does not ask the other ranks what they send"
    )


@constant_in_graphs
def _refuse_received(splits: Sequence[int]) -> None:
    check_splits("output_split_sizes", splits, _world_size(), None)


def _dim(name: str, x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        _refuse_dim(name, list(x.shape), dim)
    return dim % x.dim()


def _is_known(condition: Any) -> bool:
    """Whether ``condition`` holds for all values of the sizes that only the graph computes."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

    return guard_or_false(condition)


class CompiledWork:
    """The handle of a collective in a compiled graph: ``wait()`` returns the result, and never times out."""

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        dim: int = 0,
        parts: int = 1,
        divisor: int = 1,
        dtype: torch.dtype,
        alone: bool = False,
    ) -> None:
        self.tensor = tensor
        self.alone = alone
        self.dim = dim
        self.parts = parts
        self.divisor = divisor
        self.dtype = dtype

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        if self.alone:
            return self.tensor
        done: torch.Tensor = torch.ops._c10d_functional.wait_tensor(self.tensor)
        if self.dim:
            done = torch.cat(torch.chunk(done, self.parts, dim=0), dim=self.dim)
        return (done / self.divisor if self.divisor > 1 else done).to(self.dtype)


def _started(
    op: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *args: object,
    sent: torch.dtype | None = None,
    **rest: Any,
) -> Work[Any]:
    """Return the work of torch's functional ``op``, typed as a ``Work``, whose ``wait()`` it has.

    In a world of one rank there is no group, and every collective returns a copy. ``sent`` is the dtype in
    which a reduction is sent.
    """
    if _size() == 1:
        return cast("Work[Any]", CompiledWork(x.clone(), dtype=x.dtype, alone=True))
    same = x.to(sent or _sent(x.dtype, x.device.type)).contiguous()
    return cast("Work[Any]", CompiledWork(op(same, *args, _world()), dtype=x.dtype, **rest))


def all_reduce(
    x: Any, op: ReduceOpLike, group: GroupLike, *, lane: str | None, out: object, plain: bool
) -> Work[Any]:
    _require("all_reduce", group, lane, out is None and plain, _tracked(x))
    return _all_reduce(x, op)


def _all_reduce(x: Any, op: ReduceOpLike) -> Work[Any]:
    name, divisor, sent = _reduction("all_reduce", op, x.dtype, x.device.type)
    return _started(torch.ops._c10d_functional.all_reduce, x, name, divisor=divisor, sent=sent)


def broadcast(
    x: Any, src: int, group: GroupLike, *, lane: str | None, safe_mode: bool, out: Any
) -> Work[Any]:
    _require("broadcast", group, lane, out is None and not safe_mode, _tracked(x))
    ours = _is_source(src)
    if _tracked(x):
        # torch's broadcast has no gradient, and only warns. So sum instead, with zeros on all ranks but src.
        silent = torch.full((), not ours, dtype=torch.bool, device=x.device)
        return _all_reduce(x.masked_fill(silent, 0), "sum")
    return _started(torch.ops._c10d_functional.broadcast, x, src)


def all_gather(
    x: Any, dim: int, group: GroupLike, *, lane: str | None, uneven: bool, out: object
) -> Work[object]:
    _require("all_gather", group, lane, out is None and not uneven, _tracked(x))
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    size = _size()
    if x.dim() == 0 and dim in (0, -1):
        x = x.reshape(1)
    return _started(gather, x, size, dim=_dim("all_gather", x, dim), parts=size)


def reduce_scatter(
    x: Any, op: ReduceOpLike, dim: int, group: GroupLike, *, lane: str | None, out: object
) -> Work[Any]:
    _require("reduce_scatter", group, lane, out is None, _tracked(x))
    reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor
    size = _size()
    name, divisor, sent = _reduction("reduce_scatter", op, x.dtype, x.device.type)
    dim = _dim("reduce_scatter", x, dim)
    if _is_known(x.shape[dim] % size != 0):
        _refuse_uneven(list(x.shape), x.dtype, dim)
    if dim:
        x = torch.cat(torch.chunk(x, size, dim=dim), dim=0)
    return _started(reduce_scatter, x, name, size, divisor=divisor, sent=sent)


def all_to_all(
    x: Any,
    in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None,
    group: GroupLike,
    *,
    lane: str | None,
    out: object,
) -> Work[object]:
    _require("all_to_all", group, lane, out is None, _tracked(x))
    size = _size()
    if in_splits is not None and out_splits is None:
        _refuse_counted()
    if x.dim() == 0:
        _refuse_splits([], None)
    if in_splits is None:
        if _is_known(x.shape[0] % size != 0):
            _refuse_splits(list(x.shape), None)
        in_splits = [x.shape[0] // size] * size
    elif len(in_splits) != size or _is_known(sum(in_splits) != x.shape[0]):
        _refuse_splits(list(x.shape), list(in_splits))
    if out_splits is None:
        out_splits = in_splits
    elif len(out_splits) != size:
        _refuse_received(list(out_splits))
    exchange = torch.ops._c10d_functional.all_to_all_single
    return _started(exchange, x, list(out_splits), list(in_splits))
