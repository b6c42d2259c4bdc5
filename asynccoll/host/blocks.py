"""Blocks that a context enters and leaves, with ``with`` or ``async with``: ``ac.lane``, ``ac.scope``.

Each entry is recorded in a context variable, which child tasks inherit, and not in the object, so that
several tasks may enter one object. Leaving a block takes out the block's own entry, since async generators
may leave blocks in a different order, or in a different context.

Ctrl-C may come behind any call. A block that it strikes while it is entered is not entered, and a block that
it strikes while it is left is left (except before the first statement of ``__exit__``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class Entry(Generic[T]):
    """One entry of a block."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value: T = value


#: The entries of one kind that a context, or one it was copied from, has made and not left; innermost last.
Entries = ContextVar[tuple[Entry[T], ...]]


def innermost(entries: Entries[T]) -> T | None:
    """Return the value of the innermost block that this context is in, or None."""
    entered = entries.get()
    return entered[-1].value if entered else None


class Block(ABC, Generic[T]):
    """A block whose entry has a value, which ``_begin`` makes."""

    _entries: Entries[T]

    def __init__(self) -> None:
        self._open: dict[Entry[T], None] = {}  # in any context

    @abstractmethod
    def _begin(self) -> T:
        """Return the value of a new entry."""

    def _end(self, value: T, error: BaseException | None) -> None:
        """Do what remains to be done once the block has been left; ``error`` has ended it."""

    def _cut_off(self, value: T, why: BaseException) -> None:
        """Do instead what remains once ``why`` has come while the block was being left or in ``_end``."""

    def __enter__(self) -> Self:
        before, entry = self._entries.get(), Entry(self._begin())
        try:
            self._open[entry] = None
            self._entries.set((*before, entry))
        except BaseException:  # Ctrl-C, perhaps once it was entered
            self._take_out(entry)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        tb: TracebackType | None = None,
        end: Callable[[T, BaseException | None], object] | None = None,
    ) -> None:
        """Leave the block, and call ``end``, or ``_end``."""
        entry: Entry[T] | None = None
        try:
            entry = self._own()
            self._take_out(entry)
            (end or self._end)(entry.value, error)
        except BaseException as why:
            entry = entry or self._own()
            self._take_out(entry)  # again, if it was taken out already
            self._cut_off(entry.value, why)
            raise

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, tb)

    def _own(self) -> Entry[T]:
        """Return the entry of the block that ends here."""
        for entry in reversed(self._entries.get()):
            if entry in self._open:
                return entry
        return next(reversed(self._open))  # an async generator that has entered it in another context

    def _take_out(self, entry: Entry[T]) -> None:
        self._entries.set(tuple(one for one in self._entries.get() if one is not entry))
        self._open.pop(entry, None)
