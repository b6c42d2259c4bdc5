"""Bugs that simulated worlds have found, each kept as it was found: with its order and its fault."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Coroutine

import anyio
import pytest
import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.testing import (
    PCT,
    Cancel,
    Fail,
    Interrupt,
    Kill,
    RandomWalk,
    Report,
    Stop,
    StoreLost,
    explore,
    simulate,
)
from asynccoll.world.group import MAX_LANES
from compositions import from_json
from simulated import complaints, unwaited


def test_one_call_of_two_steps_is_over_before_its_recorder_hears_of_it() -> None:
    """The recorder took over the rest of the call with the lane locked: its thread waited for itself."""
    program = from_json(
        '{"ranks": 2, "tasks": [{"calls": [{}, {"operation": "broadcast", "payload": "text"}]}]}'
    )
    for seed in range(20):
        found, _ = complaints(program, seed, schedule=PCT())
        assert not found, found


async def told_who_left(rank: int) -> None:
    """Rank 0 leaves, and all others are told so; then each of them leaves."""
    await ac.all_reduce(1, lane="open")
    if rank > 0:
        for lane in ("open", "new"):
            with pytest.raises(ac.PeerLostError) as caught:
                await ac.all_reduce(torch.ones(3), lane=lane)
            assert caught.value.ranks == (0,), str(caught.value)
            assert str(caught.value).count("has left its world") == 1, str(caught.value)
    ac.finalize()


def test_who_comes_late_is_told_who_left_first() -> None:
    """The error does not name ranks that left as a consequence."""
    for seed in range(10):
        report = simulate(told_who_left, world_size=3, seed=seed, faults=[Stop(1, seconds=4.0, after_call=1)])
        report.check()
    explore(told_who_left, seeds=range(60), world_size=5, faults=stopped).check()


def outs_on_rank_0(rank: int) -> None:
    """Rank 0 receives many tensors in its own memory, rank 1 in new memory."""
    xs = [torch.full((75 << 10,), float(number)) for number in range(24)]
    outs = [torch.empty_like(x) for x in xs] if rank == 0 else None
    with ac.coalescing():
        works = [
            ac.all_reduce(x, out=None if outs is None else out) for x, out in zip(xs, outs or xs, strict=True)
        ]
    block = [work.wait().clone() for work in works]
    tree = ac.all_reduce(xs, out=outs) if outs is not None else ac.all_reduce(xs)
    for got in (block, tree.wait()):
        assert [(x.min().item(), x.max().item()) for x in got] == [(2.0 * n, 2.0 * n) for n in range(24)]


@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_ranks_may_differ_in_whether_they_pass_outs(transport: str) -> None:
    """Ranks that passed ``out=`` sent smaller buckets: the native calls did not match."""
    simulate(outs_on_rank_0, world_size=2, loop="none", transport=transport).check()


async def closed_in_a_block(rank: int) -> None:
    """Calls deferred on the lane are sent before the lane is closed."""
    with ac.coalescing():
        work = ac.all_reduce(torch.ones(3), lane="brief")
        ac.close_lane("brief")
        again = ac.all_reduce(torch.ones(2), lane="brief")
    assert (await work).tolist() == [3.0] * 3
    assert (await again).tolist() == [3.0] * 2


def test_a_lane_is_closed_inside_a_coalescing_block() -> None:
    explore(closed_in_a_block, seeds=range(40), world_size=3, shrink_seconds=0).check()


def test_a_rank_whose_call_broke_off_halfway_issues_nothing_after_it() -> None:
    """A rank that lost a peer between two steps of a call started the next call; others were at the first."""
    program = from_json(
        '{"ranks": 3, "tasks": [{"calls": [{"payload": "wrong"}, {"operation": "reduce_scatter", "payload":'
        ' "tracked tree of tensors"}]}], "start": "threads"}'
    )
    for seed in range(0, 16, 2):
        found, _ = complaints(program, seed, [Interrupt(2, after_call=4)], check="full")
        assert not found, found


def asks_again_and_again(rank: int) -> None:
    """Wait with a timeout that is shorter than the check on the peer takes."""
    work = ac.all_reduce(1, timeout=0.1)
    while True:
        try:
            work.wait()
        except ac.CollectiveTimeoutError:
            continue


def test_who_waits_in_short_turns_hears_of_a_silent_peer() -> None:
    """Each wait was over before the check began, and no other thread checked on the peer."""
    for seed in range(4):
        silent = [Kill(0, silent=True, after_call=1)]
        report = simulate(
            asks_again_and_again, world_size=2, seed=seed, loop="none", faults=silent, schedule=PCT()
        )
        error = report.errors[1]
        assert isinstance(error, ac.PeerLostError) and error.ranks == (0,), error
        assert report.virtual_seconds < 20


def test_a_silent_peer_is_asked_once_for_all_parts_that_wait() -> None:
    """Each part of each tree asked it again for a third of a second: none looked for lost ranks for 15 s."""
    tree = {"operation": "all_gather", "payload": "tracked tree", "coalesced": True, "wait": "gathered"}
    mapped = tree | {"operation": "broadcast", "payload": "tracked tree of tensors", "pauses": 1}
    half = mapped | {"waited_in": "default device", "form": "mapped", "dtype": "float16"}
    from_last = tree | {"root": 1}
    calls = [tree | {"seed": 4}, half | {"seed": 1}, from_last | {"seed": 1}, from_last | {"seed": 3}]
    calls += [from_last | {"seed": 4}, half | {"seed": 1}, from_last, from_last | {"seed": 1}]
    calls += [half | {"seed": 4}, from_last | {"seed": 3}]
    told = {"ranks": 2, "tasks": [{"calls": calls}], "start": "task group", "turned": True}
    program = from_json(json.dumps(told))
    for seed in range(410, 416):
        found, _ = complaints(
            program, seed, [Kill(1, silent=True, after_call=3)], transport="memory", check="full"
        )
        assert not found, found


def uses_many_lanes(rank: int) -> None:
    """Rank 1 makes no second call on the lanes."""
    for repeat in range(2 - rank):
        works = [ac.all_reduce(torch.ones(2), lane=f"l{index}") for index in range(12)]
        for work in works:
            with contextlib.suppress(ac.PeerLostError):
                work.wait()
        if repeat == 0:
            ac.barrier().wait()
    host.sleep(100 * rank)


def test_a_peer_that_was_found_dead_is_not_asked_on_the_next_lane() -> None:
    """Each lane waited a second and a half for the peer's answer, until the last lanes had timed out."""
    silent = [Kill(1, silent=True, at=0.5)]
    report = simulate(uses_many_lanes, world_size=2, seed=1, loop="none", faults=silent)
    assert not report.errors, report.errors


