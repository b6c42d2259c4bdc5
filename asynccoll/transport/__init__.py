"""What a backend gives, and how one waits for it: communicators, completions, threads that watch them.

Must not know the order of operations, nor what they mean: here they are native calls, one by one.
"""

from asynccoll.transport.backend import Backend
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise, Ready

__all__ = ["Backend", "Communicator", "Completion", "Promise", "Ready"]
