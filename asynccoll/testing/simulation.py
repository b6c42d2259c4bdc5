"""``simulate``: several ranks in one process, one thread running at a time, every choice from a seed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from types import NoneType

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import check, check_count, fitting, misfit
from asynccoll.host.timeouts import check_timeout
from asynccoll.testing.faults import Cancel, Fault
from asynccoll.testing.links import Link
from asynccoll.testing.loops import LOOPS
from asynccoll.testing.report import Report
from asynccoll.testing.schedules import RandomWalk
from asynccoll.testing.statements import sources
from asynccoll.testing.threads import Schedule
from asynccoll.testing.transports import TRANSPORTS
from asynccoll.testing.world import Setting, World

__all__ = ["simulate"]

_one_at_a_time = threading.Lock()
_LINES = ("any", "same")
_NEAR = Link((2e-6, 2e-4), 1e10)


@fitting
def simulate(
    main: Callable[[int], object] | Callable[[], object],
    *,
    world_size: int = 4,
    seed: int = 0,
    loop: str = "asyncio",
    transport: str = "gloo",
    nodes: int = 1,
    link: Link | None = None,
    local_link: Link | None = None,
    store: Link | None = None,
    faults: Sequence[Fault] = (),
    schedule: Schedule | None = None,
    statements: Sequence[str] = (),
    timeout: float = 60.0,
    operation_timeout: float = 20.0,
    check: str = "local",
    joined: bool = True,
    lines: str = "any",
    real_seconds: float = 300.0,
) -> Report:
    """Run ``main(rank)``, or ``main()``, on ``world_size`` ranks in this process, all choices from ``seed``.

    ``main`` is a function or a coroutine function that starts in an initialized world. The report has what
    it returns or raises. Every rank has its own context, threads and event loop, as if it were a process.
    Only one thread runs at a time; at every lock, event, sleep or request, ``schedule`` may switch to another
    one. Time is simulated, so sleeping takes no real time. The library above the transport is the real one;
    the transport, the store and the links are simulated. The same seed gives the same ``digest``, provided
    that ``main`` itself is deterministic.

    >>> async def main(rank):
    ...     return (await ac.all_reduce(torch.tensor([rank + 1]))).item()
    >>> simulate(main, world_size=3, seed=7).results
    {0: 6, 1: 6, 2: 6}

    Args:
        main: called on each rank, in a thread of its own: with the rank, or with nothing if it has no
            parameter.
        world_size: the number of ranks.
        seed: determines every choice and every latency.
        loop: ``"asyncio"``, ``"trio"``, or ``"none"`` if ``main`` is a plain function that waits with
            ``work.wait()``.
        transport: how calls complete, and which calls are supported: as on ``"gloo"`` (a thread calls back),
            ``"mpi"`` and ``"horovod"`` (calls must be polled), ``"xla"`` (threads block until calls
            complete), ``"memory"`` (any thread that looks moves the data, through memory that the ranks of
            a node share), ``"nccl"`` (calls are done for the host while the device lags behind).
        nodes: the number of nodes; ranks are spread over them evenly, in order.
        link: between ranks on different nodes, or between all ranks if there is one node; by default 20 us
            to 2 ms and 1 GB/s.
        local_link: between ranks on the same node, if there are several; by default 2 to 200 us and 10 GB/s.
        store: the link to the store through which ranks rendezvous; by default 50 to 500 us.
        faults: what goes wrong, and when.
        schedule: which thread runs next; by default ``RandomWalk(0.1)``.
        statements: names of modules (``"asynccoll.order.lane"``, or your own) in which threads may switch
            before every statement, too: this finds races inside them, and takes longer.
        timeout: simulated seconds after which the simulation is given up.
        operation_timeout: the context's timeout, as ``initialize(timeout=)``.
        check: as for ``initialize``.
        joined: whether ``main`` starts in an initialized world; if not, it calls ``ac.initialize()`` itself,
            and the ``timeout`` and ``check`` of that call apply.
        lines: ``"same"`` if no branch of the program has ranks make the same call from different lines: the
            report's ``strays`` are then also among its ``mismatches``, and ``check`` raises.
        real_seconds: real seconds after which TimeoutError is raised: code that waits for a thread or a
            socket that is not simulated never ends.

    Not simulated: what native code does to memory, signals, forks, sockets, and threads that are started
    other than by asyncio's ``to_thread`` or by the library.

    Raises:
        InvalidArgumentError: no such loop, transport or module, a fault that names no rank of this world, a
            ``main`` that needs more than its rank, or a simulation inside another.
        TimeoutError: see ``real_seconds``.
    """
    of_rank = _of_rank(main)
    for seconds in (timeout, operation_timeout, real_seconds):
        check_timeout(seconds, optional=False)
    _check_chance(seed, schedule)
    _check(world_size, nodes, loop, transport, faults, lines)
    here = link or Link()
    setting = Setting(
        world_size=world_size,
        seed=seed,
        loop=loop,
        transport=transport,
        nodes=nodes,
        link=here,
        local_link=(local_link or _NEAR) if nodes > 1 else here,
        store=store or Link((50e-6, 5e-4)),
        faults=tuple(faults),
        schedule=schedule or RandomWalk(),
        statements=sources(statements),
        timeout=timeout,
        operation_timeout=operation_timeout,
        check=check,
        joined=joined,
        lines=lines,
        real_seconds=real_seconds,
    )
    if not _one_at_a_time.acquire(blocking=False):
        raise InvalidArgumentError("a simulation is running in this process already")
    try:
        return World(setting).run(of_rank)
    finally:
        _one_at_a_time.release()


def _of_rank(main: Callable[..., object]) -> Callable[[int], object]:
    """Return ``main`` as a function of the rank. A script's has no parameter, and asks for its rank."""
    if not callable(main):
        called = inspect.iscoroutine(main)
        if called:
            main.close()
        told = "pass main itself, without calling it" if called else ""
        raise misfit("main", "a function, or a coroutine function", main, told)
    try:
        signature = inspect.signature(main)
    except ValueError:  # some builtins have no signature
        return main
    for given in ((0,), ()):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return main if given else lambda _: main()
    name = getattr(main, "__name__", "main")
    raise InvalidArgumentError(
        f"{name}{signature} can be called neither with the rank alone nor without arguments: pass lambda "
        f"rank: {name}(...), with what it needs"
    )


