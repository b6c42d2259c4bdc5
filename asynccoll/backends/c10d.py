"""gloo, nccl and any other backend of c10d: the native ProcessGroup methods, called directly.

Communicators are our own: each (group, lane, epoch) is a ProcessGroup made on a prefix of the store,
which meets its peers by name. The user's ``dist.*`` calls and DDP run on other groups and never
interleave with ours.

Tensors on the CPU go through gloo in every case, also beside nccl: objects, numbers and lengths are
then awaited for real instead of synchronising the GPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as _native  # torch.distributed re-exports only half of the options
import torch.distributed as dist

from asynccoll.backends import interface as own_interface
from asynccoll.backends.channels import Channels
from asynccoll.backends.published import publish, withdraw
from asynccoll.backends.rendezvous import (
    LOOPBACK,
    announce,
    host_of,
    locate,
    matching_launch,
    not_met,
    own_part,
    rendezvous,
)
from asynccoll.backends.waiters import InProgress
from asynccoll.completion import Completion
from asynccoll.errors import BackendNotFoundError
from asynccoll.spec import Capabilities, Op, ReduceOp
from asynccoll.store import Waiting

if TYPE_CHECKING:
    from asynccoll.backends import Request
    from asynccoll.context import Context
    from asynccoll.group import Group

__all__ = ["C10dBackend", "C10dCommunicator", "HostCompletion", "Transport"]

_MILLISECOND = timedelta(milliseconds=1)
#: How long closing waits for lanes that are being opened; they are told to give up.
_OPENING_SECONDS = 2.0
#: The bounds that waiters use all the time: making a timedelta costs as much as a wait that is over.
_LIMITS = {seconds: timedelta(seconds=seconds) for seconds in (0.001, 0.1)}

#: Without its types: the stubs leave out half of it.
_Gloo: Any = getattr(dist, "ProcessGroupGloo", None)

_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
#: gloo averages since 2.11; before, a sum is divided.
_GLOO_AVERAGES = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 11)

GLOO = Capabilities(
    backend="gloo",
    ops=frozenset(Op),
    reduce=(
        *((dtype, _ARITHMETIC | _BITWISE) for dtype in (*_INTEGERS, torch.bool)),
        *((d, _ARITHMETIC | ({ReduceOp.AVG} if _GLOO_AVERAGES else set())) for d in _FLOATS),
    ),
    move=frozenset((*_INTEGERS, *_FLOATS, torch.bool)),
    sparse=True,
    # Its reduce_scatter is built of all_reduces, has no future, and is slower than an exchange.
    compose=frozenset({Op.REDUCE_SCATTER}),
)
NCCL = Capabilities(
    backend="nccl",
    ops=frozenset(Op),
    reduce=(
        *((dtype, _ARITHMETIC) for dtype in _INTEGERS),
        *((dtype, _ARITHMETIC | {ReduceOp.AVG}) for dtype in _FLOATS),
    ),
    move=frozenset((*_INTEGERS, *_FLOATS)),
    devices=frozenset({"cuda"}),
)

_REDUCE_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.AVG,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}


class HostCompletion(Completion):
    """A c10d work whose end the host can see (gloo)."""

    __slots__ = ("_fine", "_future", "_work", "done")

    def __init__(self, work: Any) -> None:
        self._work = work
        self._future: Any = None
        self._fine = False
        self.done = work.is_completed  # type: ignore[method-assign]  # one call less for every look

    def wait(self, seconds: float) -> bool:
        limit = _LIMITS.get(seconds) or timedelta(seconds=max(seconds, 0.001))  # 0 is no bound
        try:
            self._work.wait(limit)
        except RuntimeError:  # either its failure, which error() gives, or this bound
            return bool(self.done())
        self._fine = True
        return True

    def add_callback(self, callback: Callable[[], object]) -> None:
        future = self._work.get_future()

        def fired(_: Any) -> None:
            # The work says that it is done only after its future's callbacks have run.
            self._future = future
            self.done = future.done  # type: ignore[method-assign]  # see above
            callback()

        future.add_done_callback(fired)

    def error(self) -> BaseException | None:
        if self._fine:
            return None
        try:
            if self._future is not None:
                self._future.value()
            else:
                self._work.wait(_MILLISECOND)
        except RuntimeError as error:
            return error
        return None


class StreamCompletion(Completion):
    """A c10d work that is ordered by the device's stream (nccl): ready when issued.

    ``synchronize`` makes the current stream wait for it; the host never does.
    """

    __slots__ = ("work",)

    stream_ordered = True

    def __init__(self, work: Any) -> None:
        self.work = work

    def done(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True

    def add_callback(self, callback: Callable[[], object]) -> None:
        callback()

    def error(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        self.work.wait()


def _options(kind: Any, **values: Any) -> Any:
    options = kind()
    if hasattr(options, "asyncOp"):
        options.asyncOp = True  # else nccl would run on the current stream and hide nothing
    for name, value in values.items():
        setattr(options, name, value)
    return options


_ALL_REDUCE = {op: _options(_native.AllreduceOptions, reduceOp=op_) for op, op_ in _REDUCE_OPS.items()}
_REDUCE_SCATTER = {
    op: _options(_native.ReduceScatterOptions, reduceOp=op_) for op, op_ in _REDUCE_OPS.items()
}
_ALL_GATHER = _options(_native.AllgatherOptions)
_ALL_TO_ALL = _options(_native.AllToAllOptions)
_BROADCAST: dict[int, Any] = {}  # by root
_BARRIER = _options(_native.BarrierOptions)


class Transport:
    """One native process group and what its works are to us."""

    def __init__(self, native: Any, complete: Callable[[Any], Completion]) -> None:
        self.native = native
        self.complete = complete


class C10dCommunicator:
    """The native groups of one (group, lane): one per device type."""

    def __init__(self, transports: dict[str, Transport], channels: Channels) -> None:
        self._transports = transports
        self._channels = channels
        # The common case, one transport, needs no look at the tensor's device.
        self._only = next(iter(transports.values())) if len(transports) == 1 else None

    def _for(self, x: torch.Tensor) -> Transport:
        return self._only or self._transports[x.device.type]

    def native(self, device: str) -> Any:
        return self._transports[device].native

    def all_reduce(self, x: torch.Tensor, op: ReduceOp) -> Completion:
        to = self._only or self._transports[x.device.type]
        return to.complete(to.native.allreduce([x], _ALL_REDUCE[op]))

    def reduce(self, x: torch.Tensor, dst: int, op: ReduceOp) -> Completion:
        to = self._for(x)
        options = _options(_native.ReduceOptions, reduceOp=_REDUCE_OPS[op], rootRank=dst)
        return to.complete(to.native.reduce([x], options))

    def broadcast(self, x: torch.Tensor, src: int) -> Completion:
        to = self._for(x)
        options = _BROADCAST.get(src)
        if options is None:
            options = _BROADCAST[src] = _options(_native.BroadcastOptions, rootRank=src)
        return to.complete(to.native.broadcast([x], options))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Completion:
        to = self._for(x)
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

    def barrier(self) -> Completion:
        to = self._transports.get("cpu") or next(iter(self._transports.values()))
        return to.complete(to.native.barrier(_BARRIER))

    def close(self) -> None:
        self._channels.close()
        self._transports = {}
        self._only = None

    def abort(self) -> None:
        for pair in self._channels.natives():
            _abort(pair)
        for to in list(self._transports.values()):
            _abort(to.native)


def _abort(native: Any) -> None:
    """Fail what is in flight on a native group: on gloo a receive that times out tears it down."""
    with contextlib.suppress(Exception):
        if native.name() != "gloo":
            native.abort()
            return
    # A peer that is gone fails at once and closes nothing: ask each.
    for peer in range(native.size()):
        if peer != native.rank():
            with contextlib.suppress(RuntimeError):
                native.recv([torch.empty(1)], peer, 2**31 - 1).wait(_MILLISECOND)


class C10dBackend:
    """c10d for one rank: which native backend serves which device, over which store."""

    open_waits = True
    ad_hoc_groups = True

    def __init__(
        self,
        name: str,
        *,
        timeout: float,
        device: torch.device,
        by_device: dict[str, str],
        interface: str | None = None,
        address: str | None = None,
        exported: str | None = None,
        owns_default_group: bool = False,
        default_group: weakref.ref[Any] | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.by_device = by_device
        self.stream_ordered = device.type != "cpu"
        self.orders_lanes = "nccl" in by_device.values()
        self._timeout = timedelta(seconds=timeout)
        self._interface = interface or os.environ.get(own_interface.VARIABLE)
        self._address = address
        self._exported = exported
        self._owns_default_group = owns_default_group
        self._default_group = default_group
        self._opening = InProgress()
        self._devices: list[Any] = []
        self._published: dict[str, dist.ProcessGroup] = {}
        self._lock = threading.Lock()

    def capabilities(self, device: str) -> Capabilities:
        return NCCL if self.by_device.get(device) == "nccl" else GLOO

    def open(self, group: Group, lane: str, epoch: int) -> C10dCommunicator:
        name = f"{group.key}/{lane}@{epoch}"
        transports = {
            device: self._transport(native, group.context, f"{name}/{device}", group.rank, group.size)
            for device, native in self.by_device.items()
        }
        # All members are here, so all beacons are in the store: from now on the dead can be named.
        group.context.liveness.learn(group.ranks)

        def open_pair(peer: int) -> Any:
            low, high = sorted((group.rank, peer))
            pair = f"{name}/p2p/{low}-{high}"
            return self._native("gloo", group.context, pair, int(group.rank > peer), 2)

        return C10dCommunicator(transports, Channels(open_pair, group.rank))

    def _transport(self, native: str, context: Context, name: str, rank: int, size: int) -> Transport:
        stream_ordered = native == "nccl"
        return Transport(
            self._native(native, context, name, rank, size),
            StreamCompletion if stream_ordered else HostCompletion,
        )

    def _native(self, native: str, context: Context, name: str, rank: int, size: int) -> Any:
        """A native group that meets its members under ``name``."""
        clients = context.clients
        assert clients is not None
        with self._opening:
            given_up = lambda: context.closed  # noqa: E731  # what it says
            clients.meet(name, rank, size, context.timeout, given_up)
            if native != "gloo":  # may ask the store again, whenever it likes
                create = _CREATE.get(native, _create_other(native))
                return create(self, dist.PrefixStore(name, clients.take()), rank, size)
            waiting = Waiting(clients, context.timeout, given_up)
            return self.create_gloo(dist.PrefixStore(name, waiting), rank, size)

    def native_group(self, group: Group) -> Any:
        """A ``torch.distributed.ProcessGroup`` of these ranks; made on the first call, by all members."""
        known = self._published.get(group.key)
        if known is not None:
            return known
        clients = group.context.clients
        assert clients is not None
        # Compiled graphs keep the name: one made for a world of another size must not find this one.
        name = f"asynccoll_{group.key}_{group.size}"
        natives = {
            device: (native, self._native(native, group.context, f"{name}/{device}", group.rank, group.size))
            for device, native in self.by_device.items()
        }
        store = dist.PrefixStore(name, Waiting(clients, group.context.timeout, lambda: group.context.closed))
        made = self._published[group.key] = publish(name, group.ranks, group.rank, store, natives)
        return made

    def close(self, *, abort: bool) -> None:
        # A helper thread in gloo's constructor must be out of it before the interpreter may end.
        self._opening.wait(_OPENING_SECONDS)
        self._devices = []
        for published in self._published.values():
            withdraw(published)
        self._published.clear()
        if self._owns_default_group and not self.orphaned():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        self._default_group = None
        own_interface.take_back(self._exported)

    def orphaned(self) -> bool:
        """Whether torch's default group, which this world came with, has been destroyed or replaced."""
        if self._default_group is None:
            return False
        native = self._default_group()
        return native is None or native is not dist.distributed_c10d.GroupMember.WORLD

    def create_gloo(self, store: dist.Store, rank: int, size: int) -> Any:
        """A bare gloo group on the chosen interface."""
        options = _Gloo._Options()
        options._devices = self._gloo_devices()
        options._timeout = self._timeout
        options._threads = 2
        return _Gloo(store, rank, size, options)

    def _gloo_devices(self) -> list[Any]:
        """What gloo listens on: one thread and one socket for all lanes of this world."""
        with self._lock:
            if not self._devices:
                if self._interface:
                    names = self._interface.split(",")
                    self._devices = [_Gloo.create_device(interface=name) for name in names]
                elif self._address:
                    self._devices = [_Gloo.create_device(hostname=self._address)]
                else:
                    self._devices = [_Gloo.create_default_device()]
            return self._devices

    def create_nccl(self, store: dist.Store, rank: int, size: int) -> Any:
        """A bare nccl group on this rank's device."""
        nccl = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = self._timeout
        native = nccl(store, rank, size, options)
        if size > 1 and hasattr(native, "eager_connect_single_device"):
            native.eager_connect_single_device(self.device)
        return native

    def create_other(self, native: str, store: dist.Store, rank: int, size: int) -> Any:
        """A backend that was registered with ``torch.distributed.Backend.register_backend``."""
        plugin = dist.Backend._plugins.get(native.upper())
        if plugin is None:
            raise BackendNotFoundError(
                f"torch.distributed has no backend {native!r} in this build; available: "
                f"{', '.join(sorted(dist.Backend.backend_list))}"
            )
        return plugin.creator_fn(store, rank, size, self._timeout)


