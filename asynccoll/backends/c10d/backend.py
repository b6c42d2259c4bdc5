"""gloo, nccl and any other backend of c10d: the native ProcessGroup methods, called directly.

We make the native groups ourselves: for each (group, lane, epoch) a ProcessGroup on a prefix of the store,
whose name all of its ranks know. (A lane begins a new epoch after a refused call.) The user's ``dist.*``
calls and DDP run on other groups and never interleave with ours.

With nccl, tensors on the CPU still go through gloo. So the host can await objects, numbers and lengths
without synchronizing the GPU. What each of these backends supports is in the rows of capabilities below.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._C._distributed_c10d as _native
import torch.distributed as dist

from asynccoll.backends.api import (
    LOOPBACK,
    Backend,
    Capabilities,
    Communicator,
    Context,
    Exchange,
    InProgress,
    LaunchInfo,
    Op,
    Opening,
    ReduceOp,
    Request,
    Waiting,
    detect,
    host,
    locate,
    locks,
    meet,
    network,
    of_torch,
    own_device,
)
from asynccoll.backends.c10d.channels import Channels
from asynccoll.backends.c10d.communicator import C10dCommunicator, Transport, end_all
from asynccoll.backends.c10d.completion import NEVER, HostCompletion, StreamCompletion
from asynccoll.backends.c10d.published import publish, withdraw
from asynccoll.errors import BackendNotFoundError, InvalidArgumentError, LaunchEnvironmentError, PeerLostError

_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
#: The dtypes that gloo may average. It divides the sum, which in half precision may overflow although the
#: average would not.
_AVERAGED = frozenset({torch.float32, torch.float64})
#: gloo supports AVG from torch 2.11 on; before that, we divide the sum.
_GLOO_AVERAGES = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 11)

GLOO = Capabilities(
    backend="gloo",
    ops=frozenset(Op),
    reduce=(
        *((dtype, _ARITHMETIC | _BITWISE) for dtype in (*_INTEGERS, torch.bool)),
        *(
            (d, _ARITHMETIC | ({ReduceOp.AVG} if _GLOO_AVERAGES and d in _AVERAGED else set()))
            for d in _FLOATS
        ),
    ),
    move=frozenset((*_INTEGERS, *_FLOATS, torch.bool)),
    sparse=True,
    # gloo's reduce_scatter is made of all_reduces, has no future, and is slower than an exchange.
    compose=frozenset({Op.REDUCE_SCATTER}),
    # gloo's all_reduce is a ring of 2(n-1) hops, each of which takes longer than sending 100 KiB.
    exchange_bytes=128 << 10,
    hop_bytes=128 << 10,
    steps_hops=8,
)
#: Any other backend that is registered with torch: as gloo, but it may know nodes itself.
OTHER = replace(GLOO, hop_bytes=0)
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


#: How long closing waits for lanes that are being opened; these are told to give up.
_OPENING_SECONDS = 2.0
#: How long a rank that leaves waits for ranks that have not connected to all others yet.
_CONNECTING_SECONDS = 5.0
#: Typed as Any, since torch's stubs lack half of its members.
_Gloo: Any = getattr(dist, "ProcessGroupGloo", None)


def _connected(name: str, rank: int) -> str:
    return f"{name}/connected/{rank}"


def _await_others(opening: Opening, names: list[str], size: int) -> None:
    """Wait until all ranks have connected to each other.

    Otherwise a rank that has yet to connect would take this one, which is closing, for lost.
    """
    keys = [_connected(name, rank) for name in names for rank in range(size)]
    clients = opening.clients
    if keys and clients is not None and opening.store_answers():
        with contextlib.suppress(RuntimeError):  # without the store, no rank can connect any more
            clients.await_keys(keys, _CONNECTING_SECONDS, lambda: False)


class C10dBackend(Backend):
    """c10d for one rank: which native backend serves which device, and over which network interface."""

    opens_early = True

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
        default_group: weakref.ref[object] | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self.by_device = by_device
        self.orders_lanes: bool = "nccl" in by_device.values()
        self.ends_alone: bool = self.orders_lanes  # an nccl call is over for the host once it is issued
        self.shares_memory: bool = by_device.get("cpu") == "gloo"
        self._timeout = timedelta(seconds=timeout)
        self._interface = interface or os.environ.get(network.VARIABLE)
        self._address = address
        self._exported = exported
        self._owns_default_group = owns_default_group
        self._default_group = default_group
        self._opening = InProgress()
        self._devices: list[object] = []
        self._published: dict[str, dist.ProcessGroup] = {}
        self._lock = locks.Lock()

    def capabilities(self, device: str) -> Capabilities:
        return _row(self.by_device, device)

    def open(self, opening: Opening) -> C10dCommunicator:
        name, lasting, rank = opening.name, opening.lasting, opening.rank

        def open_pair(peer: int) -> object:  # named without the epoch: the two ranks may be in different ones
            low, high = sorted((rank, peer))
            pair = f"{lasting}/p2p/{low}-{high}"
            native = self._lasting_native("gloo", opening, pair, int(rank > peer), 2)
            pairs.append(pair)
            return native

        pairs: list[str] = []
        channels = Channels(open_pair, rank, partial(_await_others, opening, pairs, 2))
        by_device = {
            device: native for device, native in self.by_device.items() if device not in opening.carried
        }
        opened = self._communicator(opening, name, rank, opening.size, by_device, channels)

        def open_parts() -> tuple[Communicator, Communicator]:
            node, index = opening.place
            each, on_host = opening.size // opening.nodes, {"cpu": "gloo"}
            # Not used: the lane's messages continue in its next epoch, and must not end with the parts.
            none = Channels(open_pair, rank, lambda: None)
            within = (
                opening.within()
                if opening.within is not None
                else self._communicator(opening, f"{name}/node/{node}", index, each, on_host, none)
            )
            try:
                across = self._communicator(
                    opening, f"{name}/across/{index}", node, opening.nodes, on_host, none
                )
            except BaseException:  # the other ranks of this node may wait in ``within``
                end_all([within])
                raise
            return within, across

        opened.open_parts_with(open_parts)
        return opened

    def _communicator(
        self,
        opening: Opening,
        name: str,
        rank: int,
        size: int,
        by_device: dict[str, str],
        channels: Channels,
    ) -> C10dCommunicator:
        """Open a communicator of the ranks that meet under ``name``."""
        transports = {
            device: _transport(native, self._lasting_native(native, opening, f"{name}/{device}", rank, size))
            for device, native in by_device.items()
        }
        met = [f"{name}/{device}" for device, native in by_device.items() if native == "gloo"]
        others = partial(_await_others, opening, met, size)
        return C10dCommunicator(transports, channels, size, others, on_cpu=set(self.by_device) == {"cpu"})

    def _lasting_native(self, native: str, opening: Opening, name: str, rank: int, size: int) -> object:
        """Make a native group for a lane, without a native timeout: each operation has its own deadline."""
        made = self._native(native, opening, name, rank, size)
        if native == "gloo":
            made._set_default_timeout(NEVER)
        return made

    def _native(self, native: str, opening: Opening, name: str, rank: int, size: int) -> Any:
        """Make a native group of the ranks that meet under ``name``."""
        clients = opening.clients
        assert clients is not None
        with self._opening:
            clients.meet(name, rank, size, opening.meeting, opening.given_up)
            if native != "gloo":  # such a group may use the store at any time, so it keeps a client
                store = dist.PrefixStore(name, clients.take())
                if native == "nccl":
                    return self.create_nccl(store, rank, size)
                return self.create_other(native, store, rank, size)
            exchange = Exchange(clients, opening.timeout, opening.given_up, size)
            made = self.create_gloo(dist.PrefixStore(name, exchange), rank, size)
            with clients.borrow() as client:
                client.set(_connected(name, rank), "")
            return made

    def native_group(self, opening: Opening, communicator: Communicator | None) -> object:
        """Return a ``torch.distributed.ProcessGroup`` of these ranks, all of which make the first call."""
        known = self._published.get(opening.group)
        if known is not None:
            return known
        clients = opening.clients
        assert clients is not None
        # A compiled graph keeps the group's name. With the size in it, a graph that was compiled in a world
        # of another size cannot find this group.
        name = f"asynccoll_{opening.group}_{opening.size}"
        # torch's calls on these groups have no deadline of ours, so the native groups keep their timeout.
        natives = {
            device: (native, self._native(native, opening, f"{name}/{device}", opening.rank, opening.size))
            for device, native in self.by_device.items()
        }
        store = dist.PrefixStore(name, Waiting(clients, opening.timeout, opening.given_up))
        made = publish(name, opening.ranks, opening.rank, store, natives)
        self._published[opening.group] = made
        return made

    def close(self, *, abort: bool) -> None:
        steps: list[Callable[[], object]] = [
            # The interpreter must not end while a helper thread is in gloo's constructor.
            partial(self._opening.wait, _OPENING_SECONDS),
            self._devices.clear,
            *(partial(withdraw, published) for published in self._published.values()),
            self._published.clear,
            self._leave_default_group,
            partial(network.take_back, self._exported),
        ]
        host.call_each(steps)

    def _leave_default_group(self) -> None:
        if self._owns_default_group and not self.orphaned():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        self._default_group = None

    def orphaned(self) -> bool:
        """Whether torch's default group, with which this world began, has been destroyed or replaced."""
        if self._default_group is None:
            return False
        native = self._default_group()
        return native is None or native is not dist.distributed_c10d.GroupMember.WORLD

    def create_gloo(self, store: dist.Store, rank: int, size: int) -> object:
        """Make a gloo group on the chosen interface."""
        options = _Gloo._Options()
        options._devices = self._gloo_devices()
        options._timeout = self._timeout
        options._threads = 2
        return _Gloo(store, rank, size, options)

    def _gloo_devices(self) -> list[object]:
        """Return gloo's devices. All lanes of the world share them, and so one thread and one socket each."""
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

    def create_nccl(self, store: dist.Store, rank: int, size: int) -> object:
        """Make an nccl group on this rank's device."""
        nccl = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = self._timeout
        native = nccl(store, rank, size, options)
        if size > 1 and hasattr(native, "eager_connect_single_device"):
            native.eager_connect_single_device(self.device)
        return native

    def create_other(self, native: str, store: dist.Store, rank: int, size: int) -> object:
        """Make a group of a backend registered with ``torch.distributed.Backend.register_backend``."""
        plugin = dist.Backend._plugins.get(native.upper())
        if plugin is None:
            raise BackendNotFoundError(
                f"torch.distributed has no backend {native!r} in this build; available: "
                f"{', '.join(sorted(dist.Backend.backend_list))}"
            )
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, self._timeout)
        described: Any = _native._DistributedBackendOptions()
        described.store, described.timeout = store, self._timeout
        described.group_rank, described.group_size = rank, size
        described.global_ranks_in_group = []  # empty, as for torch's default group
        return plugin.creator_fn(described, None)


