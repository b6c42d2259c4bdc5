"""What a backend provides and how to wait for it: communicators, completions, the threads that watch them.

This package must not know the order of operations or what they mean: here each one is a single native call.
"""

from asynccoll.transport.backend import Backend
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise, Ready

__all__ = ["Backend", "Communicator", "Completion", "Promise", "Ready"]
