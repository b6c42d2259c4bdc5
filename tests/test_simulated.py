"""The simulated world: a seed determines it, it reports what went wrong, and our library works in it."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.host import locks
from asynccoll.testing import (
    PCT,
    Cancel,
    Fault,
    Interrupt,
    Kill,
    Link,
    RandomWalk,
    Report,
    explore,
    primitives,
    simulate,
)
from asynccoll.testing.delivery import Delivery
from asynccoll.testing.network import Network
from asynccoll.testing.report import leaves
from asynccoll.testing.scheduler import Scheduler, install, running
from asynccoll.testing.transports import TRANSPORTS
from by_day import orders
from determined import differing
from pages import DOCS, blocks
from patience import patient

SCHEDULES = [RandomWalk(), PCT()]


async def busy(rank: int) -> list[Any]:
    """Run two tasks on two lanes, trees, objects, a message, and a refused call."""
    size = ac.get_world_size()

    async def steps(number: int) -> None:
        for step in range(3):
            work = ac.all_reduce(torch.full((2,), float(rank + 10 * step + number)))
            await anyio.sleep(0.001 * ((step + number) % 2))
            assert (await work).tolist() == [sum(r + 10 * step + number for r in range(size))] * 2

    async with ac.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(steps, number, name=f"steps {number}")
    tree = await ac.all_reduce({"ones": torch.ones(2), "two": 2})
    assert (tree["ones"].tolist(), tree["two"]) == ([size] * 2, 2 * size)
    sent = ac.send(torch.tensor([5.0]), dst=(rank + 1) % size)
    got = await ac.recv(torch.zeros(1), src=(rank - 1) % size)
    await sent
    try:
        await ac.all_reduce(torch.ones(1) if rank else "not a tensor", op="no such" if rank == 0 else "sum")
    except (ac.PeerRefusedError, ac.InvalidArgumentError) as error:
        refused = type(error).__name__
    return [got.item(), refused, await ac.all_gather_object({"rank": rank})]


def digests(count: int) -> list[str]:
    """The digests of ``count`` simulations, some of them with faults."""
    found = []
    for number in range(count):
        faults = [Kill(number % 3, after_call=1 + number % 11)] if number % 2 else []
        schedule, loop = SCHEDULES[number % 3 == 0], ("asyncio", "trio")[number % 5 == 0]
        report = simulate(busy, world_size=3, seed=number, faults=faults, schedule=schedule, loop=loop)
        found.append(report.digest)
    return found


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["random walk", "PCT"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_results_are_those_of_a_real_world(size: int, schedule: Any, loop: str) -> None:
    for number in range(5):
        report = simulate(busy, world_size=size, seed=number, schedule=schedule, loop=loop)
        report.check()
        objects = [{"rank": rank} for rank in range(size)]
        for rank, (got, refused, gathered) in report.results.items():
            assert got == 5.0
            assert refused == ("InvalidArgumentError" if rank == 0 else "PeerRefusedError")
            assert gathered == objects
        assert sorted(report.results) == list(range(size))


def in_another_process(told: str) -> list[str]:
    """Return the words that a process prints which has imported this module as ``t``."""
    here = Path(__file__).parent
    program = f"import warnings; warnings.simplefilter('ignore'); import test_simulated as t; print({told})"
    package = str(Path(ac.__file__).parent.parent)
    environ = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join([package, str(here)])}
    other = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    return other.stdout.split()


def test_the_same_seed_is_the_same_simulation() -> None:
    """The digests are the same in another process too, in which sets have another order."""
    first = digests(20)
    assert first == digests(20)
    assert in_another_process("*t.digests(20)") == first
    assert len(set(first)) == 20


def imported_meanwhile() -> set[str]:
    """Return which of our modules the first simulations of a process have imported in their ranks."""
    imported: set[str] = set()

    def main() -> None:
        before = set(sys.modules)
        ac.initialize()
        ac.all_reduce(torch.ones(3)).wait()
        ac.finalize()
        imported.update(set(sys.modules) - before)

    for transport in TRANSPORTS:
        simulate(main, joined=False, world_size=2, transport=transport, loop="none").check()
    return {name for name in imported if name.startswith("asynccoll.")}


def test_a_simulation_imports_nothing_of_ours() -> None:
    """The locks that a module makes as it is imported would be simulated ones, and stay so."""
    assert in_another_process("t.imported_meanwhile()") == ["set()"]


async def _cancelled_together(rank: int) -> list[str]:
    """The order in which tasks, each in its own cancel scope, are cancelled by the enclosing scope."""
    heard: list[str] = []

    async def wait(name: str) -> None:
        with anyio.CancelScope():
            try:
                await anyio.sleep_forever()
            finally:
                heard.append(name)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(wait, f"{rank} {number}")
        await ac.all_reduce(1)
        tasks.cancel_scope.cancel()
    return heard


def test_scopes_are_cancelled_in_the_order_in_which_they_were_entered() -> None:
    """anyio keeps the scopes in a set, whose order depends on their addresses."""
    other_addresses = []
    for _ in range(5):
        report = simulate(_cancelled_together, world_size=2, seed=1)
        assert report.results[1] == [f"1 {number}" for number in range(20)]
        other_addresses.append([object() for _ in range(997)])


@pytest.mark.slow
def test_drawn_programs_are_the_same_in_another_process() -> None:
    """Faults included, in two concurrent processes; `make determined` compares ten thousand."""
    programs = len(orders(60))
    assert differing(programs, 20261124) == (programs, [])


def test_time_is_simulated() -> None:
    async def sleepy(rank: int) -> float:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.sleep(3600)
        await ac.barrier()
        return loop.time() - begun

    begun = time.monotonic()
    report = simulate(sleepy, world_size=2, timeout=4000)
    assert time.monotonic() - begun < 60
    assert all(3600 <= slept < 3601 for slept in report.results.values())


def test_without_a_loop() -> None:
    def main(rank: int) -> float:
        return float(ac.all_reduce(torch.tensor(rank + 1.0)).wait())

    report = simulate(main, world_size=3, loop="none")
    assert report.results == {0: 6.0, 1: 6.0, 2: 6.0}
    assert str(report).startswith("seed 0: 3 ranks ended after ")
    assert str(report).endswith(" simulated seconds: {0: 6.0, 1: 6.0, 2: 6.0}")


@pytest.mark.parametrize("number", range(10))  # not the last call, which may be over on the others
def test_a_killed_rank_is_named(number: int) -> None:
    """Each survivor names it within seconds; a rank that fails as a consequence may be named, too."""
    gone = number % 3
    report = simulate(busy, world_size=3, seed=number, faults=[Kill(gone, after_call=1 + number)])
    assert report.killed == [gone]
    assert report.deadlock is None
    assert sorted(report.errors) == [rank for rank in range(3) if rank != gone]
    told = [leaf for error in report.errors.values() for leaf in leaves(error)]
    assert any(isinstance(error, ac.PeerLostError) and gone in error.ranks for error in told), told
    assert all(isinstance(error, ac.CollectiveError) for error in told), told
    assert report.virtual_seconds < 10


@pytest.mark.skipif(
    "COVERAGE_PROCESS_START" in os.environ, reason="threads begin in a frame of what measures"
)
def test_a_deadlock_is_told_with_everybodys_stack() -> None:

    async def main(rank: int) -> None:
        if rank == 1:
            await asyncio.Event().wait()
        await ac.barrier()

    report = simulate(main, world_size=2, operation_timeout=1e6)
    assert report.deadlock is not None
    assert "rank 1, MainThread" in report.deadlock
    assert "test_simulated.py" in report.deadlock
    lines = report.deadlock.splitlines()
    assert lines[0] == "all still wait when the simulation ends (timeout=):"
    assert re.fullmatch(r"rank 0 waits in barrier #1 on lane 'default' at .*test_simulated.py:\d+", lines[1])
    assert "asynccoll-" not in report.deadlock, "threads of the library say nothing"
    with pytest.raises(AssertionError, match="seed 0") as told:
        report.check()
    assert str(report) == str(told.value)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_deadlock_names_the_functions_of_tasks(loop: str) -> None:
    async def evaluate(started: anyio.Event) -> None:
        started.set()
        await anyio.sleep_forever()

    async def main(rank: int) -> None:
        started = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(evaluate, started)
            await started.wait()
            await anyio.sleep_forever()

    report = simulate(main, world_size=1, loop=loop)
    assert report.deadlock is not None
    tasks = [line for line in report.deadlock.splitlines() if line.startswith("  task ")]
    assert any("main" in line for line in tasks), tasks
    assert any("evaluate" in line for line in tasks), tasks


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_deadlock_shows_the_programs_frames_and_what_they_called(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crosswise(first: anyio.Lock, second: anyio.Lock) -> None:
        async with first:
            await anyio.sleep(1)
            async with second:
                pass

    async def main(rank: int) -> None:
        one, other = anyio.Lock(fast_acquire=True), anyio.Lock(fast_acquire=True)
        async with ac.create_task_group() as tasks:
            tasks.start_soon(crosswise, one, other)
            tasks.start_soon(crosswise, other, one)

    told = simulate(main, world_size=1, loop=loop).deadlock
    assert told is not None
    of_one = told.partition("'default/crosswise'")[2].partition("  task")[0]
    functions = re.findall(r'File "(.*)", line \d+, in (\w+)', of_one)
    assert [(name, file == __file__) for file, name in functions] == [
        ("crosswise", True),
        ("__aenter__", False),
    ]
    monkeypatch.setenv("ASYNCCOLL_FULL_TRACEBACK", "1")
    whole = simulate(main, world_size=1, loop=loop).deadlock
    assert whole is not None
    assert len(whole.splitlines()) > len(told.splitlines())


def test_all_errors_are_told_the_cause_first() -> None:
    errors = {3: ac.PeerLostError("rank 2 is gone"), 2: ValueError("cause"), 0: LookupError("later")}
    with pytest.raises(AssertionError) as caught:
        Report(7, errors=errors).check()
    assert str(caught.value).splitlines() == [
        "seed 7: rank 2 raised ValueError: cause",
        "rank 0 raised LookupError: later",
        "rank 3 raised PeerLostError: rank 2 is gone",
    ]
    assert caught.value.__cause__ is errors[2]


def test_of_many_ranks_some_errors_are_told_a_clause_a_line() -> None:
    errors: dict[int, BaseException] = {rank: ValueError("one; another") for rank in range(64)}
    with pytest.raises(AssertionError) as caught:
        Report(7, errors=errors).check()
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["seed 7: rank 0 raised ValueError: one;", "    another"]
    assert lines[-1] == "and 56 more ranks raised: see report.errors"


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi", "nccl"])
def test_a_send_is_over_once_it_is_received(transport: str) -> None:
    """So a ring in which all ranks send first hangs, as it may between real ranks."""

    async def ring(rank: int, *, begin_both: bool) -> float:
        size = ac.get_world_size()
        sent = ac.send(torch.tensor([float(rank)]), dst=(rank + 1) % size)
        if not begin_both:
            await sent
        got = await ac.recv(torch.empty(1), src=(rank - 1) % size)
        await sent
        return got.item()

    for begin_both in (False, True):
        main = partial(ring, begin_both=begin_both)
        report = simulate(main, world_size=3, transport=transport, operation_timeout=1.0)
        assert sorted(report.errors) == ([] if begin_both else [0, 1, 2])
    assert report.results == {0: 2.0, 1: 0.0, 2: 1.0}


def test_a_send_to_a_rank_that_dies_fails() -> None:
    async def main(rank: int) -> None:
        if rank == 0:
            await ac.send(torch.ones(2), dst=1)
        await ac.barrier()

    report = simulate(main, world_size=2, faults=[Kill(1, at=0.1)])
    assert isinstance(report.errors[0], ac.PeerLostError)


def test_calls_that_do_not_match_are_told() -> None:
    async def main(rank: int) -> None:
        await ac.all_reduce(torch.ones(2 + rank))

    report = simulate(main, world_size=2)
    assert set(report.errors) == {0, 1}
    assert any(isinstance(error, ac.CollectiveMismatchError) for error in report.errors.values())
    assert not report.mismatches, "the ranks are told, and nothing of it reaches the transport"


def test_a_race_of_the_program_is_found() -> None:
    """Two tasks share one lane under ``check="off"``; with some seed their calls pair up wrongly."""

    async def main(rank: int) -> None:
        async def step(seconds: float, value: float) -> None:
            await asyncio.sleep(seconds)
            await ac.all_reduce(torch.tensor([value]))

        await asyncio.gather(step(0.001 * rank, 1.0), step(0.001, 2.0))

    def wrong(number: int) -> bool:
        values = []

        async def told(rank: int) -> None:
            async def step(seconds: float, value: float) -> None:
                await asyncio.sleep(seconds)
                values.append((value, (await ac.all_reduce(torch.tensor([value]))).item()))

            await asyncio.gather(step(0.0005 + 0.001 * rank, 1.0), step(0.001, 2.0))

        simulate(told, world_size=2, seed=number, check="off").check()
        return any(got != 2 * value for value, got in values)

    assert any(wrong(number) for number in range(20))
    checked = simulate(main, world_size=2, seed=0)  # the default check
    assert any(isinstance(error, ac.LaneOrderError) for error in checked.errors.values())


def test_slow_links_take_their_time() -> None:
    async def main(rank: int) -> None:
        await ac.all_reduce(torch.zeros(1 << 20))

    quick, slow = (
        simulate(main, world_size=2, link=Link((1e-5, 1e-5), bandwidth)).virtual_seconds
        for bandwidth in (1e12, 1e8)
    )
    assert 0.03 < slow - quick < 0.2  # 4 MiB at 100 MB/s


def test_a_function_without_a_parameter_asks_for_its_rank() -> None:
    async def main() -> int:
        return await ac.all_reduce(ac.get_rank())

    assert simulate(main, world_size=3).results == dict.fromkeys(range(3), 3)
    assert explore(main, seeds=range(3), world_size=2).wrong is None


def test_a_function_that_needs_more_than_its_rank_is_refused() -> None:
    async def main(rank: int, config: str) -> None:
        raise AssertionError("it is called")

    told = r"main\(rank: 'int', config: 'str'\).* lambda rank: main\("
    with pytest.raises(ac.InvalidArgumentError, match=told):
        simulate(main)  # type: ignore[arg-type]  # which type checkers tell


@pytest.mark.parametrize("joined", [True, False])
def test_joining_a_world_twice_says_what_to_leave_out(joined: bool) -> None:
    """The simulation joins the world, or the function does; joining twice is then its own mistake."""

    async def main() -> None:
        ac.initialize()
        if not joined:
            ac.initialize()

    report = simulate(main, world_size=2, joined=joined)
    for error in report.errors.values():
        assert isinstance(error, ac.InvalidArgumentError)
        assert ("pass joined=False to simulate or explore" in str(error)) is joined, error
        assert ("ac.finalize() first" in str(error)) is not joined, error
    assert len(report.errors) == 2


def test_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    first, script, training, explored, second, racing = (
        block.code for block in blocks(DOCS / "simulation.md", "python")
    )
    names: dict[str, Any] = {}
    exec(first + explored.replace("range(500)", "range(50)"), names)  # our own code
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()
    names = {}
    exec(script, names)  # as above
    names["test_the_script"]()
    names = {}
    exec(training.replace("range(100)", "range(8)"), names)  # as above
    names["test_training"]()
    for right, wrong in (('op="avg"', 'op="sum"'), ("for work in works:", "for work in works[:1]:")):
        exec(training[: training.index("def as_one")].replace(right, wrong), mistaken := {})  # as above
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about works that are never awaited
            found = explore(
                mistaken["train"], seeds=range(3), world_size=3, expect=names["as_one_process_does"]
            )
        assert found.wrong is not None and found.world_size == 3
        assert found.script.endswith("as_one_process_does(report)\n")
    exec(second, {})  # as above
    exec(racing, names)  # as above
    counter = names["Counter"]()
    counter.add()
    assert counter.n == 1
    assert "rank 1, MainThread" in capsys.readouterr().out


def test_many_ranks() -> None:
    async def main(rank: int) -> float:
        return (await ac.all_reduce(torch.tensor([1.0]))).item()

    report = simulate(main, world_size=64)
    report.check()
    assert report.results == dict.fromkeys(range(64), 64.0)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ac.InvalidArgumentError, match="loop must be one of"):
        simulate(busy, loop="uvloop")
    with pytest.raises(ac.InvalidArgumentError, match="world_size"):
        simulate(busy, world_size=0)
    inside = simulate(lambda rank: simulate(busy), world_size=1, loop="none")
    assert isinstance(inside.errors[0], ac.InvalidArgumentError)
    with pytest.raises(ac.InvalidArgumentError, match="expected 0 to 1"):
        simulate(busy, world_size=2, faults=[Kill(2, at=0.0)])
    with pytest.raises(ValueError, match="after_call= or at="):
        Kill(0)


def test_the_host_is_as_it_was() -> None:
    simulate(busy, world_size=2)
    assert host.Lock is locks.Lock
    assert host.monotonic is time.monotonic
    assert not ac.is_initialized()
    assert ac.all_reduce(torch.tensor([3.0])).wait().tolist() == [3.0]  # the world of one


@pytest.mark.parametrize("abort", [False, True])
def test_finalize_leaves_no_thread_behind(abort: bool) -> None:
    """A thread that returns from native code while the interpreter exits aborts the process."""

    async def main(rank: int) -> list[str]:
        async def step() -> None:
            await ac.all_reduce(torch.ones(2))

        async with ac.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(step, name=f"step {number}")
        if rank == 0:
            ac.all_reduce(torch.ones(2), lane="opens").detach()  # a lane that the others do not use
        ac.finalize(abort=abort or rank == 0)
        scheduler = running()
        assert scheduler is not None
        names = [thread.name for thread in scheduler.threads if thread.rank == rank]
        return [name for name in names if name.startswith("asynccoll-")]

    for number in range(20):
        report = simulate(main, world_size=3, seed=number, schedule=SCHEDULES[number % 2])
        assert not any(report.results.values()), (number, report.results)


def test_what_a_simulation_leaves_is_collected_before_the_next_one() -> None:
    """The garbage counted as old and stayed: ten thousand simulations used up the process's mappings."""
    left: list[weakref.ref[Any]] = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    async def main(rank: int) -> None:
        left.append(weakref.ref(Cycle()))

    for seed in range(5):
        simulate(main, world_size=1, seed=seed)
    assert [one() is not None for one in left[:-1]] == [False] * 4


