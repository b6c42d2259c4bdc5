"""The interface of a backend: flags, capabilities, how to open communicators, how models are trained.

Where backends differ, the layers above read an attribute of this class, named for what it means to them.
They never test the backend's name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from asynccoll.plan.spec import Capabilities
from asynccoll.transport.communicator import Communicator, Opening


class Training:
    """What training on a backend needs in addition to collectives; the ``auto`` helpers read it.

    The defaults suit backends on which torch's ``DistributedDataParallel`` works and averages gradients.
    """

    #: torch's DDP averages the gradients; if False, ``auto_optim`` averages them when backward returns.
    ddp = True
    #: Batches may be put into pinned memory, which a GPU reads while the host continues.
    pins_memory = True
    #: With several ranks, ``loader`` wraps the loader in one that prefetches batches for the training loop.
    wraps_loader = False
    #: With several ranks, an optimizer takes over the state of rank 0's.
    starts_as_first = False

    def loader(self, loader: DataLoader[object], device: torch.device, log: logging.Logger) -> object:
        """Return what the training loop iterates over: ``loader``, or a wrapper that feeds ``device``.

        If the sampler has ``counting``, a wrapper iterates through it, so that the batches taken are counted.
        """
        return loader

    def own_optimizer(self, optimizer: Optimizer, options: Mapping[str, object]) -> Optimizer | None:
        """Wrap ``optimizer`` in the native library's own, if it has one that takes ``options``; else None."""
        return None

    def adopt(self, optimizer: Optimizer) -> None:
        """Prepare ``optimizer`` for steps whose gradients have already been averaged."""


class Backend:
    """A backend bound to one rank's context.

    Subclasses must define ``capabilities``, ``open`` and ``close``; everything else has a default.
    """

    name: str
    device: torch.device
    #: ``open`` blocks until the other members open theirs, so it must not run in the caller's thread.
    open_waits = True
    #: ``initialize`` opens the first lane, so that a rank that cannot connect fails there.
    opens_early = False
    #: A rank that leaves keeps running until the others leave too, and still answers although it makes no
    #: more calls. Once one rank has ended, no group of the world can continue, with or without that rank.
    leaves_together = False
    #: CPU tensors may be sent through memory that the ranks of one host share.
    shares_memory = False
    #: Why CPU tensors are not sent through shared memory although the backend would allow it; else "".
    without_memory = ""
    #: A call may complete on one rank before its peers have made theirs: on the root of a broadcast on MPI,
    #: and for any call on nccl, where the device waits but the host does not.
    ends_alone = False
    #: The members of a rank list can open a group by themselves, without ``new_group`` on all ranks.
    ad_hoc_groups = True
    #: Two communicators can deadlock if ranks start their operations in different orders (nccl).
    orders_lanes = False
    #: Ranks that have run out of data can contribute zeros: the communicators have ``join``.
    joins = False
    #: A forked child may keep using it: it holds no connection, thread or native library.
    survives_fork = False
    #: What training on this backend needs in addition to collectives.
    training: Training = Training()

    def capabilities(self, device: str) -> Capabilities:
        """Return what the backend can do with tensors on a device of this type."""
        raise NotImplementedError

    def capabilities_among(self, ranks: Sequence[int], device: str) -> Capabilities:
        """Return the capabilities in a group of these ranks, for backends where they depend on the group."""
        return self.capabilities(device)

    def way(self, ranks: Sequence[int], device: str) -> str:
        """Say how data is sent among these ranks, and why, for ``explain``; "" if there is only one way."""
        return f"{self.name}: {self.without_memory}" if self.without_memory and device == "cpu" else ""

    def open(self, opening: Opening) -> Communicator:
        """Open a communicator for one lane; no other lane uses it."""
        raise NotImplementedError

    def close(self, *, abort: bool) -> None:
        """Leave the world. With ``abort``, abort operations in flight; without it, none are in flight."""
        raise NotImplementedError

    def native_group(
        self, opening: Opening, communicator: Communicator | None
    ) -> object:  # for those that have one
        """Return the native library's group object; ``communicator``: the default lane's, once open."""
        return None

    def prepare_group(self, opening: Opening) -> None:
        """Register a group, on backends where every rank has to do so; called by ``new_group``.

        ``opening`` describes the group's first communicator; its ``rank`` is -1 on ranks outside the group.
        """

    def unprepared(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that have yet to register the group of ``ranks``; its members wait for them."""
        return ()

    def disown(self) -> None:
        """Drop what only the parent process may use; called in a forked child."""

    def orphaned(self) -> bool:
        """Whether the user has destroyed or replaced the native group that this world runs on."""
        return False

    def serves_this_thread(self) -> bool:
        """Whether the calling thread is an autograd thread that runs backward for this rank's device."""
        return False

    async def on_host(self, value: object) -> None:
        """Wait until everything in ``value`` is computed, for backends that compute lazily."""
