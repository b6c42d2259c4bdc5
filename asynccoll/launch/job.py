"""What a spawned rank has to do, and how it reports a failure.

``spawn`` makes a ``Job``; each rank carries it out in its own process. An error is written to a file before
the rank leaves the world, so that the first failure can be told from those that followed from it.
"""

from __future__ import annotations

import importlib
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asynccoll.errors import InvalidArgumentError, SpawnError
from asynccoll.flight import Flight
from asynccoll.host.endings import is_failure
from asynccoll.host.exits import dies_of
from asynccoll.launch import child
from asynccoll.launch.calling import complete
from asynccoll.launch.report import Failure, first_failure, last_call, read_failure, what_aborted


@dataclass(frozen=True)
class Job:
    """A function with its arguments, and the world to run it in."""

    backend: str
    function: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    #: further arguments of ``initialize``
    options: Mapping[str, Any] = field(default_factory=dict)
    #: where each rank writes how it failed
    directory: str = ""

    def carry_out(self, rank: int, local_rank: int, /, **place: object) -> None:
        """Join the world, call the function, leave; in the process of ``rank``.

        ``sys.exit(0)`` in the function is like a return. What is raised here has been recorded.
        """
        from asynccoll.runtime.process import finalize, initialize

        try:
            initialize(self.backend, **{**self.options, **place})
            try:
                complete(self.function, local_rank, *self.args, **self.kwargs)
            except SystemExit as stop:
                if is_failure(stop):
                    raise
            finalize()
        except BaseException as error:
            self.record(rank, error)
            dies_of(error)
            finalize(abort=True)
            raise

    def record(self, rank: int, error: BaseException) -> None:
        """Write down how this rank failed, for ``failed`` to read."""
        error.with_traceback(child.own_frames_removed(error.__traceback__) or error.__traceback__)
        child.record(Path(self.directory, f"{rank}.json"), error, shown=False)


def failed(
    job: Job,
    ranks: range,
    codes: Mapping[int, int],
    otherwise: str,
    flights: Mapping[int, Flight] | None = None,
) -> SpawnError:
    """Return the error for a job in which a rank failed: that of the first failure, with its traceback."""
    failures = [found for rank in ranks if (found := _failure(job, rank, codes.get(rank))) is not None]
    if not failures:
        return SpawnError(otherwise)
    first = first_failure(failures)
    flights = flights or {}
    told = first.message or first.how
    words = "" if first.time is not None else last_call(first.rank, flights)
    meant = what_aborted(first.code, flights)
    text = "; ".join(filter(None, (f"rank {first.rank} failed on {first.host}: {told}", words, meant)))
    return SpawnError(f"{text}\n\n{first.trace}" if first.trace else text, first.rank)


def _failure(job: Job, rank: int, code: int | None) -> Failure | None:
    """Return how one rank ended, if it failed."""
    recorded = child.read_record(Path(job.directory, f"{rank}.json"))
    if recorded is None and not code:
        return None
    return read_failure(rank, 0, code or 1, socket.gethostname(), recorded or {}, "")


def portable(function: Callable[..., object]) -> Callable[..., object]:
    """Return ``function`` in a form that another process can load: by name, else by value with cloudpickle.

    Raises:
        InvalidArgumentError: it cannot be found by name, and cloudpickle is not installed.
    """
    if _has_name(function):
        return function
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError as error:
        raise InvalidArgumentError(
            f"cannot send {function!r} to another process: it is not at the top level of a module that can "
            "be imported there; move it to one, or pip install cloudpickle"
        ) from error
    return _ByValue(cloudpickle.dumps(function))


def _has_name(function: Callable[..., object]) -> bool:
    """Whether another process finds the function by its name."""
    try:
        pickle.dumps(function)
    except Exception:  # whatever pickle says, it cannot be found by name
        return False
    main = sys.modules["__main__"]
    return getattr(function, "__module__", None) != "__main__" or hasattr(main, "__file__")


class _ByValue:
    """A function as bytes, loaded where it is called."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __call__(self, *args: object, **kwargs: object) -> object:
        return pickle.loads(self._data)(*args, **kwargs)  # noqa: S301 - from our own parent