def test_a_concurrent_future_is_over_by_its_deadline() -> None:
    """A peer that had lost the store gave up its side, and no waiter here would have noticed the deadline."""
    program = from_json(
        '{"ranks": 2, "tasks": [{"calls": [{"operation": "broadcast", "payload": "tree, None '
        'elsewhere", "root": 1}, {"operation": "reduce_scatter", "payload": "tree of tensors"}, '
        '{"payload": "tree", "around": ["closed lane"], "wait": "gathered"}, {"operation": '
        '"gather_object", "payload": "object"}, {"operation": "broadcast", "payload": "text, None '
        'elsewhere", "root": 1}, {"wait": "concurrent"}]}]}'
    )
    found, _ = complaints(
        program, 385, [StoreLost(after_call=9, rank=1)], transport="mpi", schedule=PCT(), check="local"
    )
    assert not found, found


async def uses_what_it_computed(rank: int) -> list[float]:
    """On a device: rank 1's host has nothing to wait for except its device's progress."""
    try:
        return (await ac.all_reduce(torch.ones(2))).tolist()
    except ac.CollectiveError:
        return (await ac.all_reduce(torch.ones(2))).tolist()


def test_a_device_that_waits_for_a_call_which_a_peer_did_not_make_is_freed() -> None:
    """No thread waited on the host, so none looked for refusals: the kernel stayed forever."""
    for seed in range(20):
        report = simulate(
            uses_what_it_computed, world_size=2, seed=seed, transport="nccl", faults=[Fail(0, after_call=1)]
        )
        report.check()
        assert report.results == {0: [2.0, 2.0], 1: [2.0, 2.0]}
        assert report.virtual_seconds < 15  # before the operation's timeout is over


