"""What a started operation looks like to its waiters, on any backend.

A ``Completion`` is the only object that a backend hands to the core. It tells whether the operation is done,
can be waited for with a time limit and without the GIL, and takes callbacks. Waiters (``waiting``), lanes and
programs (calls made of several native calls) depend on nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from asynccoll import host
from asynccoll.host.forks import renew

Callback = Callable[[], object]
_NONE: Iterator[Callback] = iter(())
#: Held briefly while any promise changes state. Reentrant: a finalizer, which garbage collection runs in any
#: thread, may settle one.
_settling = host.RLock()
renew(_settling)


class Completion:
    """One started native operation. Backends subclass it; its methods never raise the operation's failure."""

    __slots__ = ()

    #: ``wait`` really blocks, up to its limit, and is harmless; if False, only ``add_callback`` reports the
    #: end.
    blockable = True
    #: ``synchronize`` has something to do.
    stream_ordered = False
    #: The operation is known to have succeeded: there is no error to ask for and no stream to order.
    fine: bool = False

    def done(self) -> bool:
        """Whether the operation has finished or failed."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Whether it is done, polling the native operation where necessary; if so, callbacks have run."""
        return self.done()

    def landed(self) -> bool:
        """Whether the device has run the operation too, where ``done`` only means that it was issued."""
        return self.done()

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` with the GIL released; returns whether the operation is done."""
        raise NotImplementedError

    def add_callback(self, callback: Callback) -> None:
        """Call ``callback`` once when done: immediately if it is done, else on the completing thread."""
        raise NotImplementedError

    def error(self) -> BaseException | None:
        """Return the native failure, or None; only meaningful once done."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Order the current device stream after the operation (nothing to do on the CPU)."""

    def abandon(self) -> None:
        """Stop polling: the operation may never end, and its waiters already have an error."""

    def writing(self) -> bool:
        """Whether a native operation may still write to its memory, even after its waiters got an error."""
        return False


class Ready(Completion):
    """A completion that is done from the start: in a world of one rank, or of a call refused while queued."""

    __slots__ = ("_error", "fine")

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error
        self.fine: bool = error is None

    def done(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True

    def add_callback(self, callback: Callback) -> None:
        callback()

    def error(self) -> BaseException | None:
        return self._error


READY = Ready()


class Promise(Completion):
    """A completion settled by Python code: a program's last step, a waiter thread, the progress thread."""

    __slots__ = ("_callbacks", "_done", "_error", "_left", "sent", "source")

    def __init__(self) -> None:
        self._callbacks: list[Callback] = []
        #: the callbacks that have yet to be called, once done
        self._left: Iterator[Callback] = _NONE
        self._done = False
        self._error: BaseException | None = None
        #: the native completion that this promise stands for, once known (for stream ordering)
        self.source: Completion | None = None
        #: returns the completions of a program's other native calls, which may still use memory
        self.sent: Callable[[], Iterable[Completion]] = tuple

    def done(self) -> bool:
        return self._done

    def poll(self) -> bool:
        """Whether this promise is done, or its source is, whose callbacks then settle the promise."""
        return self._done or (self.source is not None and self.source.poll())

    def writing(self) -> bool:
        source = self.source
        return (source is not None and source.writing()) or any(one.writing() for one in self.sent())

    def landed(self) -> bool:
        return self._done and (self.source is None or self._error is not None or self.source.landed())

    def wait(self, seconds: float) -> bool:
        if not self._done:
            # Not an event: Ctrl-C may strike while its lock is taken, and leave it locked.
            asleep = host.Lock()
            asleep.acquire()
            wake = asleep.release
            with _settling:
                if self._done:
                    return True
                self._callbacks.insert(0, wake)  # before those that may take long
            try:
                asleep.acquire(timeout=max(0.0, seconds))
            finally:
                self._forget(wake)
        return self._done

    def _forget(self, callback: Callback) -> None:
        """Remove ``callback``, unless it has been or is about to be called."""
        with _settling, contextlib.suppress(ValueError):
            self._callbacks.remove(callback)

    def add_callback(self, callback: Callback) -> None:
        with _settling:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    def error(self) -> BaseException | None:
        return self._error

    @property
    def stream_ordered(self) -> bool:  # type: ignore[override]  # a constant of most classes, derived here
        return self.source is not None and self.source.stream_ordered

    def synchronize(self) -> None:
        if self.source is not None:
            self.source.synchronize()

    def settle(self, error: BaseException | None = None) -> None:
        """Complete the promise, with ``error`` if it has failed.

        A later call only calls the callbacks that Ctrl-C has kept from being called in this one.
        """
        try:
            with _settling:
                if not self._done:
                    self._error = error
                    if self._callbacks:
                        self._left = iter(self._callbacks)
                        self._callbacks = []
                    self._done = True
        finally:
            if self._done and self._left is not _NONE:
                host.call_each(self._left)  # each is taken off as it is called, whichever thread does that

    def follow(self, completion: Completion) -> None:
        """Complete when ``completion`` does, with the same error."""
        self.source = completion
        if completion.done():
            self.settle(completion.error())
        else:
            completion.add_callback(lambda: self.settle(completion.error()))


class Transfer(Promise):
    """The promise of a call that may write to memory until the promise is settled."""

    __slots__ = ()

    def writing(self) -> bool:
        return not self._done


class AllOf(Completion):
    """The completion of several parts: done when all are; fails with the first failed part, in order."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Completion]) -> None:
        self.parts: Sequence[Completion] = parts

    @property
    def blockable(self) -> bool:  # type: ignore[override]  # a constant of most classes, derived here
        return all(part.blockable for part in self.parts)

    @property
    def stream_ordered(self) -> bool:  # type: ignore[override]  # as blockable
        return any(part.stream_ordered for part in self.parts)

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def writing(self) -> bool:
        return any(part.writing() for part in self.parts)

    def poll(self) -> bool:
        return all(part.poll() for part in self.parts)

    def landed(self) -> bool:
        return all(part.landed() for part in self.parts)

    def wait(self, seconds: float) -> bool:
        deadline = host.monotonic() + seconds
        return all(part.done() or part.wait(max(0.0, deadline - host.monotonic())) for part in self.parts)

    def add_callback(self, callback: Callback) -> None:
        left = len(self.parts)
        lock = host.Lock()

        def one_done() -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            callback()

        if not self.parts:
            callback()
        for part in self.parts:
            part.add_callback(one_done)

    def error(self) -> BaseException | None:
        return next((error for part in self.parts if (error := part.error())), None)

    def synchronize(self) -> None:
        for part in self.parts:
            part.synchronize()

    def abandon(self) -> None:
        for part in self.parts:
            part.abandon()
