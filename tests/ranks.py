"""A rank of a test world: the object that a case gets, and the program that each rank process runs.

A case is written once, as ``async def case(me, ...)``, and runs under asyncio,
trio or no loop at all: it awaits ``me.get(work)``, which without a loop is
``work.wait()``. Run as a script, this file connects back to the world that
started it (`worlds.py`), joins the others, and runs what it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import inspect
import operator
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch

import asynccoll as ac
import oracle
import starters_horovod
from asynccoll.health import watchdog as watch
from asynccoll.launch import child
from asynccoll.runtime import process as runtime
from asynccoll.world import group
from patience import patient

Report = Callable[..., None]

MESSAGES = {"send", "recv", "send_object", "recv_object"}

#: Errors of one call, which name it.
_REFUSALS = (ac.InvalidArgumentError, ac.PayloadTypeError, ac.UnsupportedOpError)
#: What a backend cannot do: (name of the collective, its arguments) -> bool.
#: Such a case is not skipped: it must raise `UnsupportedOpError`.
GAPS: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], bool]] = {
    "horovod": starters_horovod.lacks,
    "xla-tpu": lambda name, _args, _kwargs: name in MESSAGES,
}

#: The backend name for `initialize`, where it differs from the name of the backend under test.
NATIVE = {"memory": "gloo"}

#: How many lanes a group may have. Hundreds of cases share a world here, and need more between them.
LANES = group.MAX_LANES

#: Backends on which every rank must make each group; rank lists that were not made this way are refused.
NEED_EVERY_RANK = {"horovod"}


def _nothing_lacking(_name: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return False


@dataclass
class Caught:
    """The error that `raising` caught."""

    error: BaseException | None = None


@contextlib.contextmanager
def raising(error: type[BaseException] | tuple[type[BaseException], ...], *says: str) -> Iterator[Caught]:
    """Check that the block raises this error, with all of `says` in its text."""
    caught = Caught()
    try:
        yield caught
    except error as raised:
        caught.error = raised
    assert caught.error is not None, f"nothing raised: expected {error}"
    missing = [word for word in says if word not in str(caught.error)]
    assert not missing, f"{missing} not in the error's text: {caught.error}"


@dataclass(frozen=True)
class Place:
    """Identifies a rank of a world."""

    backend: str
    rank: int
    size: int


class Rank:
    """Where a case runs: its rank, the world's size, and how to wait."""

    def __init__(self, place: Place, runner: str, signs: Path, report: Report) -> None:
        """`report` sends messages to the test; `signs` is a directory that all ranks share."""
        self.rank = place.rank
        self.size = place.size
        self.backend = place.backend
        self.runner = runner
        self._signs = signs
        self._report = report

    def get(self, work: Any) -> Awaitable[Any]:
        """Return the result of `work`: by `await` under a loop, by `wait()` without one."""
        return _wait(work) if self.runner == "blocking" else work

    async def until_ready(self, work: Any) -> Any:
        """Wait for the result, retrying as often as the wait times out."""
        while True:
            try:
                return await self.get(work)
            except ac.CollectiveTimeoutError:
                continue

    def look_until_done(self, work: Any, otherwise: str) -> None:
        """Poll `work` until it is done, without waiting for it."""
        self.look_until(work.done, otherwise)

    def look_until(self, is_so: Callable[[], object], otherwise: str) -> None:
        """Ask until `is_so`."""
        deadline = time.monotonic() + patient(10)
        while not is_so():
            assert time.monotonic() < deadline, otherwise
            time.sleep(0.001)

    @contextlib.contextmanager
    def usual_room(self) -> Iterator[None]:
        """Let the world open as many more lanes in the block as a group may normally have in all."""
        before = group.MAX_LANES
        group.MAX_LANES = LANES + len(runtime.current().world.opened.keys() - {"default"})
        try:
            yield
        finally:
            group.MAX_LANES = before

    def show(self, sign: str) -> None:
        """Tell the other ranks, without the code under test, that this rank has got this far."""
        self._signs.joinpath(sign).touch()

    def see(self, sign: str) -> None:
        """Block until some rank shows this sign."""
        while not self._signs.joinpath(sign).exists():
            time.sleep(0.002)

    def is_killed_once_all_wait(self) -> None:
        """Kill this process by SIGKILL once each other rank N has shown "N waits"."""
        for rank in range(self.size):
            if rank != self.rank:
                self.see(f"{rank} waits")
        os.kill(os.getpid(), signal.SIGKILL)

    def shown(self, sign: str) -> bool:
        """Whether some rank has shown this sign."""
        return self._signs.joinpath(sign).exists()

    def at(self, label: str) -> None:
        """Record what is being done, for the report of a failure or a hang."""
        self._report("at", label)

    @contextlib.contextmanager
    def case(self, label: str) -> Iterator[None]:
        """Run one named case of many: its failure is reported, and the next case still runs."""
        self.at(label)
        try:
            yield
        except Exception:
            self._report("failed", label, traceback.format_exc(limit=-6))

    def prepare(self, *groups: Sequence[int]) -> bool:
        """Make groups of these rank lists if every rank must. Returns whether the members alone suffice."""
        if self.backend not in NEED_EVERY_RANK:
            return True
        for ranks in groups:
            ac.new_group(ranks)
        return False

    def lacks(self, name: str, *args: Any, **kwargs: Any) -> bool:
        """Whether this backend refuses the call because it lacks the operation."""
        return GAPS.get(self.backend, _nothing_lacking)(name, args, kwargs)

    async def check(
        self,
        label: str,
        call: Callable[..., Any],
        /,
        *args: Any,
        expect: Any,
        value: bool = False,
        rtol: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """Check that `call(*args)` gives the expected result, bit for bit, and does not change its inputs."""
        if self.lacks(call.__name__, *args, **kwargs):
            await self.refuses(label, ac.UnsupportedOpError, call, *args, **kwargs)
            return
        with self.case(label):
            before = oracle.snapshot(args)
            got = await self.get(call(*args, **kwargs))
            oracle.same(got, expect, value=value, rtol=rtol)
            oracle.same(args, before, where="the arguments")

    async def refuses(
        self,
        label: str,
        error: type[BaseException] | tuple[type[BaseException], ...],
        call: Callable[..., Any],
        /,
        *args: Any,
        says: tuple[str, ...] = (),
        **kwargs: Any,
    ) -> None:
        """Check that `call(*args)` raises this typed error, with `says` and the operation in its text."""
        with self.case(label):
            with raising(error, *says) as caught:
                got = await self.get(call(*args, **kwargs))
                raise AssertionError(f"not refused: returned {got!r}")
            assert isinstance(caught.error, ac.AsyncCollError), f"untyped: {caught.error!r}"
            if isinstance(caught.error, _REFUSALS) and call.__module__ == ac.all_reduce.__module__:
                assert call.__name__ in str(caught.error), f"names no operation: {caught.error!r}"


async def _wait(work: Any) -> Any:
    return work.wait()


def _drive(case: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a coroutine that never suspends, without a loop."""
    coroutine = case(*args, **kwargs)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("the case awaited something other than me.get(...) in blocking mode")


def _under_asyncio(case: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return asyncio.run(case(*args, **kwargs))


def _under_trio(case: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import trio

    async def main() -> Any:
        return await case(*args, **kwargs)

    return trio.run(main)


RUNNERS = {"asyncio": _under_asyncio, "trio": _under_trio, "blocking": _drive}


def run_case(me: Rank, case: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run one case in this process, on the loop of `me.runner`."""
    if inspect.iscoroutinefunction(case):
        return RUNNERS[me.runner](case, me, *args, **kwargs)
    return case(me, *args, **kwargs)


@contextlib.contextmanager
def none_dropped() -> Iterator[None]:
    """Fail if any thread drops a handle in the block without awaiting it."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    lost = [str(one.message) for one in heard if issubclass(one.category, ac.UnawaitedWorkWarning)]
    assert not lost, f"handles dropped unawaited: {lost}"


def resolve(name: str) -> Callable[..., Any]:
    """Return the function named ``module:qualified.name``."""
    module, _, path = name.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))


def report_to(connection: Connection) -> Report:
    """Return a function that sends messages pickled by value (never in torch's shared memory)."""

    def report(*message: Any) -> None:
        connection.send_bytes(pickle.dumps(message))

    return report


def _listen(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    """Hand over what the test sends; end this process if the test is gone."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(70)


def as_launched(place: Place, node_of: Sequence[int]) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, with the ranks on these nodes."""
    node = node_of[place.rank]
    said = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": node_of[: place.rank].count(node),
        "LOCAL_WORLD_SIZE": node_of.count(node),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": len(set(node_of)),
    }
    return {name: str(value) for name, value in said.items()}


def serve(connection: Connection, place: Place, options: dict[str, Any]) -> None:
    """Join the world (unless it is bare), then run the cases that are sent until told to close."""
    report = report_to(connection)
    group.MAX_LANES = 100 * LANES
    watch.IDLE_SECONDS = 0.3
    watch.PATIENCE_SECONDS = 0.1  # otherwise each refused call costs its peers a second
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    bare, nodes = options.pop("bare", False), options.pop("nodes", None)
    try:
        if nodes is not None:
            os.environ.update(as_launched(place, nodes))
            ac.initialize(NATIVE.get(place.backend, place.backend), **options)
        elif not bare:
            ac.initialize(
                NATIVE.get(place.backend, place.backend), rank=place.rank, world_size=place.size, **options
            )
    except BaseException:
        report("raised", traceback.format_exc())
        raise
    report("done", None)
    while data := inbox.get():
        try:
            name, runner, signs, args, kwargs = pickle.loads(data)
            me = Rank(place, runner, signs, report)
            with none_dropped():
                result = run_case(me, resolve(name), args, kwargs)
            report("done", result)
        except BaseException:
            report("raised", traceback.format_exc())
    if not bare:
        ac.finalize()
    gc.freeze()  # a last garbage collection of memory that was idle for half an hour can take half a minute
    report("closed")


def begin(stacks: Path) -> None:
    """Set up a process of ranks: one thread for torch, and a file for its stacks if it hangs.

    A garbage collection through all objects of torch takes a sixth of a second, and cases collect hundreds of
    times, so the objects that exist now are excluded.
    """
    gc.freeze()
    torch.set_num_threads(1)
    file = stacks.open("w")  # held open by the signal's handler
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def main() -> None:
    """Run one rank process, which gets its cases over the connection."""
    child.die_with_launcher()  # even if it is stopped, and would not notice that the test is gone
    address, rank, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    begin(Path(sys.argv[4]))
    connection = Client(address, "AF_UNIX")
    report_to(connection)("hello", rank, os.getpid())
    size, options = pickle.loads(connection.recv_bytes())
    serve(connection, Place(backend, rank, size), options)


if __name__ == "__main__":
    # The modules of the cases import `ranks`: it must be this one, not a twin.
    sys.modules["ranks"] = sys.modules["__main__"]
    main()