def test_a_message_does_not_end_what_the_thread_of_the_transport_waits_for() -> None:
    """Each new message woke it, wherever it stood: it took an event to be set that was not."""
    scheduler = Scheduler(RandomWalk(), 0, 1000)
    delivery = Delivery(scheduler, Network(Link(), Link(), [0]), 1)
    event, seen = primitives.Event(), []

    def main() -> None:
        delivery.at(0, scheduler.now, lambda: seen.append(event.wait()))
        primitives.sleep(1.0)
        delivery.at(0, scheduler.now, lambda: seen.append("next"))
        primitives.sleep(1.0)
        event.set()
        primitives.sleep(1.0)
        scheduler.unwind()

    install(scheduler)
    try:
        scheduler.add(0, "main", main)
        delivery.start(0)
        scheduler.run(patient(10))
    finally:
        install(None)
    assert seen == [True, "next"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup came with 3.11")
def test_tasks_that_nobody_can_wake_are_not_told_again(
    caplog: pytest.LogCaptureFixture, unraisable: list[object]
) -> None:
    """The report shows where they stood; asyncio would log each as destroyed, and each would complain."""

    async def main(rank: int) -> None:
        async def called(lane: str) -> None:
            with ac.lane(lane):
                await ac.all_reduce(torch.ones(2))

        if rank == 0:
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as tasks:
            for lane in "abc":
                tasks.create_task(called(lane))

    report = simulate(main, world_size=3, timeout=5.0)
    gc.collect()
    assert report.deadlock is not None
    assert (caplog.messages, unraisable) == ([], [])


async def split(rank: int) -> list[float]:
    """Rank 0 sends one element to rank 1, which expects four."""
    if rank == 0:
        x, sent, received = torch.arange(3.0), [2, 1], [2, 2]
    else:
        x, sent, received = torch.arange(4.0), [2, 2], [4, 2]
    got = await ac.all_to_all(x, input_split_sizes=sent, output_split_sizes=received)
    return list(got.tolist())


def test_one_element_does_not_pass_for_several() -> None:
    """With the library's checks off, torch would fill all four elements with the one received."""
    report = simulate(split, world_size=2, check="off")
    assert "1 elements came where 4 were expected" in report.mismatches[0]
    assert 1 not in report.results


async def only_two_use_the_default_lane(rank: int) -> float:
    """Messages go there without the third rank, as it was opened when the ranks joined."""
    if rank == 0:
        await ac.send(torch.tensor([7.0]), dst=1)
    elif rank == 1:
        assert (await ac.recv(torch.empty(1), src=0)).item() == 7.0
    return float(await ac.all_reduce(torch.ones(1), lane="other"))


@pytest.mark.parametrize("transport", ["mpi", "horovod"])
@pytest.mark.parametrize("rests", [0.0, 6.0], ids=["waited for", "left alone"])
def test_a_call_that_has_to_be_polled_is_polled_once_it_has_landed(rests: float, transport: str) -> None:
    """Nobody polls in vain: that would be nearly all steps, by a waiter or by the progress thread."""

    async def main(rank: int) -> tuple[float, float]:
        await asyncio.sleep(5.0 * rank)
        work, begun = ac.all_reduce(torch.ones(1)), host.monotonic()
        over: list[float] = []
        work.add_done_callback(lambda _: over.append(host.monotonic() - begun))
        await asyncio.sleep(max(0.0, rests - 5.0 * rank))
        return (await work).item(), over[0]

    report = simulate(main, world_size=2, transport=transport)
    report.check()
    assert [report.results[rank][0] for rank in range(2)] == [2.0, 2.0]
    assert 5.0 < report.results[0][1] < 5.02
    assert report.steps < 600


@pytest.mark.parametrize("transport", ["gloo", "mpi", "memory", "nccl"])
def test_the_default_lane_is_open_once_the_ranks_have_joined(transport: str) -> None:
    """As in real worlds: two ranks need no third one for their messages."""
    for seed in range(3):
        report = simulate(only_two_use_the_default_lane, world_size=3, seed=seed, transport=transport)
        report.check()
        assert report.results == dict.fromkeys(range(3), 3.0)


def test_a_sleep_is_not_cut_short_by_a_thread_that_was_joined_before() -> None:
    """The end of the thread woke whoever had waited for it, even if that had given up since."""

    def main(rank: int) -> float:
        thread = host.Thread(target=host.sleep, args=(2.0,))
        thread.start()
        thread.join(1.0)
        begun = host.monotonic()
        host.sleep(5.0)
        return host.monotonic() - begun

    assert simulate(main, world_size=1, loop="none").results[0] >= 5.0


def test_a_wakeup_that_ctrl_c_comes_after_is_for_the_next_thread() -> None:
    """A real lock wakes nobody in particular; here the next thread would have waited for a free lock."""

    def main(rank: int) -> int:
        scheduler = running()
        assert scheduler is not None
        me, lock, got = scheduler.current, host.Lock(), []
        assert me is not None

        def strike() -> None:
            host.sleep(2.0)
            lock.release()
            scheduler.interrupt(me, KeyboardInterrupt())

        def take() -> None:
            host.sleep(1.0)
            with lock:
                got.append(rank)

        lock.acquire()
        threads = [host.Thread(target=one) for one in (strike, take)]
        for thread in threads:
            thread.start()
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
        for thread in threads:
            thread.join()
        return len(got)

    report = simulate(main, world_size=1, loop="none")
    report.check()
    assert report.results == {0: 1}


class _Held:
    """Sets an event when the last reference to it is dropped."""

    def __init__(self, dropped: threading.Event) -> None:
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.set()


@pytest.mark.slow
def test_a_thread_that_is_left_behind_leaves_no_world_that_is_not_its_own() -> None:
    """A rank that waited for something real went on once that came, and finalized the process's world."""
    released, ended = threading.Event(), threading.Event()
    of_thread = threading.local()

    def main(rank: int) -> None:
        of_thread.held = _Held(ended)
        released.wait()

    with pytest.raises(TimeoutError, match="it was not over"):
        simulate(main, world_size=1, loop="none", real_seconds=patient(0.5))
    ac.initialize("serial")
    try:
        released.set()
        assert ended.wait(patient(20))
        assert ac.is_initialized()
        assert ac.backend() == "serial"
    finally:
        ac.finalize()


async def summed(rank: int) -> float:
    """Sum over four calls; through memory none takes long enough to suspend the task."""
    total = 0.0
    for number in range(4):
        total += (await ac.all_reduce(torch.tensor([float(number + rank)]))).item()
    return total


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(Cancel(1, after_call=2), asyncio.CancelledError), (Interrupt(1, after_call=2), KeyboardInterrupt)],
)
def test_a_task_that_is_never_suspended_is_cancelled_as_well(
    fault: Fault, raised: type[BaseException]
) -> None:
    """It is cancelled as by asyncio at Ctrl-C; otherwise the fault would have had no effect."""
    report = simulate(summed, world_size=3, transport="memory", faults=[fault], seed=3)
    assert isinstance(report.errors[1], raised)