def stopped(chance: object, world_size: int) -> list[Stop]:
    """Stop one rank for some seconds."""
    return [Stop(world_size - 1, seconds=3.0, after_call=1)]


def test_the_first_rank_lets_an_epoch_pass_that_this_rank_has_yet_to_begin() -> None:
    """The epoch's turn passed without a start, so that none was left when this rank began the epoch."""
    program = from_json(
        '{"ranks": 2, "tasks": [{"calls": [{"wait": "exception", "pauses": 1}, '
        '{"payload": "tracked", "form": "out"}, {}]}], "start": "task group", "loop": "trio"}'
    )
    for seed in (3639, *range(40)):
        found, _ = complaints(program, seed, transport="nccl", schedule=PCT())
        assert not found, found


def waited_for_in_another_mode(rank: int) -> None:
    """The call is made under no_grad, while the thread that moves it through memory has gradients enabled."""
    x = torch.ones(2, 40, requires_grad=True)
    with torch.no_grad():
        work = ac.all_reduce(x, out=torch.empty(2, 40))
    assert work.wait().tolist() == [[3.0] * 40] * 2
    assert not ac.all_reduce(torch.ones(2, 40)).wait().requires_grad  # in the same slots


def test_what_is_moved_through_memory_belongs_to_no_graph() -> None:
    """Ranks that reduce a part read each caller's own tensor, in the grad mode of the reducing thread."""
    for seed in range(10):
        simulate(waited_for_in_another_mode, world_size=3, seed=seed, transport="memory", loop="none").check()


def test_a_call_behind_on_a_device_is_lost_with_the_rank_that_its_lane_lost() -> None:
    """Its error said that this rank aborted the communicator, though this rank knew who was gone."""
    program = from_json(
        '{"ranks": 3, "tasks": [{"calls": [{"wait": "gathered", "pauses": 1}, {}]}], "start": "threads", '
        '"loop": "none"}'
    )
    for seed in range(1975, 2175, 4):
        found, _ = complaints(program, seed, [Kill(1, after_call=2)], transport="nccl", schedule=PCT())
        assert not found, found


def test_works_taken_as_completed_end_by_their_deadline_where_the_store_is_lost() -> None:
    """The program kept asking, and each time the operation's timeout began anew."""
    program = from_json(
        '{"ranks": 2, "tasks": [{"calls": [{"operation": "broadcast", "payload": "number, None elsewhere", '
        '"wait": "gathered"}, {"operation": "reduce", "payload": "tree", "form": "mapped", "around": '
        '["lane"], "wait": "gathered", "pauses": 1, "seed": 4}]}, {"calls": [{"operation": '
        '"all_gather", "payload": "tree", "form": "mapped", "around": ["shared scope"], "pauses": 1}]}, '
        '{"calls": [{"payload": "tree of tensors", "form": "in place", "wait": "both"}], "around": ["shared '
        'scope"]}], "start": "lanes", "loop": "trio"}'
    )
    options = {"transport": "memory", "schedule": RandomWalk(), "check": "local"}
    found, _ = complaints(program, 3454, [StoreLost(after_call=4, rank=1)], **options)
    assert not found, found


async def sent_in_order(
    rank: int, send: Callable[[int], ac.Work[None]], receive: Callable[[], ac.Work[int]]
) -> list[int | str]:
    """What rank 0 has sent or rank 1 has received of 1, 2, 3, or the type of the error raised instead."""
    await ac.barrier()
    got: list[int | str] = []
    for number in (1, 2, 3):
        try:
            if rank == 0:
                await send(number)
                got.append(number)
            else:
                got.append(await receive())
        except ac.CollectiveError as error:
            got.append(type(error).__name__)
    return got


