"""The ranks of one simulation: joined, run, struck by faults, and gone."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from asynccoll.runtime import process as runtime
from asynccoll.runtime import state
from asynccoll.testing import device as devices
from asynccoll.testing import network as wires
from asynccoll.testing import primitives
from asynccoll.testing import scheduler as scheduling
from asynccoll.testing.delivery import Delivery
from asynccoll.testing.faults import Fault
from asynccoll.testing.links import Link
from asynccoll.testing.loops import LOOPS
from asynccoll.testing.network import Network, SimulatedStore
from asynccoll.testing.processes import processes
from asynccoll.testing.report import Report
from asynccoll.testing.scheduler import Killed, Schedule, Scheduler, SimulatedThread
from asynccoll.testing.statements import Source, instrumented
from asynccoll.testing.transport import Fabric, SimulatedBackend
from asynccoll.testing.transports import TRANSPORTS
from asynccoll.testing.worker_threads import worker_threads
from asynccoll.trace import recording
from asynccoll.world.context import Context, Identity

__all__ = ["Setting", "World"]

_MOST_STEPS = 20_000_000


@dataclass(frozen=True)
class Setting:
    """What ``simulate`` was told."""

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
    real_seconds: float


class World:
    """The ranks of one simulation, and all that connects them."""

    def __init__(self, setting: Setting) -> None:
        size = setting.world_size
        self._setting = setting
        self._loop = LOOPS[setting.loop]
        self._scheduler = Scheduler(setting.schedule, setting.seed, _MOST_STEPS)
        self._scheduler.ends = self._scheduler.now + setting.timeout
        self._per_node = size // setting.nodes
        node_of = [rank // self._per_node for rank in range(size)]
        self._network = Network(setting.link, setting.local_link, node_of)
        self._delivery = Delivery(self._scheduler, self._network, size)
        self._fabric = Fabric(self._delivery)
        self._store = SimulatedStore(setting.store)
        self._main_threads: list[SimulatedThread] = []
        self._left = size
        self.report = Report(setting.seed)

    def run(self, main: Callable[[int], Any]) -> Report:
        """From the first rank's beginning to the last one's end."""
        scheduler, report, size = self._scheduler, self.report, self._setting.world_size
        with (
            _on_one_core(),
            _uncollected(),
            processes(size) as enter,
            self._loop.around(report.seed),
            worker_threads(),
            instrumented(self._setting.statements),
            self._installed(),
        ):
            scheduler.entered = enter
            for rank in range(size):
                live = partial(self._live, rank, main)
                self._main_threads.append(scheduler.add(rank, "MainThread", live))
                self._delivery.start(rank)
            for fault in self._setting.faults:
                self._arm(fault)
            scheduler.run(self._setting.real_seconds)
        report.deadlock = scheduler.stuck
        report.mismatches = self._delivery.mismatches
        report.events = scheduler.events
        report.taken = scheduler.taken
        report.virtual_seconds = scheduler.elapsed
        report.steps, report.switches = scheduler.steps, scheduler.switches
        scheduler.note(f"{sorted(report.results)} {sorted(report.errors)} {report.deadlock is None}")
        report.digest = scheduler.digest
        return report

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """For the block it is the one that simulated threads, wires and devices belong to."""
        before = wires.current.network
        wires.current.network = self._network
        devices.devices[:] = [devices.Device() for _ in range(self._setting.world_size)]
        scheduling.install(self._scheduler)
        try:
            yield
        finally:
            scheduling.install(None)
            wires.current.network = before
            devices.devices.clear()
            primitives.forget_threads()

    # A rank

    def _live(self, rank: int, main: Callable[[int], Any]) -> None:
        """One rank's main thread, from the first to the last."""
        try:
            self.report.results[rank] = self._whole(rank, main)
        except Killed:
            raise
        except BaseException as error:
            self.report.errors[rank] = error
            self._scheduler.tell(rank, f"raises {type(error).__name__}")
        finally:
            self._end(rank)

    def _whole(self, rank: int, main: Callable[[int], Any]) -> Any:
        """Join the world, run ``main``, leave."""
        try:
            state.process.context = self._context(rank)
            state.process.context.begin()
            with recording() as timeline:
                self.report.timelines[rank] = timeline
                result = main(rank)
                if inspect.iscoroutine(result):
                    result = self._loop.run(self._scheduler, result)
            runtime.finalize()
        except Killed:
            raise
        except BaseException:
            runtime.finalize(abort=True)
            raise
        return result

    def _context(self, rank: int) -> Context:
        setting, per_node = self._setting, self._per_node
        node, place = divmod(rank, per_node)
        identity = Identity(rank, setting.world_size, place, per_node, node, setting.nodes)
        backend = SimulatedBackend(self._fabric, TRANSPORTS[setting.transport], devices.devices[rank])
        return Context(
            backend,
            identity,
            store=self._store.clone(),
            timeout=setting.operation_timeout,
            check=setting.check,
            nodes=tuple(self._network.node_of),
        )

    def _end(self, rank: int) -> None:
        """Its process is gone, and the last one turns off the light."""
        if rank not in self._network.dead:
            self._network.kill(rank)
            self._fabric.kill(rank)
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
        """As by SIGKILL: the kernel closes its sockets; or, if ``silent``, there is no kernel any more."""
        self.report.killed.append(rank)
        self._network.kill(rank, silent=silent, now=self._scheduler.now)
        if not silent:
            self._fabric.kill(rank)
        self._scheduler.kill(rank)

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

    def lose_store(self) -> None:
        self._network.store_is_lost = True


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """A finalizer runs where the last reference goes, and nowhere else; no thread has a pool of others."""
    collected, threads = gc.isenabled(), torch.get_num_threads()
    gc.disable()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collected:
            gc.enable()


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Threads of which one runs at a time hand over to each other twice as fast on one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
