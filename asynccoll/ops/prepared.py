"""Operations that are planned once and started every step.

``prepare`` does everything that is the same each time (the plan, the checks, the memory); ``start`` makes the
native call and records it. Both use the same ``Call`` that the ordinary function makes and starts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from asynccoll.errors import InvalidArgumentError, NotInitializedError
from asynccoll.host.timeouts import check_timeout
from asynccoll.host.uncopied import Uncopied
from asynccoll.memory.aliasing import has_memory
from asynccoll.memory.plain import overwritten
from asynccoll.memory.unfilled import refuse_unfilled
from asynccoll.memory.unwritten import beside, counted_of
from asynccoll.modes.captured import Modes
from asynccoll.modes.unseen import with_data
from asynccoll.ops.coalescing import own_block
from asynccoll.ops.scopes import lane_of
from asynccoll.ops.signatures import fitting
from asynccoll.order.lane import Lane
from asynccoll.order.operation import Operation
from asynccoll.payload.preparing import Calls, check_untracked, prepared_calls
from asynccoll.plan.spec import Op, ReduceOpLike
from asynccoll.plan.tree_texts import Outline
from asynccoll.plan.trees import flatten
from asynccoll.runtime.process import current
from asynccoll.waiting.started import Started
from asynccoll.waiting.work import Work, handed_out
from asynccoll.world.group import GroupLike

T = TypeVar("T")


class Prepared(Uncopied, Generic[T]):
    """A collective bound to its memory: ``start()`` sends its input's content. Made by ``prepare``."""

    __slots__ = (
        "_beginning",
        "_calls",
        "_fills",
        "_finish",
        "_lane",
        "_last",
        "_make",
        "_memory",
        "_read",
        "_reads",
        "_results",
        "_timeout",
        "_whole",
        "_world",
        "name",
    )

    _belongs = "to its tensors and process"
    _instead = "prepare another one for the copies of its tensors"

    def __init__(
        self,
        name: str,
        lane: Lane,
        like: object,
        make: Callable[[], Calls],
        timeout: float | None,
        fills: list[torch.Tensor],
        *,
        reads: bool,
    ) -> None:
        """``make`` creates the calls, with memory for their results.

        ``fills`` are the tensors that the user passed as ``out``. ``reads`` is false if this rank receives a
        broadcast: ``like`` is only an example of what is received.
        """
        self._make = make
        self._calls, self._finish = with_data(make)  # first, as it checks the arguments
        self.name: str = name
        self._lane = lane
        self._world = lane.world
        self._reads, spec = flatten(like)
        self._whole = name, Outline.of(spec, self._reads)
        #: the input, which must not be written to until a start has been waited for
        read = beside(self._reads, fills) if fills else self._reads
        self._read = counted_of(read) if reads else None
        self._timeout = timeout
        self._fills = fills
        self._memory = _memory_of(self._reads, fills)
        self._last: Work[T] | None = None
        #: whether a start has begun its call, which Ctrl-C may keep from becoming ``_last``
        self._beginning = False
        #: what each start fills; without ``out``, known once a start has been waited for
        self._results = fills

    def __repr__(self) -> str:
        return f"<Prepared {self.name} on {self._lane}>"

    def start(self) -> Work[T]:
        """Start the operation with its input's current content; return a ``Work``, like the ordinary call.

        The result is in the same memory every time, so the work has to be awaited before the next start.
        (After an error it is in new memory, if a native call may still write to the old.) If that await was
        cut short (cancelled, or timed out), start again without writing to the input: the new start waits in
        its lane for the previous one, whose result is lost (awaiting that work again raises).

        Raises:
            InvalidArgumentError: the work of the previous start has not been awaited; or its await was cut
                short and the input has been written to since, while other ranks may still receive it (await
                that work before you write); or a tensor's memory is no longer that for which this was
                prepared, as after ``x.data = y``; or autograd would now record the input; or ``out`` was made
                in inference mode and the start is outside of it; or a failed call may still write to ``out``.
            LaneOrderError, CollectiveError: as for the ordinary call.
        """
        if self._world.closed:
            raise NotInitializedError(f"{self!r} belongs to a context that was finalized; prepare it again")
        block = own_block()
        try:
            self._lane.admit()
            if block is not None:
                block.check_unread(self.name, self._fills)
            check_untracked(self.name, self._reads)
            if _memory_of(self._reads, self._fills) != self._memory:
                raise InvalidArgumentError(
                    f"{self!r} is bound to its tensors' memory, and the memory or shape of one has changed "
                    "since it was prepared (x.data = y, set_, resize_, t_): write into it with x.copy_(y), "
                    "or prepare it again"
                )
            if _any_inference(self._fills) and not torch.is_inference_mode_enabled():
                raise InvalidArgumentError(
                    f"{self!r} fills an out= that was made in inference mode, and was started outside of it; "
                    "start it in torch.inference_mode(), or prepare it with another out="
                )
            self._check_last()
            lost = self._lost_last()
            refuse_unfilled(self.name, (*self._reads, *self._fills), but=None if lost else self._last)
            unfinished = self._supersede_last(lost=lost)
            if lost:
                self._calls, self._finish = with_data(self._make)
                self._results = self._fills
            self._overwrite_results()
            begin = partial(self._begin, unfinished)
            return begin() if block is None else block.behind(self._lane, self.name, begin)
        except Exception as error:
            self._beginning = False
            (block or self._world).refuse(self._lane, error, name=self.name)
            raise

    def _check_last(self) -> None:
        """Refuse to start if the last work has not been waited for, and no wait for it was cut short."""
        if self._beginning:
            raise InvalidArgumentError(
                f"an earlier start of {self!r} was cut off (Ctrl-C?), so its call may still use this memory: "
                "prepare it again"
            )
        if self._last is not None and self._last.pending and not self._last.cut_short:
            raise InvalidArgumentError(
                f"{self!r} was started before its last work was awaited, and all starts share their memory: "
                "await each work before the next start, or prepare a second operation"
            )

    def _lost_last(self) -> bool:
        """Whether the last start has failed, and may still write to the memory of its result."""
        last = self._last
        return last is not None and last.claims and any(one.failure for one in last.operations)

    def _supersede_last(self, *, lost: bool) -> Sequence[Operation]:
        """Give up the last work if its await was cut short; return its operations that still use memory."""
        last = self._last
        if last is None:
            return ()
        if last.pending:
            last.supersede(
                f"{self!r} was started again after the await of this start had been cut short, and the new "
                "start overwrites its result"
            )
        return () if lost else last.in_flight()

    def _overwrite_results(self) -> None:
        """Tell autograd, and works that read the last result, that its memory is being filled again."""
        last = self._last
        if not self._results and last is not None and not last.pending and last.exception() is None:
            self._results = [x for x in flatten(last.result())[0] if isinstance(x, torch.Tensor)]
        overwritten(*self._results)

    def _begin(self, after: Sequence[Operation]) -> Work[T]:
        self._beginning = True
        self._last = work = handed_out(with_data(self._start, after), self._fills or None, self._read)
        self._beginning = False
        return work

    def _start(self, after: Sequence[Operation]) -> Started[Any]:
        lane, timeout = self._lane, self._timeout
        if self._finish is None:
            return self._calls[0].begin_again(lane, timeout, after)
        with lane.together(what=self._whole, name=self.name):
            parts = [call.begin_again(lane, timeout, after) for call in self._calls]
        return Started(tuple(operation for part in parts for operation in part.operations), self._finish)


