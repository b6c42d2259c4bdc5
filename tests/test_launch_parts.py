"""Parts of the launchers, each by itself: no rank is started here."""

from __future__ import annotations

import errno
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asynccoll.launch import spawn


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
