"""The collectives: plain functions that start at once and return a ``Work``.

The following holds for every function here:

- **Group and lane.** ``group`` is None (the world), a ``Group``, a list of global ranks, a
  one-dimensional ``DeviceMesh`` or a torch process group; ``lane`` names the order of calls that the call
  belongs to (default: that of ``with ac.lane(...)``, else ``"default"``). Roots and pairs are global
  ranks; ``group_src`` and ``group_dst`` are indices in the group instead.
- **Await.** ``await work`` (or ``work.wait()``) returns a result that may be used on the current device
  stream: on gloo, mpi and horovod the bytes are there; on nccl the current stream is ordered after
  the operation; ``await work.on_host()`` also waits until the device has finished.
- **Inputs** are never changed by a call, and you must not change them until the work has been waited for.
  ``done()`` alone is not enough: the waiter may still read the inputs and fill ``out``. If torch has
  written to an input before that, the await raises ``InvalidArgumentError``. (Writes through NumPy or
  ``x.data`` are not detected, nor are writes to an input that is a view of a part of its base.)
- **out** (one tensor of the result's shape and dtype) is filled and returned; ``out=x`` is the in-place
  operation. If the waiter fills ``out`` (a tree, strides, an average), any other call that uses it before
  the wait raises ``InvalidArgumentError`` with the line of the call to await. After an error the transport
  may still write to ``out`` until the lane's next call is over.
  Without ``out``, a result of the input's shape has the input's strides, as with ``torch.empty_like``.
- **timeout** in seconds, counted from the call, limits how long this operation is waited for. Once it has
  expired, a second await waits for the same time again.
- **Gradients** are those of the sum of all ranks' losses. Whether autograd records depends on the mode at
  the call, not at the await. ``out=`` is refused for a call that autograd records
  (``InvalidArgumentError``).
- **Errors.** Before anything is sent: ``PayloadTypeError``, ``InvalidArgumentError``,
  ``UnsupportedOpError``, ``LaneOrderError``, ``NotInitializedError``, and ``InvalidCallError`` for arguments
  that do not fit the function; peers that have made the call get a ``PeerRefusedError``. From ``await``:
  ``CollectiveTimeoutError``, ``CollectiveMismatchError``, ``PeerLostError``, ``PeerRefusedError``; and the
  errors above, if a mistake is found only after a part was sent, or when a queued call is issued.

In the examples two ranks make the call; ``r0`` and ``r1`` mark what each of them gets.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, TypeVar, overload

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from asynccoll import payload, tensors
from asynccoll.errors import (
    AsyncCollError,
    DiscardedResultWarning,
    InvalidArgumentError,
)
from asynccoll.health.refusals import leaves_its_call
from asynccoll.host import misfits
from asynccoll.host.call_site import called_at, caller
from asynccoll.host.timeouts import check_timeout
from asynccoll.memory.unwritten import Read, counted, counted_of
from asynccoll.modes.unseen import with_data
from asynccoll.ops import compiled
from asynccoll.ops.coalescing import name_of, own_block
from asynccoll.ops.scopes import lane_of
from asynccoll.ops.signatures import Misfit, fitting
from asynccoll.order.lane import Lane
from asynccoll.payload import objects
from asynccoll.payload.codecs import Codec
from asynccoll.payload.scaling import is_one
from asynccoll.plan.spec import Op, Plan, ReduceOpLike, premul_factor
from asynccoll.runtime.process import current
from asynccoll.waiting.discarded import thrown_away_by
from asynccoll.waiting.started import Started
from asynccoll.waiting.work import Work, handed_out
from asynccoll.world.context import Context
from asynccoll.world.group import GroupLike
from asynccoll.world.resolving import resolve_group

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "explain",
    "gather",
    "gather_object",
    "join",
    "monitored_barrier",
    "permute",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
]

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., object])
#: Types whose values are gathered into a list of the same type.
Plain = TypeVar("Plain", bool, int, float, str)

#: The point-to-point functions: which side of a message each is, and the index of the other rank among its
#: arguments (the tag follows). Messages are not numbered in a lane's order of calls, and only the other rank
#: is notified of a refusal.
_MESSAGES: dict[Callable[..., object], tuple[str, int]] = {
    payload.send: ("send", 1),
    payload.recv: ("recv", 1),
    objects.send_object: ("send", 1),
    objects.recv_object: ("recv", 0),
}
#: The frames from a check here to the user's: `_start`, the public function, and the wrapper of `fitting`.
_DEPTH = 4
_ENDS = {"send": "dst", "recv": "src"}
_ROLES = {start.__name__: role for start, (role, _) in _MESSAGES.items()}

#: The functions that read their argument on every rank that passes one. (That of recv is only an example.)
_READING = frozenset(
    {
        payload.all_reduce,
        payload.all_reduce_scaled,
        payload.reduce,
        payload.all_gather,
        payload.gather,
        payload.scatter,
        payload.reduce_scatter,
        payload.all_to_all,
        payload.permute,
        payload.send,
    }
)

#: The functions whose torch counterparts change their argument: on every rank (None), on all but the root
#: (False), or on the root only (True).
_IN_PLACE_IN_TORCH = {
    payload.all_reduce: None,
    payload.all_reduce_scaled: None,
    payload.broadcast: False,
    payload.reduce: True,
}
#: Their further positional arguments, with the defaults, which a call need not spell out.
_SAID: dict[Callable[..., object], tuple[tuple[str, object], ...]] = {
    payload.all_reduce: (("op", "sum"),),
    payload.all_reduce_scaled: (("op", "sum"),),
    payload.broadcast: (("src", 0),),
    payload.reduce: (("dst", 0), ("op", "sum")),
}


class Common(TypedDict, total=False):
    """The arguments that every collective takes."""

    group: GroupLike
    lane: str | None
    timeout: float | None


def _start(
    group: GroupLike,
    lane: str | None,
    timeout: float | None,
    start: Callable[..., Started[Any]],
    *args: object,
    **filled: Any,
) -> Work[Any]:
    """Start a call on its lane; if this rank refuses it, notify the other ranks, which may be waiting.

    ``filled`` is ``out=``, for calls that have it.
    """
    context, block = current(), own_block()
    at: Lane | None = None
    before = called_at.set(caller(_DEPTH - 1))
    try:
        at = lane_of(context, group, lane)
        if timeout is not None:
            check_timeout(timeout)
        if filled.get("out") is None and start in _OTHER_IN_TORCH:
            _OTHER_IN_TORCH[start](start, args, at)
        if block is not None:
            block.check_unread(start.__name__, filled.get("out"))
            if start not in _MESSAGES:
                read_by = partial(_read_by, start, args, context.rank, **filled)
                return block.start(at, start, args, timeout, read_by, **filled)
        started = with_data(start, at, *args, timeout=timeout, **filled)
        return handed_out(
            started, read=_read_by(start, args, context.rank, started.leaves, **filled), **filled
        )
    except Exception as error:  # from a codec or torch, too: the call was not made
        _tell_refused(context, at, start, args, error)
        raise
    finally:
        called_at.reset(before)


def _tell_refused(
    context: Context,
    at: Lane | None,
    start: Callable[..., Started[Any]],
    args: Sequence[Any],
    error: Exception,
) -> None:
    """Notify ranks that may wait for a call that was refused with ``error``; ``at``: its lane, if known."""
    name = name_of(start)
    if at is None:
        context.note_refused(name, error)
    elif start in _MESSAGES:
        _, place = _MESSAGES[start]
        payload.refuse_message(at, start.__name__, *args[place : place + 2], error)  # type: ignore[call-arg]
    elif (block := own_block()) is None:
        context.refusals.refuse(at, error, name=name)
    else:
        block.refuse(at, error, name)
    leaves_its_call(error)


def refuse_send(
    error: Exception, *, dst: int | None, tag: int, group_dst: int | None, group: GroupLike, lane: str | None
) -> None:
    """Notify the receiver of a send that is not made because of ``error``, unless it is itself wrong."""
    with suppress(AsyncCollError):
        at = lane_of(current(), group, lane)
        payload.refuse_message(at, "send", _peer("dst", dst, group_dst, group), tag, error)


def _check_result_is_kept(start: Callable[..., Started[Any]], args: Sequence[object], at: Lane) -> None:
    """Warn if the result of a call is discarded, and the call would have changed its input in torch."""
    roots_own = _IN_PLACE_IN_TORCH[start]
    if roots_own is not None and (args[1] == at.world.rank) is not roots_own:
        return
    how = thrown_away_by(_DEPTH)
    if how and not isinstance(args[0], (bool, int, float, complex, str)):
        name = name_of(start)
        called = f"ac.{name}(x{_said(start, args)})"
        kept = f"await {called}" if how == "await" else f"{called}.wait()"
        warnings.warn(
            f"{name} does not change its input, and its result is thrown away here: write `x = {kept}`, or "
            "pass out=x; if you only want to wait, put `_ = ` before it",
            DiscardedResultWarning,
            stacklevel=_DEPTH + 1,
        )


def _said(start: Callable[..., object], args: Sequence[object]) -> str:
    """Return the root and the reduction of such a call as source text, without defaults."""
    names = _SAID.get(start, ())
    given = [(name, x) for (name, usual), x in zip(names, args[1:], strict=False) if x != usual]
    return "".join(f", {name}={_shown(x)}" for name, x in given)


def _shown(x: object) -> str:
    if isinstance(x, str):  # a ``ReduceOp`` is a str, too: show its text
        return repr(str.__str__(x))
    return repr(x) if isinstance(x, int) else "..."


def _check_each_is_meant(_: Callable[..., Started[Any]], args: Sequence[object], at: Lane) -> None:
    """Warn about a list with one tensor per rank, all alike, which is what torch's reduce_scatter takes."""
    xs, size = args[0], at.group.size
    if (
        type(xs) is not list
        or len(xs) != size
        or size == 1
        or not all(isinstance(x, torch.Tensor) for x in xs)
    ):
        return
    if len({(x.shape, x.dtype) for x in xs}) == 1:
        warnings.warn(
            f"reduce_scatter cuts each tensor of a list into {size} parts; torch's gives rank r the sum of "
            "the r-th tensors: write `y = await ac.reduce_scatter(torch.cat(xs))` for that, and pass a tuple "
            "if each is to be cut",
            stacklevel=_DEPTH + 1,
        )


