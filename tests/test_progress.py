"""The progress thread polls operations without waiters, backs off, and sleeps when idle."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from asynccoll.transport.progress import (
    GRACE_SECONDS,
    LONG_SECONDS,
    LONGEST_CALM_SECONDS,
    LONGEST_NAP_SECONDS,
    LONGEST_REST_SECONDS,
    SHORTEST_NAP_SECONDS,
    SHORTEST_REST_SECONDS,
    YIELDS,
    Progress,
    _Pace,
    _Watched,
)
from patience import patient, until


class Item:
    """An operation that completes after a number of polls, or never."""

    def __init__(self, looks: int | None = None, *, urgent: bool = False, expected: float = 0.0) -> None:
        self.finished = False
        self.attended = False
        self.urgent = urgent
        self.lateness: float | None = None
        self.polled = 0
        self.over = threading.Event()
        self.first: float | None = None
        self._looks = looks
        self._expected = expected

    def expected(self) -> float:
        return self._expected

    def poll(self) -> bool:
        self.first = self.first or time.monotonic()
        self.polled += 1
        if self._looks is not None and self.polled >= self._looks:
            self.finished = True
            self.over.set()
        return self.finished


@pytest.fixture
def progress() -> Iterator[Progress]:
    """Make a progress thread for one test."""
    one = Progress()
    yield one
    one.stop()


def test_what_nobody_waits_for_is_polled_until_it_is_over(progress: Progress) -> None:
    """Many items are watched; each is polled as often as it needs, and no more afterwards."""
    items = [Item(looks) for looks in (1, 2, 60, 120)]
    for item in items:
        progress.watch(item)
    for item in items:
        assert item.over.wait(patient(5))
    last = Item(1, urgent=True)
    progress.watch(last)
    assert last.over.wait(patient(5))
    assert [item.polled for item in items] == [1, 2, 60, 120]


def test_the_thread_survives_an_item_that_raises(
    progress: Progress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise nothing would ever be polled again. The log has the same error once."""
    broken, sound = Item(3), Item(2)
    poll = broken.poll

    def raises() -> bool:
        if poll():
            return True
        raise RuntimeError("a callback's")

    monkeypatch.setattr(broken, "poll", raises)
    for item in broken, sound:
        progress.watch(item)
    assert sound.over.wait(patient(5))
    assert broken.over.wait(patient(5))
    assert "a callback's" in caplog.text
    assert len(caplog.records) == 1


