"""What a call has started, before its user gets a ``Work`` for it.

A call is made of parts: the buckets of a tree, a comparison of signatures, a number sent along with tensors.
Inside the library each part is a ``Started``: its operations, and the function that makes their result. It
cannot be awaited, no scope tracks it, and dropping it loses nothing. Only the public call makes a ``Work``,
for all parts together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from asynccoll.order.operation import Operation

_NOTHING: Any = None

T = TypeVar("T")
U = TypeVar("U")


class Started(Generic[T]):
    """Operations in flight, and their result: what ``finish`` returns, or else ``value``, once filled.

    ``leaves``: the leaves of a tree, or the elements of a list, that the operations read.
    """

    __slots__ = ("finish", "leaves", "operations", "value")

    def __init__(
        self, operations: tuple[Operation, ...], finish: Callable[[], T] | None = None, value: T = _NOTHING
    ) -> None:
        self.operations: tuple[Operation, ...] = operations
        self.finish: Callable[[], T] | None = finish
        self.value: T = value
        self.leaves: Sequence[object] = ()

    def outcome(self) -> T:
        """Return the result, once all operations are over. Call only once: it runs ``finish``."""
        return self.value if self.finish is None else self.finish()

    def then(self, function: Callable[[T], U]) -> Started[U]:
        """Return a ``Started`` of the same operations whose result is ``function`` of this one's."""
        derived = Started(self.operations, lambda: function(self.outcome()))
        derived.leaves = self.leaves
        return derived


def together(parts: Sequence[Started[Any]], finish: Callable[[list[object]], T]) -> Started[T]:
    """Return one ``Started`` for all ``parts``; ``finish`` makes its result from the list of theirs."""
    operations = tuple(operation for part in parts for operation in part.operations)
    return Started(operations, lambda: finish([part.outcome() for part in parts]))
