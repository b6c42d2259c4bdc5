"""The errors of asynccoll, and the one place where foreign errors are converted to them.

    AsyncCollError
    ├── NotInitializedError (RuntimeError)      no context, or already finalized
    │   └── ForkedProcessError                  a forked child tried to communicate (also a CollectiveError)
    ├── BackendNotFoundError (ImportError)      unknown name, or its package is missing
    ├── LaunchEnvironmentError (ValueError)     contradictory or incomplete launcher variables
    ├── InvalidArgumentError (ValueError)       a value that no call of this kind accepts
    │   └── InvalidCallError (TypeError)        arguments that do not fit the function, or have the wrong type
    ├── PayloadTypeError (TypeError)            a payload that this collective cannot carry
    ├── UnsupportedOpError (NotImplementedError) the backend lacks it; the message names those that have it
    ├── LaneOrderError (RuntimeError)           concurrent tasks share one lane
    ├── LaneLimitError (RuntimeError)           too many lanes in one group
    ├── SpawnError (RuntimeError)               a process that we started has failed; ``rank`` says which
    ├── WorkNotDoneError (RuntimeError)         ``result()`` before the work is done
    └── CollectiveError (RuntimeError)          an operation that was accepted has failed
        ├── CollectiveTimeoutError (TimeoutError)
        ├── CollectiveMismatchError             ranks called different things
        ├── PeerRefusedError                    another rank refused its side of the call
        ├── PeerLostError                       a rank is gone; ``ranks`` says which
        └── AbortedError                        the group was aborted with the work in flight

This module imports nothing else from the package.
"""

from __future__ import annotations

import copy
import re
import weakref
from typing import ClassVar, TypeGuard

__all__ = [
    "AbortedError",
    "AsyncCollError",
    "BackendNotFoundError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DiscardedResultWarning",
    "ForkedProcessError",
    "InvalidArgumentError",
    "InvalidCallError",
    "LaneLimitError",
    "LaneOrderError",
    "LaunchEnvironmentError",
    "NotInitializedError",
    "PayloadTypeError",
    "PeerLostError",
    "PeerRefusedError",
    "SpawnError",
    "UnawaitedWorkWarning",
    "UnsupportedOpError",
    "WorkNotDoneError",
]


class AsyncCollError(Exception):
    """Base class of all errors that this package raises."""

    _raised: weakref.ref[AsyncCollError] | None = None

    def for_waiter(self) -> AsyncCollError:
        """Return a copy to raise. This error is kept, and raising it would attach frames to it.

        The same copy is returned for as long as something refers to it.
        """
        raised = None if self._raised is None else self._raised()
        if raised is None:
            raised = self.copied()
            self._raised = weakref.ref(raised)
        return raised

    def copied(self) -> AsyncCollError:
        """Return a copy with the same cause."""
        copied = copy.copy(self)
        copied.__dict__.pop("_raised", None)  # a weak reference cannot be pickled
        copied.__cause__ = self.__cause__
        return copied


class NotInitializedError(AsyncCollError, RuntimeError):
    """There is no context to communicate in: ``initialize`` was not called, or ``finalize`` was."""


class BackendNotFoundError(AsyncCollError, ImportError):
    """The named backend does not exist, or the package it needs is not installed."""


class LaunchEnvironmentError(AsyncCollError, ValueError):
    """The launcher's environment variables are incomplete or contradict each other."""


class InvalidArgumentError(AsyncCollError, ValueError):
    """An argument has a value that no call of this kind accepts."""


class InvalidCallError(InvalidArgumentError, TypeError):
    """The arguments do not fit the function: too many by position, an unknown name, or the wrong type."""


class PayloadTypeError(AsyncCollError, TypeError):
    """The payload is of a type or dtype that this collective cannot carry."""


class UnsupportedOpError(AsyncCollError, NotImplementedError):
    """The backend lacks this operation; the message names what can be done instead."""


class LaneOrderError(AsyncCollError, RuntimeError):
    """Two tasks issue on one lane in no defined order, so ranks could run them in different orders."""


class LaneLimitError(AsyncCollError, RuntimeError):
    """More lanes were opened in one group than a group may have."""


