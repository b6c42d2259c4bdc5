"""How ranks meet at one store: again, in worlds of other sizes, and after some were killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from asynccoll.backends.api import rendezvous
from asynccoll.backends.api.assembly import Member, assemble
from asynccoll.environment import nodes
from asynccoll.errors import CollectiveTimeoutError
from asynccoll.host.store import Clients, Exchange
from patience import patient

SECONDS = patient(20)


@pytest.fixture(params=["hash", "tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    """Return an empty store."""
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"))
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=SECONDS))


def come(store: dist.Store, rank: int, size: int, seconds: float = SECONDS) -> tuple[dist.Store, list[str]]:
    own = store.clone() if isinstance(store, dist.TCPStore) else store
    part, members = assemble(own, rank, size, Member(f"host-{rank}"), seconds)
    return part, [member.host for member in members]


def meet(store: dist.Store, size: int) -> list[dist.Store]:
    """Let all ranks join one world, check what each knows of others, and return their parts of the store."""
    with ThreadPoolExecutor(size) as pool:
        met = list(pool.map(lambda rank: come(store, rank, size), range(size)))
    assert [hosts for _, hosts in met] == [[f"host-{rank}" for rank in range(size)]] * size
    return [part for part, _ in met]


def test_a_world_has_a_part_of_its_own_each_time(store: dist.Store) -> None:
    """The world may grow and shrink; its part has no keys of an earlier world, and all ranks share it."""
    for life, size in enumerate([2, 3, 1, 5, 2]):
        parts = meet(store, size)
        assert not any(part.check(["key"]) for part in parts)
        parts[-1].set("key", str(life))
        assert [part.get("key") for part in parts] == [str(life).encode()] * size


def test_a_rank_that_was_killed_while_it_waited_is_replaced(store: dist.Store) -> None:
    """The keys that the killed rank wrote remain, but no rank mistakes them for its replacement's."""
    for killed in (0, 1, 2):
        with pytest.raises(CollectiveTimeoutError):
            come(store, killed, 3, seconds=0.01)
        parts = meet(store, 3)
        parts[0].set("key", "here")
        assert [part.get("key") for part in parts] == [b"here"] * 3


def test_a_rank_that_is_replaced_while_the_others_wait(store: dist.Store) -> None:
    """All agree on a world with the replacement, whenever they first saw the rank."""
    own = [store.clone() if isinstance(store, dist.TCPStore) else store for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        with pytest.raises(CollectiveTimeoutError):
            come(own[1], 1, 3, seconds=0.01)
        waiting = [pool.submit(come, own[rank], rank, 3) for rank in (0, 2)]
        while not store.check(["asynccoll/world/1/agreed/2"]):  # rank 0 has counted the dead rank 1
            pass
        waiting.append(pool.submit(come, own[1], 1, 3))
        parts = [one.result()[0] for one in waiting]
    parts[0].set("key", "here")
    assert [part.get("key") for part in parts] == [b"here"] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_who_does_not_come_is_named(rank: int) -> None:
    """The error names the missing rank on rank 0 and on the others, also if earlier worlds were complete."""
    store = dist.HashStore()
    meet(store, 3)
    other = 2 - rank
    done = threading.Event()

    def come_in_vain() -> None:
        with pytest.raises(CollectiveTimeoutError):
            come(store, other, 3, seconds=0.5)
        done.set()

    threading.Thread(target=come_in_vain).start()
    told = f"rank {rank} timed out waiting for rank 1 of 3 to join within 0.5 s"
    with pytest.raises(CollectiveTimeoutError, match=told):
        come(store, rank, 3, seconds=0.5)
    assert done.wait(SECONDS)


@pytest.mark.parametrize("last", ["2", "two"])
def test_addresses_are_fetched_together_once_all_are_there(last: str) -> None:
    """They are fetched in two requests, whatever the number of members; any other key is fetched alone."""
    store = dist.HashStore()
    keys = ["p/0/0", "p/0/1", f"p/0/{last}"]
    for key in keys:
        store.set(key, f"of {key}")
    asked = []

    class Counting(Clients):
        def borrow(self):
            asked.append(1)
            return super().borrow()

    exchange = Exchange(Counting(store), SECONDS, lambda: False, 3)
    for key in keys:
        exchange.wait([key])
        assert exchange.get(key) == f"of {key}".encode()
    assert (len(asked) == 2) == (last == "2")
    with pytest.raises(CollectiveTimeoutError, match="p/0/3"):
        exchange.wait(["p/0/3"], timedelta(seconds=0.01))


def test_a_node_is_its_name_and_boot_unless_somebody_says(monkeypatch, tmp_path: Path) -> None:
    """The same host name under two kernels means two nodes; one kernel is one node."""
    monkeypatch.delenv(nodes.VARIABLE, raising=False)
    here = nodes.node_name()
    assert nodes.node_name() == here
    monkeypatch.setattr(nodes, "_BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("another\n")
    assert nodes.node_name() not in (here, "")
    monkeypatch.setattr(nodes.host, "gethostname", lambda: "another")
    (tmp_path / "boot_id").unlink()
    assert nodes.node_name() not in (here, "")
    monkeypatch.setenv(nodes.VARIABLE, "rack 7")
    assert nodes.node_name() == "rack 7"


def test_a_directory_to_meet_in_may_be_made_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the rank that came before the one that makes it was refused, and its peers waited."""
    directory = tmp_path / "made"

    def looks(_seconds: float) -> Iterator[float]:
        yield 0.0
        directory.mkdir()
        yield 0.0

    monkeypatch.setattr(rendezvous, "looks", looks)
    rendezvous._await_directory(f"file://{directory}/x", directory, 60)
    assert directory.is_dir()
