"""Notes when the operations of a simulation end, without callbacks.

A callback changes what happens: a program that its waiter would drive is driven by its completions, and
memory that only waiters would poll is polled by a thread. So the recording of a simulation adds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from asynccoll.backends.memory.flight import InFlight
from asynccoll.order.operation import Operation
from asynccoll.testing.processes import exchanged
from asynccoll.testing.transports import Asked
from asynccoll.transport.completion import AllOf, Completion, Promise

if TYPE_CHECKING:
    from asynccoll.trace.recorder import Recorder

__all__ = ["Endings"]

#: Called when something is over, with whether it failed.
_Told = Callable[[bool], object]


class Endings:
    """What to call when operations end, on all ranks of one simulation."""

    def __init__(self) -> None:
        self._told: dict[object, list[_Told]] = {}

    def observer(self, recorder: Recorder) -> Callable[[Operation, int], None]:
        """Return an observer (``Context.observe``): ``recorder`` notes each operation and its end."""
        return partial(self._observe, recorder)

    def _observe(self, recorder: Recorder, operation: Operation, size_bytes: int) -> None:
        entry = recorder.note(operation, size_bytes)
        over = partial(recorder.over, entry)
        self._told[operation] = [over]
        self._when_over(operation.completion, lambda failed: self._tell(operation, failed))

    def _when_over(self, completion: Completion, told: _Told) -> None:
        if isinstance(completion, Asked):  # ``done`` would poll it
            completion = completion.promise
        if isinstance(completion, AllOf):
            self._when_all_are_over(completion.parts, told)
        elif completion.finished if isinstance(completion, InFlight) else completion.done():
            told(completion.error() is not None)
        elif isinstance(completion, (InFlight, Promise)):
            self._told.setdefault(completion, []).append(told)
        else:
            completion.add_callback(lambda: told(completion.error() is not None))

    def _when_all_are_over(self, parts: Any, told: _Told) -> None:
        ends: list[bool] = []

        def one(failed: bool) -> None:
            ends.append(failed)
            if len(ends) == len(parts):
                told(any(ends))

        for part in parts:
            self._when_over(part, one)

    def _tell(self, one: object, failed: bool) -> None:
        for told in self._told.pop(one, ()):
            told(failed)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Intercept ends for the block, each before any thread that waits for it continues."""
        settle, end, fails = Promise.settle, InFlight.end, Operation._fails

        def settled(promise: Promise, error: BaseException | None = None) -> None:
            self._tell(promise, error is not None)
            settle(promise, error)

        def ended(call: InFlight, error: BaseException | None = None) -> None:
            self._tell(call, error is not None)
            end(call, error)

        def failed(operation: Operation, error: Any) -> None:
            self._tell(operation, failed=True)
            fails(operation, error)

        with (
            exchanged(Promise, ("settle",), SimpleNamespace(settle=settled)),
            exchanged(InFlight, ("end",), SimpleNamespace(end=ended)),
            exchanged(Operation, ("_fails",), SimpleNamespace(_fails=failed)),
        ):
            yield
