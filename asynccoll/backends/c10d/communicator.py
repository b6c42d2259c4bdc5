"""One lane's native process groups, and how each collective is started on them."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch._C._distributed_c10d as _native  # torch.distributed re-exports only half of the options
import torch.distributed as dist
from torch._C._autograd import _enable_record_function
from torch.autograd import profiler

from asynccoll.backends.api import Communicator, Completion, Helpers, ReduceOp, forks, host, uncast
from asynccoll.backends.c10d.channels import Channels
from asynccoll.backends.c10d.completion import MILLISECOND, HostCompletion

_REDUCE_OPS: dict[ReduceOp, object] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.AVG,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}


#: How long to wait for the threads of a native group to end; most end at once.
_DESTROY_SECONDS = 1.0
#: How long to wait at the end of the program for those that did not; they end when their peers do.
_EXIT_SECONDS = 5.0
#: The threads that run destructors of native groups.
_destroying = host.per_process(Helpers, Helpers.forget_parent)


def _options(kind: Any, **values: object) -> object:
    options = kind()
    if hasattr(options, "asyncOp"):
        options.asyncOp = True  # else nccl would run on the current stream, and overlap with nothing
    for name, value in values.items():
        setattr(options, name, value)
    return options


_ALL_REDUCE = {op: _options(_native.AllreduceOptions, reduceOp=op_) for op, op_ in _REDUCE_OPS.items()}
_REDUCE_SCATTER = {
    op: _options(_native.ReduceScatterOptions, reduceOp=op_) for op, op_ in _REDUCE_OPS.items()
}
_ALL_GATHER = _options(_native.AllgatherOptions)
_ALL_TO_ALL = _options(_native.AllToAllOptions)
_BARRIER = _options(_native.BarrierOptions)


@cache
def _broadcast_from(root: int) -> object:
    return _options(_native.BroadcastOptions, rootRank=root)


class Unprofiled:
    """A stand-in for a native group while a profiler is running: torch.profiler does not record calls on it.

    gloo's thread records the end of a profiled call, after the call's future has completed. By then the
    profiler may have been stopped and its memory freed, and torch writes to that memory all the same (2.13).
    So the profiler sees only the range that the lane records for an operation, which ends in time.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._native, name)

        def call(*args: object) -> Any:
            _enable_record_function(False)
            try:
                return method(*args)
            finally:
                _enable_record_function(True)

        return call


class Transport:
    """One native process group, and the ``Completion`` class for its works."""

    def __init__(self, group: Any, complete: Callable[[object], Completion], exchange_bytes: int = 0) -> None:
        self.group = group
        self.complete = complete
        self.exchange_bytes = exchange_bytes
        # nccl's works are over for the host when they are issued.
        self._ends_later = complete is HostCompletion

    @property
    def native(self) -> Any:
        """The group to make calls on, hidden from a running profiler if its works end after the call."""
        if self._ends_later and profiler._is_profiler_enabled:
            return Unprofiled(self.group)
        return self.group


#: The communicators within the node and across nodes, and a function that opens them.
Parts = tuple[Communicator, Communicator]
OpenParts = Callable[[], Parts]


