"""Where a program is: in its thread, or in the tasks of a sleeping event loop."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest
import trio

import asynccoll as ac
from asynccoll.cli.where import folded
from asynccoll.host import standing
from asynccoll.host.standing import Stack, stacks, summary
from patience import patient


def asked(run: Callable[[Callable[[], None]], None]) -> list[Stack]:
    """Return the stacks of a thread that runs ``run``, once it has called back and its loop sleeps."""
    there, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (run(there.set), over.set()), daemon=True)
    thread.start()
    assert there.wait(patient(10))
    assert thread.ident is not None
    found = stacks(thread.ident)
    while found and not all(one.who for one in found) and not over.wait(0.001):  # it is about to sleep
        found = stacks(thread.ident)
    return found


async def nobody_comes(say: Callable[[], None]) -> None:
    say()
    await anyio.sleep(0.5)


async def two(say: Callable[[], None]) -> None:
    async def waits() -> None:
        await nobody_comes(say)

    async def calls() -> None:
        await ac.all_reduce(1.0)
        await anyio.sleep(0.6)

    async with ac.create_task_group() as tasks:
        tasks.start_soon(calls)
        tasks.start_soon(waits)


RUNNERS = {
    "asyncio": lambda main: lambda say: asyncio.run(main(say)),
    "trio": lambda main: lambda say: trio.run(main, say),
    "anyio": lambda main: lambda say: anyio.run(main, say),
}


@pytest.mark.parametrize("runner", RUNNERS)
def test_of_a_loop_that_sleeps_its_tasks_are_told(runner: str) -> None:
    (only,) = asked(RUNNERS[runner](nobody_comes))
    assert only.at.startswith("nobody_comes (test_standing.py:")
    assert only.frames[-1] == only.at  # no frames of the loop, or of its caller, are below
    assert summary([only]) == only.at


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_task_of_a_group_is_told_by_its_name_and_the_others_after_it(runner: str) -> None:
    found = asked(RUNNERS[runner](two))
    named = {one.who.rpartition("/")[2].strip("'"): one for one in found}
    assert [one.split(" ")[0].rpartition(".")[2] for one in named["waits"].frames[-2:]] == [
        "nobody_comes",
        "waits",
    ]
    assert found[-1].in_call  # the parent, which waits for its children
    assert "nobody_comes (test_standing.py:" in summary(found)
    assert "two (test_standing.py:" not in summary(found)


def holding_the_loop(runner: str) -> Stack:
    """Return the stack of a thread whose event loop runs a task that does not await."""
    here, over = threading.Event(), threading.Event()

    async def holds_the_loop(_: object) -> None:
        here.set()
        over.wait()

    thread = threading.Thread(target=lambda: RUNNERS[runner](holds_the_loop)(None), daemon=True)
    thread.start()
    assert here.wait(patient(10))
    assert thread.ident is not None
    (only,) = stacks(thread.ident)
    over.set()
    thread.join(patient(10))
    return only


def test_of_a_loop_that_runs_something_its_thread_is_told() -> None:
    only = holding_the_loop("asyncio")
    assert only.who == ""
    assert "holds_the_loop (test_standing.py:" in only.at


@pytest.mark.parametrize("runner", RUNNERS)
def test_frames_of_loops_are_a_line(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception is what the program called last; the environment variable shows all frames."""
    held = holding_the_loop(runner)
    (asleep,) = asked(RUNNERS[runner](nobody_comes))
    told = folded(held.frames)
    loops = [line for line in told if "[..." in line]
    assert loops == [f"[... {len(held.frames) - len(told) + 1} frames in {loops[0].rpartition(' in ')[2]}"]
    assert {*loops[0].rpartition(" in ")[2].strip("]").split(", ")} <= {runner, "asyncio", "outcome"}
    assert [line for line in told if line not in loops] == [
        frame for frame in held.frames if "threading.py" in frame or "test_standing.py" in frame
    ]
    *inner, called, mine = folded(asleep.frames)
    assert (mine, called) == (asleep.at, asleep.frames[-2])
    assert len(inner) <= 1
    monkeypatch.setenv("ASYNCCOLL_FULL_TRACEBACK", "1")
    assert folded(held.frames) == list(held.frames)


