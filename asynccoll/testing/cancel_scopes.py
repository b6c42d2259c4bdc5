"""anyio's cancel scopes on asyncio, whose children are cancelled in the order in which they were entered.

anyio keeps them in a set, whose order depends on their addresses: the same seed would not be reproducible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from anyio._backends import _asyncio

__all__ = ["ordered_cancel_scopes"]


class _OrderedSet(dict[Any, None]):
    """As much of a set as anyio needs."""

    def add(self, one: object) -> None:
        self[one] = None

    def discard(self, one: object) -> None:
        self.pop(one, None)

    def remove(self, one: object) -> None:
        del self[one]


class _CancelScope(_asyncio.CancelScope):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._child_scopes: Any = _OrderedSet()


@contextlib.contextmanager
def ordered_cancel_scopes() -> Iterator[None]:
    """Give new cancel scopes on asyncio an order, for the block."""
    with patch.object(_asyncio, "CancelScope", _CancelScope):
        yield
