"""``simulate``: several ranks in one process, one thread at a time, every choice from a seed."""

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
    """Run ``main(rank)``, or ``main()``, on ``world_size`` ranks in this process, as ``seed`` says.

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
        main: called on each rank, in a thread of its own: with its number, or with nothing if it has no
            parameter.
        world_size: how many ranks.
        seed: of every choice and every latency.
        loop: ``"asyncio"``, ``"trio"``, or ``"none"`` where ``main`` is a plain function that waits with
            ``work.wait()``.
        transport: how calls are over, and what can be called: as ``"gloo"`` (told by a thread), ``"mpi"`` and
            ``"horovod"`` (must be asked), ``"xla"`` (waited for in threads), ``"memory"`` (moved by a thread
            that passes, through memory that ranks of a node share), ``"nccl"`` (done for the host while the
            device is behind).
        nodes: on how many nodes they are, each with as many ranks, in order.
        link: between ranks of different nodes, or of one if there is only one; unless said otherwise 20 us to
            2 ms and 1 GB/s.
        local_link: between ranks of one node of several; 2 to 200 us and 10 GB/s.
        store: to the store at which ranks meet; 50 to 500 us.
        faults: what goes wrong, and when.
        schedule: who goes on; ``RandomWalk(0.1)`` unless said otherwise.
        statements: names of modules before each statement of which another thread may go on, too
            (``"asynccoll.order.lane"``, or one of yours): finds races inside of them, and takes longer.
        timeout: simulated seconds after which it is given up.
        operation_timeout: that of the context, as ``initialize(timeout=)``.
        check: as of ``initialize``.
        joined: whether ``main`` finds its world joined; if not, it calls ``ac.initialize()`` itself, whose
            ``timeout`` and ``check`` count then.
        lines: ``"same"`` where no branch of the program has ranks make one call from different lines: what is
            in ``strays`` of the report is in its ``mismatches`` then, too, and ``check`` raises.
        real_seconds: after which TimeoutError is raised: code that waits for a thread or a socket that is not
            simulated never ends.

    Not simulated: what native code does to memory, signals, forks, sockets, and threads that are started
    otherwise than by asyncio's ``to_thread`` or by the library.

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
    """``main``, also one without a parameter: that of a script, which asks for its rank."""
    if not callable(main):
        called = inspect.iscoroutine(main)
        if called:
            main.close()
        told = "pass main itself, without calling it" if called else ""
        raise misfit("main", "a function, or a coroutine function", main, told)
    try:
        signature = inspect.signature(main)
    except ValueError:  # of some builtins it is unknown
        return main
    for given in ((0,), ()):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return main if given else lambda _: main()
    name = getattr(main, "__name__", "main")
    raise InvalidArgumentError(
        f"{name}{signature} cannot be called with the rank alone, nor with nothing: pass lambda rank: "
        f"{name}(...), with what it needs"
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
        raise InvalidArgumentError(f"{world_size} ranks cannot be on {nodes!r} nodes of equally many")
    check("faults", faults, Sequence, "a list of faults, such as [Kill(1, after_call=3)]")
    for fault in faults:
        check("each of faults", fault, Fault, "a fault, such as Kill(1, after_call=3)")
        if not 0 <= fault.struck < world_size:
            raise InvalidArgumentError(
                f"{fault} names a rank outside the world; expected 0 to {world_size - 1}"
            )
        if isinstance(fault, Cancel) and loop == "none":
            raise InvalidArgumentError(f'{fault} needs a task: say loop="asyncio" or loop="trio"')
