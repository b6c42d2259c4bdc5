"""How scripts end: with work in flight, by an error, by Ctrl-C; nothing stays behind.

`scripts.run` fails if a script is not done in time or leaves a process.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import scripts
from asynccoll.host.exits import EXIT_SECONDS
from ports import free_port

ENDS_IN_FLIGHT = """
    import torch, asynccoll as ac
    ac.initialize("gloo")
    ac.all_reduce(1).wait()
    if ac.get_rank() == 0:
        stuck = ac.all_reduce(torch.ones(1000))
        stuck.detach()
    print("end of script")
"""


def test_a_script_that_ends_with_work_in_flight(tmp_path: Path) -> None:
    """The peer never joins; both ranks end by themselves, not by a signal."""
    first, second = scripts.run(tmp_path, ENDS_IN_FLIGHT, ranks=2)
    assert "end of script" in first.out
    assert "end of script" in second.out
    assert second.code == 0
    assert first.code >= 0, f"died of signal {-first.code}\n{first.err}"


RAISES = """
    import torch, asynccoll as ac
    ac.initialize("gloo")
    ac.all_reduce(1).wait()
    if ac.get_rank() == 0:
        stuck = ac.all_reduce(torch.ones(1000))
        raise LookupError("of my own")
    try:
        ac.all_reduce(torch.ones(1000)).wait()
    except ac.CollectiveError as error:
        print(type(error).__name__)
    else:
        print("a result")
"""


def test_a_script_that_raises_with_work_in_flight(tmp_path: Path) -> None:
    """Its traceback is shown, its exit code is 1, and it does not hang."""
    first, second = scripts.run(tmp_path, RAISES, ranks=2)
    assert first.code == 1
    assert "LookupError: of my own" in first.err
    assert second.code == 0, second.err
    assert second.out.split() in (["PeerLostError"], ["a", "result"])


REFUSES = """
    import torch, asynccoll as ac
    ac.initialize("gloo", timeout=30)
    ac.all_reduce(1).wait()
    try:
        ac.all_reduce(1, timeout=-1 if ac.get_rank() == 1 else None).wait()
    except ac.AsyncCollError as error:
        print(type(error).__name__)
"""


def test_who_has_refused_a_call_stays_until_its_peers_know(tmp_path: Path) -> None:
    """It has no work in flight at its end; without the wait its peers would see only that it was lost."""
    first, second = scripts.run(tmp_path, REFUSES, ranks=2)
    assert (first.out.split(), second.out.split()) == (["PeerRefusedError"], ["InvalidArgumentError"])
    assert (first.code, second.code) == (0, 0)


FORGETS = """
    import asynccoll as ac
    ac.initialize("gloo")
    print(ac.all_reduce(ac.get_rank() + 1).wait())
    print(ac.all_reduce(1, lane="other").wait())
"""


def test_a_script_that_forgets_finalize(tmp_path: Path) -> None:
    """It ends cleanly with exit code 0 on every rank."""
    for ended in scripts.run(tmp_path, FORGETS, ranks=4):
        assert ended.out.split() == ["10", "4"]
        assert ended.code == 0, ended.err
        assert "Traceback" not in ended.err


INTERRUPTED = """
    import torch, asynccoll as ac
    ac.initialize("gloo")
    ac.all_reduce(1).wait()
    print("waiting", flush=True)
    if ac.get_rank() == 0:
        {waits}
    else:
        ac.recv(torch.ones(4), src=0).wait()
"""


@pytest.mark.parametrize(
    "waits",
    [
        "ac.all_reduce(torch.ones(4)).wait()",
        pytest.param("work = ac.all_reduce(torch.ones(4)); ac.finalize()", marks=pytest.mark.nightly),
    ],
)
def test_ctrl_c_while_waiting(tmp_path: Path, waits: str) -> None:
    """KeyboardInterrupt interrupts a blocking wait, and the process ends, with one frame of ours to show."""
    for ended in scripts.run(tmp_path, INTERRUPTED.format(waits=waits), ranks=2, interrupt_at="waiting"):
        assert "KeyboardInterrupt" in ended.err
        assert ended.err.count('File "') == 2, ended.err
        assert ended.code != 0


ASYNC_INTERRUPTED = """
    import {loop}, torch, asynccoll as ac
    async def main():
        await ac.all_reduce(1)
        print("waiting", flush=True)
        if ac.get_rank() == 0:
            await ac.all_reduce(torch.ones(4))
        else:
            await ac.recv(torch.ones(4), src=0)
    ac.initialize("gloo")
    {loop}.run(main{call})