#: The checks for calls that mean something else in torch.
_OTHER_IN_TORCH = dict.fromkeys(_IN_PLACE_IN_TORCH, _check_result_is_kept) | {
    payload.reduce_scatter: _check_each_is_meant
}


def _read_by(
    start: object, args: Sequence[object], rank: int, leaves: Sequence[object] = (), out: Any = None
) -> Read | None:
    """Return the tensors that the call reads until it is waited for, if torch counts writes to them."""
    if start in _READING or (start is payload.broadcast and args[1] == rank):
        return counted_of(leaves) if leaves else counted(args[0], out)
    return None


def refuse(error: AsyncCollError, *, group: GroupLike = None, lane: str | None = None, name: str) -> NoReturn:
    """Raise ``error`` instead of calling ``name``, and notify the peers, which may be making that call.

    For code on top of these functions that checks more than they do.
    """

    def start(*_: object, **__: object) -> NoReturn:
        raise error

    start.__name__ = name
    _start(group, lane, None, start)
    raise AssertionError("start raises")


_AS_EVERY_CALL = """
Like every collective it starts at once and returns a ``Work``. ``await`` it, or call ``.wait()`` without
an event loop, and use the result. Inputs are not changed; do not write to them before the call is ready.

{arguments}

More on these, and the errors: ``help("asynccoll.ops.collectives")``. To try the examples: ``await`` works
at the prompt of ``python -m asyncio``.
"""
#: The help text for each argument, for functions that have it.
_ARGUMENTS = {
    "group": "the ranks that call, as ``ac.new_group`` or a list of ranks gives them; default: all.",
    "lane": "the order that the call belongs to; tasks that run at the same time need one each.",
    "timeout": "seconds, after which the await raises ``CollectiveTimeoutError``.",
    "out": "a tensor for the result; ``out=x`` reduces or receives in place.",
}