@fitting
def prepare(
    name: str,
    /,
    like: object,
    *,
    op: ReduceOpLike | None = None,
    src: int | None = None,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
    out: object = None,
    group: GroupLike = None,
    lane: str | None = None,
    timeout: float | None = None,
) -> Prepared[Any]:
    """Plan an operation, check it and allocate its memory once, to start it every step.

    >>> op = ac.prepare("all_reduce", like=x, op="avg")
    >>> for batch in batches:
    ...     x.copy_(gradient(batch))
    ...     mean = await op.start()       # r0 has x = [1.], r1 has [3.]: [2.] on both

    ``start()`` sends the content of ``like`` at that moment. The result is ``out``, or without it memory of
    the operation that the next start overwrites; ``out=like`` is the in-place operation.

    Args:
        name: ``all_reduce`` (``op``), ``broadcast`` (``src``), both of a tensor or a tree of tensors, which
            are sent packed; ``all_gather``, ``reduce_scatter`` (``op``), along dim 0; ``all_to_all``
            (``input_split_sizes`` and ``output_split_sizes``, or even).
        like: the contiguous tensor that is read at each start.
        op, src, input_split_sizes, output_split_sizes, out: as for the ordinary call, if it takes them.
        group, lane, timeout: as in every operation; fixed here, not at ``start``. Every rank has to prepare
            and start the same operations, but preparing sends nothing.

    Raises:
        InvalidArgumentError, PayloadTypeError, UnsupportedOpError: as for the ordinary call; also for
            tensors that are not contiguous, or that autograd records (there is no gradient).

    Source: persistent collectives of MPI 4 (``MPI_Allreduce_init``, ``MPI_Start``).
    """
    operation = Op.parse(name)
    call = {
        "op": op,
        "src": src,
        "input_split_sizes": input_split_sizes,
        "output_split_sizes": output_split_sizes,
        "out": out,
    }
    chosen = lane_of(current(), group, lane)
    check_timeout(timeout)
    fills = [leaf for leaf in flatten(out)[0] if isinstance(leaf, torch.Tensor)]
    # Unless ``out`` was made in inference mode, allocate outside of it, so that ``start`` works in any mode.
    inferring = torch.is_inference_mode_enabled() and _any_inference(fills)
    modes = Modes(torch.is_grad_enabled(), inferring)
    given = {key: x for key, x in call.items() if x is not None}
    make = partial(modes.run, prepared_calls, chosen, operation, like, given)
    reads = operation is not Op.BROADCAST or (src or 0) == chosen.world.rank
    return Prepared(operation.value, chosen, like, make, timeout, fills, reads=reads)


def _memory_of(*those: Iterable[object]) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
    """Return address, shape and strides of the strided tensors in ``those``; lazy ones have no address."""
    found = (x for xs in those for x in xs if isinstance(x, torch.Tensor) and has_memory(x))
    return [(x.data_ptr(), x.shape, x.stride()) for x in found if x.layout is torch.strided]


def _any_inference(xs: list[torch.Tensor]) -> bool:
    return any(x.is_inference() for x in xs)
