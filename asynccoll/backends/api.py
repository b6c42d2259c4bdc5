"""What a backend is made of: all that ours are built on, and that another package's may use.

A backend is a module with ``create(request) -> Context`` and, for ``ac.explain`` without a world,
``capabilities(name, device) -> Capabilities``. It is found by name through the entry-point group
``asynccoll.backends`` (name -> ``module:create``). ``create`` gives the context a ``Backend``, which opens a
``Communicator`` for each lane; every native call gives a ``Completion``.
"""

from asynccoll.backends.request import Request
from asynccoll.health.checks import mismatch
from asynccoll.plan.spec import Capabilities, Op, ReduceOp
from asynccoll.transport.communicator import Backend, Communicator, Opening
from asynccoll.transport.completion import READY, AllOf, Completion, Promise, Ready
from asynccoll.transport.progress import progress
from asynccoll.world.context import Context, Identity

__all__ = [
    "READY",
    "AllOf",
    "Backend",
    "Capabilities",
    "Communicator",
    "Completion",
    "Context",
    "Identity",
    "Op",
    "Opening",
    "Promise",
    "Ready",
    "ReduceOp",
    "Request",
    "mismatch",
    "progress",
]