def _fitting(function: Function) -> Function:
    """Wrap a public function so that the peers are notified of a misfit call, and complete its docstring."""
    taken = inspect.signature(function).parameters
    arguments = "\n".join(f"- ``{name}``: {told}" for name, told in _ARGUMENTS.items() if name in taken)
    told = _AS_EVERY_CALL.format(arguments=arguments)
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n{told}"
    return fitting(function, _refuse_misfit)


def _refuse_misfit(name: str, wrong: Misfit) -> NoReturn:
    if name in _ROLES:
        _refuse_message(name, wrong)
    refuse(wrong.error, group=wrong.group, lane=wrong.meant.get("lane"), name=name)


def _refuse_message(name: str, wrong: Misfit) -> NoReturn:
    """Raise the error of a misfit ``send`` or ``recv``, and notify the other rank, if the call named it."""
    end, meant = _ENDS[_ROLES[name]], wrong.meant
    with suppress(AsyncCollError):
        lane = lane_of(current(), wrong.group, meant.get("lane"))
        rank = _peer(end, meant.get(end), meant.get(f"group_{end}"), wrong.group)
        payload.refuse_message(lane, name, rank, meant.get("tag", 0), wrong.error)
    raise wrong.error


def _root(name: str, role: str, rank: int, index: int | None, group: GroupLike, lane: str | None) -> int:
    """Return the global rank of the root of a call of ``name``; if it is invalid, raise, and notify peers."""
    if index is None:
        return rank
    try:
        return _peer(role, rank or None, index, group)
    except AsyncCollError as error:
        refuse(error, group=group, lane=lane, name=name)


