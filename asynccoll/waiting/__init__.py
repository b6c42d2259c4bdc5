"""The ``Work`` that a user holds, and how waiters sleep until it is done: on asyncio, on trio, in a thread.

Knows operations and the memory that they fill; not what they mean or which backend runs them.
"""

from asynccoll.waiting.started import Started
from asynccoll.waiting.together import wait_all
from asynccoll.waiting.work import Work

__all__ = ["Started", "Work", "wait_all"]
