"""What a call has started, before its user gets a ``Work`` for it.

A call is made of parts: the buckets of a tree, a comparison of signatures, a number beside tensors. Inside,
each part is a ``Started``: its operations, and what makes their result. Nobody waits for one, no scope knows
it and nothing is lost if it is dropped; the public call alone makes a ``Work``, of all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from asynccoll.order.operation import Operation

__all__ = ["Started", "together"]

_NOTHING: Any = None

T = TypeVar("T")
U = TypeVar("U")


class Started(Generic[T]):
    """Operations under way, and their result: ``value`` as it will be, or what ``finish`` returns, if any.

    ``leaves`` are those of a tree, which are read.
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
        """The result, once all operations are over. What is left to do is done here: it is called once."""
        return self.value if self.finish is None else self.finish()

    def then(self, function: Callable[[T], U]) -> Started[U]:
        """The same, with ``function`` of the result as the result."""
        return Started(self.operations, lambda: function(self.outcome()))


def together(parts: Sequence[Started[Any]], finish: Callable[[list[object]], T]) -> Started[T]:
    """All ``parts`` as one, whose result ``finish`` makes of theirs."""
    operations = tuple(operation for part in parts for operation in part.operations)
    return Started(operations, lambda: finish([part.outcome() for part in parts]))