def are_in_order(report: Report) -> bool:
    """Whether all three have arrived; checks that each rank has the first ones, and errors for the others."""
    rights = []
    for got in report.results.values():
        right = list(itertools.takewhile(lambda one: not isinstance(one, str), got))
        assert right == [1, 2, 3][: len(right)], (report.seed, got)
        assert all(isinstance(one, str) for one in got[len(right) :]), (report.seed, got)
        rights.append(len(right))
    return all(right == 3 for right in rights)


def three_messages(rank: int) -> Coroutine[object, object, list[int | str]]:
    """Tensors, of one piece each."""
    return sent_in_order(
        rank,
        lambda number: ac.send(torch.tensor([number]), dst=1),
        lambda: ac.recv(torch.tensor([0]), src=0).map(int),
    )


@pytest.mark.parametrize("transport", ["gloo", "mpi", "memory", "nccl"])
def test_a_message_that_the_library_does_not_take_is_not_replaced_by_the_next(transport: str) -> None:
    """The receiver took the next message for it: a silently wrong number."""
    for rank, call, seed in itertools.product((0, 1), (2, 3, 4), range(3)):
        fault = Fail(rank, after_call=call)
        report = simulate(three_messages, world_size=2, seed=seed, transport=transport, faults=[fault])
        report.check()
        are_in_order(report)


def three_long_objects(rank: int) -> Coroutine[object, object, list[int | str]]:
    """Objects that need a second piece each."""
    return sent_in_order(
        rank,
        lambda number: ac.send_object([number] * 1000, dst=1),
        lambda: ac.recv_object(src=0).map(min),
    )


def test_a_second_piece_that_the_library_does_not_take_is_not_taken_for_the_next_message() -> None:
    """It was received as the beginning of the next one, whose receive got the one before."""
    arrived = []
    for seed, call in itertools.product(range(6), range(1, 9)):
        fault = Fail(1, after_call=call)
        report = simulate(three_long_objects, world_size=2, seed=seed, transport="mpi", faults=[fault])
        report.check(faults=True)  # it may strike in the barrier
        arrived.append(are_in_order(report))
    assert not all(arrived)


async def makes_room(rank: int) -> list[float]:
    """Rank 0 needs one more lane while rank 1 has the maximum and has yet to close one."""
    said = [float(await ac.all_reduce(torch.ones(1), lane=f"lane {k}")) for k in range(MAX_LANES - 1)]
    if rank == 1:
        await anyio.sleep(0.5)
    ac.close_lane("lane 0")
    said.append(float(await ac.all_reduce(torch.ones(1), lane="one more")))
    said.append(float(await ac.all_reduce(torch.ones(1), lane="lane 1")))
    return said


def test_the_order_of_starts_waits_for_a_lane_that_is_one_too_many() -> None:
    """The error ended its thread, and no lane of this rank started anything any more."""
    for seed in range(3):
        report = simulate(makes_room, world_size=2, seed=seed, transport="nccl")
        report.check()
        assert report.results == dict.fromkeys(range(2), [2.0] * (MAX_LANES + 1))


def test_a_device_that_gives_up_names_the_rank_that_was_killed() -> None:
    """The device's error is of an unknown kind, and named no rank."""
    program = from_json(
        '{"ranks": 2, "tasks": [{"calls": [{}]}, {"calls": [{"pauses": 2}]}, {"calls": [{"coalesced": true, '
        '"wait": "cut short", "pauses": 2}]}], "start": "task group"}'
    )
    found, _ = complaints(unwaited(program), 16087, [Kill(1, after_call=2)], transport="nccl", schedule=PCT())
    assert not found, found