def _peer(role: str, rank: int | None, index: int | None, group: GroupLike) -> int:
    """Return the global rank that a call names, either directly or by its index in the group."""
    if (rank is None) is (index is None):
        got = "neither" if rank is None else f"{role}={rank} and group_{role}={index}"
        anybody = "; to receive from any source, use ac.recv_any or ac.recv_any_object"
        raise InvalidArgumentError(
            f"pass {role}=, a global rank, or group_{role}=, an index in the group; got {got}"
            f"{anybody if rank is None and role == 'src' else ''}"
        )
    if index is None:
        assert rank is not None
        return rank
    return resolve_group(current(), group).rank_at(index, f"group_{role}")


@_fitting
def all_reduce(
    x: T,
    /,
    *,
    op: ReduceOpLike = "sum",
    prescale: float = 1.0,
    postscale: float = 1.0,
    compression: str | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    out: object = None,
    timeout: float | None = None,
) -> Work[T]:
    """Reduce every rank's ``x``; all ranks get the same result, of the type of ``x``.

    A tensor keeps its shape and dtype. Python ints and bools reduce to exact ints (which never overflow),
    floats to floats. A tree is reduced leaf by leaf, with its tensors fused; ``out`` is then a tree as well.

    >>> await ac.all_reduce(torch.tensor([1, 2]))     # r0 has [1, 2], r1 has [3, 4]
    tensor([4, 6])                                    # both

    ``op``: ``sum``, ``avg`` or ``mean`` (of floats), ``product``, ``min``, ``max``, ``and``, ``or`` (logical:
    0 or 1 in the dtype of ``x``), ``band``, ``bor``, ``bxor`` (of integers and bool), or torch's
    ``ReduceOp``. For bool tensors a sum is an *or* and a product an *and*. Averages in half precision are
    computed in float32 and rounded once. ``min`` and ``max`` of tensors keep every NaN only in shared memory:
    gloo and Horovod may return another rank's number instead, and MPI may do so on some ranks only. For
    Python numbers every backend keeps NaN.
    sum and avg have gradients (all_reduce of the gradients); the others raise in backward.

    ``adasum`` is available on Horovod only (if built with MPI or NCCL).

    ``prescale`` and ``postscale`` multiply a floating-point tensor before and after the reduction;
    ``compression="fp16"`` sends wider floats as float16 and converts the result back. All three apply to each
    tensor of a tree. torch's ``_make_nccl_premul_sum(factor)`` as ``op`` means ``prescale=factor``, on every
    backend.

    >>> await ac.all_reduce(gradient, prescale=1 / 8, postscale=8 / n, compression="fp16")

    Source: ``torch.distributed.all_reduce``, ``MPI_Iallreduce``, ``horovod.torch.allreduce``.
    """
    if is_compiling():
        plain = is_one(prescale) and is_one(postscale) and compression is None
        return compiled.all_reduce(x, op, group, lane=lane, out=out, plain=plain)
    if isinstance(op, dist.ReduceOp) and (factor := premul_factor(op)) is not None:
        op, prescale = "sum", prescale * factor
    if compression is not None or not (is_one(prescale) and is_one(postscale)):
        scaling = (prescale, postscale, compression)
        return _start(group, lane, timeout, payload.all_reduce_scaled, x, op, scaling, out=out)
    return _start(group, lane, timeout, payload.all_reduce, x, op, out=out)


