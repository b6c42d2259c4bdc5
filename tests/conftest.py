"""Fixtures: worlds by backend and size, ways to wait, and a time limit for each test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from patience import patient

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ASYNCCOLL_STALL_WARNING", "0")  # tests wait for operations that never complete
os.environ.setdefault("ASYNCCOLL_DUMPS", "off")  # tests fail on purpose

import pytest
from hypothesis import HealthCheck, Phase, settings

import by_day
import forked
import jobs
import records
import worlds
from asynccoll.runtime import state

#: Seconds after which a test is interrupted.
TEST_SECONDS = patient(150)

# The same examples in every run; failing ones are not shrunk, since that would repeat a hang many times.
settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=20,
    phases=(Phase.explicit, Phase.generate),
)
settings.register_profile(
    "explore",
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C reach the programs under test even if a shell started us in the background."""
    records.register(config)
    forked.listen()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_test_outlives_its_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that hangs in this process, at the line where it hangs."""

    def stop(_signum: int, _frame: FrameType | None) -> None:
        told = f"{request.node.nodeid} not done in {TEST_SECONDS:.0f} s"
        raise TimeoutError(f"{told}; its forked children:\n{found}" if (found := forked.stacks()) else told)

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(TEST_SECONDS))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


#: What a launcher in the process of the tests would handle.
_OF_LAUNCHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


@pytest.fixture(autouse=True)
def _no_test_leaves_signals_handled() -> Iterator[None]:
    """A launcher's handlers would stop this process at the next test that interrupts itself."""
    before = [signal.getsignal(number) for number in _OF_LAUNCHERS]
    yield
    after = [signal.getsignal(number) for number in _OF_LAUNCHERS]
    wakes = signal.set_wakeup_fd(-1)
    for number, handler in zip(_OF_LAUNCHERS, before, strict=True):
        signal.signal(number, handler)
    assert after == before, "the test has left handlers of signals"
    assert wakes == -1, "the test has left a descriptor that signals are written to"


@pytest.fixture(autouse=True)
def _as_never_initialized() -> Iterator[None]:
    """After a test that finalized a world of this process, restore the initial state."""
    yield
    state.process.left = None


@pytest.fixture(autouse=True)
def _unused_worlds_stand_still() -> Iterator[None]:
    """Keep worlds that a test leaves behind from taking processor time from the next test."""
    yield
    worlds.quieten()


@pytest.fixture(scope="module", autouse=True)
def _crowded_worlds_end() -> Iterator[None]:
    """Keep worlds that a file leaves behind from taking processor time from later files."""
    yield
    worlds.retire()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect nightly tests, and tests of ranks as processes on backends whose ranks are threads."""
    out = by_day.left_out(items)
    out |= {item for item in items if item.get_closest_marker("processes") and _on_threads(item)}
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]


def _on_threads(item: pytest.Item) -> bool:
    values = getattr(item, "callspec", None)
    named = (
        [value[0] if isinstance(value, tuple) else value for value in values.params.values()]
        if values
        else []
    )
    return not worlds.THREADED.isdisjoint(value for value in named if isinstance(value, str))


@pytest.fixture(scope="session", autouse=True)
def _close_worlds() -> Iterator[None]:
    """Let no rank outlive the session."""
    yield
    worlds.close_all()


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list to which errors raised in finalizers are added, of objects that this test makes."""
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    gc.collect()  # what earlier tests have left
    told.clear()
    return told


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., jobs.Job]]:
    """Starts ``asynccoll`` in a fresh directory; jobs still running at the end are killed."""
    with jobs.starting(tmp_path) as start:
        yield start


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a script into that directory and returns its name."""
    return jobs.writing(tmp_path)


def _world_fixture(sizes: list[int]) -> list[object]:
    return [
        pytest.param(
            (backend, size),
            id=f"{backend}-{size}",
            # An odd number of ranks is a separate case; the inner loop makes do with an even one.
            marks=[pytest.mark.slow] if size == 3 else [],
        )
        for backend in worlds.BACKENDS
        for size in sizes
    ]


@pytest.fixture(scope="session", params=_world_fixture(worlds.WORLD_SIZES))
def world(request: pytest.FixtureRequest) -> worlds.World:
    """Every backend under test at every world size."""
    return worlds.world(*request.param)


@pytest.fixture(scope="session", params=_world_fixture([n for n in worlds.WORLD_SIZES if n > 1]))
def several(request: pytest.FixtureRequest) -> worlds.World:
    """Every backend under test at every world size with peers."""
    return worlds.world(*request.param)


@pytest.fixture(scope="session", params=_world_fixture([2]))
def pair(request: pytest.FixtureRequest) -> worlds.World:
    """Every backend under test with two ranks."""
    return worlds.world(*request.param)


@pytest.fixture(scope="session", params=_world_fixture([4]))
def four(request: pytest.FixtureRequest) -> worlds.World:
    """Every backend under test with four ranks."""
    return worlds.world(*request.param)


@pytest.fixture(scope="session", params=worlds.RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    """The ways to wait: asyncio, trio, and blocking without a loop."""
    return str(request.param)


@pytest.fixture(scope="session", params=[name for name in worlds.RUNNERS if name != "blocking"])
def loop(request: pytest.FixtureRequest) -> str:
    """The event loops."""
    return str(request.param)
