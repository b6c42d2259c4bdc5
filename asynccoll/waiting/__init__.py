"""The ``Work`` that a user holds, and how waiters sleep until it is done: on asyncio, on trio, in a thread.

This package knows operations and the memory that they fill. It must not know what operations mean or which
backend runs them.
"""

from asynccoll.waiting.started import Started
from asynccoll.waiting.together import wait_all
from asynccoll.waiting.work import Work

__all__ = ["Started", "Work", "wait_all"]
