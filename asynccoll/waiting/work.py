"""``Work``: the awaitable handle of a collective that has started.

A ``Work`` is a view of operations that the runtime holds: they continue if the work is dropped or an
awaiter is cancelled. The processing of the received bytes (concatenate, decode, average) is called
*finishing*; it runs once, in the first waiter.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from asynccoll import host
from asynccoll.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ForkedProcessError,
    InvalidArgumentError,
    PayloadTypeError,
    WorkNotDoneError,
    as_final,
)
from asynccoll.host.blocks import Entries, innermost
from asynccoll.host.exits import in_main_thread
from asynccoll.host.forks import renew
from asynccoll.host.frames import without_ours
from asynccoll.host.misfits import check_function
from asynccoll.host.timeouts import check_patience
from asynccoll.memory.unfilled import claims, let_go
from asynccoll.memory.unwritten import Read, is_empty, writes_to
from asynccoll.modes.captured import as_called
from asynccoll.modes.unseen import with_data
from asynccoll.order.operation import Operation
from asynccoll.transport.completion import Promise
from asynccoll.transport.streams import Mark, carried
from asynccoll.transport.waiters import Waiters
from asynccoll.waiting.forgotten import NotItsResult, warn
from asynccoll.waiting.started import Started
from asynccoll.waiting.suspending import Signal, block, pause, quick, suspend
from asynccoll.waiting.synchronizing import synchronized

_NOTHING: Any = None
_log = logging.getLogger("asynccoll.work")

T = TypeVar("T")
U = TypeVar("U")

_PENDING = 0
_FINISHING = 1
_DONE = 2
_FAILED = 3
#: How many works a scope keeps before it drops those whose outcome has been received.
_FEW = 64
#: Reentrant: making a promise with it held may collect garbage, and what that drops may complete a work.
_claim = host.RLock()
_waiters = host.per_process(lambda: Waiters("asynccoll-future"))
renew(_claim)


def _disown(waited: WeakKeyDictionary[concurrent.futures.Future[Any], str]) -> None:
    """In a forked child, fail the futures that threads of the parent settle, and drop their callbacks."""
    for future, work in list(waited.items()):
        future.__init__()  # type: ignore[misc]  # as new: another thread may have held its lock
        error = f"this process was forked while a thread of its parent waited for {work}: do it there"
        future.set_exception(ForkedProcessError(error))
    waited.clear()


#: The futures that are not settled yet, each with what the work is.
_waited: WeakKeyDictionary[concurrent.futures.Future[Any], str] = host.per_process(WeakKeyDictionary, _disown)
#: How often a waiter checks whether another thread is still finishing the work: after Ctrl-C, that thread may
#: fail to wake it.
_LOOK_SECONDS = 1.0
#: By the ``id`` of a work that one thread is finishing while others wait for it: what wakes them.
_finishing: dict[int, Promise] = host.per_process(dict)

#: The open scopes, each with its works, for which it waits when it ends.
scopes: Entries[Members] = ContextVar("asynccoll_scopes", default=())


class Work(NotItsResult, Generic[T]):
    """A collective that has started, and its result.

    - ``await work`` returns the result, on asyncio or trio, any number of times, from any number of tasks;
      ``work.wait(timeout=None)`` returns it without an event loop (inside one it blocks the loop).
    - Both promise that the result is *ready*: it may be used on the current device stream. On the CPU
      (gloo, mpi, horovod) the bytes have arrived. On nccl the current stream is ordered after the
      operation, and the host has not waited; ``await work.on_host()`` does.
    - All awaiters get the same object. Cancelling an awaiter stops its waiting, not the operation.
    - A work that fails raises the same error for every waiter: ``CollectiveTimeoutError``,
      ``CollectiveMismatchError``, ``PeerRefusedError``, ``PeerLostError`` or another ``CollectiveError``;
      or an error in this rank's own call that is detected late (such as ``UnsupportedOpError``).
    - A work that is dropped without having been waited for warns (``UnawaitedWorkWarning``) and names the
      line that created it; call ``detach()`` if dropping it is intended.
    """

    __slots__ = (
        "__weakref__",
        "_cut_short",
        "_error",
        "_finish",
        "_finisher",
        "_heard",
        "_mark",
        "_operations",
        "_origin",
        "_read",
        "_state",
        "_streamed",
        "_value",
        "_writes",
        "out",
    )

    def __init__(
        self, operations: tuple[Operation, ...], finish: Callable[[], T] | None, value: T = _NOTHING
    ) -> None:
        self._operations = operations
        # None: there is nothing to finish, and the result is ``value``, which the operations fill
        self._finish = None if finish is None else as_called(finish)
        self._state = _PENDING
        self._heard = False
        self._cut_short = False
        self._error: BaseException | None = None
        self._streamed = False  # ordered by a device stream: each waiter's stream is ordered after it
        self._mark: Mark | None = None  # a point after finishing, on the stream where the work was finished
        self._value = value
        self.out: object = None  # the tensor or tree that the call fills for its user
        #: the work whose result ``finish`` asks for: it is over once this one is, also where they fail
        self._origin: Work[Any] | None = None
        self._read: Read | None = None  # the input, which must not be written to until a wait has ended
        self._writes = 0  # how often ``_read`` had been written to at the call

    # Waiting

    def __await__(self) -> Generator[Any, object, T]:
        self._heard = True
        if self._state == _PENDING:
            plain = self._finish is None
            try:
                for operation in self._operations:
                    if not quick(operation):
                        yield from suspend(operation)
                    plain = plain and operation.over
            except BaseException:
                self._end_early()
                raise
            if not self._operations:
                yield from pause()
            elif plain and self._state != _FAILED and (self._read is None or self._is_unwritten()):
                self._state = _DONE  # nothing runs here, so two threads may do this concurrently
                self._read = None
                if self.out is not None:
                    claims.is_over(self)
                return self._value
        else:
            yield from pause()
        while (finished := self._finished_elsewhere()) is not None:
            signal = Signal()
            finished.add_callback(signal.set)
            yield from signal.wait(_LOOK_SECONDS).__await__()
        return self._outcome()

    def wait(self, timeout: float | None = None) -> T:
        """Wait without an event loop, and return the result.

        ``timeout`` in seconds limits this wait; after it ``CollectiveTimeoutError`` is raised, and the
        operation is still in flight. The operation's own ``timeout=`` applies as well.
        """
        if timeout is not None:
            check_patience(timeout)
        self._heard = True
        ends = None if timeout is None else host.monotonic() + timeout
        if self._state == _PENDING:
            plain = self._finish is None
            try:
                for operation in self._operations:
                    block(operation, None if ends is None else ends - host.monotonic())
                    plain = plain and operation.over
            except KeyboardInterrupt as error:
                self._end_early()
                raise without_ours(error)  # noqa: B904  # it is the same one
            except BaseException:
                self._end_early()
                raise
            plain = plain and bool(self._operations) and self._state != _FAILED
            if plain and (self._read is None or self._is_unwritten()):
                self._state = _DONE  # as in __await__
                self._read = None
                if self.out is not None:
                    claims.is_over(self)
                return self._value
        return self._outcome(ends)

    async def on_host(self) -> T:
        """Return the result once the host may read it (on the CPU that is the same as ready).

        Raises:
            CollectiveTimeoutError: the device is not done within the operation's ``timeout=``, which counts
                from the call. Call ``on_host`` again to wait for the full timeout again.
            CollectiveError: a kernel on the device has failed, or a peer is lost (``PeerLostError``).
        """
        value = await self
        if self._operations:
            last = self._operations[-1]
            world = last.lane.world
            await world.backend.on_host(value)
            if self._streamed and (left := synchronized(self._operations, world.device)) is not None:
                try:
                    await Work((left,), None)
                except CollectiveTimeoutError:
                    last.extend()
                    raise
        return value

    # Looking

    @property
    def pending(self) -> bool:
        """Whether no waiter has received the result or error yet, even if it is available (``done``)."""
        return self._state < _DONE

    @property
    def cut_short(self) -> bool:
        """Whether a wait for the work was cut short: cancelled, or timed out."""
        return self._cut_short

    def in_flight(self) -> tuple[Operation, ...]:
        """Return the operations whose native calls may still use memory; none once a waiter has the result.

        A failed work may have some as well: it may have been given up (``supersede``).
        """
        if self._state == _DONE:
            return ()
        return tuple(one for one in self._operations if one.failure is None and not one.completion.done())

    def fills(self, out: object) -> None:
        """Claim ``out``, which this work fills: no other call may use it until this work is waited for."""
        self.out = out
        claims.add(self)

    def reads(self, read: Read) -> None:
        """Note that this work reads ``read``: a write to that before a wait has ended makes the wait fail."""
        self._read, self._writes = read, writes_to(read)

    @property
    def claims(self) -> bool:
        """Whether other calls must not use ``out``: no waiter has the result, or a failed call may write."""
        if self._state == _FAILED:
            return any(operation.completion.writing() for operation in self._operations)
        return self._state != _DONE

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations that the work waits for."""
        return self._operations

    def supersede(self, why: str) -> None:
        """Fail the work, unless a waiter has its result: another call is about to use its memory.

        Waiters that are still waiting get the error when their wait ends.

        Raises:
            InvalidArgumentError: the input was written to in the meantime; every wait for the work raises
                this as well.
        """
        if self.pending:
            written = self._written()
            self._fail(written or CollectiveError(why))
            if written is not None:
                raise written

    def done(self) -> bool:
        """Whether waiting would return immediately (with the result or the error).

        Write to inputs and read ``out`` only after a wait, or after ``result()``.
        """
        if self._state > _FINISHING:
            return True
        for operation in self._operations:
            if not operation.done():
                operation.polled()  # a caller that polls is a waiter too
                return False
        return True

    def result(self) -> T:
        """Return the result of a work that is done; raises ``WorkNotDoneError`` before."""
        self._check_done("result")
        self._heard = True
        return self._outcome()

    def exception(self) -> BaseException | None:
        """Return the error of a work that is done, or None; raises ``WorkNotDoneError`` before."""
        self._check_done("exception")
        self._heard = True
        try:
            self._outcome()
        except BaseException as error:
            if error is not self._error:  # such as Ctrl-C while the work was being finished
                raise
            return error
        return None

    def _check_done(self, what: str) -> None:
        if not self.done():
            raise WorkNotDoneError(
                f"{what}() of {self!r}, which is not done; await it, or call wait() or done() first"
            )

    def __bool__(self) -> bool:
        raise PayloadTypeError(
            "a Work has no truth value: await it for its result, or ask work.done() whether it is done"
        )

    def __repr__(self) -> str:
        state = "failed" if self._state == _FAILED else "done" if self.done() else "in flight"
        names = ", ".join(map(str, self._operations[:3]))
        more = ", ..." if len(self._operations) > 3 else ""
        return f"<Work {names or 'complete'}{more}: {state}>"

    # Deriving

    def map(self, function: Callable[[T], U]) -> Work[U]:
        """Return a work whose result is ``function`` of this one's, called once, in the first waiter."""
        check_function("what work.map() calls", function)
        self._heard = True
        derived = Work(self._operations, lambda: function(self._outcome()))
        derived._origin = self
        return noted(derived)

    def add_done_callback(self, callback: Callable[[Work[T]], object]) -> None:
        """Call ``callback(work)`` once the work is done: now if it already is, else on the completing thread.

        That thread also completes other works, so the callback must not block or wait for them. Exceptions
        that it raises are logged (``asynccoll.work``).
        """
        check_function("what work.add_done_callback() calls", callback)
        self.attended(callback)

    def attended(self, callback: Callable[[Work[T]], object]) -> Callable[[], object]:
        """Call ``callback`` as ``add_done_callback`` does; return a function that ends this wait before."""
        if not self._operations:
            _call_back(callback, self)
        left = len(self._operations)

        def one_done() -> None:
            nonlocal left
            with _claim:
                left -= 1
                if left:
                    return
            _call_back(callback, self)

        return partial(host.call_each, [operation.attended(one_done) for operation in self._operations])

    def detach(self) -> None:
        """Fire and forget: do not warn if nothing waits for it. ``finalize`` and ``scope`` still do.

        An ``out=`` is still filled, by the thread that completes the operation. There is no way to tell when
        the input has been read: pass a copy (``x.clone()``) if you write to it afterwards.
        """
        self._heard = True
        if self.out is not None:
            self.add_done_callback(Work.exception)
        elif self._origin is not None:
            self._origin.detach()

    def as_future(self) -> asyncio.Future[T]:
        """Return an ``asyncio.Future`` of the running loop, for ``asyncio.wait``, ``gather``, ``wait_for``.

        Cancelling the future does not stop the operation.

        Raises:
            InvalidArgumentError: no asyncio loop runs in this thread.
        """

        async def outcome() -> T:
            return await self

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise InvalidArgumentError(
                "as_future() needs an asyncio loop that is running in this thread, and there is none: call "
                "it inside a coroutine; on trio await the work itself, and in threads use work.wait() or "
                "work.as_concurrent_future()"
            ) from None
        self._heard = True
        self._send()  # here, since otherwise the other task would become the owner of the lane
        return loop.create_task(outcome())

    def as_concurrent_future(self) -> concurrent.futures.Future[T]:
        """Return a ``concurrent.futures.Future`` for code that waits in threads.

        The future is a wait like any other: after the operation's deadline it fails with
        ``CollectiveTimeoutError``; call this again to continue waiting. The future cannot be cancelled.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        self._heard = True
        self._send()  # here, since otherwise the waiting thread would become the owner of the lane

        def settle() -> None:
            try:
                future.set_result(self.wait())
            except BaseException as error:
                future.set_exception(error)

            _waited.pop(future, None)  # afterwards: a fork meanwhile copies the future's lock as held

        if self.done():
            settle()
        else:  # a separate thread waits, so that the deadline is enforced
            _waited[future] = ", ".join(f"{one.name} at {one.place}" for one in self._operations[:3])
            _waiters.submit(future, carried(settle))
        return future

    # Finishing

    def _outcome(self, ends: float | None = None) -> T:
        """Return the result or raise the error. The first call finishes the work; later calls reuse that.

        While another thread finishes the work, wait for that: until ``ends``, if given.
        """
        here = False
        if self._state < _DONE:
            if self._finish is None and self._succeeded() and self._is_unwritten():
                self._state = _DONE  # as in __await__
                self._read = None
            else:
                here = self._settle(ends)
            self._saw_ends()
        if self._state == _FAILED:
            assert self._error is not None
            raise self._error.with_traceback(None)
        if self._streamed and not here:
            self._order()
        return self._value

    def _saw_ends(self) -> None:
        """Note the end of operations that had no waiter: their outcome is being received now."""
        for operation in self._operations:
            if not operation.over and operation.failure is None:
                operation.saw_end(host.monotonic())

    def _order(self) -> None:
        """Order the current stream, which need not be the first waiter's, after the result's computation."""
        if self._mark is not None:
            self._mark.order()
        else:
            for operation in self._operations:
                operation.completion.synchronize()

    def _succeeded(self) -> bool:
        """Whether all operations succeeded and none is ordered by a stream (those need ``_complete``)."""
        for operation in self._operations:
            completion = operation.completion
            if operation.failure is not None or completion.stream_ordered or completion.error() is not None:
                return False
        return True

    def _settle(self, ends: float | None) -> bool:
        """Finish the work, or wait for the thread that does. Returns whether this call finished it.

        A waiter puts a promise into ``_finishing`` before it reads the state again; the finisher sets the
        state before it looks for a promise. So one of the two always sees the other's write. Ctrl-C affects
        only the waiter that it strikes; the next waiter finishes the work. Ctrl-C may strike as any call
        returns, so the claim is made inside the ``try`` whose ``finally`` gives it back.
        """
        while self._state < _DONE:
            mine, state = False, _PENDING
            try:
                with _claim:
                    if self._state == _PENDING:
                        self._finisher = host.getpid()
                        mine, self._state = True, _FINISHING
                if mine:
                    self._complete()
                    state = _DONE
            except Exception as error:
                self._error = as_final(error)
                state = _FAILED
            finally:
                if mine:
                    if state != _PENDING:
                        self._finish = self._read = self._origin = None  # frees what the function refers to
                    # The work may have been superseded in the meantime; another call then uses its memory.
                    self._state = state if self._state == _FINISHING else self._state
                    self._wake_waiters()
            if mine:
                return True
            while (finished := self._finished_elsewhere()) is not None:
                left = _LOOK_SECONDS if ends is None else min(_LOOK_SECONDS, ends - host.monotonic())
                if left <= 0:
                    raise CollectiveTimeoutError(
                        f"{self!r} is over, but another thread is still making its result; wait for it again",
                        pending=True,
                    )
                finished.wait(left)
        return False

    def _finished_elsewhere(self) -> Promise | None:
        """Return what is settled when the thread that is finishing the work has ended that; else None.

        After Ctrl-C that thread may fail to settle it, so a wait for it has a time limit.
        """
        if self._state != _FINISHING:
            return None
        with _claim:
            if self._state != _FINISHING:
                return None
            if self._finisher == host.getpid():
                return _finishing.setdefault(id(self), Promise())
        self._fail(
            ForkedProcessError(
                f"{self!r}: another thread was making its result when this process was forked; wait for it "
                "before the fork, or in the parent"
            )
        )
        return None

    def _wake_waiters(self) -> None:
        if _finishing:
            with _claim:
                late = _finishing.pop(id(self), None)
            if late is not None:
                late.settle()

    def _complete(self) -> None:
        """Compute the result and check the input. Raise the error of an operation if one has failed."""
        for operation in self._operations:
            if operation.error() is None and operation.completion.stream_ordered:
                self._streamed = True
                operation.order()
            if operation.failure is not None and self._origin is None:
                raise operation.failure.for_waiter()
        written = self._written()
        finish = self._finish  # read once: another thread may supersede the work
        if finish is not None:
            # Before ``written`` is raised, because peers may wait for what this does. A user's function (in
            # ``map``) sees the active torch modes; the library's own runs outside of those that hide data.
            self._value = with_data(finish) if self._origin is None else finish()
            if self._streamed:
                self._mark = Mark(self._operations[-1].lane.world.device)
        if written is not None:
            raise written

    def _is_unwritten(self) -> bool:
        """Whether the input has not been written to since the call.

        ``_read`` is read again after the count: another thread's wait may have ended in between, which clears
        ``_read``, and that thread may then write to the input.
        """
        read = self._read
        return read is None or writes_to(read) == self._writes or self._read is None or is_empty(read)

    def _written(self) -> InvalidArgumentError | None:
        """Return the error for an input that was written to since the call; else None."""
        if self._is_unwritten():
            return None
        return InvalidArgumentError(
            f"the input of {self._operations[0]} was written to in place before its work was waited for, "
            "somewhere between that line and this one: this rank may have sent the old values, the new "
            "ones, or some of each. Await it first, or pass a copy (x.clone())"
        )

    def _fail(self, error: BaseException) -> None:
        """Set the error, so that every wait raises it."""
        self._finish = self._read = self._origin = None
        self._error = error
        self._state = _FAILED

    def _send(self) -> None:
        """Start the call if it was deferred, which only that of a ``Deferred`` (in ``coalescing``) is."""

    def _told(self) -> None:
        self._heard = True

    def wanted(self) -> None:
        """Note that a wait for several works includes this one, and start the call if it was deferred."""
        self._heard = True
        self._send()

    def is_late_too(self, until: float = math.inf) -> bool:
        """Whether a wait up to ``until`` would time out immediately; if so, this call counts as that wait.

        A wait for several works asks the other ranks only once why they are late: for the first late work.
        """
        now = host.monotonic()
        due = [one for one in self._operations if not one.done() and min(until, one.deadline) <= now]
        late = [one for one in due if not one.tell()]
        for operation in late:
            operation.extend()
        if late:
            self._heard = True
            self._end_early()
        return bool(late)

    def leave(self) -> None:
        """Note that a wait for several works was cut short, if this work is not over."""
        if self._state == _PENDING:
            self._end_early()

    def _end_early(self) -> None:
        """Note that a wait was cut short: for this work, and for those that it was derived from."""
        work: Work[Any] | None = self
        while work is not None:
            work._cut_short = True
            work = work._origin

    def __del__(self) -> None:
        try:
            out = self.out
        except AttributeError:  # Ctrl-C struck in the constructor
            return
        if out is not None and self.claims:
            let_go(out, self._operations)
        if self._heard or not self._operations:
            return
        if isinstance(self._operations[0].failure, ForkedProcessError):  # in a fork: the work is the parent's
            return
        place = self._operations[0].place
        names = ", ".join(operation.name for operation in self._operations[:3])
        error = next((one.failure for one in self._operations if one.failure is not None), None)
        lost = "its result, and an error in it, would be lost" if error is None else f"it has failed: {error}"
        warn(
            f"{names} started at {place} was never awaited: {lost} (await it, call wait(), or detach() it)",
            place,
            error,
        )

    def __reduce__(self) -> Any:
        raise PayloadTypeError("a Work belongs to its process and cannot be pickled; await it instead")

    def __copy__(self) -> object:
        raise PayloadTypeError("a Work cannot be copied; await the same one as often as you like")

    def __deepcopy__(self, memo: object) -> object:
        raise PayloadTypeError("a Work cannot be copied; await the same one as often as you like")


class Members:
    """The works of a scope. Works whose results were received are dropped while the scope is still open."""

    __slots__ = ("_left", "_lock", "_most", "_outer", "_works")

    def __init__(self, outer: Members | None = None) -> None:
        """``outer``: the members of the enclosing scope, which gets works started after this scope ended."""
        self._lock = host.Lock()
        self._most = _FEW
        self._works: deque[Work[object]] = deque()
        self._outer = outer
        self._left = False

    def add(self, work: Work[Any]) -> None:
        with self._lock:
            if not self._left:
                works = self._works
                while works and works[0]._state == _DONE:  # most works end in order
                    works.popleft()
                if len(works) >= self._most:
                    works = self._works = deque(one for one in works if one._state != _DONE)
                    self._most = max(_FEW, 2 * len(works))
                works.append(work)
                return
        if self._outer is not None:
            self._outer.add(work)

    def outstanding(self) -> Iterator[Work[object]]:
        """Yield the works whose outcome was not received, including new ones; then the scope is over."""
        while (work := self._next()) is not None:
            yield work

    def _next(self) -> Work[object] | None:
        with self._lock:
            while self._works:
                work = self._works.popleft()
                if work.pending:
                    return work
            self._left = True
            return None

    def errors(self) -> list[BaseException]:
        """Return the errors that waiters have received."""
        with self._lock:
            return [work._error for work in self._works if work._error is not None]


def noted(work: Work[T]) -> Work[T]:
    """Add ``work`` to the open scope, if any, which will wait for it; return ``work``."""
    members = innermost(scopes)
    if members is not None:
        members.add(work)
    return work


def handed_out(started: Started[T], out: object = None, read: Read | None = None) -> Work[T]:
    """Return the user's ``Work`` for everything that a call has started, with its input and ``out``."""
    work = Work(started.operations, started.finish, started.value)
    if out is not None:
        work.fills(out)
    if read is not None:
        work.reads(read)
    return noted(work)


def waited_for(started: Started[T]) -> T:
    """Wait for the result of a call whose user gets no ``Work``, such as a collective of a backward."""
    return Work(started.operations, started.finish, started.value).wait()


def _call_back(callback: Callable[[Work[T]], object], work: Work[T]) -> None:
    """Call ``callback``, and log the exception if it raises: the caller has other works to complete.

    A ``BaseException`` such as ``CancelledError`` or ``SystemExit`` is logged as well, since it would end the
    thread that completes works. Only in the main thread is it raised, where a signal handler may have raised
    it.
    """
    try:
        callback(work)
    except BaseException as error:
        if not isinstance(error, Exception) and in_main_thread():
            raise
        _log.exception("the done-callback %r of %r raised", callback, work)
