"""The ``Work`` that a user holds, and how one sleeps until it is over: on asyncio, on trio, as a thread.

Knows operations, and what they fill; not what they mean or which backend runs them.
"""

from asynccoll.waiting.started import Started
from asynccoll.waiting.work import Work, wait_all

__all__ = ["Started", "Work", "wait_all"]
