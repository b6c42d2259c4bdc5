"""The ranks of one simulation, from joining the world to their end, and the faults that strike them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from asynccoll.backends import choosing
from asynccoll.backends.api import Backend
from asynccoll.backends.memory.sharing import Sharing
from asynccoll.health import stalls
from asynccoll.runtime import process as runtime
from asynccoll.testing import device as devices
from asynccoll.testing import network as wires
from asynccoll.testing import primitives
from asynccoll.testing import scheduler as scheduling
from asynccoll.testing.cancel_scopes import ordered_cancel_scopes
from asynccoll.testing.delivery import Delivery
from asynccoll.testing.endings import Endings
from asynccoll.testing.faults import Fault
from asynccoll.testing.hub import Host, SimulatedHub
from asynccoll.testing.links import Link
from asynccoll.testing.loops import LOOPS
from asynccoll.testing.network import Network, SimulatedStore
from asynccoll.testing.processes import exchanged, processes
from asynccoll.testing.report import Report
from asynccoll.testing.scheduler import Scheduler
from asynccoll.testing.statements import Source, instrumented
from asynccoll.testing.strays import Strays
from asynccoll.testing.threads import Killed, Schedule, SimulatedThread
from asynccoll.testing.transport import Fabric, SimulatedBackend
from asynccoll.testing.transports import TRANSPORTS, Pace
from asynccoll.testing.worker_threads import worker_threads
from asynccoll.trace import Timeline
from asynccoll.transport import progress as progressing
from asynccoll.world.context import Context, Identity

__all__ = ["Setting", "World"]

_MOST_STEPS = 20_000_000
#: A full collection takes as long as five simulations; this many reports of errors may hold 300 MB.
_RUNS_UNCOLLECTED = 300
_runs = count(1)
#: The advice for a ``main`` that joins the world itself, as scripts do.
_INSTEAD = (
    "leave this call out, or have the function join the world by itself, as a script does: pass joined=False "
    "to simulate or explore (on the command line --not-joined)"
)


@dataclass(frozen=True)
class Setting:
    """The arguments of ``simulate`` except ``main``, with defaults filled in."""

    world_size: int
    seed: int
    loop: str
    transport: str
    nodes: int
    link: Link
    local_link: Link
    store: Link
    faults: tuple[Fault, ...]
    schedule: Schedule
    statements: tuple[Source, ...]
    timeout: float
    operation_timeout: float
    check: str
    joined: bool
    lines: str
    real_seconds: float


class World:
    """The ranks of one simulation, and everything that connects them."""

    def __init__(self, setting: Setting) -> None:
        size = setting.world_size
        self._setting = setting
        self._loop = LOOPS[setting.loop]
        self._transport = TRANSPORTS[setting.transport]
        # Asked before the host is replaced: this imports the real backend, whose locks are to be real ones.
        self._capabilities = self._transport.capabilities
        self._scheduler = Scheduler(setting.schedule, setting.seed, _MOST_STEPS)
        self._scheduler.ends = self._scheduler.now + setting.timeout
        self._per_node = size // setting.nodes
        node_of = [rank // self._per_node for rank in range(size)]
        self._network = Network(setting.link, setting.local_link, node_of)
        self._scheduler.in_flight = self._network.in_flight
        self._delivery = Delivery(self._scheduler, self._network, size)
        #: one for each of the worlds that ranks join one after another, as also in the two lists below
        self._fabrics: list[Fabric] = []
        self._hosts: list[Host] = []
        self._stores: list[SimulatedStore] = []
        self._joined = [0] * size
        self._ends: dict[int, Callable[[], None]] = {}  # by rank: ends its timeline
        self._main_threads: list[SimulatedThread] = []
        self._left = size
        self._strays = Strays()
        self._endings = Endings()
        self.report: Report = Report(setting.seed)

    def run(self, main: Callable[[int], object]) -> Report:
        """Run ``main`` on all ranks, until the last of them has ended."""
        scheduler, report, setting = self._scheduler, self.report, self._setting
        size = setting.world_size
        with (
            _on_one_core(),
            instrumented(setting.statements),  # before the freeze in ``_uncollected``, which hides functions
            _uncollected(),
            _unheard(scheduler),
            processes(size) as enter,
            self._loop.around(report.seed),
            worker_threads(),
            ordered_cancel_scopes(),
            self._endings.heard(),
            self._installed(),
            exchanged(choosing, ("create",), SimpleNamespace(create=self._create)),
            exchanged(progressing, ("_Pace",), SimpleNamespace(_Pace=Pace)),
            exchanged(stalls, ("DEFAULT_SECONDS",), SimpleNamespace(DEFAULT_SECONDS=math.inf)),
        ):
            scheduler.entered = enter
            for rank in range(size):
                live = partial(self._live, rank, main)
                self._main_threads.append(scheduler.add(rank, "MainThread", live))
                self._delivery.start(rank)
            for fault in setting.faults:
                self._arm(fault)
            scheduler.run(setting.real_seconds)
            if report.killed or report.errors or scheduler.stuck:
                gc.collect()  # suspended tasks may raise when freed, which is silenced only in here
        report.deadlock = scheduler.stuck
        report.mismatches = self._delivery.mismatches
        report.strays = self._strays.found(report.timelines)
        if setting.lines == "same":
            report.mismatches += map(str, report.strays)
        report.events = scheduler.events
        report.taken = scheduler.taken
        report.virtual_seconds = scheduler.elapsed
        report.longest_timeout = scheduler.longest_timeout
        report.steps, report.switches = scheduler.steps, scheduler.switches
        scheduler.note(f"{sorted(report.results)} {sorted(report.errors)} {report.deadlock is None}")
        report.digest = scheduler.digest
        return report

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Make this the world that simulated threads, connections and devices belong to, for the block."""
        before = wires.current.network
        wires.current.network = self._network
        setting = self._setting
        devices.devices[:] = [devices.Device(setting.operation_timeout) for _ in range(setting.world_size)]
        scheduling.install(self._scheduler)
        try:
            yield
        finally:
            scheduling.install(None)
            wires.current.network = before
            devices.devices.clear()
            primitives.forget_threads()

    # A rank

    def _live(self, rank: int, main: Callable[[int], object]) -> None:
        """The main thread of ``rank``, from start to end."""
        try:
            self.report.results[rank] = self._whole(rank, main)
        except Killed:
            raise
        except BaseException as error:
            self.report.errors[rank] = error
            self._scheduler.tell(rank, f"raises {type(error).__name__}")
        finally:
            self._end(rank)

    def _whole(self, rank: int, main: Callable[[int], object]) -> object:
        """Join the world, run ``main``, and leave the world."""
        try:
            if self._setting.joined:
                runtime.initialize(timeout=self._setting.operation_timeout, check=self._setting.check)
            result = main(rank)
            if inspect.iscoroutine(result):
                result = self._loop.run(self._scheduler, result)
            self._leave(rank, abort=False)
        except Killed:
            raise
        except BaseException as error:
            self.report.errors[rank] = error  # before it leaves, which makes its peers raise
            self._leave(rank, abort=True)
            raise
        return result

    def _leave(self, rank: int, *, abort: bool) -> None:
        """Leave the world. If the simulation was given up meanwhile, the process's world is another one."""
        if self._scheduler.is_gone(self._main_threads[rank]):
            raise Killed
        runtime.finalize(abort=abort)

    def _backend(self, rank: int, life: int) -> Backend:
        fabric, device = self._fabrics[life], devices.devices[rank]
        backend = SimulatedBackend(fabric, self._transport, self._capabilities, device, rank)
        if not self._transport.in_memory:
            return backend
        hub: Any = SimulatedHub(self._hosts[life], rank)
        return Sharing(backend, hub, self._network.node_of, {})

    def _create(self, *_: object, timeout: float, check: str, **__: object) -> Context:
        """Stand in for ``choosing.create``: join the first world that this rank has not been in."""
        assert self._scheduler.current is not None
        setting, per_node, rank = self._setting, self._per_node, self._scheduler.current.rank
        life = self._joined[rank]
        self._joined[rank] += 1
        if life == len(self._fabrics):
            self._fabrics.append(Fabric(self._delivery))
            self._hosts.append(Host(self._delivery))
            self._stores.append(SimulatedStore(setting.store))
        node, place = divmod(rank, per_node)
        context = Context(
            self._backend(rank, life),
            Identity(rank, setting.world_size, place, per_node, node, setting.nodes),
            store=self._stores[life].clone(),
            timeout=timeout,
            check=check,
            nodes=tuple(self._network.node_of),
        )
        if setting.joined:
            context.instead = _INSTEAD
        timeline = self.report.timelines.setdefault(rank, Timeline(rank, setting.world_size))
        # Not by ``observe``: nothing else has the context yet, and its lock would be one more switch point.
        context.observers = (
            *context.observers,
            self._strays.observer(life, rank),
            self._endings.observer(timeline.recorder),
        )
        self._ends[rank] = timeline.recorder.end
        return choosing.completed(context, memory=False)

    def _end(self, rank: int) -> None:
        """End the rank's process; after the last one, end the simulation."""
        if rank in self._ends:
            self._ends[rank]()
        if rank not in self._network.dead:
            self._network.kill(rank)
            self._cut_off(rank)
        self._scheduler.kill(rank)
        self._left -= 1
        if not self._left:
            self._scheduler.unwind()

    # Faults

    def _arm(self, fault: Fault) -> None:
        if fault.at is not None:
            self._scheduler.add(-1, "fault", partial(self._later, fault, fault.at))
        else:
            self._delivery.observers.append(partial(self._on_call, fault))

    def _later(self, fault: Fault, at: float) -> None:
        self._scheduler.park(self._scheduler.now + at)
        self._strike(fault)

    def _on_call(self, fault: Fault, rank: int, made: int) -> None:
        if rank == fault.struck and made == fault.after_call:
            self._strike(fault)
            current = self._scheduler.current
            if current is not None and self._scheduler.is_gone(current):
                raise Killed

    def _strike(self, fault: Fault) -> None:
        if fault.struck not in self._network.dead:
            self._scheduler.tell(fault.struck, f"is struck by {fault}")
            fault.strike(self)

    def kill(self, rank: int, *, silent: bool) -> None:
        """Kill ``rank`` as by SIGKILL: the kernel closes its sockets. If ``silent``, its host is gone."""
        self.report.killed.append(rank)
        self._network.kill(rank, silent=silent, now=self._scheduler.now)
        if not silent:
            self._cut_off(rank)
        self._scheduler.kill(rank)

    def _cut_off(self, rank: int) -> None:
        for fabric in self._fabrics:
            fabric.kill(rank)
        for host in self._hosts:
            host.kill(rank)

    def hold(self, rank: int, thread: str, seconds: float) -> None:
        self._scheduler.hold(lambda one: one.rank == rank and thread in one.name, seconds)

    def delay(self, rank: int, call: int | None, seconds: float) -> None:
        self._delivery.delay(rank, call, seconds)

    def cancel(self, rank: int) -> None:
        stop = self._scheduler.cancellers.get(rank)
        if stop is not None:
            stop(None)

    def interrupt(self, rank: int) -> None:
        stop = self._scheduler.cancellers.get(rank)
        if stop is not None:
            stop(KeyboardInterrupt())
        elif not self._main_threads[rank].ended:
            self._scheduler.interrupt(self._main_threads[rank], KeyboardInterrupt())

    def fail(self, rank: int) -> None:
        self._delivery.fail(rank)

    def lose_store(self) -> None:
        self._network.store_is_lost = True


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Turn off the garbage collector and torch's thread pool for the block.

    So a finalizer runs only where the last reference is dropped. Objects from before the block are frozen: a
    fault that collects garbage collects only the simulation's. Afterwards they count as old, and would be
    collected too rarely. So what the last simulation has left is collected first, and every
    ``_RUNS_UNCOLLECTED``-th block starts with a full collection, as its report may still have been in use.
    """
    collected, threads = gc.isenabled(), torch.get_num_threads()
    if collected:
        gc.collect(1 if next(_runs) % _RUNS_UNCOLLECTED else 2)
    gc.disable()
    gc.freeze()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()
        if collected:
            gc.enable()


@contextlib.contextmanager
def _unheard(scheduler: Scheduler) -> Iterator[None]:
    """Silence warnings and finalizers' errors of ranks that are gone: a killed process prints nothing."""
    before, shown = sys.unraisablehook, warnings.showwarning

    def counts() -> bool:
        current = scheduler.current if scheduling.running() else None
        return current is not None and not scheduler.is_gone(current)

    def hear(unraisable: Any) -> None:
        if counts():
            before(unraisable)

    def show(*warning: Any, **where: Any) -> None:
        if counts():
            shown(*warning, **where)

    sys.unraisablehook, warnings.showwarning = hear, show
    try:
        yield
    finally:
        sys.unraisablehook, warnings.showwarning = before, shown


@cache
def _sched_getcpu() -> Callable[[], int] | None:
    """Return what says on which core the caller runs, if threads can be pinned to it."""
    return getattr(ctypes.CDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Pin threads to the current core for the block: one at a time, they hand over twice as fast there.

    Under SCHED_BATCH they are twice as fast again: a thread does not preempt the one that wakes it, which
    still holds the GIL.
    """
    here = _sched_getcpu()
    if here is None:
        yield
        return
    before, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    os.sched_setaffinity(0, before & {here()} or before)
    if policy == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        if policy == os.SCHED_OTHER:
            os.sched_setscheduler(0, policy, os.sched_param(0))
