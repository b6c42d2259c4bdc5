"""What a backend is made of. Ours import only this and the errors; other packages' may use all of it.

A backend is a module with ``create(request) -> Context`` and, for ``ac.explain`` without a world,
``capabilities(name, device) -> Capabilities``. It is found by name, through a row of ``backends.table`` or
the entry-point group ``asynccoll.backends`` (name -> ``module:create``). ``create`` gives the context a
``Backend``, which opens a ``Communicator`` for each lane; every native call returns a ``Completion``.

The rest is optional: ``meet``, to meet where the launcher or the user says, or ``connect`` and
``agree_on_store`` for a store of the backend's own; ``Exchange``, a store for members' addresses;
``progress`` and ``Waiters``, threads that poll or wait; ``detect``, which reads what the launcher has set.
"""

from asynccoll import host
from asynccoll.backends.api.gpu import own_device
from asynccoll.backends.api.meeting import agree_on_store, make_default_group
from asynccoll.backends.api.rendezvous import Meeting, locate, meet
from asynccoll.backends.api.request import Request, of_torch
from asynccoll.backends.api.tcpstore import LOOPBACK, connect
from asynccoll.backends.api.within import within
from asynccoll.environment.detection import LaunchInfo, detect
from asynccoll.health.checks import misfit, mismatch
from asynccoll.host import forks, give_way, locks, network
from asynccoll.host.cores import usable_cores
from asynccoll.host.endings import is_new
from asynccoll.host.handing import received
from asynccoll.host.helpers import Helpers, start_once
from asynccoll.host.looks import looks
from asynccoll.host.store import Clients, Exchange, Waiting, values
from asynccoll.host.words import encoded
from asynccoll.memory.aliasing import may_overlap
from asynccoll.memory.arithmetic import reduce_chunks
from asynccoll.modes.captured import as_called, uncast
from asynccoll.modes.unseen import unseen
from asynccoll.plan.spec import DTYPES_BY_NAME, Capabilities, Op, ReduceOp, dtype_name
from asynccoll.plan.texts import at_line, shown, unlike
from asynccoll.plan.trees import flatten
from asynccoll.transport.backend import Backend, Training
from asynccoll.transport.communicator import Communicator, Opening, as_matrix
from asynccoll.transport.completion import READY, AllOf, Callback, Completion, Promise, Ready, Transfer
from asynccoll.transport.progress import (
    GRACE_SECONDS,
    LONGEST_NAP_SECONDS,
    SHORTEST_NAP_SECONDS,
    Polled,
    progress,
)
from asynccoll.transport.waiters import InProgress, Waiters
from asynccoll.waiting.suspending import Signal
from asynccoll.world.context import Context, Identity

__all__ = [
    "DTYPES_BY_NAME",
    "GRACE_SECONDS",
    "LONGEST_NAP_SECONDS",
    "LOOPBACK",
    "READY",
    "SHORTEST_NAP_SECONDS",
    "AllOf",
    "Backend",
    "Callback",
    "Capabilities",
    "Clients",
    "Communicator",
    "Completion",
    "Context",
    "Exchange",
    "Helpers",
    "Identity",
    "InProgress",
    "LaunchInfo",
    "Meeting",
    "Op",
    "Opening",
    "Polled",
    "Promise",
    "Ready",
    "ReduceOp",
    "Request",
    "Signal",
    "Training",
    "Transfer",
    "Waiters",
    "Waiting",
    "agree_on_store",
    "as_called",
    "as_matrix",
    "at_line",
    "connect",
    "detect",
    "dtype_name",
    "encoded",
    "flatten",
    "forks",
    "give_way",
    "host",
    "is_new",
    "locate",
    "locks",
    "looks",
    "make_default_group",
    "may_overlap",
    "meet",
    "misfit",
    "mismatch",
    "network",
    "of_torch",
    "own_device",
    "progress",
    "received",
    "reduce_chunks",
    "shown",
    "start_once",
    "uncast",
    "unlike",
    "unseen",
    "usable_cores",
    "values",
    "within",
]