"""


@pytest.mark.parametrize(
    ("loop", "call"), [pytest.param("asyncio", "()", marks=pytest.mark.nightly), ("trio", "")]
)
def test_ctrl_c_while_awaiting(tmp_path: Path, loop: str, call: str) -> None:
    """It also leaves an event loop."""
    source = ASYNC_INTERRUPTED.format(loop=loop, call=call)
    for ended in scripts.run(tmp_path, source, ranks=2, interrupt_at="waiting"):
        assert "KeyboardInterrupt" in ended.err
        assert ended.code != 0


DROPS = """
    import warnings
    warnings.simplefilter("always")
    import torch, asynccoll as ac
    ac.initialize("gloo")
    ac.all_reduce(torch.ones(1))
    ac.barrier().wait()
"""


def test_a_dropped_handle_is_heard_in_a_plain_script(tmp_path: Path) -> None:
    """The warning on stderr has the script's line."""
    for ended in scripts.run(tmp_path, DROPS, ranks=2):
        assert ended.code == 0
        assert "script.py:6" in ended.err
        assert "UnawaitedWorkWarning" in ended.err


DROPS_AS_ERRORS = """
    import warnings
    import torch, asynccoll as ac
    warnings.simplefilter("error", ac.UnawaitedWorkWarning)  # python -W error has more
    with ac.session("gloo"):
        ac.all_reduce(torch.ones(1))
        ac.barrier().wait()
    print("not reached")
"""


def test_a_dropped_handle_ends_the_program_where_warnings_are_errors(tmp_path: Path) -> None:
    """Python only prints errors in finalizers; leaving the world raises the warning as an error."""
    for ended in scripts.run(tmp_path, DROPS_AS_ERRORS, ranks=2):
        assert ended.code == 1, ended.err
        assert "not reached" not in ended.out
        last = ended.err.strip().splitlines()[-1]
        assert "asynccoll.errors.UnawaitedWorkWarning: all_reduce started at " in last, ended.err
        assert "script.py:6 was never awaited" in last


DIES = """
    import asyncio, warnings
    warnings.simplefilter("always")
    import torch, asynccoll as ac

    async def main():
        left = [ac.all_reduce(torch.ones(1)) for _ in range(3)]
        await ac.barrier()
        raise LookupError("of my own")

    ac.initialize("gloo")
    asyncio.run(main())
"""


def test_handles_that_a_program_dies_with_do_not_hide_its_error(tmp_path: Path) -> None:
    """The failing frame's handles were not dropped by mistake, and the traceback must stay the last text."""
    for ended in scripts.run(tmp_path, DIES, ranks=2):
        assert ended.code == 1
        assert "LookupError: of my own" in ended.err
        assert "UnawaitedWorkWarning" not in ended.err


DIES_WITH_AN_ERROR_UNHEARD = """
    import warnings
    warnings.simplefilter("always")
    import torch, asynccoll as ac
    ac.initialize("gloo")
    ac.all_reduce(torch.ones(1))
    if ac.get_rank() == 0:
        left = ac.all_reduce(torch.ones(1))
        while not left.done():
            pass
        raise LookupError("of my own")
    try:
        ac.all_reduce(torch.ones(1), timeout=-1)
    except ac.InvalidArgumentError:
        print("refused")
"""


def test_an_error_in_a_handle_that_a_program_dies_with_is_told(tmp_path: Path) -> None:
    """A handle that was dropped before the end also warns as usual."""
    first, second = scripts.run(tmp_path, DIES_WITH_AN_ERROR_UNHEARD, ranks=2)
    assert second.out.split() == ["refused"]
    assert "script.py:6 was never awaited: its result, and an error in it, would be lost" in first.err
    assert "script.py:8 was never awaited: it has failed: rank 1 refused its side of all_reduce" in first.err
    assert first.err.count("UnawaitedWorkWarning: ") == 2, first.err


def test_an_error_of_the_program_comes_before_a_dropped_handle(tmp_path: Path) -> None:
    """The program's error is what the user looks for."""
    source = DROPS_AS_ERRORS.replace("ac.barrier().wait()", "ac.barrier().wait(); 1 / 0")
    for ended in scripts.run(tmp_path, source, ranks=2):
        assert ended.code == 1
        assert ended.err.strip().splitlines()[-1].endswith("ZeroDivisionError: division by zero"), ended.err


FORKS = """
    import os, asynccoll as ac
    ac.initialize("gloo")
    ac.all_reduce(1).wait()
    child = os.fork()
    if child == 0:
        try:
            ac.all_reduce(1)
        except ac.NotInitializedError:
            os._exit(7)
        os._exit(8)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(ac.all_reduce(1).wait())
"""


