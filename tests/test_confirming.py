"""Calls of ranks on different nodes are compared before they are made: drawn programs, simulated."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import torch

import asynccoll as ac
from asynccoll import host
from asynccoll.flight import Headers, Recorder
from asynccoll.flight.layout import TEXT_BYTES
from asynccoll.health import confirming
from asynccoll.health.accounts import NOTE
from asynccoll.health.prediction import Prediction
from asynccoll.order.queue import Queue
from asynccoll.testing import Kill, Link, Stop, simulate

# What is expected


def test_a_loop_is_expected_once_it_has_repeated_itself() -> None:
    """A call is expected once the same call has followed the same two calls before."""
    prediction = Prediction()
    expected = [prediction.expects(call) for call in [1, 2, 3, 4] * 3]
    assert expected == [False] * 6 + [True] * 6


def test_what_is_new_is_expected_the_next_time() -> None:
    """A call that came instead of the expected one replaces it."""
    prediction = Prediction()
    for call in [1, 1, 1, 1]:
        prediction.expects(call)
    assert [prediction.expects(call) for call in (1, 2, 1, 1, 2)] == [True, False, False, False, True]
    prediction.restart()
    assert not prediction.expects(1)


def test_a_program_that_never_repeats_itself_takes_no_more_memory() -> None:
    prediction = Prediction()
    assert not any(prediction.expects(call) for call in range(10_000))
    assert len(prediction._followed) <= 4096


# Drawn programs


def of(rank: int, count: int = 3) -> torch.Tensor:
    return torch.full((count,), float(rank), device="cpu")


#: What is called, and its result on that many ranks.
CALLS: dict[str, tuple[Any, Any]] = {
    "sum": (lambda rank, size: ac.all_reduce(of(rank)), lambda size: [float(sum(range(size)))] * 3),
    "max": (lambda rank, size: ac.all_reduce(of(rank), op="max"), lambda size: [size - 1.0] * 3),
    "longer": (lambda rank, size: ac.all_reduce(of(rank, 8)), lambda size: [float(sum(range(size)))] * 8),
    "of integers": (lambda rank, size: ac.all_reduce(of(rank).long()), lambda size: [sum(range(size))] * 3),
    "broadcast": (lambda rank, size: ac.broadcast(of(rank), src=0), lambda size: [0.0] * 3),
    "gather": (
        lambda rank, size: ac.all_gather(of(rank, 1)),
        lambda size: [float(rank) for rank in range(size)],
    ),
    "scatter": (
        lambda rank, size: ac.reduce_scatter(of(rank, size)),
        lambda size: [float(sum(range(size)))],
    ),
    "object": (lambda rank, size: ac.all_gather_object(rank), lambda size: list(range(size))),
}


class Drawn:
    """A loop with a few other calls inserted; in most of them some ranks differ at one call."""

    def __init__(self, seed: int, size: int) -> None:
        source = random.Random(seed)
        names = list(CALLS)
        loop = [source.choice(names) for _ in range(source.randint(1, 4))]
        self.calls = (loop * 6)[: source.randint(3, 16)]
        for _ in range(source.randint(0, 2)):
            self.calls.insert(source.randrange(len(self.calls) + 1), source.choice(names))
        self.pauses = [[source.choice((0, 0, 0, 1e-4, 3e-3)) for _ in self.calls] for _ in range(size)]
        self.place = source.randrange(len(self.calls)) if source.random() < 0.8 else -1
        self.differ = source.sample(range(size), source.randint(1, size - 1))
        self.other = source.choice([name for name in names if name != self.calls[self.place]])
        self.loop = source.choice(("asyncio", "trio"))
        self.size = size

    def name(self, rank: int, place: int) -> str:
        return self.other if place == self.place and rank in self.differ else self.calls[place]

    async def __call__(self, rank: int) -> list[Any]:
        got: list[Any] = []
        for place, pause in enumerate(self.pauses[rank]):
            await anyio.sleep(pause)
            try:
                result = await CALLS[self.name(rank, place)][0](rank, self.size)
                got.append(result.tolist() if isinstance(result, torch.Tensor) else result)
            except ac.CollectiveError as error:
                got.append(error)
        return got

    def check(self, rank: int, got: list[Any], ends_alone: bool) -> None:
        """Check that results are right, and that every rank's mismatch error names both sides' lines."""
        for place, result in enumerate(got):
            name = self.name(rank, place)
            through = ends_alone and name == "broadcast"  # ranks that agree on a root may have completed it
            if place != self.place or (through and isinstance(result, list)):
                assert result == CALLS[name][1](self.size), (rank, place, name, result)
            else:
                assert isinstance(result, ac.CollectiveMismatchError), (rank, place, name, result)
                assert str(result).count("test_confirming.py:") >= 2, result


@pytest.mark.parametrize(
    ("transport", "size", "nodes"),
    [("gloo", 2, 2), ("gloo", 4, 2), ("gloo", 3, 3), ("memory", 4, 2), ("mpi", 3, 3), ("horovod", 2, 2)],
)
def test_who_differs_is_told_on_every_rank(transport: str, size: int, nodes: int) -> None:
    """All other calls are unaffected: the lane still works, with right results."""
    for seed in range(30):
        drawn = Drawn(seed, size)
        report = simulate(
            drawn, world_size=size, nodes=nodes, seed=seed, transport=transport, loop=drawn.loop,
            link=Link((20e-6, 2e-3), 1e9),
        )  # fmt: skip
        report.check()
        for rank, got in report.results.items():
            drawn.check(rank, got, ends_alone=transport == "mpi")


def test_a_held_call_has_its_deadline_and_names_who_has_not_made_it() -> None:
    """It has both like a call in flight."""

    async def main(rank: int) -> str:
        await ac.all_reduce(of(rank))
        if rank == 1:
            await anyio.sleep(30)
            await ac.all_gather(of(rank))
            return ""
        work = ac.all_gather(of(rank), timeout=2.0)
        with pytest.raises(ac.CollectiveTimeoutError) as caught:
            await work
        await anyio.sleep(40)
        assert (await work).tolist() == [0.0] * 3 + [1.0] * 3
        return str(caught.value)

    report = simulate(main, world_size=2, nodes=2, timeout=100)
    report.check()
    assert "rank 1" in report.results[0]
    assert "has not called all_gather" in report.results[0]


def test_a_rank_that_dies_is_named_while_a_call_is_held_for_it() -> None:
    """After its death it confirms no call, and no other rank does so for it."""

    async def main(rank: int) -> str:
        await ac.all_reduce(of(rank))
        if rank == 1:
            await anyio.sleep(30)
        try:
            await ac.all_gather(of(rank))
        except ac.PeerLostError as error:
            return str(error)
        return ""

    report = simulate(main, world_size=2, nodes=2, faults=[Kill(1, at=1.0)], timeout=100)
    assert 0 not in report.errors, report.errors
    assert "rank 1" in report.results[0]


def test_calls_of_trees_of_many_leaves_are_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note has the names and shapes of all leaves, as far as they fit into a text."""
    texts: list[str] = []
    plain = confirming._plain

    def noted(call: confirming.Announced) -> dict[str, object]:
        texts.append(call.text())
        return plain(call)

    monkeypatch.setattr(confirming, "_plain", noted)
    source = random.Random(1)
    leaves = [
        (f"{source.getrandbits(40):x}", torch.ones(source.randint(1, 99), device="cpu")) for _ in range(140)
    ]

    async def main(rank: int) -> list[float]:
        trees = [dict(leaves[:count]) for count in range(110, 140, 2)]
        return [float((await ac.all_reduce(tree))[leaves[0][0]][0]) for tree in trees]

    report = simulate(main, world_size=2, nodes=2, transport="gloo", operation_timeout=5.0)
    report.check()
    assert report.results == dict.fromkeys(range(2), [2.0] * 15)
    assert TEXT_BYTES - 60 < max(map(len, texts)) <= TEXT_BYTES