def _transport(native: str, group: object) -> Transport:
    return Transport(
        group,
        StreamCompletion if native == "nccl" else HostCompletion,
        GLOO.exchange_bytes if native == "gloo" else 0,
    )


#: What the native backends support; others are assumed to support what gloo does.
_ROWS = {"gloo": GLOO, "nccl": NCCL}


def _row(by_device: dict[str, str], device: str) -> Capabilities:
    return _ROWS.get(by_device.get(device, "gloo"), OTHER)


def capabilities(name: str, device: str) -> Capabilities:
    """Return the capabilities of backend ``name`` for tensors on ``device``."""
    return _row(parse_backend(name), device)


# Making a context

#: What ``create`` takes besides the arguments of every backend.
OPTIONS = ("interface", "by_node")


def create(request: Request) -> Context:
    """Join the world over c10d. Also make torch's default group for other libraries, unless there is one."""
    options = request.take_options(*OPTIONS)
    by_node = _wish(options.get("by_node"))
    native = _default_group() if request.store is None and request.init_method is None else None
    if native is not None:
        if by_node is not None:
            raise InvalidArgumentError(
                "by_node is for a world that ac.initialize creates, but torch's default group already exists;"
                " call ac.initialize instead of torch.distributed.init_process_group"
            )
        return adopt(*native, request.timeout, request.check)
    by_device = parse_backend(request.backend)
    met = meet(request, by_node=by_node)
    identity = met.identity
    rank, world_size = identity.rank, identity.world_size
    device = pick_device(by_device, identity.local_rank)
    # Ranks that are threads have no default group, since torch has one per process.
    owns_default = not met.threads and not dist.is_initialized()
    # Ranks of one host need only its loopback, and a host without a network has nothing else.
    address = "127.0.0.1" if identity.nnodes == 1 else network.own_address(met.host)
    exported = network.use_for_torch(address) if address and identity.nnodes > 1 else None
    try:
        if owns_default:
            dist.init_process_group(
                request.backend,
                store=dist.PrefixStore("default", met.store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=request.timeout),
            )
    except BaseException as error:
        # torch has counted the failed group. A retry would use the next number, where no other rank joins.
        dist.distributed_c10d._world.group_count = 0
        network.take_back(exported)
        if not isinstance(error, RuntimeError):
            raise
        # The error comes from torch's store, or from gloo.
        raise PeerLostError(f"rank {rank} of {world_size} cannot connect to the others: {error}") from error
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
        store=met.store,
        timeout=request.timeout,
        check=request.check,
        thread_rank=met.threads,
        nodes=met.nodes,
        by_node=met.by_node,
    )
    return context