def test_a_forked_child_starts_uninitialised(tmp_path: Path) -> None:
    """The child's call raises NotInitializedError; the parent continues."""
    for ended in scripts.run(tmp_path, FORKS, ranks=2):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["7", "2"]


COPIES_AND_FORKS = """
    import asyncio, os, signal
    import torch
    import asynccoll as ac

    async def main():
        return float((await ac.all_reduce(torch.ones(1 << 20))).sum())

    assert asyncio.run(main()) == 1 << 20
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if asyncio.run(main()) == 1 << 20 else 9)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own(tmp_path: Path) -> None:
    """The parent's thread for large calls does not exist in the child, which needs its own."""
    (ended,) = scripts.run(tmp_path, COPIES_AND_FORKS, ranks=1)
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["0"]


FINALIZES = """
    import os
    import asynccoll as ac
    for turn, port in enumerate(os.environ["PORTS"].split()):
        os.environ["MASTER_PORT"] = port
        ac.initialize("gloo")
        assert ac.all_reduce(turn).wait() == 4 * turn
        ac.finalize()
    print("done")
"""


@pytest.mark.slow
def test_four_ranks_end_without_an_abort(tmp_path: Path) -> None:
    """All ranks initialize and finalize ten times, each time at another port: no signal ends a process."""
    ports = " ".join(str(free_port()) for _ in range(10))
    for ended in scripts.run(tmp_path, FINALIZES, ranks=4, env={"PORTS": ports}):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["done"]


ROUNDS = """
    import torch, asynccoll as ac
    for _ in range(10):
        ac.initialize("gloo")
        works = [ac.all_reduce(torch.ones(100), lane=lane) for lane in ("a", "b", "c")]
        assert all(work.wait().eq(ac.get_world_size()).all() for work in works)
        if ac.get_rank():
            ac.send(torch.ones(1), dst=0).wait()
        else:
            for peer in range(1, ac.get_world_size()):
                ac.recv(torch.ones(1), src=peer).wait()
        ac.finalize()
"""


def test_worlds_that_follow_each_other(tmp_path: Path) -> None:
    """At one address, with three lanes and messages, no rank meets an earlier world; stderr stays empty."""
    for ended in scripts.run(tmp_path, ROUNDS, ranks=4):
        assert ended.code == 0, ended.err
        assert ended.err == ""


RANK_0_FIRST = """
    import pathlib, sys, time
    import asynccoll as ac
    ac.initialize("gloo")
    ac.all_reduce(1).wait()
    sign = pathlib.Path(__file__).with_name("rank 0 is through")
    if ac.get_rank() == 0:
        sign.touch()
        sys.exit()
    while not sign.exists():
        time.sleep(0.001)
    for lane in "abc":
        print(ac.all_reduce(1, group=[1, 2], lane=lane).wait())
"""


def test_rank_0_ends_first(tmp_path: Path) -> None:
    """The rank that serves the store stays until the others no longer need it to open lanes."""
    first, *others = scripts.run(tmp_path, RANK_0_FIRST, ranks=3)
    assert (first.code, first.err) == (0, "")
    for ended in others:
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.split() == ["2", "2", "2"]


LEFT_BY_A_THREAD = """
    import atexit, os, pathlib, sys, threading, time
    import asynccoll as ac
    sign = pathlib.Path(__file__).with_name("rank 0 exits")
    if os.environ["RANK"] == "0":
        atexit.register(lambda: print("left" if not leaver.is_alive() else "leaving"))  # runs last
    ac.initialize("gloo")
    ac.all_reduce(1).wait()
    if ac.get_rank() == 0:
        from asynccoll.runtime.process import current
        world = current()
        leaver = threading.Thread(target=ac.finalize, daemon=True)
        leaver.start()
        while not world.closed:
            time.sleep(0.001)
        atexit.register(sign.touch)  # runs first
        sys.exit()
    while not sign.exists():
        time.sleep(0.001)
    print(ac.all_reduce(1, group=[1, 2], lane="other").wait())
"""


def test_a_world_that_another_thread_is_leaving_is_left_before_the_program_ends(tmp_path: Path) -> None:
    """Otherwise the interpreter ends around a thread in native code, and the store is gone with rank 0."""
    first, *others = scripts.run(tmp_path, LEFT_BY_A_THREAD, ranks=3)
    assert (first.out, first.code) == ("left\n", 0), first.err
    for ended in others:
        assert (ended.out, ended.code) == ("2\n", 0), ended.err


