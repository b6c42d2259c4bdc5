"""What a backend is: what others must know of it, a row of capabilities, and a way to open communicators.

What is not the same on all backends stands here, under a name that says what it means to whoever asks. Nobody
above asks for a backend by its own.
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
    """A backend bound to one rank's context. Three methods it must have; the rest has defaults."""

    name: str
    device: torch.device
    #: ``open`` waits for the other members, so that it must not run in a caller's thread.
    open_waits = True
    #: The first lane is opened when the world comes together, so that who cannot connect learns it there.
    opens_early = False
    #: Tensors on the CPU may go through memory that ranks of one host share, instead.
    shares_memory = False
    #: Why tensors on the CPU do not go through memory, where that might have been.
    without_memory = ""
    #: A call may be over on one rank before its peers have made theirs: a broadcast's root on MPI, and any
    #: call on nccl, where the host goes on and the device waits.
    ends_alone = False
    #: Rank lists may be opened among their members alone, without ``new_group`` on all ranks.
    ad_hoc_groups = True
    #: Communicators that start in different order on different ranks can deadlock (nccl).
    orders_lanes = False
    #: Ranks that have run out of data can take part with zeros: its communicators have ``join``.
    joins = False
    #: A forked child may go on with it: it has no connection, thread or library of the process.
    survives_fork = False
    #: What training on it needs besides collectives.
    training: Training = Training()

    def capabilities(self, device: str) -> Capabilities:
        """What it does for tensors on a device of this type."""
        raise NotImplementedError

    def capabilities_among(self, ranks: Sequence[int], device: str) -> Capabilities:
        """The same in a group of these ranks, where that makes a difference."""
        return self.capabilities(device)

    def way(self, ranks: Sequence[int], device: str) -> str:
        """Which way calls among these ranks go, and why, for ``explain``; nothing where there is no other."""
        return f"{self.name}: {self.without_memory}" if self.without_memory and device == "cpu" else ""

    def open(self, opening: Opening) -> Communicator:
        """A communicator of its own for one lane."""
        raise NotImplementedError

    def close(self, *, abort: bool) -> None:
        """Leave the world: nothing is in flight, unless it is to be aborted."""
        raise NotImplementedError

    def native_group(
        self, opening: Opening, communicator: Communicator | None
    ) -> object:  # for those that have one
        """A group as the library underneath knows it; ``communicator``: its default lane's, once open."""
        return None

    def prepare_group(self, ranks: tuple[int, ...]) -> None:
        """Every rank calls ``new_group`` with these: here is the chance to register them."""

    def disown(self) -> None:
        """In a forked child: let go of what only the parent may use."""

    def orphaned(self) -> bool:
        """Whether the user has taken away what this world stands on."""
        return False

    def serves_this_thread(self) -> bool:
        """Whether autograd runs backward for this rank's device in the calling thread, one of its own."""
        return False

    async def on_host(self, value: object) -> None:
        """Wait until everything in ``value`` is computed, where that is put off."""
