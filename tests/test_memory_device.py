"""A lane of a backend with a device: only CPU tensors go through shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynccoll.backends.memory.sharing import Sharing
from asynccoll.plan.spec import ReduceOp
from asynccoll.transport.communicator import Opening


class Communicator:
    """A communicator that records its calls."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.called.append(name)


class Backend(Communicator):
    """A backend with a device; torch's "meta" device stands for it."""

    name = "nccl"
    device = torch.device("meta")

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator

    def open(self, opening: Opening) -> Communicator:
        assert opening.carried == {"cpu"}
        return self.communicator


CALLS = {
    "all_reduce": lambda to, x: to.all_reduce(x, ReduceOp.SUM),
    "reduce": lambda to, x: to.reduce(x, 0, ReduceOp.SUM),
    "broadcast": lambda to, x: to.broadcast(x, 0),
    "all_gather": lambda to, x: to.all_gather(x, x),
    "gather": lambda to, x: to.gather(None, x, 0),
    "scatter": lambda to, x: to.scatter(x, None, 0),
    "reduce_scatter": lambda to, x: to.reduce_scatter(x, x, ReduceOp.SUM),
    "all_to_all": lambda to, x: to.all_to_all(x, x, [1, 1], [1, 1]),
    "send": lambda to, x: to.send(x, 1, 0),
    "recv": lambda to, x: to.recv(x, 1, 0),
}


OPENING = Opening(
    ranks=(0, 1),
    rank=0,
    is_world=True,
    group="world",
    lane="default",
    epoch=0,
    clients=None,
    timeout=1.0,
    meeting=1.0,
    given_up=lambda: False,
    disagreed=lambda place, error: None,
    store_answers=lambda: True,
)


@pytest.fixture
def near() -> Communicator:
    """Make the communicator in memory."""
    return Communicator()


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch, near: Communicator) -> Sharing:
    """Make two ranks of one host."""
    hub: Any = SimpleNamespace(watcher=SimpleNamespace(gone=set()))
    inner: Any = Backend(Communicator())
    made = Sharing(inner, hub, [0, 0], {})
    monkeypatch.setattr(made, "_in_memory", lambda opening: near)
    return made


@pytest.fixture
def lane(sharing: Any, near: Communicator) -> tuple[Any, Communicator, Communicator]:
    """Open a lane between the two; return it, its part in memory, and the backend's part."""
    return sharing.open(OPENING), near, sharing._inner.communicator


@pytest.mark.parametrize("call", sorted(CALLS))
def test_each_device_has_its_way(lane: tuple[Any, Communicator, Communicator], call: str) -> None:
    """Otherwise a tensor on the GPU would be copied through the memory of the host."""
    opened, near, rest = lane
    CALLS[call](opened, torch.empty(2, device="meta"))
    assert (near.called, rest.called) == ([], [call])
    CALLS[call](opened, torch.empty(2))
    assert (near.called, rest.called) == ([call], [call])


def test_both_are_ended(lane: tuple[Any, Communicator, Communicator]) -> None:
    opened, near, rest = lane
    for end in ("retire", "abort", "close"):
        getattr(opened, end)()
    assert near.called == rest.called == ["retire", "abort", "close"]


def test_the_part_in_memory_is_left_where_the_other_cannot_be_opened(
    sharing: Any, near: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the lane's memory would stay in use until the end of the job."""

    def fails(opening: Opening) -> Communicator:
        raise ConnectionError("no such network")

    monkeypatch.setattr(sharing._inner, "open", fails)
    with pytest.raises(ConnectionError):
        sharing.open(OPENING)
    assert near.called == ["abort"]
