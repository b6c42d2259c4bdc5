"""Messages between ranks of one host through memory, in simulated worlds: each look at a word a switch point.

The environment variable TIMES multiplies the number of orders.
"""

from __future__ import annotations

import gc
import math
import os
import random
import re
from typing import Any

import anyio
import pytest
import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.testing import PCT, Kill, Report, simulate
from by_day import orders
from letters import Letter, begun, check, drawn, started
from simulated_memory import ENGINE, flat, interrupted, run

TIMES = int(os.environ.get("TIMES", "1"))
#: The seconds within which messages complete that wait for no slow rank; opening a region asks the store. A
#: thread that sleeps through a word looks again after 0.1 s.
QUICK_SECONDS = 0.06


def waited(work: Any, tries: int = 1) -> Any:
    for _ in range(tries):
        try:
            return work.wait()
        except KeyboardInterrupt:
            continue
    raise AssertionError("it was interrupted too often")


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.nightly)]
)
def test_any_order_of_tags_and_sizes(size: int) -> None:
    """All are started together, in an order of each rank's own, and waited for in another one."""
    for seed in orders(60 * TIMES):
        letters = drawn(seed, size)

        def main(rank: int, letters: Any = letters, seed: int = seed) -> None:
            works = begun(letters, rank, seed)
            random.Random(f"{rank} {seed}").shuffle(works)
            for letter, work in works:
                check(letter, rank, waited(work))
            ac.barrier().wait()  # else a rank without messages may leave before the others open their lane

        report = run(main, seed, world_size=size, loop="none", statements=ENGINE if seed % 3 == 0 else ())
        report.check()
        assert report.virtual_seconds < QUICK_SECONDS, (seed, report.virtual_seconds)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_tasks_await_them(loop: str) -> None:
    """They are mixed with collectives, and are not ordered relative to them."""
    for seed in orders(30 * TIMES):
        letters = drawn(seed, 3)

        async def main(rank: int, letters: Any = letters, seed: int = seed) -> None:
            works = begun(letters[: len(letters) // 2], rank, seed)
            total = ac.all_reduce(torch.ones(30))
            works += begun(letters[len(letters) // 2 :], rank, seed)
            random.Random(f"{rank} {seed}").shuffle(works)
            for letter, work in works:
                check(letter, rank, await work)
            assert flat(await total) == [3.0] * 30

        report = run(main, seed, world_size=3, loop=loop)
        report.check()
        assert report.virtual_seconds < QUICK_SECONDS, (seed, report.virtual_seconds)


def test_what_nobody_awaits_arrives() -> None:
    """Rank 0 starts its sends and receives and sleeps; the others wait for theirs meanwhile."""
    for seed in orders(40 * TIMES):
        letters = drawn(seed, 3)

        async def main(rank: int, letters: Any = letters, seed: int = seed) -> float:
            await ac.barrier()  # now the lane is open
            works = begun(letters, rank, seed)
            since = host.monotonic()
            if rank == 0:
                await anyio.sleep(15.0)
            for letter, work in works:
                check(letter, rank, await work)
            return host.monotonic() - since

        report = run(main, seed, world_size=3, statements=ENGINE if seed % 4 == 0 else ())
        report.check()
        assert all(seconds < QUICK_SECONDS for rank, seconds in report.results.items() if rank), (
            seed,
            report.results,
        )


def test_what_was_not_asked_for_holds_nothing_up() -> None:
    """One tag has far more messages than the receiver can buffer; those of another tag overtake them.

    The sender learns that each was received, whatever the receiver does once it has them all.
    """
    for seed in orders(20 * TIMES):
        early = [Letter(number, 0, 1, 0, (1, 40, 300)[number % 3]) for number in range(50)]
        late = [Letter(50 + number, 0, 1, 1, (300, 1)[number % 2]) for number in range(3)]

        async def main(rank: int, early: Any = early, late: Any = late, seed: int = seed) -> float:
            since = host.monotonic()
            if rank == 0:
                works = [(letter, started(letter, rank)) for letter in (*early, *late)]
            else:
                for letter in late:
                    check(letter, rank, await started(letter, rank))
                works = [(letter, started(letter, rank)) for letter in early]
            for letter, work in works:
                check(letter, rank, waited(work) if seed % 2 else await work)
            seconds = host.monotonic() - since
            if rank and seed % 4 < 2:
                await anyio.sleep(15.0)
            return seconds

        report = run(main, seed, world_size=2, schedule=PCT(depth=6))
        report.check()
        assert max(report.results.values()) < QUICK_SECONDS, (seed, report.results)


def test_several_threads_of_a_rank_wait() -> None:
    """Each thread waits for a message of its own."""
    for seed in orders(30 * TIMES):
        letters = drawn(seed, 2)

        def main(rank: int, letters: Any = letters, seed: int = seed) -> None:
            got: dict[int, Any] = {}

            def wait(number: int, work: Any) -> None:
                got[number] = waited(work)

            works = begun(letters, rank, seed)
            threads = [host.Thread(target=wait, args=(one.number, work)) for one, work in works]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for letter, _ in works:
                check(letter, rank, got[letter.number])

        report = run(main, seed, world_size=2, loop="none", statements=ENGINE if seed % 3 == 0 else ())
        report.check()
        assert report.virtual_seconds < QUICK_SECONDS, (seed, report.virtual_seconds)


def test_an_interrupted_wait_can_be_begun_again() -> None:
    """Ctrl-C strikes before any statement of the engine."""
    seeds = orders(50 * TIMES)
    times = 0
    for seed in seeds:
        letters = drawn(seed, 2, most=8)
        after = random.Random(seed).uniform(0, 3e-4)

        def main(rank: int, letters: Any = letters, seed: int = seed, after: float = after) -> bool:
            works = begun(letters, rank, seed)
            random.Random(f"{rank} {seed}").shuffle(works)
            with interrupted(after if rank == 0 else math.inf) as struck:
                for letter, work in works:
                    check(letter, rank, waited(work, 3))
            return bool(struck)

        report = run(main, seed, world_size=2, loop="none", statements=ENGINE)
        if isinstance(report.errors.get(0), KeyboardInterrupt):
            continue  # it struck as the last wait ended
        report.check()
        assert report.virtual_seconds < QUICK_SECONDS, (seed, report.virtual_seconds)
        times += report.results[0]
    assert times > len(seeds) // 4


def test_who_waits_for_a_killed_rank_is_told_soon() -> None:
    """The rank may die anywhere; messages between the others may or may not arrive."""
    for seed in orders(60 * TIMES):
        letters = drawn(seed, 3)

        def main(rank: int, letters: Any = letters, seed: int = seed) -> None:
            for letter, work in begun(letters, rank, seed):
                check(letter, rank, waited(work))
            ac.barrier().wait()

        report = run(main, seed, world_size=3, loop="none", faults=[Kill(1, after_call=1 + seed % 6)])
        judge(report)


def judge(report: Report) -> None:
    """Check that the survivors ended soon, either well or with an error that says why."""
    assert report.deadlock is None, report.deadlock
    for error in report.errors.values():
        assert isinstance(error, ac.CollectiveError), error
    assert report.virtual_seconds < QUICK_SECONDS, report.virtual_seconds


def test_what_does_not_fit_is_dropped_and_said() -> None:
    """Long and short messages between ones that fit; a send and a receive are refused and repeated."""
    for seed in orders(30 * TIMES):
        counts = [random.Random(seed).choice((1, 40, 700)) for _ in range(4)]

        def main(rank: int, counts: Any = counts) -> None:
            peer = 1 - rank
            if rank == 0:
                works: list[Any] = [ac.send(torch.ones(count), dst=peer) for count in counts]
                with pytest.raises(ac.PayloadTypeError):
                    ac.send(object(), dst=peer)
                works.append(ac.send(torch.full((30,), 2.0), dst=peer))
                for work in works:
                    waited(work)
                return
            good = ac.recv(torch.empty(counts[0]), src=peer)
            short = ac.recv(torch.empty(counts[1] + 1), src=peer)
            other = ac.recv(torch.empty(counts[2], dtype=torch.int32), src=peer)
            with pytest.raises(ac.InvalidArgumentError):
                ac.recv(torch.empty(counts[3]), src=peer, out=torch.empty(counts[3] + 1))
            again = ac.recv(torch.empty(counts[3]), src=peer)
            refused, last = ac.recv(torch.empty(1), src=peer), ac.recv(torch.empty(30), src=peer)
            for work, count in ((good, counts[0]), (again, counts[3])):
                assert flat(waited(work)) == [1.0] * count
            for work in (short, other):
                with pytest.raises(ac.CollectiveMismatchError, match="tag 0"):
                    waited(work)
            with pytest.raises(ac.PeerRefusedError, match="rank 0 refused"):
                waited(refused)
            assert flat(waited(last)) == [2.0] * 30

        run(main, seed, world_size=2, loop="none").check()


def test_messages_outlive_a_refused_call() -> None:
    """After the refused call the lane begins a new epoch, with other memory for its collectives."""
    for seed in orders(40 * TIMES):
        letters = drawn(seed, 2)

        def main(rank: int, letters: Any = letters, seed: int = seed) -> None:
            half = len(letters) // 2
            works = begun(letters[:half], rank, seed)
            try:
                ac.all_gather(object() if rank else "text").wait()
            except (ac.PayloadTypeError, ac.PeerRefusedError):
                works += begun(letters[half:], rank, seed)
            random.Random(f"{rank} {seed}").shuffle(works)
            for letter, work in works:
                check(letter, rank, waited(work))
            assert ac.all_reduce(1).wait() == 2

        run(main, seed, world_size=2, loop="none").check()


def served(rank: int, jobs: int = 6) -> list[tuple[int, int]]:
    """Rank 0 hands out numbers to the ranks that ask, and returns their squares, each with its sender."""
    if rank:
        done = -1
        while True:
            ac.send_object(done, dst=0).wait()
            job = ac.recv_object(src=0).wait()
            if job < 0:
                return []
            done = job * job
    left, found = [*range(jobs)], []
    arriving = ac.recv_any_object()
    for source, done in arriving:
        job = left.pop() if left else -1
        ac.send_object(job, dst=source).detach()
        if done != -1:
            found.append((source, done))
        if job >= 0:
            arriving.again(source)
    return found


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_who_comes_first_is_served_first(transport: str) -> None:
    """No job is lost or done twice in any order; the order decides how many jobs each rank does."""
    shares = set()
    for seed in orders(30 * TIMES):
        report = run(served, seed, world_size=3, loop="none", transport=transport)
        report.check()
        found = report.results[0]
        assert sorted(done for _, done in found) == [job * job for job in range(6)]
        shares.add(sum(source == 1 for source, _ in found))
    assert len(shares) > 1


@pytest.mark.filterwarnings("error::asynccoll.UnawaitedWorkWarning")
def test_a_killed_source_ends_the_waiting_for_any(unraisable: list[object]) -> None:
    """The error names it, whichever ranks might still send, and the remaining receives do not warn."""
    named = 0
    seeds = orders(30 * TIMES)
    for seed in seeds:
        report = run(served, seed, world_size=3, loop="none", faults=[Kill(2, after_call=1 + seed % 5)])
        assert report.deadlock is None, report.deadlock
        if 0 in report.errors:
            lost = report.errors[0]
            assert isinstance(lost, ac.PeerLostError)
            assert lost.ranks == (2,)
            named += 1
    del report, lost
    gc.collect()
    assert named > len(seeds) // 3
    assert unraisable == []


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_a_refused_send_is_told_whatever_the_name_of_the_program(transport: str) -> None:
    """Paths in Python need not be valid Unicode; the receiver once waited forever."""
    known: dict[str, Any] = {"ac": ac}
    exec(compile("def send(x):\n    return ac.send(x, dst=1)\n", "/d\udcfcr/program.py", "exec"), known)

    async def main(rank: int) -> None:
        out = torch.zeros(2)
        work = ac.all_reduce(torch.ones(2), out=out)
        if rank == 0:
            with pytest.raises(ac.InvalidArgumentError, match="not been waited for yet"):
                known["send"](out)
            assert (await work).tolist() == [2, 2]
        else:
            assert (await work).tolist() == [2, 2]
            with pytest.raises(
                ac.PeerRefusedError, match=r"rank 0 refused its side .*not been waited for yet"
            ):
                await ac.recv(torch.zeros(2), src=0)
        await ac.barrier()

    simulate(main, world_size=2, transport=transport).check()


@pytest.mark.parametrize("transport", ["gloo", "memory", "mpi"])
@pytest.mark.parametrize("stays", [False, True])
def test_a_message_without_its_other_side_ends_alike_for_who_sends_and_who_receives(
    transport: str, stays: bool
) -> None:
    """It fails once the other rank has left; if that stays, ``finalize`` raises, and names it."""
    ended = {}
    for name in ("send", "recv"):

        def main(rank: int, name: str = name) -> None:
            ac.barrier().wait()
            if rank == 1:
                host.sleep(6.5 if stays else 0.0)
                return
            x = torch.ones(2)
            work: Any = ac.send(x, dst=1, tag=3) if name == "send" else ac.recv(x, src=1, tag=3)
            try:
                ac.finalize()
            except ac.CollectiveTimeoutError as error:
                ended[name] = f"{error} {error.ranks}"
            assert isinstance(work.exception(), ac.AbortedError if stays else ac.PeerLostError)

        options: Any = {"loop": "none", "transport": transport, "operation_timeout": 5.0}
        simulate(main, world_size=2, **options).check()
    for name, other in (("send", "recv from rank 0"), ("recv", "send to rank 0")) if stays else ():
        assert re.search(
            rf"in flight: \[{name} .*pid 1001\) has not called {other} \(tag 3\).*\(1,\)", ended[name]
        )
    assert len(ended) == 2 * stays