def test_what_is_within_a_call_is_one_frame() -> None:
    work = ac.all_reduce(1.0)
    work.wait()
    found: list[Stack] = []
    work.add_done_callback(lambda _: found.extend(stacks(threading.get_ident())))
    ((_, frames, at, in_call),) = found
    inner = frames[: 1 + next(n for n, frame in enumerate(frames) if "one_frame (" in frame)]
    assert [frame.split(" ")[0].rpartition(".")[2] for frame in inner[-3:]] == [
        "<lambda>",
        "add_done_callback",
        "test_what_is_within_a_call_is_one_frame",
    ]
    assert (at, in_call) == (frames[1], True)


def test_what_awaits_a_call_is_told_by_the_line_of_the_program() -> None:
    """No other line is shown, as the way in which a call waits is the same in all programs."""
    mine, awaits = two.__code__, ac.Work.__await__.__code__
    frames = standing._stack("", [(awaits, awaits.co_firstlineno), (mine, mine.co_firstlineno)]).frames
    assert [frame.split(" ")[0] for frame in frames] == ["two"]


def test_of_many_tasks_three_are_told() -> None:
    many = [Stack(f"task '{n}'", (), f"load (data.py:{n})", False) for n in range(5)]
    assert summary(many) == (
        "load (data.py:0) of task '0', load (data.py:1) of task '1', load (data.py:2) of task '2', "
        "and 2 more tasks"
    )
    assert summary([Stack("", ("select (selectors.py:1)",), "", False)]) == ""


def test_where_modules_are_imported_the_modules_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import system's frames between them are left out, and packages are shown by their names."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("import heavy.inner\n")
    (tmp_path / "heavy" / "inner.py").write_text(
        "import test_standing as here, threading\nhere.FOUND[:] = here.stacks(threading.get_ident())"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "test_standing", sys.modules[__name__])
    importlib.import_module("heavy")
    ((_, frames, at, _),) = FOUND
    first = frames.index("<module> (inner.py:2)")
    assert frames[first + 1] == "<module> (heavy/__init__.py:1)"
    assert frames[first + 2].startswith("import_module (")
    assert at == frames[first]


FOUND: list[Stack] = []


def test_installed_modules_that_import_each_other_do_not_bury_the_programs_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first and the last are shown, and the program is located at its own line, not at theirs."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for number in range(40):
        (installed / f"chain{number}.py").write_text(f"import chain{number + 1}\n")
    (installed / "chain40.py").write_text(
        "import test_standing as here, threading\nhere.FOUND[:] = here.stacks(threading.get_ident())"
    )
    (tmp_path / "train.py").write_text("import os\nimport chain0\n")
    for folder in (installed, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, "test_standing", sys.modules[__name__])
    importlib.import_module("train")
    ((_, frames, at, _),) = FOUND
    assert at == "<module> (train.py:2)"
    first = frames.index("<module> (chain40.py:2)")
    assert frames[first : first + 3] == ("<module> (chain40.py:2)", "<module> (chain0.py:1)", at)


def test_the_programs_line_is_told_however_deep_torch_is_below_it(tmp_path: Path) -> None:
    deep = tmp_path / "site-packages" / "torch" / "deep.py"
    scope: dict[str, object] = {"look": partial(stacks, threading.get_ident())}
    exec(compile("def call(n): return call(n - 1) if n else look()", str(deep), "exec"), scope)
    exec(compile("\nfound = call(50)", str(tmp_path / "train.py"), "exec"), scope)
    ((_, frames, at, _),) = scope["found"]  # type: ignore[misc]  # an object, as far as types go
    assert at == "<module> (train.py:2)"
    calls = ["call (deep.py:1)"] * 27
    assert frames[0].startswith("stacks (standing.py:")
    assert [*frames[1:]] == [*calls, "[... 24 frames]", at]


def test_of_a_thread_that_has_ended_nothing_is_told() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join(patient(10))
    assert thread.ident is not None
    assert stacks(thread.ident) == [Stack("", (), "", False)]
