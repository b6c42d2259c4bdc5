"""What a backend gives, and how one waits for it: communicators, completions, threads that watch them.

Knows no order and no group: an operation here is one native call.
"""

from asynccoll.transport.backend import Backend
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion, Promise, Ready

__all__ = ["Backend", "Communicator", "Completion", "Promise", "Ready"]
