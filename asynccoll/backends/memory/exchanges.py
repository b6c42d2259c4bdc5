"""The collectives as steps: what each rank puts into its slot, and what it takes from the slots of all.

Reductions are done in rank order, so that every rank gets the same bits; half precision is accumulated in
float32 and rounded once. Tensors are flat.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asynccoll.backends.api import ReduceOp, reduce_chunks
from asynccoll.backends.memory.engine import Engine
from asynccoll.backends.memory.exchange import Call, Exchange

#: Parts of a slot begin at multiples of this, so that no two ranks write to one cache line.
_LINE_BYTES = 64


def _steps(count: int, per_step: int) -> int:
    return max(1, -(-count // per_step))


class _Whole(Exchange):
    """A call in which a rank puts one tensor ``x``, a slot's worth at each step."""

    __slots__ = ("_count", "_dtype", "_per_step", "_region", "_x")

    def __init__(self, engine: Engine, call: Call, x: torch.Tensor) -> None:
        self._region = engine.region
        self._x = x
        self._dtype = x.dtype
        self._count = count = x.numel()
        self._per_step = per_step = self._region.per_slot[x.dtype]
        super().__init__(engine, call, 1 if count <= per_step else -(-count // per_step))

    def _here(self, step: int) -> int:
        """Return how many elements that step has."""
        return min(self._per_step, self._count - step * self._per_step)

    def _part(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Return the part of ``x`` that belongs to that step."""
        return x if self.steps == 1 else x.narrow(0, step * self._per_step, self._here(step))

    def _slots(self, step: int, slot: int) -> list[torch.Tensor]:
        """Return the data of that step in all ranks' slots."""
        count = self._count if self.steps == 1 else self._here(step)
        return self._region.views(slot, self._dtype, count)

    def put(self, step: int, slot: int) -> None:
        x = self._x
        self._slots(step, slot)[self._region.index].copy_(x if self.steps == 1 else self._part(x, step))


class AllReduce(_Whole):
    """Reduce all ranks' ``x`` into ``out``, which may be the same memory: every rank reduces all elements."""

    __slots__ = ("_op", "_out")

    def __init__(self, engine: Engine, call: Call, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> None:
        super().__init__(engine, call, x)
        self._out, self._op = out, op

    def take(self, step: int, slot: int) -> None:
        reduce_chunks(self._slots(step, slot), self._op, self._part(self._out, step))


class AllReduceByParts(AllReduce):
    """As ``AllReduce``, but every rank reduces one part of each step, and takes the others' parts from them.

    A rank writes its reduced part to its own slot.
    """

    __slots__ = ()

    combines = True

    def _bounds(self, step: int, rank: int) -> tuple[int, int]:
        """Return where a rank's part of that step begins, and how many elements it has."""
        here, size = self._here(step), self._region.size
        line = max(1, _LINE_BYTES // self._dtype.itemsize)
        each = -(-here // size)
        each = -(-each // line) * line
        start = min(here, rank * each)
        return start, min(here, start + each) - start

    def combine(self, step: int, slot: int) -> None:
        mine = self._region.index
        start, count = self._bounds(step, mine)
        if count:
            rows = self._region.views(slot, self._dtype, count, start * self._dtype.itemsize)
            # This rank's data is read from ``x``, not from its slot, where the result goes: so that the step
            # can be done again.
            sent = self._part(self._x, step).narrow(0, start, count)
            reduce_chunks([*rows[:mine], sent, *rows[mine + 1 :]], self._op, rows[mine])

    def take(self, step: int, slot: int) -> None:
        into = self._part(self._out, step)
        for rank in range(self._region.size):
            start, count = self._bounds(step, rank)
            if count:
                rows = self._region.views(slot, self._dtype, count, start * self._dtype.itemsize)
                into.narrow(0, start, count).copy_(rows[rank])


class Reduce(_Whole):
    """Reduce all ranks' ``x`` into ``x`` of the rank ``dst``."""

    __slots__ = ("_dst", "_op")

    def __init__(self, engine: Engine, call: Call, x: torch.Tensor, dst: int, op: ReduceOp) -> None:
        super().__init__(engine, call, x)
        self._dst, self._op = dst, op

    def take(self, step: int, slot: int) -> None:
        if self._region.index == self._dst:
            reduce_chunks(self._slots(step, slot), self._op, self._part(self._x, step))


class Broadcast(_Whole):
    """Copy ``x`` of the rank ``src`` to ``x`` of all others."""

    __slots__ = ("_src",)

    def __init__(self, engine: Engine, call: Call, x: torch.Tensor, src: int) -> None:
        super().__init__(engine, call, x)
        self._src = src

    def put(self, step: int, slot: int) -> None:
        if self._region.index == self._src:
            super().put(step, slot)

    def take(self, step: int, slot: int) -> None:
        if self._region.index != self._src:
            self._part(self._x, step).copy_(self._slots(step, slot)[self._src])


class Gather(_Whole):
    """Copy all ranks' ``x`` into ``rows``, which only the receiving rank has."""

    __slots__ = ("_rows",)

    def __init__(
        self, engine: Engine, call: Call, rows: Sequence[torch.Tensor] | None, x: torch.Tensor
    ) -> None:
        super().__init__(engine, call, x)
        self._rows = rows

    def take(self, step: int, slot: int) -> None:
        if self._rows is not None:
            for row, sent in zip(self._rows, self._slots(step, slot), strict=True):
                self._part(row, step).copy_(sent)


class AllGather(_Whole):
    """Copy all ranks' ``x``, in rank order, into the flat ``out`` of every rank."""

    __slots__ = ("_out",)

    def __init__(self, engine: Engine, call: Call, out: torch.Tensor, x: torch.Tensor) -> None:
        super().__init__(engine, call, x)
        self._out = out

    def take(self, step: int, slot: int) -> None:
        slots = self._slots(step, slot)
        if self.steps == 1:
            torch.cat(slots, out=self._out)
            return
        count = self._count
        for rank, sent in enumerate(slots):
            self._out.narrow(0, rank * count + step * self._per_step, sent.numel()).copy_(sent)


class _Split(Exchange):
    """A call in which a rank puts a part for each receiver. A slot is divided into ``places`` for these.

    ``places`` is the number of ranks unless given.
    """

    __slots__ = ("_dtype", "_per_step", "_place_bytes", "_region")

    def __init__(
        self, engine: Engine, call: Call, dtype: torch.dtype, count: int | None, places: int | None = None
    ) -> None:
        """``count`` is the number of elements of a part, or None if parts differ."""
        region = self._region = engine.region
        self._dtype = dtype
        place = region.layout.slot_bytes // (places or region.size)
        self._place_bytes = place // _LINE_BYTES * _LINE_BYTES or place // dtype.itemsize * dtype.itemsize
        self._per_step = max(1, self._place_bytes // dtype.itemsize)
        super().__init__(engine, call, None if count is None else _steps(count, self._per_step))

    def _here(self, count: int, step: int) -> int:
        """Return how many elements of a part of ``count`` that step has."""
        return max(0, min(self._per_step, count - step * self._per_step))

    def _places(self, slot: int, of: int, count: int) -> list[torch.Tensor]:
        """Return the first ``count`` elements of place ``of`` in all ranks' slots."""
        return self._region.views(slot, self._dtype, count, of * self._place_bytes)

    def _put_part(self, part: torch.Tensor, of: int, step: int, slot: int) -> None:
        if here := self._here(part.numel(), step):
            self._places(slot, of, here)[self._region.index].copy_(self._of(part, step, here))

    def _of(self, part: torch.Tensor, step: int, here: int) -> torch.Tensor:
        """Return the ``here`` elements of a part that belong to that step."""
        return part if part.numel() == here else part.narrow(0, step * self._per_step, here)


class ReduceScatter(_Split):
    """Reduce this rank's part of every rank's flat ``x`` into ``out``."""

    __slots__ = ("_op", "_out", "_parts", "_whole", "_x")

    def __init__(self, engine: Engine, call: Call, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> None:
        super().__init__(engine, call, x.dtype, out.numel())
        self._out, self._x, self._op = out, x, op
        #: whether all parts fit into one slot, and so go there as they lie in ``x``
        self._whole = x.numel() <= engine.region.per_slot[x.dtype]
        if self._whole:
            self.steps: int = 1
            self.is_long: bool = False
        else:
            self._parts = x.view(engine.region.size, -1).unbind(0)

    def put(self, step: int, slot: int) -> None:
        if self._whole:
            region, x = self._region, self._x
            region.views(slot, self._dtype, x.numel())[region.index].copy_(x)
            return
        for of, part in enumerate(self._parts):
            self._put_part(part, of, step, slot)

    def take(self, step: int, slot: int) -> None:
        if self._whole:
            region, count = self._region, self._out.numel()
            start = region.index * count * self._dtype.itemsize
            reduce_chunks(region.views(slot, self._dtype, count, start), self._op, self._out)
        elif here := self._here(self._out.numel(), step):
            places = self._places(slot, self._region.index, here)
            reduce_chunks(places, self._op, self._of(self._out, step, here))


class Scatter(_Split):
    """Copy this rank's part of those that the rank ``src`` passes into ``out``."""

    __slots__ = ("_out", "_parts", "_src")

    def __init__(
        self,
        engine: Engine,
        call: Call,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor] | None,
        src: int,
    ) -> None:
        super().__init__(engine, call, out.dtype, out.numel())
        self._out, self._parts, self._src = out, parts, src

    def put(self, step: int, slot: int) -> None:
        for of, part in enumerate(self._parts or ()):
            self._put_part(part, of, step, slot)

    def take(self, step: int, slot: int) -> None:
        if here := self._here(self._out.numel(), step):
            sent = self._places(slot, self._region.index, here)[self._src]
            self._of(self._out, step, here).copy_(sent)


class AllToAll(_Split):
    """Copy a part of ``x`` to each rank, and theirs into ``out``. Parts may have any lengths.

    ``out`` must not share memory with ``x``. A rank's own part does not go through its slot, which has places
    for the other ranks only.
    """

    __slots__ = ("_engine", "_in", "_length", "_out", "_row", "_splits")

    has_length = True

    def __init__(
        self,
        engine: Engine,
        call: Call,
        out: torch.Tensor,
        x: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        row: int,
    ) -> None:
        """``splits``: the elements of each part of ``out``, and of ``x``; ``row``: those of a row."""
        super().__init__(engine, call, x.dtype, None, engine.region.size - 1)
        self._engine = engine
        self._row = row
        self._splits = splits
        self._out = out.split_with_sizes(list(splits[0]))
        self._in = x.split_with_sizes(list(splits[1]))
        self._length = _steps(max(*splits[0], *splits[1]), self._per_step)
        self.is_long: bool = self._length > 1

    def length(self) -> int:
        return self._length

    def agreed(self, lengths: list[int], slot: int) -> None:
        if (found := self._region.misfit(slot)) is not None:
            raise self._engine.misfit(self, slot, found, self._row)
        self.steps: int = max(lengths)

    def put(self, step: int, slot: int) -> None:
        if step == 0:
            self._region.write_note(slot, (*self._splits[0], *self._splits[1]))
        for of, part in enumerate(self._in):
            mine = self._region.index
            if of != mine and (here := self._here(part.numel(), step)):
                self._between(slot, mine, of, here).copy_(self._of(part, step, here))

    def _between(self, slot: int, source: int, of: int, count: int) -> torch.Tensor:
        """Return the place in the slot of rank ``source`` for its data to rank ``of``."""
        return self._places(slot, of - (of > source), count)[source]

    def take(self, step: int, slot: int) -> None:
        mine = self._region.index
        for rank, into in enumerate(self._out):
            if here := self._here(into.numel(), step):
                own = rank == mine
                sent = self._of(self._in[mine], step, here) if own else self._between(slot, rank, mine, here)
                self._of(into, step, here).copy_(sent)


class Barrier(Exchange):
    """Move no data: the call is over once all ranks have posted it."""

    __slots__ = ()

    def __init__(self, engine: Engine, call: Call) -> None:
        super().__init__(engine, call, 1)