def _check_chance(seed: object, schedule: object) -> None:
    check("seed", seed, int, "an int")
    check("schedule", schedule, (Schedule, NoneType), "None, RandomWalk(), PCT() or Replay(...)")


def _check(
    world_size: int, nodes: int, loop: str, transport: str, faults: Sequence[Fault], lines: str
) -> None:
    chosen = (("loop", loop, LOOPS), ("transport", transport, TRANSPORTS), ("lines", lines, _LINES))
    for what, given, known in chosen:
        if not isinstance(given, str) or given not in known:
            raise InvalidArgumentError(f"{what} must be one of {', '.join(map(repr, known))}, got {given!r}")
    check_count("world_size", world_size)
    check_count("nodes", nodes)
    if world_size % nodes:
        raise InvalidArgumentError(f"{world_size} ranks cannot be divided evenly among {nodes!r} nodes")
    check("faults", faults, Sequence, "a list of faults, such as [Kill(1, after_call=3)]")
    for fault in faults:
        check("each of faults", fault, Fault, "a fault, such as Kill(1, after_call=3)")
        if not 0 <= fault.struck < world_size:
            raise InvalidArgumentError(
                f"{fault} names a rank outside the world; expected 0 to {world_size - 1}"
            )
        if isinstance(fault, Cancel) and loop == "none":
            raise InvalidArgumentError(f'{fault} needs a task: pass loop="asyncio" or loop="trio"')
