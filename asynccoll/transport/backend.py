"""What a backend is: flags, a row of capabilities, and a way to open communicators.

Wherever backends differ, the layers above ask for an attribute of this class, named for what it means to
them, and not for the backend's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynccoll.transport.training import Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from asynccoll.plan.spec import Capabilities
    from asynccoll.transport.communicator import Communicator, Opening

__all__ = ["Backend"]


class Backend:
    """A backend bound to one rank's context.

    It must define ``capabilities``, ``open`` and ``close``; the rest has defaults.
    """

    name: str
    device: torch.device
    #: ``open`` waits for the other members, so it must not run in a caller's thread.
    open_waits = True
    #: ``initialize`` opens the first lane, so that a rank which cannot connect learns it there.
    opens_early = False
    #: A rank that leaves stays until the others do, and answers although it will not call any more: where one
    #: has ended, no group goes on, of whichever ranks.
    leaves_together = False
    #: Tensors on the CPU may be sent through memory that the ranks of one host share.
    shares_memory = False
    #: Why tensors on the CPU are not sent through shared memory, where the backend would allow it.
    without_memory = ""
    #: A call may be over on one rank before its peers have made theirs: a broadcast's root on MPI, and any
    #: call on nccl, where the host goes on and the device waits.
    ends_alone = False
    #: The members of a rank list may open it alone, without ``new_group`` on all ranks.
    ad_hoc_groups = True
    #: Communicators that start in different order on different ranks can deadlock (nccl).
    orders_lanes = False
    #: Ranks that have run out of data can take part with zeros: its communicators have ``join``.
    joins = False
    #: A forked child may go on using it: it holds no connection, thread or native library.
    survives_fork = False
    #: What training on it needs besides collectives.
    training: Training = Training()

    def capabilities(self, device: str) -> Capabilities:
        """What the backend can do with tensors on a device of this type."""
        raise NotImplementedError

    def capabilities_among(self, ranks: Sequence[int], device: str) -> Capabilities:
        """The same in a group of these ranks, for backends where that makes a difference."""
        return self.capabilities(device)

    def way(self, ranks: Sequence[int], device: str) -> str:
        """How data is sent among these ranks, and why, for ``explain``; "" where there is only one way."""
        return f"{self.name}: {self.without_memory}" if self.without_memory and device == "cpu" else ""

    def open(self, opening: Opening) -> Communicator:
        """Open a communicator for one lane, which shares it with no other."""
        raise NotImplementedError

    def close(self, *, abort: bool) -> None:
        """Leave the world: with ``abort``, abort what is in flight; without it nothing is in flight."""
        raise NotImplementedError

    def native_group(
        self, opening: Opening, communicator: Communicator | None
    ) -> object:  # for those that have one
        """The native library's object for a group; ``communicator``: that of its default lane, once open."""
        return None

    def prepare_group(self, opening: Opening) -> None:
        """Register a group, for backends where every rank has to; called by ``new_group``.

        ``opening``: that of the group's first communicator; on a rank that is no member, ``rank`` is -1.
        """

    def unprepared(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that have yet to register the group of ``ranks``, for which its members wait."""
        return ()

    def disown(self) -> None:
        """Drop what only the parent may use; called in a forked child."""

    def orphaned(self) -> bool:
        """Whether the user has destroyed or replaced the native group that this world runs on."""
        return False

    def serves_this_thread(self) -> bool:
        """Whether the calling thread is autograd's own, running backward for this rank's device."""
        return False

    async def on_host(self, value: object) -> None:
        """Wait until everything in ``value`` is computed, for backends that compute lazily."""
