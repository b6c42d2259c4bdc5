"""What a backend provides, and how to wait for it: communicators, completions, the threads that watch them.

Must not know the order of operations, nor what they mean: here they are single native calls.
"""

from asynccoll.transport.backend import Backend
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise, Ready

__all__ = ["Backend", "Communicator", "Completion", "Promise", "Ready"]
