"""Parts of the launchers, each by itself: no rank is started here."""

from __future__ import annotations

import errno
import os
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.multiprocessing as mp

import asynccoll as ac
from asynccoll.environment.nodes import Nodes
from asynccoll.launch import elastic, spawn
from asynccoll.launch.request import RunRequest
from asynccoll.launch.witness import Witness


class Started:
    """A process as multiprocessing has it, which ends as soon as it is told to."""

    def __init__(self, sentinel: int = -1) -> None:
        self.sentinel = sentinel
        self.ended = False

    def join(self, timeout: float | None = None) -> None:
        pass

    def terminate(self) -> None:
        self.ended = True

    kill = terminate


def test_who_spawns_on_a_thread_hears_that_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that have been started end, and those copies that could be made are closed."""
    reader, writer = os.pipe()
    ranks = [Started(reader), Started()]
    copies, copied = [], os.dup

    def dup(descriptor: int) -> int:
        if descriptor != reader:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        copies.append(copied(descriptor))
        return copies[-1]

    heard: list[Any] = []

    def ask() -> None:
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as caught:
            spawn._kept(lambda: SimpleNamespace(processes=ranks))
        heard.append(caught.value.errno)

    monkeypatch.setattr(os, "dup", dup)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(10)
    assert heard == [errno.EMFILE]
    assert all(rank.ended for rank in ranks)
    for copy in copies:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(copy)
    os.close(reader)
    os.close(writer)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands for this process's environment: empty at first."""
    made: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", made)
    return made


def test_an_empty_secret_is_none(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Launchers of several hosts must not each make one: their ranks would not trust each other."""
    environ["ASYNCCOLL_SECRET"] = ""
    given = Namespace(standalone=False, nnodes="2", nproc_per_node="1")
    elastic._set_environment(given, None, tmp_path)
    assert environ["ASYNCCOLL_SECRET"] == ""

    told: list[Any] = []

    def start(_rank: object, args: tuple[Any, ...], *_: object, **__: object) -> SimpleNamespace:
        told.append(args)
        return SimpleNamespace(processes=[])

    monkeypatch.setattr(mp, "start_processes", start)
    where = {"nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 1}
    ac.spawn("gloo", print, join=False, **where)
    ac.spawn("gloo", print, join=False, nnodes=1)
    several, one = (named.get("ASYNCCOLL_SECRET", "") for *_, named in told)
    assert several == ""
    assert one


def test_an_empty_address_is_none(environ: dict[str, str]) -> None:
    environ["MASTER_ADDR"] = ""
    assert Nodes(2, master_port=2222).address == "127.0.0.1"
    environ["MASTER_ADDR"] = "10.0.0.1"
    assert Nodes(2, master_port=2222).address == "10.0.0.1"


def test_nobody_watches_ranks_once_they_have_ended(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However that was."""
    environ["LOGLEVEL"] = "ERROR"
    seen: list[Witness] = []

    def launch(*told: Any) -> int:
        seen.extend(one for one in told if isinstance(one, Witness))
        assert seen[-1]._thread.is_alive()
        if len(seen) == 2:
            raise ac.InvalidArgumentError("no such host")
        return 7

    monkeypatch.setattr(elastic, "_configure", lambda given: (None, "", []))
    monkeypatch.setattr(elastic, "_launch", launch)
    assert elastic.run(RunRequest(__file__)) == 7
    with pytest.raises(ac.InvalidArgumentError, match="no such host"):
        elastic.run(RunRequest(__file__))
    assert [one._thread.is_alive() for one in seen] == [False, False]