def _create_other(native: str) -> Callable[[C10dBackend, dist.Store, int, int], Any]:
    return lambda backend, store, rank, size: backend.create_other(native, store, rank, size)


_CREATE: dict[str, Callable[[C10dBackend, dist.Store, int, int], Any]] = {
    "gloo": C10dBackend.create_gloo,
    "nccl": C10dBackend.create_nccl,
}


def capabilities(name: str, device: str) -> Capabilities:
    """The row for backend ``name`` and tensors on ``device``."""
    return NCCL if parse_backend(name).get(device) == "nccl" else GLOO


# Making one


def create(request: Request) -> Context:
    """Join the world over c10d: torch's default group for everybody else, our own beside it."""
    from asynccoll.context import Context

    options = request.take_options("interface")
    native = _default_group() if request.store is None and request.init_method is None else None
    if native is not None:
        return adopt(*native, request.timeout, request.check)
    by_device = parse_backend(request.backend)
    store, rank, world_size = rendezvous(request)
    threads = isinstance(store, dist.HashStore) and world_size > 1
    meeting_host = host_of(store)
    store = own_part(store, rank)
    hosts = dist.PrefixStore("hosts", store)
    announce(hosts, rank)
    identity = locate(request.launch, hosts, rank, world_size)
    device = pick_device(by_device, identity.local_rank)
    # Where ranks are threads there can be no default group: torch has one a process.
    owns_default = not threads and not dist.is_initialized()
    # One host needs no more than its loopback, and a host without a network has no more.
    address = "127.0.0.1" if identity.nnodes == 1 else own_interface.own_address(meeting_host)
    exported = own_interface.use_for_torch(address) if address and identity.nnodes > 1 else None
    try:
        if owns_default:
            dist.init_process_group(
                request.backend,
                store=dist.PrefixStore("default", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=request.timeout),
            )
    except RuntimeError as error:  # from torch's store, or from gloo
        own_interface.take_back(exported)
        raise not_met(error, hosts, rank, world_size) from error
    backend = C10dBackend(
        request.backend,
        timeout=request.timeout,
        device=device,
        by_device=by_device,
        interface=options.get("interface"),
        address=address,
        exported=exported,
        owns_default_group=owns_default,
        default_group=_default_group_ref() if owns_default else None,
    )
    context = Context(
        backend,
        identity,
        store=store,
        timeout=request.timeout,
        check=request.check,
        thread_rank=threads,
    )
    context.world.lane().open()
    return context