@_fitting
def reduce(
    x: T,
    /,
    *,
    dst: int = 0,
    op: ReduceOpLike = "sum",
    group_dst: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> Work[T | None]:
    """Reduce every rank's ``x`` to ``dst``; the result is None elsewhere. Has no gradient.

    >>> await ac.reduce(torch.tensor([1, 2]), dst=1)  # r0 has [1, 2], r1 has [3, 4]
    None                                              # r0
    tensor([4, 6])                                    # r1

    Source: ``torch.distributed.reduce``, ``MPI_Ireduce``.
    """
    dst = _root("reduce", "dst", dst, group_dst, group, lane)
    return _start(group, lane, timeout, payload.reduce, x, dst, op, out=out)


@_fitting
def broadcast(
    x: T,
    /,
    *,
    src: int = 0,
    safe_mode: bool = False,
    group_src: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    out: object = None,
    timeout: float | None = None,
) -> Work[T]:
    """Send the ``x`` of ``src`` to every rank.

    The other ranks pass something of the same kind: a tensor of the same shape and dtype, a number or string
    of any value, or a tree of the same structure (``out`` is then a tree as well). With ``safe_mode=True``
    they may pass None or anything else: the message describes its own content.

    >>> await ac.broadcast(torch.tensor([1, 2]), src=0)           # r1 passes any int64 of 2
    tensor([1, 2])                                                # both
    >>> await ac.broadcast("héllo" if rank == 0 else None, safe_mode=True)
    'héllo'                                                       # both

    Numbers are sent exactly, and strings may be any Unicode. The gradient is the sum of all ranks' gradients
    on ``src``, and zeros elsewhere; ``safe_mode`` has none. Source: ``torch.distributed.broadcast``,
    ``MPI_Ibcast``.
    """
    src = _root("broadcast", "src", src, group_src, group, lane)
    if is_compiling():
        return compiled.broadcast(x, src, group, lane=lane, safe_mode=safe_mode, out=out)
    return _start(group, lane, timeout, payload.broadcast, x, src, safe_mode, out=out)


@overload
def all_gather(
    x: torch.Tensor,
    /,
    *,
    dim: int = 0,
    uneven: Literal[False] = False,
    out: torch.Tensor | None = None,
    **common: Unpack[Common],
) -> Work[torch.Tensor]: ...
@overload
def all_gather(
    x: torch.Tensor, /, *, dim: int = 0, uneven: Literal[True], **common: Unpack[Common]
) -> Work[list[torch.Tensor]]: ...
@overload
def all_gather(x: Plain, /, **common: Unpack[Common]) -> Work[list[Plain]]: ...
@overload
def all_gather(
    x: object,
    /,
    *,
    dim: int = 0,
    uneven: bool = False,
    out: torch.Tensor | None = None,
    **common: Unpack[Common],
) -> Work[Any]: ...
@_fitting
def all_gather(
    x: object,
    /,
    *,
    dim: int = 0,
    uneven: bool = False,
    group: GroupLike = None,
    lane: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> Work[Any]:
    """Gather every rank's ``x`` on every rank, in rank order.

    Tensors of one shape are concatenated along ``dim``; 0-d tensors become a vector of n. With
    ``uneven=True`` shapes (and dtypes) may differ and need not be known in advance: the result is a list of n
    tensors, without gradients. Numbers and strings give a list; a tree is gathered leaf by leaf.

    >>> await ac.all_gather(torch.tensor([[1, 2]]))           # r0 has [[1, 2]], r1 has [[3, 4]]
    tensor([[1, 2], [3, 4]])                                  # shape (1, 2) -> (2, 2)
    >>> await ac.all_gather(torch.tensor([[1, 2]]), dim=1)
    tensor([[1, 2, 3, 4]])                                    # shape (1, 2) -> (1, 4)
    >>> await ac.all_gather(torch.ones(rank), uneven=True)
    [tensor([]), tensor([1.])]
    >>> await ac.all_gather({"n": 5, "name": f"rank {rank}"})
    {'n': [5, 5], 'name': ['rank 0', 'rank 1']}

    The gradient is the reduce_scatter of the gradients. Source:
    ``torch.distributed.all_gather_single``, ``MPI_Iallgather``.
    """
    if is_compiling():
        return compiled.all_gather(x, dim, group, lane=lane, uneven=uneven, out=out)
    return _start(group, lane, timeout, payload.all_gather, x, dim, uneven, out=out)


@overload
def gather(
    x: torch.Tensor,
    /,
    *,
    dst: int = 0,
    dim: int = 0,
    uneven: Literal[False] = False,
    group_dst: int | None = None,
    out: torch.Tensor | None = None,
    **common: Unpack[Common],
) -> Work[torch.Tensor | None]: ...
@overload
def gather(
    x: torch.Tensor,
    /,
    *,
    dst: int = 0,
    uneven: Literal[True],
    group_dst: int | None = None,
    **common: Unpack[Common],
) -> Work[list[torch.Tensor] | None]: ...
@overload
def gather(
    x: Plain, /, *, dst: int = 0, group_dst: int | None = None, **common: Unpack[Common]
) -> Work[list[Plain] | None]: ...
@overload
def gather(
    x: object,
    /,
    *,
    dst: int = 0,
    dim: int = 0,
    uneven: bool = False,
    group_dst: int | None = None,
    out: torch.Tensor | None = None,
    **common: Unpack[Common],
) -> Work[Any]: ...
@_fitting
def gather(
    x: object,
    /,
    *,
    dst: int = 0,
    dim: int = 0,
    uneven: bool = False,
    group_dst: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> Work[Any]:
    """Gather every rank's ``x`` on ``dst``, as ``all_gather`` does; None elsewhere. Has no gradient.

    With ``uneven=True`` shapes and dtypes may differ, and ``dst`` gets a list of n tensors.

    >>> await ac.gather(torch.tensor([rank]), dst=1)
    None                                                      # r0
    tensor([0, 1])                                            # r1: shape (1,) -> (2,)
    >>> await ac.gather(torch.ones(rank), dst=1, uneven=True)
    [tensor([]), tensor([1.])]                                # r1

    Source: ``torch.distributed.gather``, ``MPI_Igather``.
    """
    dst = _root("gather", "dst", dst, group_dst, group, lane)
    return _start(group, lane, timeout, payload.gather, x, dst, dim, uneven, out=out)


@overload
def scatter(
    x: torch.Tensor | Sequence[torch.Tensor] | None,
    /,
    *,
    src: int = 0,
    group_src: int | None = None,
    out: torch.Tensor | None = None,
    **common: Unpack[Common],
) -> Work[torch.Tensor]: ...
@overload
def scatter(
    x: Sequence[T], /, *, src: int = 0, group_src: int | None = None, **common: Unpack[Common]
) -> Work[T]: ...
@_fitting
def scatter(
    x: object,
    /,
    *,
    src: int = 0,
    group_src: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> Work[Any]:
    """Distribute the parts that ``src`` passes, one to each rank; the others pass None. Has no gradient.

    ``src`` passes one tensor whose dim 0 is divisible by n, or a list of n parts: tensors of any shapes and
    dtypes, numbers, strings, trees of these. Each message describes its own content.

    >>> await ac.scatter(torch.tensor([1, 2, 3, 4]) if rank == 0 else None)
    tensor([1, 2])                                            # r0: shape (4,) -> (2,)
    tensor([3, 4])                                            # r1
    >>> await ac.scatter([0.1, {"lr": 0.2}] if rank == 0 else None)
    0.1                                                       # r0
    {'lr': 0.2}                                               # r1

    Source: ``torch.distributed.scatter``, ``MPI_Iscatter``.
    """
    src = _root("scatter", "src", src, group_src, group, lane)
    return _start(group, lane, timeout, payload.scatter, x, src, out=out)


@_fitting
def reduce_scatter(
    x: T,
    /,
    *,
    op: ReduceOpLike = "sum",
    dim: int = 0,
    group: GroupLike = None,
    lane: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> Work[T]:
    """Reduce every rank's ``x``; rank r gets the r-th of n equal parts of the result along ``dim``.

    ``reduce_scatter(x)`` is ``all_reduce(x).chunk(n, dim)[rank]``.

    >>> await ac.reduce_scatter(torch.tensor([1, 2, 3, 4]))   # both have [1, 2, 3, 4]
    tensor([2, 4])                                            # r0: shape (4,) -> (2,)
    tensor([6, 8])                                            # r1

    ``op`` as in ``all_reduce``; the gradient of sum and avg is the all_gather of the gradients.
    Source: ``torch.distributed.reduce_scatter_tensor``, ``MPI_Ireduce_scatter_block``.
    """
    if is_compiling():
        return compiled.reduce_scatter(x, op, dim, group, lane=lane, out=out)
    return _start(group, lane, timeout, payload.reduce_scatter, x, op, dim, out=out)


@overload
def all_to_all(
    x: torch.Tensor,
    /,
    *,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    **common: Unpack[Common],
) -> Work[torch.Tensor]: ...
@overload
def all_to_all(x: Sequence[T], /, **common: Unpack[Common]) -> Work[list[T]]: ...
@_fitting
def all_to_all(
    x: object,
    /,
    *,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> Work[Any]:
    """Send part j of dim 0 to rank j; the result is the received parts, in rank order.

    Without split sizes the parts are equal. With them, ``input_split_sizes[j]`` rows go to rank j, and
    ``output_split_sizes[i]`` rows come from rank i. If only ``input_split_sizes`` are given (on every rank),
    the counts are sent first, and there can be no ``out``. If both are given, the counts of CPU tensors are
    still sent first between ranks that do not share memory: if they do not match, every rank gets a
    ``CollectiveMismatchError``. With ``check="off"`` they are not sent: counts that do not match abort the
    process, or the result is uninitialized memory.

    From a list of n parts, part j goes to rank j. Parts are tensors of any shapes and dtypes, numbers,
    strings, and trees of these. Each message describes its own content, and the result is the list of
    received parts. Has no gradient.

    >>> await ac.all_to_all(torch.tensor([0, 1]) + 10 * rank)
    tensor([ 0, 10])                                          # r0: shape (2,) -> (2,)
    tensor([ 1, 11])                                          # r1
    >>> await ac.all_to_all(torch.arange(3), input_split_sizes=[1, 2])
    tensor([0, 0])                                            # r0: shape (3,) -> (2,)
    tensor([1, 2, 1, 2])                                      # r1: shape (3,) -> (4,)
    >>> await ac.all_to_all([f"{rank} to {other}" for other in range(2)])
    ['0 to 0', '1 to 0']                                      # r0
    ['0 to 1', '1 to 1']                                      # r1

    The gradient is the reverse exchange. Source: ``torch.distributed.all_to_all_single``, ``MPI_Ialltoallv``.
    """
    if is_compiling():
        return compiled.all_to_all(x, input_split_sizes, output_split_sizes, group, lane=lane, out=out)
    return _start(group, lane, timeout, payload.all_to_all, x, input_split_sizes, output_split_sizes, out=out)


@_fitting
def permute(
    x: T,
    pairs: Iterable[tuple[int, int]],
    /,
    *,
    group: GroupLike = None,
    lane: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> Work[T]:
    """Send ``x`` along ``pairs`` of (source, destination); a rank without a source gets zeros.

    Every rank of the group passes the same ``pairs`` and an ``x`` of the same shape; each rank is a source at
    most once and a destination at most once.

    >>> await ac.permute(torch.tensor([rank + 1]), [(0, 1)])
    tensor([0])                                               # r0: no rank sends to it
    tensor([1])                                               # r1: shape (1,) -> (1,)

    The gradient is the permutation with each pair reversed. Source: ``jax.lax.ppermute``.
    """
    return _start(group, lane, timeout, payload.permute, x, pairs, out=out)


@_fitting
def send(
    x: torch.Tensor,
    /,
    *,
    dst: int | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[None]:
    """Send ``x`` to rank ``dst``, matched by a ``recv`` there with the same ``tag``, group and lane.

    The work is ready once the receiver has taken ``x`` (on nccl: ordered by the stream). Messages between two
    ranks with the same tag arrive in the order they were sent; different tags do not wait for each other. Has
    no gradient.

    >>> await ac.send(x, dst=1, tag=7)                # r0; r1: await ac.recv(torch.empty(2), src=0, tag=7)

    Source: ``torch.distributed.isend``, ``MPI_Isend``.
    """
    dst = _peer("dst", dst, group_dst, group)
    return _start(group, lane, timeout, payload.send, x, dst, tag)


@_fitting
def recv(
    like: torch.Tensor,
    /,
    *,
    src: int | None = None,
    tag: int = 0,
    group_src: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> Work[torch.Tensor]:
    """Receive the tensor that rank ``src`` sends, shaped like ``like`` (whose content does not matter).

    To receive from any source, use ``recv_any``.

    >>> await ac.recv(torch.empty(2), src=0)                  # r0: ac.send(torch.tensor([1., 2.]), dst=1)
    tensor([1., 2.])

    Source: ``torch.distributed.irecv``, ``MPI_Irecv``.
    """
    src = _peer("src", src, group_src, group)
    return _start(group, lane, timeout, payload.recv, like, src, tag, out=out)


@_fitting
def barrier(*, group: GroupLike = None, lane: str | None = None, timeout: float | None = None) -> Work[None]:
    """Synchronize the ranks: the work is ready once every rank of the group has made this call.

    Source: ``torch.distributed.barrier``, ``MPI_Ibarrier``.
    """
    return _start(group, lane, timeout, tensors.start_barrier)


@_fitting
def monitored_barrier(
    *,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | timedelta | None = None,
    wait_all_ranks: bool = False,  # for torch's signature: all ranks are named anyway
) -> Work[None]:
    """Call ``barrier``, under torch's name: past ``timeout`` it raises on every rank that has called it.

    The ``CollectiveTimeoutError``, like that of any other call, names each rank that has not called it and
    says what it is doing instead; ``error.ranks`` has their numbers. torch's function raises only on rank 0
    and, without ``wait_all_ranks``, names only the first such rank.

    >>> await ac.monitored_barrier(timeout=30)        # r0, while r1 reads a file
    CollectiveTimeoutError: ... rank 1 (host n1, pid 71) has not called barrier #7 on lane 'default'; ...

    Source: ``torch.distributed.monitored_barrier``.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return barrier(group=group, lane=lane, timeout=seconds)


@_fitting
def join(*, lane: str | None = None, timeout: float | None = None) -> Work[int]:
    """Signal that this rank has run out of inputs, where the ranks have different numbers of them.

    The work is ready once all ranks have called it; the result is the rank that called it last. While this
    rank waits for the others, their ``all_reduce`` calls continue, with zeros for this rank's tensors:
    an average still divides by the number of all ranks, and the zeros also count in a product, a max or a
    min. All their other collectives fail, and so does an ``all_reduce`` of numbers, of sparse tensors or with
    a logical ``op``. This rank must not call anything before the join is ready.

    Only Horovod supports it, for the world only, and only if no rank has refused a call before; otherwise it
    is refused.

    >>> for batch in batches:                         # two on r0, three on r1
    ...     await ac.all_reduce(gradient(batch))
    >>> await ac.join()
    1                                                 # both

    Source: ``horovod.torch.join``.
    """
    return _start(None, lane, timeout, tensors.start_join)


# Objects


@_fitting
def all_gather_object(
    obj: T,
    /,
    *,
    codec: Codec | str | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[list[T]]:
    """Gather every rank's ``obj`` on every rank, as a list in rank order.

    The default codec encodes plain data: None, numbers of any size, strings, bytes, containers, dates, paths,
    ``argparse.Namespace``, NumPy arrays and scalars, tensors (which arrive on the CPU). Decoding it runs no
    code. docs/guide.md has the full list. ``codec="pickle"`` encodes any picklable object; use it only if you
    trust every rank.

    >>> await ac.all_gather_object({"rank": rank})
    [{'rank': 0}, {'rank': 1}]

    Source: ``torch.distributed.all_gather_object``.
    """
    return _start(group, lane, timeout, objects.all_gather_object, obj, codec)


@_fitting
def gather_object(
    obj: T,
    /,
    *,
    dst: int = 0,
    codec: Codec | str | None = None,
    group_dst: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[list[T] | None]:
    """Gather every rank's ``obj`` on ``dst``, as ``all_gather_object`` does; None elsewhere.

    >>> await ac.gather_object(f"rank {rank}", dst=0)
    ['rank 0', 'rank 1']                                      # r0
    None                                                      # r1
    """
    dst = _root("gather_object", "dst", dst, group_dst, group, lane)
    return _start(group, lane, timeout, objects.gather_object, obj, dst, codec)


@_fitting
def broadcast_object(
    obj: object = None,
    /,
    *,
    src: int = 0,
    codec: Codec | str | None = None,
    group_src: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[Any]:
    """Send the ``obj`` of ``src`` to every rank; what the others pass is ignored.

    Every rank gets its own copy, including ``src``.

    >>> await ac.broadcast_object({"lr": 0.1} if rank == 0 else None)
    {'lr': 0.1}                                               # both
    """
    src = _root("broadcast_object", "src", src, group_src, group, lane)
    return _start(group, lane, timeout, objects.broadcast_object, obj, src, codec)


@_fitting
def scatter_object(
    obj: Sequence[T] | None,
    /,
    *,
    src: int = 0,
    codec: Codec | str | None = None,
    group_src: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[T]:
    """Distribute the n objects that ``src`` passes, one to each rank; what the others pass is ignored.

    >>> await ac.scatter_object(["a", {"b": 1}] if rank == 0 else None)
    'a'                                                       # r0
    {'b': 1}                                                  # r1
    """
    src = _root("scatter_object", "src", src, group_src, group, lane)
    return _start(group, lane, timeout, objects.scatter_object, obj, src, codec)


@_fitting
def send_object(
    obj: object,
    /,
    *,
    dst: int | None = None,
    tag: int = 0,
    codec: Codec | str | None = None,
    group_dst: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[None]:
    """Send ``obj`` to rank ``dst``, which calls ``recv_object`` with the same ``tag``, group and lane.

    The work is ready once the receiver has taken ``obj``. Messages between two ranks with the same tag arrive
    in order, both objects and tensors. Short objects (up to about 480 bytes) take one message, longer ones
    two.

    Source: ``torch.distributed.send_object_list``, ``mpi4py.MPI.Comm.isend``.
    """
    dst = _peer("dst", dst, group_dst, group)
    return _start(group, lane, timeout, objects.send_object, obj, dst, tag, codec)


@_fitting
def recv_object(
    *,
    src: int | None = None,
    tag: int = 0,
    codec: Codec | str | None = None,
    group_src: int | None = None,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Work[Any]:
    """Receive the object that rank ``src`` sends by ``send_object``; its type need not be known in advance.

    >>> await ac.recv_object(src=0)                           # r0: ac.send_object({"lr": 0.1}, dst=1)
    {'lr': 0.1}

    Source: ``torch.distributed.recv_object_list``, ``mpi4py.MPI.Comm.irecv``.
    """
    src = _peer("src", src, group_src, group)
    return _start(group, lane, timeout, objects.recv_object, src, tag, codec)


@misfits.fitting
def explain(name: str, x: object = None, /, **call: Any) -> Plan:
    """Return the plan of a call, without making it: ``print(ac.explain("all_reduce", x, op="avg"))``.

    It takes the arguments of the call. The plan says which native call runs, how the elements are sent, and
    why. Most payloads that the call would refuse are refused here, too; their shapes are not checked.

    >>> print(ac.explain("all_reduce", torch.ones(3)))        # ranks on one host
    all_reduce on memory: all_reduce
      - through memory that ranks share
      - memory has all_reduce with sum
    """
    from asynccoll.ops.explaining import explain_call

    taken = inspect.signature(globals()[Op.parse(name)]).parameters
    known = [each for each in taken if each not in ("x", "like")]  # ``x`` stands for them here
    misfits.check_options(f"explain: {name}", call, known)
    at = lane_of(current(), call.pop("group", None), call.pop("lane", None))
    return explain_call(at, name, x, call)