def test_where_no_thread_can_be_started_the_next_call_tries_again(
    progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    first, second = Item(1), Item(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError, match="new thread"):
            progress.watch(first)
    progress.watch(second)
    assert first.over.wait(patient(5))
    assert second.over.wait(patient(5))


def test_a_waiter_is_left_alone_for_a_grace(progress: Progress) -> None:
    """An item that is not urgent is first polled after the grace period, an urgent one immediately."""
    calm, hasty = Item(1), Item(1, urgent=True)
    start = time.monotonic()
    progress.watch(calm)
    assert calm.over.wait(patient(5))
    assert calm.first is not None
    assert calm.first - start >= GRACE_SECONDS
    progress.watch(hasty)
    progress.rouse()
    assert hasty.over.wait(patient(5))


def test_an_attended_item_is_not_polled(progress: Progress) -> None:
    """Its waiter polls it; once the waiter leaves, the thread polls it again."""
    item, other = Item(1), Item(300)
    item.attended = True
    progress.watch(item)
    progress.watch(other)
    assert other.over.wait(patient(5))
    assert item.polled == 0
    item.attended = False
    assert item.over.wait(patient(5))


def test_urgency_may_come_later(progress: Progress) -> None:
    """An item that becomes urgent, because someone wants to be told, is polled when the thread is roused."""
    item = Item(10**9)
    progress.watch(item)
    while item.polled < 200:  # until it has backed off to its longest nap
        time.sleep(0.001)
    item._looks = item.polled + 1
    item.urgent = True
    progress.rouse()
    assert item.over.wait(patient(5))


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the naps of all progress threads from now on: each turn asks for one."""
    asked: list[float] = []
    nap = _Pace.nap

    def counted(self: _Pace, watched: Sequence[_Watched], now: float) -> float:
        asked.append(nap(self, watched, now))
        return asked[-1]

    monkeypatch.setattr(_Pace, "nap", counted)
    return asked


def test_with_nothing_to_do_it_burns_no_core(progress: Progress, turns: list[float]) -> None:
    """After the last operation the thread lingers briefly, then sleeps indefinitely."""
    item = Item(1)
    progress.watch(item)
    assert item.over.wait(patient(5))
    assert until(lambda: turns[-1] == math.inf, patient(10))
    taken = len(turns)
    time.sleep(0.2)  # time in which nothing may happen
    assert len(turns) == taken


def test_with_one_operation_out_it_burns_little(progress: Progress, turns: list[float]) -> None:
    """The thread keeps polling, but backs off to naps of one millisecond, then of ten and more."""
    stuck = Item()
    progress.watch(stuck)
    assert until(lambda: turns[-1:] == [LONGEST_NAP_SECONDS], patient(10))
    assert until(lambda: turns[-1] >= SHORTEST_REST_SECONDS / 2, patient(10))
    assert len(turns) <= YIELDS + LONG_SECONDS / LONGEST_NAP_SECONDS + 50
    seen = stuck.polled
    assert until(lambda: stuck.polled > seen + 3, patient(10))


def test_it_is_tight_while_an_operation_is_expected(progress: Progress, turns: list[float]) -> None:
    """A long transfer is polled without naps for as long as it is expected to take."""
    item = Item(urgent=True, expected=600.0)
    progress.watch(item)
    progress.rouse()
    assert until(lambda: item.polled > 1000, patient(10))
    assert set(turns) <= {0.0, GRACE_SECONDS}


def test_a_stopped_thread_is_not_started_again() -> None:
    """After `stop`, when the library is about to end, nothing is polled any more."""
    one = Progress()
    one.watch(Item(1))
    one.stop()
    late = Item(1, urgent=True)
    one.watch(late)
    assert not late.over.wait(0.05)
    assert not [thread for thread in threading.enumerate() if thread is one._thread and thread.is_alive()]


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    """The parent's thread does not exist in the child; the child's first operation starts one."""
    from asynccoll.transport.progress import progress

    first = Item(1)
    progress.watch(first)
    assert first.over.wait(patient(5))
    pid = os.fork()
    if not pid:
        item = Item(1)
        progress.watch(item)
        os._exit(0 if item.over.wait(patient(5)) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_who_may_be_told_late_is_looked_at_seldom() -> None:
    """The least patient item sets the pace for all; one that wants no delay allows no nap."""
    patient, calm, eager = Item(urgent=True), Item(urgent=True), Item(urgent=True, expected=60.0)
    patient.lateness, calm.lateness = 1 / 4, 1 / 16
    watched = [_Watched(patient, 10.0), _Watched(calm, 10.0)]
    pace = _Pace()
    assert pace.nap(watched, 10.008) == pytest.approx(0.0005)
    assert pace.nap(watched, 10.0) == SHORTEST_NAP_SECONDS
    assert pace.nap(watched, 20.0) == LONGEST_NAP_SECONDS
    assert pace.nap([*watched, _Watched(eager, 10.0)], 20.0) == 0.0


def test_what_is_out_for_long_delays_nothing_else() -> None:
    """After half a second it is polled only now and then, whatever else there is to poll."""
    stale, fresh = Item(urgent=True), Item(urgent=True, expected=60.0)
    long_out = _Watched(stale, 10.0)
    for now, looks in ((10.1, 1), (10.2, 2), (10.6, 3), (10.605, 3), (10.611, 4), (10.62, 4), (10.63, 5)):
        assert not long_out.over(now)
        assert stale.polled == looks, now
    pace = _Pace()
    assert 0.0 < pace.nap([long_out], 10.635) <= SHORTEST_REST_SECONDS
    assert pace.nap([long_out, _Watched(fresh, 10.63)], 10.635) == 0.0
    assert not long_out.over(15.0)
    assert long_out.left(15.0) == pytest.approx(0.05)
    assert not long_out.over(1000.0)
    assert long_out.left(1000.0) == pytest.approx(LONGEST_REST_SECONDS)


def test_where_waiters_see_to_everything_looks_become_rare() -> None:
    """They become rare up to a bound, and only while this lasts; with no items the thread sleeps."""
    attended, alone = Item(), Item()
    attended.attended = True
    watched, late = [_Watched(attended, 10.0)], 10.0 + 2 * GRACE_SECONDS
    pace = _Pace()
    naps = [pace.nap(watched, 10.0) for _ in range(6)]
    assert naps[:3] == [LONGEST_NAP_SECONDS, 2 * LONGEST_NAP_SECONDS, 4 * LONGEST_NAP_SECONDS]
    assert set(naps[3:]) == {LONGEST_CALM_SECONDS}
    watched.append(_Watched(alone, 10.0))
    assert pace.nap(watched, 10.0) == pytest.approx(GRACE_SECONDS), "left to its waiter first"
    assert pace.nap(watched, late) == 0.0
    assert pace.nap(watched[:1], late) == LONGEST_NAP_SECONDS
    assert pace.nap([], late) == math.inf