def test_messages_pass_a_call_that_is_held() -> None:
    """The other rank needs the message before it makes the held call."""

    async def main(rank: int) -> float:
        await ac.all_reduce(of(rank))
        if rank == 0:
            held = ac.all_gather(of(rank))
            await ac.send(of(7), dst=1)
            await held
            return 7.0
        got = await ac.recv(of(0), src=0)
        await ac.all_gather(of(rank))
        return float(got[0])

    for seed in range(20):
        report = simulate(main, world_size=2, nodes=2, seed=seed, transport="gloo")
        report.check()
        assert report.results == {0: 7.0, 1: 7.0}


# Ranks that are far ahead


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_a_rank_that_comes_hundreds_of_calls_late_hears_what_the_others_have_called(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's node has spoken for it: on MPI the others have completed, on gloo all calls are in flight."""
    monkeypatch.setattr(confirming, "OVER", 64)

    async def main(rank: int) -> bool:
        if rank == 1:
            await anyio.sleep(10)
        works = [ac.broadcast(of(index), src=2) for index in range(400)]
        got = [await work for work in works]
        return [x.tolist() for x in got] == [[index] * 3 for index in range(400)]

    report = simulate(main, world_size=4, nodes=2, transport=transport)
    report.check()
    assert all(report.results.values())


def test_calls_that_are_forgotten_are_taken_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are more calls that could not be expected than a rank keeps."""
    monkeypatch.setattr(confirming, "MOST_UNEXPECTED", 8)
    monkeypatch.setattr(confirming, "OVER", 2)

    async def main(rank: int) -> bool:
        if rank == 1:
            await anyio.sleep(10)
        got = [await ac.broadcast(of(7, count), src=2) for count in range(1, 40)]
        return [x.tolist() for x in got] == [[7.0] * count for count in range(1, 40)]

    report = simulate(main, world_size=4, nodes=2, transport="mpi")
    report.check()
    assert all(report.results.values())


@pytest.mark.parametrize(("transport", "told"), [("gloo", "broadcast src=1"), ("mpi", "which has completed")])
def test_a_rank_that_differs_about_what_was_expected_hundreds_of_calls_ago_is_told(
    transport: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On MPI the root had completed earlier, and continues with calls that are in step again."""
    monkeypatch.setattr(confirming, "OVER", 64)

    async def main(rank: int) -> list[str]:
        for _ in range(6):
            await ac.broadcast(of(rank), src=1)
        await anyio.sleep(10 * (1 - rank))
        calls = [lambda: ac.broadcast(of(rank), src=1)] * 400
        if rank == 0:
            calls[0] = lambda: ac.all_gather(of(rank))
        works = [call() for call in calls]
        said = []
        for work in works:
            try:
                await work
            except (ac.CollectiveMismatchError, ac.PeerRefusedError) as error:
                said.append(str(error))
        await anyio.sleep(20)
        assert (await ac.all_reduce(of(rank))).tolist() == [1.0] * 3
        return said

    report = simulate(main, world_size=2, nodes=2, transport=transport, timeout=50)
    report.check()
    assert "all_gather" in report.results[0][0] and told in report.results[0][0]
    assert transport == "mpi" or "all_gather" in report.results[1][0]


def test_a_call_that_is_just_being_forgotten_has_been_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that asks at this moment would wait for it, and is asked no more."""
    monkeypatch.setattr(confirming, "OVER", 2)
    lane = SimpleNamespace(group=SimpleNamespace(key="world"), key="default", epoch=0, is_over=lambda _: True)
    answers = []

    class Forgetting(dict[int, confirming.Announced]):
        def __delitem__(self, nth: int) -> None:
            super().__delitem__(nth)
            answers.append(one.made(confirming.Where(0, nth), confirming.Note(7, nth, 1, "another call")))

    every = confirming.Confirmations(0, lambda *_: {})
    one = confirming.Confirming(cast("Any", lane), every, {0: 0, 1: 1})
    one._said = Forgetting()
    try:
        for nth in range(1, 5):
            one._say(nth, confirming.Announced(nth, nth, nth, 1, str))
    finally:
        every.close()
    assert len(answers) == 2
    assert all(answers)


@pytest.mark.parametrize(
    ("transport", "nodes"), [("gloo", 1), ("gloo", 2), ("memory", 1), ("memory", 2), ("mpi", 1), ("mpi", 2)]
)
def test_a_block_that_has_more_calls_on_one_rank_is_a_mismatch(transport: str, nodes: int) -> None:
    """The mismatch is immediate, also if the others call nothing else (the last turn) and wait for it."""

    async def main(rank: int) -> list[str]:
        said = []
        for turn in range(6):
            with ac.coalescing():
                works = [ac.all_reduce(of(rank)), ac.all_reduce(of(rank, 2), op="max")]
                if turn == 5 and rank == 1:
                    works.append(ac.broadcast(of(rank), src=0))
            for work in works:
                try:
                    await work
                except ac.CollectiveError as error:
                    said.append(f"{turn} {type(error).__name__} {error}")
        return said

    for seed in range(10):
        report = simulate(main, world_size=4, nodes=nodes, seed=seed, transport=transport)
        report.check()
        for rank, said in report.results.items():
            assert len(said) == (3 if rank == 1 else 2), said
            assert all(one.startswith("5 CollectiveMismatchError") for one in said), said
            assert all(f"all_reduce max{more}" in one for one in said for more in ("):", ", broadcast")), said


def test_a_block_on_a_lane_that_took_a_closed_ones_place_in_the_recorder_has_an_end() -> None:
    """It needs its own end: with that of the closed lane's block the others would wait until a timeout."""

    async def main(rank: int) -> None:
        for turn in range(4):
            with ac.coalescing():
                await ac.all_reduce(of(rank), lane=f"{turn}")
                more = ac.all_gather(of(rank), lane=f"{turn}") if turn < 3 or rank == 0 else None
            if turn < 3:
                await more
                ac.close_lane(f"{turn}")
            elif more is not None:
                with pytest.raises(ac.CollectiveMismatchError, match="rank 1: end of coalescing at"):
                    await more
            await ac.barrier()

    simulate(main, world_size=2, nodes=2).check()


def test_a_lane_for_which_the_recorder_has_no_room_leaves_the_others_headers_alone() -> None:
    """Its header would be taken for another lane's."""
    recorder = Recorder(0, 2)
    Headers(recorder, -1, "world", "one too many", {}).write(1, 1, 1, 1)
    assert not any(recorder.headers)
    recorder.close()


def test_a_held_call_that_a_refusal_overtakes_is_lost_or_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its rank was about to start it: no rank announces what the others call any more."""
    start = Queue.start

    def late(queue: Queue) -> None:
        if queue._jobs and queue._jobs[0].gate is not None and queue._jobs[-1].place == 8:
            host.sleep(5)
        start(queue)

    monkeypatch.setattr(Queue, "start", late)

    async def main(rank: int) -> str:
        for _ in range(6):
            await ac.all_reduce(of(rank))
        await anyio.sleep(rank)
        works = [ac.all_gather(of(rank)) if rank else ac.all_reduce(of(rank)), ac.broadcast(of(rank), src=0)]
        with pytest.raises(ac.CollectiveMismatchError):
            await works[0]
        with pytest.raises(ac.PeerRefusedError):
            await works[1]
        return str((await ac.all_reduce(of(rank))).tolist())

    report = simulate(main, world_size=2, nodes=2, transport="gloo", timeout=100)
    report.check()
    assert report.results == {0: "[1.0, 1.0, 1.0]", 1: "[1.0, 1.0, 1.0]"}


def test_a_stopped_host_does_not_hold_up_the_calls_of_others() -> None:
    """It is asked repeatedly what it calls on one lane, while a group without it continues."""

    async def main(rank: int) -> float:
        group = ac.new_group([0, 1])
        await ac.all_reduce(of(rank))
        await anyio.sleep(10)
        held = ac.all_gather(of(rank), timeout=200.0)
        begun = anyio.current_time()
        for count in range(20 if rank < 2 else 0):
            await ac.all_reduce(of(rank, 1 + count), group=group)
        took = anyio.current_time() - begun
        await held
        return took

    report = simulate(main, world_size=3, nodes=3, faults=[Stop(2, 80.0, at=1.0)], timeout=200)
    report.check()
    # The first note waits half a second for the answer of the stopped rank. Further notes would, too.
    assert max(report.results.values()) < 2, report.results


def test_a_call_that_fails_to_be_made_keeps_no_other_from_being_made() -> None:
    """It was settled as far as anyone knew, but its promise was not."""
    every = confirming.Confirmations(0, lambda *_: {})
    call = confirming.Announced(1, 1, 1, 1, str)
    held = [
        confirming._Held(cast("Any", SimpleNamespace()), confirming.Where(0, nth), call, set(), [])
        for nth in (1, 2)
    ]

    def fails() -> None:
        raise RuntimeError("can't start new thread")

    held[0].promise.add_callback(fails)
    every._held = list(held)
    every._decide()
    with pytest.raises(RuntimeError, match="new thread"):
        every._settle()
    assert all(one.promise.done() for one in held)


def test_an_earlier_note_is_sent_again_to_a_rank_that_answers_a_later_one() -> None:
    """Regression: it was sent again only to ranks that had not answered since, and calls waited for it."""
    asked: list[int] = []

    def ask(ranks: Any, question: str, _: float) -> Any:
        asked.append(json.loads(question.removeprefix(NOTE))["place"])
        return {rank: {} for rank in ranks} if len(asked) > 1 else {}

    every = confirming.Confirmations(0, ask)
    lane: Any = SimpleNamespace(name="a lane", is_broken=False)
    every._held = [
        confirming._Held(lane, confirming.Where(0, nth), confirming.Announced(1, 1, nth, 1, str), {1}, [(1,)])
        for nth in (2, 3)
    ]
    while every.is_telling:
        assert not asked or every._wanted.is_set()
        every._wanted.clear()
        every._look()
    assert asked == [2, 3, 2]


def test_an_answer_that_comes_while_a_call_is_settled_does_not_change_what_is_read() -> None:
    """Regression: "dictionary changed size during iteration" broke the lane, instead of a mismatch."""
    answer = {"word": 2, "place": 1, "part": 1, "text": "another call"}
    every = confirming.Confirmations(0, lambda ranks, *_: dict.fromkeys(ranks, answer))
    told: list[int] = []

    def error(_: object, others: Any) -> Exception:
        for rank in others:
            told.append(rank)
            every._tell(held, {2})  # as the thread does that sends notes
        return RuntimeError("a mismatch")

    lane: Any = SimpleNamespace(name="a lane", is_broken=False, error=error)
    call = confirming.Announced(1, 1, 1, 1, str)
    held = confirming._Held(lane, confirming.Where(0, 1), call, {2}, [(1, 2)])
    held.learn(1, confirming.Note.of(answer))
    every._held = [held]
    every._decide()
    every._settle()
    assert (told, held.promise.done(), every.is_telling) == ([1], True, False)