class SpawnError(AsyncCollError, RuntimeError):
    """A rank that ``spawn`` or ``Parallel`` started has failed; its traceback is in the text.

    ``rank`` is the rank that failed first, -1 if none could tell. Also raised if a process in which
    ``testing.explore`` tries seeds has died.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[SpawnError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class WorkNotDoneError(AsyncCollError, RuntimeError):
    """The result was requested before the work was done."""


class CollectiveError(AsyncCollError, RuntimeError):
    """An operation that was accepted has failed.

    ``ranks`` are the global ranks that caused the failure, as far as they are known; ``operation`` and
    ``lane`` are the names of the operation and of its lane, "" if there is no single one.
    """

    #: the attributes that a pickled error keeps
    _kept: ClassVar[tuple[str, ...]] = ("ranks", "operation", "lane")

    def __init__(
        self, message: str, ranks: tuple[int, ...] = (), *, operation: str = "", lane: str = ""
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.operation = operation
        self.lane = lane

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),), {name: getattr(self, name) for name in self._kept}


class ForkedProcessError(NotInitializedError, CollectiveError):
    """A process forked from a rank, such as a DataLoader worker, cannot use that rank's connections.

    ``get_rank`` and similar functions work there.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """The operation was not ready within its timeout.

    ``pending``: it is still in flight, so only this wait has ended: await the same work again to go on. If
    False, the operation has failed (the backend itself timed out, say), and every wait raises this error.
    ``ranks`` are those that have not called it or cannot continue (stopped, gone). The message names them,
    and says what each called last and what it is doing now.
    """

    _kept = (*CollectiveError._kept, "pending")

    def __init__(
        self,
        message: str,
        ranks: tuple[int, ...] = (),
        *,
        pending: bool = False,
        operation: str = "",
        lane: str = "",
    ) -> None:
        super().__init__(message, ranks, operation=operation, lane=lane)
        self.pending = pending


class CollectiveMismatchError(CollectiveError):
    """The ranks called different operations, or with different shapes, dtypes or roots."""

    #: Place and part of the lane's first call in which they differ, if known; read by the lane.
    begins: tuple[int, int] | None = None
    #: The place of the call in which the mismatch was found; 0 if that is not known.
    place: int = 0
    #: Whether this rank alone has found the mismatch, so that the other ranks have to be told.
    alone: bool = False


class PeerRefusedError(CollectiveError):
    """Another rank refused its side of this call before anything was sent."""


class PeerLostError(CollectiveError):
    """A rank of the group is gone. ``ranks`` holds the global ranks known to be lost.

    ``left`` are those of them that have left the world in an orderly way (``finalize``). Their processes may
    still be running.
    """

    _kept = (*CollectiveError._kept, "left")

    def __init__(
        self,
        message: str,
        ranks: tuple[int, ...] = (),
        *,
        left: tuple[int, ...] = (),
        operation: str = "",
        lane: str = "",
    ) -> None:
        super().__init__(message, ranks, operation=operation, lane=lane)
        self.left = left


class AbortedError(CollectiveError):
    """The group was aborted (``finalize(abort=True)`` or the exit hook) with this work in flight."""


class UnawaitedWorkWarning(RuntimeWarning):
    """A ``Work`` was dropped without being awaited, so an error in it would have been lost."""


class DiscardedResultWarning(RuntimeWarning):
    """A reduction or broadcast was awaited and its result discarded: inputs stay as they are.

    The warning is issued at the line of the call, on ranks that get a result, for tensors without ``out=``.
    """


def still_pending(error: BaseException | None) -> TypeGuard[CollectiveTimeoutError]:
    """Whether ``error`` has ended only a wait, for an operation that is still in flight."""
    return isinstance(error, CollectiveTimeoutError) and error.pending


def as_final(error: Exception) -> Exception:
    """Return ``error``, with which something has failed: what is pending, if anything, is another work.

    A function that ``map`` calls may have waited for that one.
    """
    if still_pending(error):
        error.pending = False
    return error


_TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_LOST = re.compile(
    r"connection (reset|closed|refused)|broken pipe|socket closed|recv.*closed|pair closure"
    r"|peer (is )?(gone|closed|reset)|remote process|network error|no such process",
    re.IGNORECASE,
)

#: Native libraries prefix their messages with the file and line in their own source.
_SOURCE_LINE = re.compile(r"^\[[^\]]*:\d+\]\s*")


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that is kept, and of its causes.

    A frame keeps its callers alive, and with each of them all local variables.
    """
    chain = [error]
    for one in chain:
        one.__traceback__ = None
        causes = (one.__cause__, one.__context__)
        chain += [cause for cause in causes if cause is not None and cause not in chain]


def collective_error(error: BaseException, what: str) -> CollectiveError:
    """Return the typed error for a failure that a native operation reported while doing ``what``."""
    if isinstance(error, CollectiveError):
        return error
    text = _SOURCE_LINE.sub("", str(error).strip().split("\n")[0]) or type(error).__name__
    text = text.partition(" This is typically caused by")[0]
    message = f"{what} failed: {text}"
    mapped: CollectiveError
    if _TIMEOUT.search(text):
        mapped = CollectiveTimeoutError(message)
    elif _LOST.search(text):
        mapped = PeerLostError(message)
    else:
        mapped = CollectiveError(message)
    mapped.__cause__ = error
    return mapped