def _wish(by_node: object) -> bool | None:
    """Check ``by_node=`` of ``initialize``: whether all_reduces sum within nodes first. Rank 0's counts."""
    if by_node is None or isinstance(by_node, bool):
        return by_node
    raise InvalidArgumentError(
        "by_node must be True (all_reduces reduce within each node first), False (never), or None (where "
        f"that is expected to be faster), got {by_node!r}"
    )


def _default_group_ref() -> weakref.ref[object]:
    """Return a reference to torch's default group: a weak one, so that the user can destroy the group."""
    return weakref.ref(dist.distributed_c10d.GroupMember.WORLD)


def _default_group() -> tuple[str, dist.Store, int, int] | None:
    """Return name, store, rank and size of the default group that the user made with torch, or None."""
    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    return of_torch(), store, dist.get_rank(), dist.get_world_size()


def adopt(
    name: str, store: dist.Store | None, rank: int, world_size: int, timeout: float, check: str
) -> Context:
    """Make a context next to the user's default group. Nothing is opened until an operation needs it.

    Without a store, as in a forked child, the context can only tell the rank's place.
    """
    by_device = parse_backend(name)
    identity = locate(matching_launch(rank, world_size), rank, world_size, [])
    backend = C10dBackend(
        name,
        timeout=timeout,
        # A forked child cannot use CUDA if its parent has.
        device=pick_device(by_device, identity.local_rank) if store is not None else torch.device("cpu"),
        by_device=by_device,
        address="127.0.0.1" if identity.nnodes == 1 and os.environ.get("MASTER_ADDR") in LOOPBACK else None,
        default_group=_default_group_ref(),
    )
    return Context(backend, identity, store=store and own_part(store, rank), timeout=timeout, check=check)


def own_part(store: dist.Store, rank: int) -> dist.Store:
    """Return a part of the store of the user's group that no earlier world of ours on this group has used.

    No rank waits for another: each counts the worlds that it has begun, and all ranks begin the same ones.
    """
    life = store.add(f"asynccoll/lives/{rank}", 1)
    return dist.PrefixStore(f"asynccoll/{life}", store)


def matching_launch(rank: int, world_size: int) -> LaunchInfo | None:
    """Return what the launcher says, or None if its rank and size are not those of the user's group."""
    try:
        launch = detect(os.environ)
    except LaunchEnvironmentError:
        return None
    return launch if (launch.rank, launch.world_size) == (rank, world_size) else None


def parse_backend(name: str) -> dict[str, str]:
    """Return ``{"cpu": "gloo", "cuda": "nccl"}`` for ``"nccl"``, and for torch's ``"cpu:gloo,cuda:nccl"``."""
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
    """Return the device of this rank's tensors; with a backend for CUDA, also make it the current device."""
    return own_device(local_rank) if "cuda" in by_device else torch.device("cpu")
