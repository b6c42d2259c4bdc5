"""Which rank launches the collectives of one communicator: one rank for all of them, or each its own side.

If the ranks are threads of this process (the CPU client), the last one to arrive at a call compares the calls
of all ranks and launches them together. If each rank is a process with a device of its own (TPU), each
launches its side in the lane's order, and the devices wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import torch

from asynccoll.backends.xla.calls import Call, Splits, agreed, launch
from asynccoll.backends.xla.collectives import AllGather
from asynccoll.backends.xla.replicas import Replicas
from asynccoll.errors import CollectiveError


class Launcher(Protocol):
    """Launches the calls of one rank on one communicator."""

    def enter(self, call: Call) -> Callable[[], object]:
        """Accept ``call`` in the lane's order; return a function to call once its input is on the device.

        Any thread may call that: it only passes the call to a progress thread.
        """
        ...

    def give_up(self, error: CollectiveError) -> None:
        """Make no more calls: those that wait for this rank on other ranks fail with ``error``."""
        ...

    def leave(self) -> None:
        """Note that this rank is done with the communicator."""
        ...


class ThreadLauncher:
    """For replicas that are threads: their calls wait off the device until the last rank arrives."""

    def __init__(self, world: Replicas, name: str, index: int, size: int) -> None:
        self._world = world
        self._room = world.room(name, size)
        self._name = name
        self._index = index
        self._place = 0

    def enter(self, call: Call) -> Callable[[], object]:
        self._place += 1
        place = self._place
        return lambda: self._arrive(place, call)

    def _arrive(self, place: int, call: Call) -> None:
        if self._room.arrive(place, self._index, call):
            call.replica.progress.submit(self._launch)

    def _launch(self) -> None:
        """Launch, in order, the calls at which all ranks have arrived, unless another thread has done so."""
        # One lock for all communicators, so that every device gets its launches in the same order.
        with self._world.launching:
            while (calls := self._room.take()) is not None:
                launch(cast("list[Call]", calls), self._name)

    def give_up(self, error: CollectiveError) -> None:
        self._room.give_up(error)

    def leave(self) -> None:
        self._world.leave(self._name, self._index)


class ProcessLauncher:
    """For one replica in each process.

    Calls are launched in the order in which they were accepted, whichever input is on the device first. A
    device executes launches in order, and in each of them waits for the other devices. If the order depended
    on when an input was ready, it would not be the same on all ranks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._accepted: deque[Call] = deque()
        self._ready: set[Call] = set()

    def enter(self, call: Call) -> Callable[[], object]:
        self._accepted.append(call)
        return lambda: self._arrive(call)

    def _arrive(self, call: Call) -> None:
        self._ready.add(call)
        call.replica.progress.submit(self._launch_ready)

    def _launch_ready(self) -> None:
        """Launch the calls that are ready, up to the first one that is not. Runs on one thread only."""
        while self._accepted and self._accepted[0] in self._ready:
            call = self._accepted.popleft()
            self._ready.discard(call)
            self._launch(call)

    def _launch(self, call: Call) -> None:
        try:
            if call.error is not None:
                raise call.error
            self._carry_out(call)
        except BaseException as error:
            call.fail(error)

    def _carry_out(self, call: Call) -> None:
        if call.splits is not None:
            call.matrix = agreed(self._exchange(call), call.collective.members.ranks, self._name)
        call.prepare()
        call.replica.xla.wait()
        call.launch()
        call.end()

    def _exchange(self, call: Call) -> list[Splits]:
        """Return the splits of all ranks, gathered by a separate collective: ranks meet nowhere else."""
        assert call.splits is not None
        device = call.replica.xla
        members = call.collective.members
        gather = AllGather(members, "splits")
        with device.lock:
            sent = torch.tensor(call.splits, dtype=torch.int32, device="cpu").to(device.torch_device)
            device.settle([sent])
            rows = device.launch(lambda token: gather.trace(sent, token))
        device.wait()
        found: list[Splits] = rows.cpu().view(members.size, 2, -1).tolist()
        return found

    def give_up(self, error: CollectiveError) -> None:
        """Do nothing: the other ranks wait on their devices, where they cannot be told."""

    def leave(self) -> None:
        """Do nothing: no rank but this one knows of the communicator."""
