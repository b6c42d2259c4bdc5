"""The ``Work`` that a user holds, and how one sleeps until it is over: on asyncio, on trio, as a thread.

Knows operations, not what they carry or which backend runs them.
"""
