"""The processes in which ``explore`` tries seeds, and the error if one of them dies.

They must not know what trying a seed means.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from ctypes import Structure, c_char
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any

from asynccoll.errors import SpawnError
from asynccoll.host.endings import in_words

__all__ = ["begins", "is_over", "pool"]


class _Note(Structure):
    """What a process tells, in memory that outlives it: its pid, and the seed that it tries."""

    _fields_ = (("text", c_char * 128),)


@contextmanager
def pool(jobs: int) -> Iterator[Callable[..., Future[Any]]]:
    """Yield a function that calls a function in one of ``jobs`` processes, which end with the block.

    Raises:
        SpawnError: one of them has died.
    """
    spawning = get_context("spawn")
    over, notes = spawning.Event(), spawning.Array(_Note, jobs)
    others, children = set(active_children()), set[BaseProcess]()

    def submit(function: Callable[..., object], *args: object) -> Future[Any]:
        # Processes that this starts do not get Ctrl-C: this one does, and ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return executor.submit(_call, function, *args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            children.update(set(active_children()) - others)

    with ProcessPoolExecutor(jobs, spawning, initializer=_begin, initargs=(over, notes)) as executor:
        try:
            yield submit
        except BaseException as error:
            over.set()
            # Waits: a child that is still starting would not find the semaphores of a parent that has ended.
            executor.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise _died(jobs, children, [one.text.decode() for one in notes]) from None
            raise


def _died(jobs: int, children: set[BaseProcess], notes: Sequence[str]) -> SpawnError:
    """Return the error for a pool one of whose ``children`` has died; it has ended the others by SIGTERM."""
    seeds = {int(pid): seed for pid, _, seed in (note.partition(" ") for note in notes if note)}
    died = next((one for one in children if one.exitcode != -signal.SIGTERM), None)
    code = -signal.SIGTERM if died is None or died.exitcode is None else died.exitcode
    seed = seeds.pop(died.pid or 0, "") if died is not None else ""
    others = ", ".join(filter(None, seeds.values()))
    how = f"was {in_words(code)}" if code < 0 else f"ended with {in_words(code)}"
    told = f" while it tried seed {seed}" if seed else " before it had tried a seed" if not others else ""
    return SpawnError(
        f"one of the processes that try seeds (jobs={jobs}) {how}{told}"
        f"{f'; others were trying {others}' if others else ''}: {_advice(code, seed)}"
    )


def _advice(code: int, seed: str) -> str:
    if not seed and code >= 0:
        return (
            "it imports the program first, so a script has to call explore under "
            '`if __name__ == "__main__":`; what it has written to stderr says more'
        )
    alone = "try that seed by itself, in this process: seeds=[...], jobs=1 (--first, --seeds 1, --jobs 1)"
    if code == -signal.SIGKILL:
        return f"if it ran out of memory, dmesg says so: then pass fewer jobs. Otherwise {alone}"
    cause = "native code crashed" if code < 0 else "something in it ended the process, such as os._exit"
    return f"{cause}; {alone}"


# In one of these processes


class _Here:
    """What a process of a pool shares with the one that has started it."""

    over: Event | None = None  # tells it to stop
    note: _Note | None = None


def begins(seed: object) -> None:
    """Note that this process tries ``seed`` from now on."""
    if _Here.note is not None:
        _Here.note.text = f"{os.getpid()} {seed}"[:127].encode()


def _call(function: Callable[..., object], *args: object) -> object:
    try:
        return function(*args)
    finally:
        begins("")


def is_over() -> bool:
    """Whether this process should stop."""
    return _Here.over is not None and _Here.over.is_set()


def _begin(over: Event, notes: Any) -> None:
    _Here.over = over
    with notes.get_lock():
        _Here.note = next(one for one in notes.get_obj() if not one.text)
        begins("")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has ended, however: it would wait for seeds forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(128 + signal.SIGKILL)
