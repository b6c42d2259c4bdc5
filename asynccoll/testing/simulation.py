"""``simulate``: several ranks in one process, one thread at a time, every choice from a seed."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from asynccoll.errors import InvalidArgumentError
from asynccoll.runtime import process as runtime
from asynccoll.runtime import state
from asynccoll.testing import network as wires
from asynccoll.testing import primitives
from asynccoll.testing import scheduler as scheduling
from asynccoll.testing.delivery import Delivery
from asynccoll.testing.faults import Fault
from asynccoll.testing.loops import LOOPS
from asynccoll.testing.network import Link, Network, SimulatedStore
from asynccoll.testing.processes import processes
from asynccoll.testing.report import Report
from asynccoll.testing.scheduler import Killed, Scheduler
from asynccoll.testing.schedules import PCT, RandomWalk
from asynccoll.testing.transport import Fabric, SimulatedBackend
from asynccoll.world.context import Context, Identity

__all__ = ["simulate"]

_MOST_STEPS = 20_000_000
_one_at_a_time = threading.Lock()


def simulate(
    main: Callable[[int], Any],
    *,
    world_size: int = 4,
    seed: int = 0,
    loop: str = "asyncio",
    link: Link | None = None,
    store: Link | None = None,
    faults: Sequence[Fault] = (),
    schedule: RandomWalk | PCT | None = None,
    timeout: float = 60.0,
    operation_timeout: float = 20.0,
    check: str = "local",
    real_seconds: float = 300.0,
) -> Report:
    """Run ``main(rank)`` on ``world_size`` ranks in this process, as ``seed`` says.

    ``main`` is a function or a coroutine function, and finds its world joined; what it returns or raises is
    in the report. Every rank has its own context, threads and event loop, as if it was a process. One thread
    runs at a time; wherever a lock, an event, a sleep or a request is, ``schedule`` may let another one go
    on. Time is simulated: sleeping takes none. The library above the transport is the real one; the
    transport, the store and the links are simulated. The same seed gives the same ``digest``, where ``main``
    itself is deterministic.

    >>> async def main(rank):
    ...     return (await ac.all_reduce(torch.tensor([rank + 1]))).item()
    >>> simulate(main, world_size=3, seed=7).results
    {0: 6, 1: 6, 2: 6}

    Args:
        main: called on each rank, in a thread of its own.
        world_size: how many ranks.
        seed: of every choice and every latency.
        loop: ``"asyncio"``, ``"trio"``, or ``"none"`` where ``main`` is a plain function that waits with
            ``work.wait()``.
        link: between any two ranks; 20 us to 2 ms and 1 GB/s unless said otherwise.
        store: to the store at which ranks meet; 50 to 500 us.
        faults: what goes wrong, and when.
        schedule: who goes on; ``RandomWalk(0.1)`` unless said otherwise.
        timeout: simulated seconds after which it is given up.
        operation_timeout: that of the context, as ``initialize(timeout=)``.
        check: as of ``initialize``.
        real_seconds: after which TimeoutError is raised: code that waits for a thread or a socket that is not
            simulated never ends.

    Not simulated: what native code does to memory, signals, forks, sockets, and threads that are started
    otherwise than by asyncio's ``to_thread`` or by the library.

    Raises:
        InvalidArgumentError: no such loop, or a simulation inside another.
        TimeoutError: see ``real_seconds``.
    """
    if loop not in LOOPS:
        raise InvalidArgumentError(f"loop must be one of {', '.join(map(repr, LOOPS))}, got {loop!r}")
    if world_size < 1:
        raise InvalidArgumentError(f"world_size must be at least 1, got {world_size!r}")
    for fault in faults:
        if not 0 <= fault.rank < world_size:
            raise InvalidArgumentError(
                f"{fault} names a rank outside the world; expected 0 to {world_size - 1}"
            )
    if not _one_at_a_time.acquire(blocking=False):
        raise InvalidArgumentError("a simulation is running in this process already")
    try:
        scheduler = Scheduler(schedule or RandomWalk(), seed, _MOST_STEPS)
        scheduler.ends = scheduler.now + timeout
        world = _World(scheduler, world_size, link or Link(), store or Link((50e-6, 5e-4)), seed)
        world.run(main, loop, faults, operation_timeout, check, real_seconds)
        return world.report
    finally:
        _one_at_a_time.release()


class _World:
    """The ranks of one simulation."""

    def __init__(self, scheduler: Scheduler, size: int, link: Link, store: Link, seed: int) -> None:
        self._scheduler = scheduler
        self._size = size
        self._network = Network()
        self._delivery = Delivery(scheduler, self._network, link, size)
        self._fabric = Fabric(self._delivery)
        self._store = SimulatedStore(store)
        self._left = size
        self.report = Report(seed)

    def run(
        self,
        main: Callable[[int], Any],
        loop: str,
        faults: Sequence[Fault],
        operation_timeout: float,
        check: str,
        real_seconds: float,
    ) -> None:
        scheduler, report = self._scheduler, self.report
        collected = gc.isenabled()
        gc.disable()  # a finalizer runs where the last reference goes, and nowhere else
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # each of our threads would have a pool of them
        before = wires.current.network
        try:
            with processes(self._size) as enter, LOOPS[loop].around(report.seed):
                wires.current.network = self._network
                scheduler.entered = enter
                for rank in range(self._size):
                    join = partial(self._context, rank, operation_timeout, check)
                    scheduler.add(rank, "MainThread", partial(self._live, rank, main, loop, join))
                    self._delivery.start(rank)
                self._arm(faults)
                scheduling.install(scheduler)
                scheduler.run(real_seconds)
        finally:
            scheduling.install(None)
            wires.current.network = before
            primitives.forget_threads()
            torch.set_num_threads(threads)
            if collected:
                gc.enable()
        report.deadlock = scheduler.stuck
        report.mismatches = self._delivery.mismatches
        report.virtual_seconds = scheduler.elapsed
        report.steps, report.switches = scheduler.steps, scheduler.switches
        scheduler.note(f"{sorted(report.results)} {sorted(report.errors)} {report.deadlock is None}")
        report.digest = scheduler.digest

    def _context(self, rank: int, timeout: float, check: str) -> Context:
        identity = Identity(rank, self._size, rank, self._size)
        return Context(
            SimulatedBackend(self._fabric), identity, store=self._store.clone(), timeout=timeout, check=check
        )

    def _live(self, rank: int, main: Callable[[int], Any], loop: str, join: Callable[[], Context]) -> None:
        """One rank's main thread, from the first to the last."""
        try:
            self.report.results[rank] = self._whole(rank, main, loop, join)
        except Killed:
            raise
        except BaseException as error:
            self.report.errors[rank] = error
        finally:
            self._end(rank)

    def _whole(self, rank: int, main: Callable[[int], Any], loop: str, join: Callable[[], Context]) -> Any:
        """Join the world, run ``main``, leave."""
        try:
            state.process.context = join()
            state.process.context.begin()
            result = main(rank)
            if inspect.iscoroutine(result):
                result = LOOPS[loop].run(self._scheduler, result)
            runtime.finalize()
        except Killed:
            raise
        except BaseException:
            runtime.finalize(abort=True)
            raise
        return result

    def _end(self, rank: int) -> None:
        """Its process is gone, and the last one turns off the light."""
        if rank not in self._network.dead:
            self._network.kill(rank)
            self._fabric.kill(rank)
        self._scheduler.kill(rank)
        self._left -= 1
        if not self._left:
            self._scheduler.unwind()

    def _arm(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if fault.at is not None:
                self._scheduler.add(-1, "fault", partial(self._later, fault))
            else:
                self._delivery.observers.append(partial(self._on_call, fault))

    def _later(self, fault: Fault) -> None:
        assert fault.at is not None
        self._scheduler.park(self._scheduler.now + fault.at)
        self._kill(fault.rank)

    def _on_call(self, fault: Fault, rank: int, made: int) -> None:
        if rank == fault.rank and made == fault.after_call:
            self._kill(rank)
            raise Killed

    def _kill(self, rank: int) -> None:
        """As by SIGKILL: the kernel closes its sockets, and nobody of it does anything any more."""
        if rank in self._network.dead:
            return
        self.report.killed.append(rank)
        self._network.kill(rank)
        self._fabric.kill(rank)
        self._scheduler.kill(rank)