LATE = """
    import threading, torch, asynccoll as ac
    def train():
        threading.main_thread().join()
        ac.initialize("gloo")
        print(ac.all_reduce(1).wait())
    threading.Thread(target=train).start()
"""


def test_a_thread_joins_a_world_when_the_main_thread_has_ended(tmp_path: Path) -> None:
    for ended in scripts.run(tmp_path, LATE, ranks=2):
        assert (ended.out, ended.code) == ("2\n", 0), ended.err


DIES_BEFORE_THE_STORE = """
    import os, asynccoll as ac
    ac.initialize("gloo")
    ac.all_reduce(1).wait()
    if ac.get_rank() == 1:
        os._exit(3)
"""


def test_rank_0_waits_for_no_dead_rank(tmp_path: Path) -> None:
    """A rank that died sends no goodbye, and is not waited for."""
    first, second = scripts.run(tmp_path, DIES_BEFORE_THE_STORE, ranks=2)
    assert second.code == 3
    assert (first.code, first.err) == (0, "")
    assert first.seconds < 0.9 * EXIT_SECONDS + second.seconds


POOL_WAITS = """
    import contextlib, os, threading, time, torch, asynccoll as ac
    from asynccoll.host import exits as exiting
    from concurrent.futures import ThreadPoolExecutor
    exiting.EXIT_SECONDS = 1.0
    ac.initialize("gloo")
    pid = ac.all_gather_object(os.getpid()).wait()[0]
    if ac.get_rank() == 0:
        stuck = ac.all_reduce(torch.ones(1000))
        others = [ac.all_reduce(float(k), lane=f"lane {k}") for k in range(4)]
        STARTED
    with contextlib.suppress(ProcessLookupError):
        while ac.get_rank():  # there, and not in the call, until the other has ended
            os.kill(pid, 0)
            time.sleep(0.02)
    print("end of script")
"""


@pytest.mark.parametrize(
    "started",
    [
        pytest.param("ThreadPoolExecutor().submit(stuck.wait)", marks=pytest.mark.nightly),
        "threading.Thread(target=stuck.wait).start()",
    ],
)
def test_a_script_that_ends_while_another_thread_waits(tmp_path: Path, started: str) -> None:
    """The peer never joins. Python joins that thread first, but does not wait for its whole timeout."""
    first, _ = scripts.run(tmp_path, POOL_WAITS.replace("STARTED", started), ranks=2, timeout=40)
    assert first.code == 0, first.err
    assert re.search(
        r"rank 0 ends with 5 operations in flight, aborted: all_reduce #2 on lane 'default' .*; and 2 more\n",
        first.err,
    ), first.err


POOL_WORKS = """
    import asyncio, asynccoll as ac
    from asynccoll.host import exits as exiting
    from concurrent.futures import ThreadPoolExecutor
    exiting.EXIT_SECONDS = 1.0
    ac.initialize("gloo")
    def train():
        for turn in range(30):
            if ac.get_rank():
                asyncio.run(asyncio.sleep(0.05))  # what is computed meanwhile
            assert ac.all_reduce(turn).wait() == 2 * turn
        print("trained")
    ThreadPoolExecutor().submit(train)
"""


def test_a_script_whose_threads_go_on_when_its_main_thread_has_ended(tmp_path: Path) -> None:
    """They run longer than operations get at exit, and still complete their work."""
    for ended in scripts.run(tmp_path, POOL_WORKS, ranks=2, timeout=40):
        assert ended.code == 0, ended.err
        assert ended.out.split() == ["trained"], ended.err
        assert "aborted" not in ended.err


NO_THREADS = """
    import threading, torch, asynccoll as ac
    ac.initialize("gloo")
    def refuse(*_):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    def shut_down():
        threading.Thread.start = refuse
    threading._register_atexit(shut_down)  # runs before all that were registered earlier
    print(ac.all_reduce(ac.get_rank() + 1).wait())
    if ac.get_rank() in STUCK:
        stuck = ac.all_reduce(torch.ones(1000))
        stuck.detach()
"""


@pytest.mark.parametrize("stuck", ["", "0"])
def test_worlds_are_left_where_no_thread_can_start_any_more(tmp_path: Path, stuck: str) -> None:
    """As in the exit hooks of Python 3.12."""
    for ended in scripts.run(tmp_path, NO_THREADS.replace("STUCK", f"[{stuck}]"), ranks=2):
        assert ended.out.split() == ["3"]
        assert ended.code == 0, ended.err
        assert "Traceback" not in ended.err
