"""How the calls of one communicator come together, by where its ranks are.

Replicas that are threads of this process meet here, are compared and launched together. Where each rank
is a process with a device of its own (TPU), a call is launched at once, alone: the devices meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch

from asynccoll.backends.xla.calls import Call, launch
from asynccoll.backends.xla.collectives import AllGather
from asynccoll.errors import CollectiveError

if TYPE_CHECKING:
    from asynccoll.backends.xla.replicas import Replicas

__all__ = ["Alone", "Meeting", "Together"]


class Meeting(Protocol):
    """Where the calls of one communicator meet."""

    def enter(self, call: Call) -> Callable[[], object]:
        """Give ``call`` its place in the order; what is returned is called once its input is there.

        In any thread, for it only hands over.
        """
        ...

    def give_up(self, error: CollectiveError) -> None:
        """This rank will not come any more."""
        ...


class Together:
    """Among replica threads: off the device, until the last has come."""

    def __init__(self, world: Replicas, name: str, index: int, size: int) -> None:
        self._launching = world.launching
        self._room = world.room(name, size)
        self._name = name
        self._index = index
        self._place = 0

    def enter(self, call: Call) -> Callable[[], object]:
        self._place += 1
        place = self._place
        return lambda: self._meet(place, call)

    def _meet(self, place: int, call: Call) -> None:
        if self._room.arrive(place, self._index, call):
            call.replica.progress.submit(self._launch)

    def _launch(self) -> None:
        """Launch what is complete, in order; another thread may have done it already."""
        with self._launching:
            while (calls := self._room.take()) is not None:
                launch(cast("list[Call]", calls), self._name)

    def give_up(self, error: CollectiveError) -> None:
        self._room.give_up(error)


class Alone:
    """One replica in this process: the others launch theirs in processes of their own."""

    def __init__(self) -> None:
        self._ordered: object = None

    def enter(self, call: Call) -> Callable[[], object]:
        return lambda: call.replica.progress.submit(lambda: self._launch(call))

    def _launch(self, call: Call) -> None:
        try:
            if call.error is not None:
                raise call.error
            self._carry_out(call)
        except BaseException as error:
            call.fail(error)

    def _carry_out(self, call: Call) -> None:
        if call.splits is not None:
            call.matrix = self._exchange(call)
        call.prepare()
        call.replica.xla.wait()
        call.launch()
        call.end()

    def _exchange(self, call: Call) -> list[list[int]]:
        """The split sizes of all ranks."""
        assert call.splits is not None
        device = call.replica.xla
        members = call.collective.members
        gather = AllGather(members, "splits")
        with device.lock:
            sent = torch.tensor(call.splits[0], dtype=torch.int32, device="cpu").to(device.torch_device)
            device.settle([sent])
            rows = device.launch(lambda token: gather.trace(sent, token))
        device.wait()
        matrix: list[list[int]] = rows.cpu().view(members.size, -1).tolist()
        return matrix

    def give_up(self, error: CollectiveError) -> None:
        """Nobody waits for this rank here."""
