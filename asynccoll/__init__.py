"""Functional async collectives: plain functions that start at once and return an awaitable ``Work``.

import asynccoll as ac

ac.initialize()
work = ac.all_reduce(grad)      # started now
loss = next_batch_forward()     # overlaps with it
grad = await work               # asyncio or trio; work.wait() without a loop
"""

import importlib
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from asynccoll.host import elsewhere

if TYPE_CHECKING:
    from asynccoll.public import *  # noqa: F403  # its ``__all__`` is this package's public API

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """Return the public names. Submodules are not listed, but ``__getattr__`` finds them."""
    return [*_public(), "__doc__", "__version__"]


def _public() -> dict[str, object]:
    """Return the public objects by name."""
    public = importlib.import_module("asynccoll.public")
    return {name: getattr(public, name) for name in public.__all__}


if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute name

    def __getattr__(name: str) -> object:
        """Import all public names when the first one is used.

        This imports torch, too, which a launcher need not load. For an unknown name, the error says what to
        write instead, if it is a name from another library or one in ``overlap`` or ``trace``.
        """
        if name != "__all__" and name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        if PathFinder.find_spec(f"{__name__}.{name}", sys.modules[__name__].__path__) is not None:
            return importlib.import_module(f"{__name__}.{name}")
        names = _public()
        there = globals()  # names already set here (by tests, say) are kept
        there.update({one: names[one] for one in names if one not in there}, __all__=tuple(names))
        if name in there:
            return there[name]
        parts = (one for one in ("overlap", "trace") if name in names[one].__all__)
        if meant := next((f"ac.{one}.{name}" for one in parts), elsewhere.called_here(name)):
            raise AttributeError(f"asynccoll has no {name!r}: write {meant}", name=name)
        told = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(told, name=name, obj=sys.modules[__name__])  # ``obj`` lets Python suggest one