class C10dCommunicator:
    """The native groups of one lane: one for each device type, and those of its messages (``channels``)."""

    def __init__(
        self,
        transports: dict[str, Transport],
        channels: Channels,
        size: int,
        await_others: Callable[[], object],
        *,
        on_cpu: bool,
    ) -> None:
        """``await_others`` returns when all ranks have opened this communicator, so that it may be closed.

        ``on_cpu`` says that the world has no other device than the CPU.
        """
        self._transports = transports
        self._await_others = await_others
        self._aborted = False
        self._size = size
        self._channels = channels
        self._on_cpu = on_cpu
        # With one transport, the common case, the tensor's device need not be looked up.
        self._only = next(iter(transports.values())) if len(transports) == 1 else None
        self._open_parts: OpenParts | None = None
        self.parts: Parts | None = None

    def open_parts_with(self, how: OpenParts) -> None:
        """Have ``open_parts`` call ``how``."""
        self._open_parts = how

    def open_parts(self) -> None:
        """Open ``parts``, a communicator within this node and one across nodes. Waits for the other ranks."""
        assert self._open_parts is not None
        parts = self._open_parts()
        announce = getattr(parts[0], "announce", None)
        if announce is not None:  # a call by node begins on the communicator within the node
            self.announce = announce
        self.parts = parts
        if self._aborted or not self._transports:  # this communicator has ended while the parts were opened
            end_all(parts)

    def _for(self, x: torch.Tensor) -> Transport:
        return self._only or self._transports[x.device.type]

    def native(self, device: str) -> object:
        return self._transports[device].group

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        to = self._only or self._transports[x.device.type]
        return to.complete(to.native.allreduce([x], _ALL_REDUCE[op]))

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        to = self._for(x)
        options = _options(_native.ReduceOptions, reduceOp=_REDUCE_OPS[op], rootRank=dst)
        return to.complete(to.native.reduce([x], options))

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        to = self._for(x)
        return to.complete(to.native.broadcast([x], _broadcast_from(src)))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        to = self._for(x)
        # gloo's all_gather is a ring, too: an exchange is faster for small tensors (see ``exchange_bytes``).
        if 0 < x.nbytes * (self._size - 1) <= to.exchange_bytes:
            copies, even = uncast(torch.cat, [x] * self._size), [x.numel()] * self._size
            return to.complete(to.native.alltoall_base(out, copies, even, even, _ALL_TO_ALL))
        return to.complete(to.native._allgather_base(out, x, _ALL_GATHER))

    def gather(self, out: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int) -> Completion:
        to = self._for(x)
        options = _options(_native.GatherOptions, rootRank=dst)
        return to.complete(to.native.gather([list(out)] if out is not None else [], [x], options))

    def scatter(self, out: torch.Tensor, x: Sequence[torch.Tensor] | None, src: int) -> Completion:
        to = self._for(out)
        options = _options(_native.ScatterOptions, rootRank=src)
        return to.complete(to.native.scatter([out], [list(x)] if x is not None else [], options))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: ReduceOp) -> Completion:
        to = self._for(x)
        return to.complete(to.native._reduce_scatter_base(out, x, _REDUCE_SCATTER[op]))

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> Completion:
        to = self._for(x)
        return to.complete(to.native.alltoall_base(out, x, out_splits, in_splits, _ALL_TO_ALL))

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Completion:
        if x.device.type == "cpu":
            return self._channels.send(x, dst, tag)
        to = self._for(x)
        return to.complete(to.native.send([x], dst, tag))

    def recv(self, x: torch.Tensor, src: int, tag: int) -> Completion:
        if x.device.type == "cpu":
            return self._channels.recv(x, src, tag)
        to = self._for(x)
        return to.complete(to.native.recv([x], src, tag))

    def refuse(self, dst: int, tag: int, why: str) -> None:
        if self._on_cpu:  # else the receiver's tensor may be on another device, which does not use channels
            self._channels.refuse(dst, tag, why)

    def barrier(self) -> Completion:
        to = self._transports.get("cpu") or next(iter(self._transports.values()))
        return to.complete(to.native.barrier(_BARRIER))

    def retire(self) -> bool:
        for part in self.parts or ():
            part.retire()
        self._abort_collectives()
        self._destroy()
        return True

    def inherit(self, previous: C10dCommunicator) -> None:
        self._channels = previous._channels

    def close(self) -> None:
        steps: list[Callable[[], object]] = [
            *(() if self._aborted else [self._await_others]),
            *(part.close for part in self.parts or ()),
            partial(self._channels.close, _abort, aborted=self._aborted),
            self._destroy,
        ]
        host.call_each(steps)

    def _destroy(self) -> None:
        held = list(self._transports.values())
        self._transports, self._only = {}, None
        _shut_down(held)
        _destroy(held)

    def abort(self) -> None:
        self._aborted = True
        steps: list[Callable[[], object]] = [
            *(part.abort for part in self.parts or ()),
            *(partial(_abort, pair) for pair in self._channels.natives()),
            self._abort_collectives,
        ]
        host.call_each(steps)

    def _abort_collectives(self) -> None:
        for to in list(self._transports.values()):
            _abort(to.group)


def end_all(parts: Sequence[Communicator]) -> None:
    """Abort and close all ``parts``, even if one of them raises."""
    host.call_each([*(part.abort for part in parts), *(part.close for part in parts)])


def _shut_down(held: list[Transport]) -> None:
    """Shut down groups of nccl: if one is only destroyed, it aborts its kernels."""
    for to in held:
        if to.group.name() == "nccl":
            with contextlib.suppress(Exception):
                to.group.shutdown()


def _destroy(held: list[Transport]) -> None:
    """Destroy native groups, to which ``held`` has the last references; wait a moment for their threads.

    The destructors join the groups' threads, and one of these may never end: if a connection is closed, gloo
    does not fail a receive that has got its first bytes. So they run in a thread. Where none can start, the
    groups are left to the end of the process.
    """
    thread = _destroying.start("asynccoll-destroying", held.clear)
    if thread is None:
        forks.keep(*held)
    else:
        thread.join(_DESTROY_SECONDS)


# gloo's threads call Python when they end: if one does while the interpreter ends, the process is aborted.
atexit.register(_destroying.join, _EXIT_SECONDS)


def _abort(native: Any) -> None:
    """Fail all operations in flight on a native group. A receive that times out tears down gloo's group."""
    with contextlib.suppress(Exception):
        if native.name() != "gloo":
            native.abort()
            return
    # A receive from a peer that is gone fails at once and tears nothing down, so try every peer.
    for peer in range(native.size()):
        if peer != native.rank():
            with contextlib.suppress(RuntimeError):
                native.recv([torch.empty(1, device="cpu")], peer, 2**31 - 1).wait(MILLISECOND)