def test_who_leaves_before_its_second_refusal_is_told_has_left() -> None:
    """It counted as having made that call, and its peer waited for it until the deadline."""
    program = from_json(
        '{"ranks": 2, "tasks": [{"calls": [{"operation": "broadcast", "payload": "text, None elsewhere", '
        '"wait": "dropped"}, {"payload": "wrong on one", "wait": "dropped", "root": 1}]}], '
        '"start": "task group"}'
    )
    for seed in range(1138, 1143):
        found, report = complaints(program, seed)
        assert not found, found
        assert report.virtual_seconds < 5.0


def test_a_lane_that_was_opened_anew_waits_at_its_end_for_all_threads_that_open_it() -> None:
    """Of two threads, one for each epoch, only the latest was joined: the other outlived its world."""
    program = from_json(
        '{"ranks": 2, "tasks": [{"calls": [{"operation": "broadcast", "payload": "tree, None elsewhere"}]}]}'
    )
    for seed in range(40):
        found, _ = complaints(program, seed, transport="memory", again=True)
        assert not found, found


async def adds(rank: int) -> None:
    await ac.all_reduce(1)


def test_a_cancellation_that_comes_after_the_last_turn_of_trio_is_lost() -> None:
    """There is nothing left to cancel; the fault ended in trio's RunFinishedError."""
    for number in range(60, 130):
        faults = [Cancel(1, at=number * 2e-5)]
        report = simulate(adds, world_size=2, seed=number, loop="trio", faults=faults)
        assert report.deadlock is None, report.deadlock
        assert all("RunFinished" not in repr(error) for error in report.errors.values()), report.errors


def test_a_rank_that_is_blocked_in_a_call_still_announces_it_to_other_hosts() -> None:
    """The thread that made calls that were confirmed also sent the notes for which the peers held theirs."""
    program = from_json(
        '{"ranks": 2, "tasks": [{"calls": ['
        '{"operation": "scatter", "root": 1}, {"wait": "threaded"}, {"operation": "scatter", "root": 1}]}]}'
    )
    for seed in range(40):
        schedule = PCT(3) if seed % 2 else RandomWalk()
        found, _ = complaints(program, seed, transport="nccl", nodes=2, schedule=schedule)
        assert not found, found


async def five_at_once(rank: int) -> list[str]:
    """Issue five calls of two steps each, and say how each of them ended."""
    works = [ac.all_reduce(torch.ones(2)) for _ in range(5)]
    return [await ended(work) for work in works]


async def ended(work: ac.Work[torch.Tensor]) -> str:
    try:
        return str((await work).tolist())
    except ac.CollectiveError as error:
        return f"{type(error).__name__}: {error}"


def test_a_refusal_is_settled_although_a_thread_waits_for_the_device() -> None:
    """The thread that issues calls waited for a step of a lost call, so its rank could make no statement."""
    for seed in range(12):
        faults = [Fail(1, after_call=4)]  # the second step of the second call
        report = simulate(
            five_at_once, world_size=3, seed=seed, transport="nccl", check="full", faults=faults
        )
        report.check()
        assert report.virtual_seconds < 10.0
        for rank, said in report.results.items():
            kinds = [one.partition(":")[0] for one in said]
            assert kinds[:2] == ["[3.0, 3.0]", "CollectiveError" if rank == 1 else "PeerRefusedError"], said
            assert set(kinds[2:]) <= {"[3.0, 3.0]", "PeerRefusedError"}, said


async def three_in_turn(rank: int) -> list[str]:
    return [await ended(ac.all_reduce(torch.ones(2), timeout=100.0)) for _ in range(3)]


def test_who_leaves_without_having_issued_a_held_call_is_told_has_left() -> None:
    """The held call counted as made, and a rank that had been stopped waited for it until the deadline."""
    said = []
    for seed in range(6):
        faults = [Fail(1, after_call=2), Stop(0, 25.0, after_call=2)]
        report = simulate(three_in_turn, world_size=3, seed=seed, transport="mpi", nodes=3, faults=faults)
        report.check()
        assert report.virtual_seconds < 40.0
        said.append(report.results[0][-1])
    assert any("PeerLostError" in one and "rank 1 (" in one for one in said), said
    assert not any("skipped" in one for one in said), said