def _default_group_ref() -> weakref.ref[Any]:
    """Weak, so that the connections of a group that the user destroys are closed."""
    return weakref.ref(dist.distributed_c10d.GroupMember.WORLD)


def _default_group() -> tuple[str, dist.Store, int, int] | None:
    """The default group that the user made with torch before ``initialize``, if there is one."""
    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    return dist.get_backend(), store, dist.get_rank(), dist.get_world_size()


def adopt(name: str, store: dist.Store, rank: int, world_size: int, timeout: float, check: str) -> Context:
    """A context beside the user's default group. Opens nothing until an operation needs it."""
    from asynccoll.context import Context

    by_device = parse_backend(name)
    identity = locate(matching_launch(rank, world_size), None, rank, world_size)
    backend = C10dBackend(
        name,
        timeout=timeout,
        device=pick_device(by_device, identity.local_rank),
        by_device=by_device,
        address="127.0.0.1" if identity.nnodes == 1 and os.environ.get("MASTER_ADDR") in LOOPBACK else None,
        default_group=_default_group_ref(),
    )
    return Context(backend, identity, store=own_part(store, rank), timeout=timeout, check=check)


def parse_backend(name: str) -> dict[str, str]:
    """``"nccl"`` -> ``{"cpu": "gloo", "cuda": "nccl"}``; also torch's ``"cpu:gloo,cuda:nccl"``."""
    if ":" not in name:
        if name == "gloo":
            return {"cpu": "gloo"}
        if name == "nccl":
            return {"cpu": "gloo", "cuda": "nccl"}
        return {"cpu": name}
    by_device = dict(part.strip().split(":", 1) for part in name.split(",") if ":" in part)
    by_device.setdefault("cpu", "gloo")
    return by_device


def pick_device(by_device: dict[str, str], local_rank: int) -> torch.device:
    """The device of this rank's tensors; with nccl also the current one."""
    if "cuda" not in by_device or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
