"""Asking a job from outside, while it hangs and afterwards: where, dumps, diff, stragglers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import jobs
from asynccoll import errors, flight, host
from asynccoll.cli import main
from asynccoll.cli.where import overview
from asynccoll.flight import Call, Flight, Progress, dumps, hang_of, partings, unmet
from asynccoll.flight.layout import GIVEN_UP, REFUSED
from asynccoll.health.accounts import Account, Peer
from asynccoll.host import shared_memory
from asynccoll.jobs import live, whereabouts
from asynccoll.jobs.whereabouts import Job, Whereabouts, find_jobs
from asynccoll.trace.stragglers import by_line, load_stragglers

# Where ranks diverge


AT = {"lane": "default", "place": "train.py:8", "group": "world"}


def call(sequence: int, operation: str = "all_reduce", of: str = "float32[4] sum", **more) -> Call:
    at = {**AT, "called": 10.0 + sequence, **more}
    group, lane, called = at["group"], at["lane"], at["called"]
    ended = at.get("ended", called)
    return Call(
        sequence, group, at.get("lane_key", lane), lane, operation, of, at["place"], sequence,
        at.get("part", 1), -1, 16,
        called, called, ended, 0.0 if ended else called, "",
    )  # fmt: skip


def recorded(rank: int, *calls: Call, size: int = 3) -> Flight:
    lanes = {(one.group, one.lane_key): one.sequence for one in calls}
    progress = tuple(Progress(group, key, place) for (group, key), place in lanes.items())
    return Flight(rank, size, 70 + rank, 0.0, 0.0, "running", 0.0, calls, progress)


def told(*flights: Flight) -> list[str]:
    return [str(one) for one in partings({one.rank: one for one in flights})]


def test_ranks_that_called_the_same_do_not_part() -> None:
    assert told(*(recorded(rank, call(1), call(2)) for rank in range(3))) == []


def test_a_different_call_is_shown_from_both_sides() -> None:
    assert told(
        recorded(0, call(1), call(2)),
        recorded(1, call(1), call(2, of="float32[5] sum", place="train.py:9")),
        recorded(2, call(1), call(2)),
    ) == [
        (
            "lane 'default', #2: ranks 0, 2: all_reduce float32[4] sum at train.py:8; "
            "rank 1: all_reduce float32[5] sum at train.py:9"
        )
    ]


def test_the_first_place_counts_and_differences_before_absences() -> None:
    late = recorded(1, call(1), call(1, "broadcast", lane="eval"))
    assert told(
        recorded(0, call(1), call(2), call(3, "barrier", ""), call(1, "all_gather", lane="eval")), late
    ) == [
        (
            "lane 'eval', #1: rank 0: all_gather float32[4] sum at train.py:8; "
            "rank 1: broadcast float32[4] sum at train.py:8"
        ),
        "lane 'default', #2: rank 0: all_reduce float32[4] sum at train.py:8; rank 1: has not called",
    ]


def test_what_is_recorded_no_longer_is_not_compared() -> None:
    """Rank 1 is far ahead, and its ring begins at 5: what was before is unknown."""
    ahead = recorded(1, *(call(place) for place in range(5, 9)))
    behind = recorded(0, *(call(place, of="float32[9] sum") for place in range(1, 5)))
    assert told(behind, ahead) == [PARTS_AT_5]


PARTS_AT_5 = "lane 'default', #5: rank 0: has not called; rank 1: all_reduce float32[4] sum at train.py:8"


def test_what_was_not_told_of_a_rank_does_not_count_as_absent() -> None:
    """Of ranks of a large world, only the last calls and earlier ones in flight are reported."""
    made = [call(place, ended=0.0 if place == 1 else 9.0) for place in range(1, 9)]
    told_of = flight.from_plain(flight.to_plain(recorded(1, *made), 2))
    assert told(recorded(0, *made), told_of) == []
    (found,) = partings({0: recorded(0, *made[:-1], call(8, "barrier")), 1: told_of})
    assert (found.kind, found.agreed) == ("different", 7)
    (found,) = partings({0: recorded(0, *made, call(9)), 1: told_of})
    assert (found.kind, found.missing) == ("absent", (1,))


def test_a_group_is_compared_among_its_members() -> None:
    of = {"group": "0-2"}
    assert told(recorded(0, call(1, **of)), recorded(1), recorded(2, call(1, **of))) == []
    assert told(recorded(0, call(1, **of)), recorded(1), recorded(2)) == [
        (
            "lane 'default' of ranks 0, 2, #1: rank 0: all_reduce float32[4] sum at train.py:8; "
            "rank 2: has not called"
        )
    ]


def test_the_first_call_from_different_lines_hints_at_a_skipped_one() -> None:
    """Rank 1 has skipped #2 or #3 of four equal calls in a loop, and continues with the call after it."""
    whole = recorded(0, *(call(place) for place in (1, 2, 3, 4)), call(5, place="train.py:9"))
    less = recorded(1, *(call(place) for place in (1, 2, 3)), call(4, place="train.py:9"))
    (parting,) = partings({0: whole, 1: less})
    assert (parting.kind, parting.agreed, parting.missing) == ("absent", 4, (1,))
    assert parting.hint == (
        "a rank may have skipped an earlier call: likely at #4, the first that was called from different "
        "lines: train.py:8 on rank 0, train.py:9 on rank 1"
    )
    places = {0: "train.py:8", 1: "train.py:9"}
    assert parting.to_dict()["strayed"] == {"sequence": 4, "places": places, "exact": True}
    (parting,) = partings({0: whole, 1: recorded(1, call(1), call(2))})
    assert (parting.hint, parting.to_dict()["strayed"]) == ("", None)


def test_a_record_that_begins_too_late_does_not_say_where_a_call_was_skipped() -> None:
    lines = ("train.py:8", "train.py:9")
    first = recorded(0, *(call(place, place=lines[place % 2]) for place in (6, 7, 8, 9)))
    second = recorded(1, *(call(place, place=lines[1 - place % 2]) for place in (5, 6, 7, 8)))
    (parting,) = partings({0: first, 1: second})
    assert parting.hint == (
        "a rank may have skipped an earlier call: at #6, where the recorded calls begin, or before: "
        "train.py:8 on rank 0, train.py:9 on rank 1"
    )
    strayed = parting.strayed
    assert strayed is not None and not strayed.exact


def test_a_call_of_several_parts_is_compared_part_by_part() -> None:
    zero, one = (
        recorded(rank, call(1), call(1, of=of, part=2)) for rank, of in enumerate(("int64[2]", "int64[3]"))
    )
    (parting,) = partings({0: zero, 1: one})
    assert parting.sides() == [
        ((0,), "all_reduce int64[2] at train.py:8"),
        ((1,), "all_reduce int64[3] at train.py:8"),
    ]


def message(operation: str, peer: int, group: str = "world", ended: float = 0.0) -> Call:
    return Call(
        1, group, "default", "default", operation, "", "ring.py:5", 0, 7, peer, 8, 10.0, 10.0, ended, 10.0, ""
    )


def test_messages_whose_other_side_nobody_called_are_told() -> None:
    ring = {rank: recorded(rank, message("send", (rank + 1) % 3)) for rank in range(3)}
    assert str(unmet(ring)[0]) == (
        "rank 0 waits in send to rank 1 (tag 7) on lane 'default' at ring.py:5: "
        "rank 1 has not called recv from rank 0 (tag 7)"
    )
    assert [(one.rank, one.peer) for one in unmet(ring)] == [(0, 1), (1, 2), (2, 0)]
    met = {0: recorded(0, message("send", 1)), 1: recorded(1, message("recv", 0))}
    assert unmet(met) == unmet({0: recorded(0, message("send", 1, ended=11.0)), 1: recorded(1)}) == []
    group = {0: recorded(0, message("recv_object", 1, "0-2")), 2: recorded(2)}
    assert [one.missing for one in unmet(group)] == ["send_object to rank 0 (tag 7)"]


def refused(sequence: int, operation: str = "all_reduce") -> Call:
    made = call(sequence, operation, "", place="train.py:9")
    return made._replace(waited=REFUSED, failure="PayloadTypeError: got None")


def test_who_has_refused_its_call_has_called() -> None:
    flights = {rank: recorded(rank, call(1), call(2, ended=0.0)) for rank in (0, 2)}
    flights[1] = recorded(1, call(1), refused(2))
    (parting,) = partings(flights)
    assert parting.kind == "refused"
    assert str(parting) == (
        "lane 'default', #2: ranks 0, 2: all_reduce float32[4] sum at train.py:8; "
        "rank 1: all_reduce at train.py:9, refused there: PayloadTypeError: got None"
    )
    found = hang_of(flights, dict.fromkeys(flights, 60.0))
    assert str(found) == (
        "rank 1 refused all_reduce #2 on lane 'default', in which ranks 0, 2 have waited 48.00 s "
        "(train.py:8): called it at train.py:9, and it was refused there: PayloadTypeError: got None"
    )
    flights[2] = recorded(2, call(1))
    assert str(hang_of(flights, dict.fromkeys(flights, 60.0))).startswith("ranks 1, 2 have not called")
    assert partings({rank: recorded(rank, refused(1)) for rank in range(3)}) == []


# Which rank all others wait for


def hung(size: int = 3) -> dict[int, Flight]:
    """Rank 1 skips an all_reduce on "metrics", in which the others wait, and later waits for them."""
    skipped = {"lane": "metrics", "place": "train.py:7"}
    others = [call(5, **skipped), call(6, **skipped, ended=0.0, called=20.0)]
    mine = [call(5, **skipped), call(9, lane="gradients/backward", ended=0.0, called=22.0)]
    return {rank: recorded(rank, *(mine if rank == 1 else others)) for rank in range(size)}


SAME_ORDER = "await lanes in the same order on every rank, and never skip a call, here or in an earlier step"
SKIPPED_OR_FEWER = (
    "either rank 1 skipped all_reduce #6 on lane 'metrics', as under an `if` that is not true on every rank, "
    "or ranks 0, 2 had fewer batches, or inputs that do not require grad: never skip a call; a rank without "
    "data for a step still has to await the gradients (or optimizer.step())"
)


def test_of_a_circle_the_rank_is_named_that_left_a_call_out() -> None:
    flights = hung()
    verdict = "rank 1 has not called all_reduce #6 on lane 'metrics', in which ranks 0, 2 have waited {} s "
    verdict += (
        "(train.py:7), but waits in all_reduce #9 on lane 'gradients/backward' (train.py:8) for ranks 0, 2"
    )
    verdict += f": {SKIPPED_OR_FEWER}"
    assert str(hang_of(flights, dict.fromkeys(flights, 60.0))) == verdict.format("40.00")
    assert str(hang_of(flights)) == verdict.format("2.00")  # until the last recorded time


def test_of_a_circle_in_which_nobody_stands_out_all_sides_are_told() -> None:
    """Two ranks await two lanes in opposite order: neither has skipped a call."""
    two = {
        0: recorded(0, call(1, lane="a", place="train.py:3", ended=0.0)),
        1: recorded(1, call(1, lane="b", place="train.py:4", ended=0.0, called=12.0)),
    }
    found = hang_of(two, dict.fromkeys(two, 31.0))
    assert str(found) == (
        "ranks wait in a circle: rank 0 waits in all_reduce #1 on lane 'a' (train.py:3) for rank 1, and "
        f"rank 1 in all_reduce #1 on lane 'b' (train.py:4) for rank 0, for 20.00 s: {SAME_ORDER}"
    )
    assert found is not None
    assert (found.ranks, found.waiting) == ((), (0,))
    four = {
        **{rank: replace(two[0], rank=rank) for rank in (0, 2)},
        **{rank: replace(two[1], rank=rank) for rank in (1, 3)},
    }
    assert "ranks 1, 3 in all_reduce #1 on lane 'b' (train.py:4) for ranks 0, 2" in str(hang_of(four))


def test_a_circle_on_one_lane_says_that_some_have_closed_it() -> None:
    """Rank 0 has closed and reopened lane "eval"; the others wait in a call on the first lane "eval"."""
    mine = call(1, lane="eval", lane_key="eval~1", place="train.py:3", ended=0.0)
    others = [
        call(1, lane="eval", lane_key="eval", place="train.py:3"),
        call(2, lane="eval", lane_key="eval", place="train.py:3", ended=0.0),
    ]
    for size in (2, 3):
        flights = {
            rank: recorded(rank, others[0], *([mine] if rank == 0 else [others[1]])) for rank in range(size)
        }
        told = str(hang_of(flights))
        assert "call ac.close_lane(name) on every rank, between the same calls" in told
        assert SAME_ORDER not in told


def test_a_circle_over_several_groups_is_told_all_around() -> None:
    """The wait of rank 3 leads into the circle, but is not part of it."""
    ring = {
        rank: recorded(rank, call(1, lane="ring", group=group, ended=0.0, called=10.0 + rank))
        for rank, group in enumerate(("0-1", "1-2", "0-2"))
    }
    later = recorded(3, call(1, lane="side", group="0-3", ended=0.0, called=1.0))
    found = hang_of({**ring, 3: later}, dict.fromkeys(range(4), 31.0))
    assert found is not None
    assert [(turn.waiting, turn.ranks) for turn in found.circle] == [((0,), (1,)), ((1,), (2,)), ((2,), (0,))]


def test_of_a_circle_the_rank_is_named_that_refused_a_call() -> None:
    """It is named whichever rank has waited longer."""
    zero = recorded(0, call(1), call(2, ended=0.0, called=20.0))
    one = recorded(1, call(1), refused(2), call(1, lane="eval", ended=0.0, called=14.0))
    found = hang_of({0: zero, 1: one}, dict.fromkeys(range(2), 60.0))
    assert str(found).startswith("rank 1 refused all_reduce #2 on lane 'default', in which rank 0 has waited")


def test_who_is_held_up_itself_is_not_named() -> None:
    """Rank 0 waits for both others; rank 1 waits for rank 2, which is somewhere else."""
    zero = recorded(0, call(1, ended=0.0, called=1.0))
    one = recorded(1, call(1, lane="side", group="1-2", ended=0.0, called=2.0))
    found = hang_of({0: zero, 1: one, 2: recorded(2)}, dict.fromkeys(range(3), 9.0))
    assert found is not None
    assert (found.ranks, found.lane, found.waiting) == ((2,), "side of [1, 2]", (1,))


def test_who_waits_for_a_message_is_not_named() -> None:
    """Rank 1 waits for rank 2, which skipped its send; neither has made the call in which rank 0 waits."""
    waits = call(4, lane="metrics", ended=0.0)._replace(called=20.0)
    flights = {0: recorded(0, waits), 1: recorded(1, message("recv", 2)), 2: recorded(2, call(3))}
    assert str(hang_of(flights, dict.fromkeys(flights, 60.0))) == (
        "rank 2 has not called send to rank 1 (tag 7) on lane 'default', for which rank 1 has waited 50.00 s "
        "(ring.py:5)"
    )


def crossed(*waits: tuple[int, str, int]) -> dict[int, Flight]:
    return {rank: recorded(rank, message(operation, peer)) for rank, operation, peer in waits}


START_FIRST = (
    "start all sends and receives before you await any of them (`sent = ac.send(...)`, `await ac.recv(...)`, "
    "`await sent`, or ac.batch_isend_irecv of both)"
)


def test_ranks_that_wait_for_each_others_messages_are_told_so() -> None:
    two = crossed((0, "recv", 1), (1, "recv", 0))
    found = hang_of(two, dict.fromkeys(two, 60.0))
    assert str(found) == (
        "ranks 0, 1 each wait for a message from the other, and neither has sent one: rank 0 waits at "
        "ring.py:5 for rank 1 to call send to rank 0 (tag 7), and rank 1 at ring.py:5 for rank 0 to call "
        f"send to rank 1 (tag 7), for 50.00 s: {START_FIRST}"
    )
    assert found is not None
    assert (found.ranks, found.waiting) == ((), (0,))
    assert str(hang_of(two)).endswith(START_FIRST)  # from recordings, too
    ring = crossed((0, "recv", 2), (1, "recv", 0), (2, "recv", 1))
    assert str(hang_of(ring, dict.fromkeys(ring, 60.0))).startswith(
        "ranks 0, 1, 2 each wait for a message from another, and none has sent one: rank 0 waits at "
        "ring.py:5 for rank 2 to call send to rank 0 (tag 7), and rank 2 "
    )
    sends = crossed((0, "send_object", 1), (1, "send", 0))
    assert str(hang_of(sends, dict.fromkeys(sends, 60.0))).startswith(
        "ranks 0, 1 each wait for the other to receive a message, and neither does: rank 0 waits "
    )
    mixed = crossed((0, "recv", 1), (1, "recv", 2), (2, "send", 0))
    mixed[2] = recorded(2, message("send", 0)._replace(part=8))
    assert str(hang_of(mixed, dict.fromkeys(mixed, 60.0))).startswith(
        "ranks 0, 1, 2 each wait for another to send or receive a message: rank 0 waits "
    )


def test_each_wait_for_a_message_is_one_of_its_own() -> None:
    """The warning of the next wait, with the same ranks and tag, is not suppressed as a repetition."""
    first = crossed((0, "recv", 1), (1, "recv", 0))
    other = {rank: replace(one, calls=(one.calls[0]._replace(ticket=9),)) for rank, one in first.items()}
    one, two, again = (hang_of(flights) for flights in (first, other, dict(reversed(first.items()))))
    assert one and two and again
    assert one.key == again.key != two.key


def test_of_a_circle_of_messages_those_that_nobody_waits_for_are_no_part() -> None:
    """They were started early, or they are the two sides of one message with different tags."""
    early = crossed((0, "recv", 1), (1, "recv", 0))
    early[1] = recorded(1, message("recv", 0)._replace(waited=0.0))
    assert hang_of(early) is None
    two = {0: recorded(0, message("recv", 1)), 1: recorded(1, message("send", 0)._replace(part=8))}
    assert len(unmet(two)) == 2
    assert hang_of(two, dict.fromkeys(two, 60.0)) is None


def test_who_gathers_a_whole_state_alone_is_told_what_is_for_every_rank() -> None:
    two = {
        0: recorded(0, call(1, "all_gather", lane="sharded/full_state/backward", ended=0.0)),
        1: recorded(1, call(1, lane="sharded/backward", ended=0.0)),
    }
    told = str(hang_of(two, dict.fromkeys(two, 31.0)))
    assert "call full_state_dict() (or full_optimizer_state()) on every rank, and only save what" in told
    assert SAME_ORDER not in told and "had fewer batches" not in told


def test_a_message_that_was_started_early_is_no_wait() -> None:
    """Rank 0 posts a receive early and continues; so does rank 1, which then computes."""
    late = recorded(1, call(3), message("recv", 0))
    for early in ([message("recv", 2), call(4, ended=0.0)], [call(4, ended=0.0)]):
        flights = {0: recorded(0, *early), 1: late, 2: recorded(2, call(4, ended=0.0))}
        found = hang_of(flights, dict.fromkeys(flights, 60.0))
        assert found is not None
        assert (found.ranks, found.operation, found.waiting) == ((1,), "all_reduce", (0, 2))


#: For a call in flight: ``waited`` in its record, whether it counts as a wait while its rank is live, and in
#: a dump. The rank's clock is at 60 s; its last call was at 12 s.
WAITED = {
    "somebody waits": (50.0, True, True),
    "has just timed out": (-59.8, True, True),
    "timed out": (-30.0, False, True),
    "timed out before the next call": (-11.5, False, False),
    "was cancelled": (GIVEN_UP, False, False),
    "nobody ever waited": (0.0, False, True),
}


@pytest.mark.parametrize("what", WAITED)
def test_what_nobody_waits_for_is_part_of_no_circle(what: str) -> None:
    waited, live, dumped = WAITED[what]
    side = call(1, lane="side", ended=0.0)._replace(waited=waited)
    flights = {0: recorded(0, call(2, ended=0.0)), 1: recorded(1, side, call(2, lane="eval"))}
    for now, expected in (({0: 60.0, 1: 60.0}, live), (None, dumped)):
        found = hang_of(flights, now)
        assert found is not None
        assert (found.ranks == ()) == bool(found.circle) == expected, str(found)


def test_a_call_before_one_that_is_waited_for_on_its_lane_is_what_holds_it_up() -> None:
    first = call(1, ended=0.0)._replace(waited=0.0)
    flights = {0: recorded(0, first, call(2, ended=0.0)), 1: recorded(1)}
    found = hang_of(flights, {0: 60.0, 1: 60.0})
    assert found is not None
    assert (found.ranks, found.sequence) == ((1,), 1)


def test_nobody_is_waited_for_where_all_have_called_or_called_different_things() -> None:
    over = recorded(0, call(1), call(2))
    assert hang_of({0: over, 1: recorded(1, call(1))}) is None
    later = call(1, lane="eval", ended=0.0)
    zero, one = (
        recorded(rank, call(1, ended=0.0, of=of)) for rank, of in enumerate(("int64[2]", "int64[3]"))
    )
    assert hang_of({0: recorded(0, *zero.calls, later), 1: one}) is None


def test_where_and_diff_begin_with_whom_all_wait_for(tmp_path: Path, capsys, monkeypatch) -> None:
    """In a dump they have waited until it was written, whatever was recorded last."""
    flights = hung()
    monkeypatch.setattr(host, "wall_clock", lambda: 28.0)
    verdict = "rank 1 has not called all_reduce #6 on lane 'metrics', in which ranks 0, 2 have waited"
    others = "waits in all_reduce #9 on lane 'gradients/backward' (train.py:8) for ranks 0, 2"
    dumps.write_dumps(tmp_path / "job", flights)
    assert main(["trace", "diff", str(tmp_path / "job")]) == 1
    assert capsys.readouterr().out.startswith(
        f"{verdict} 8.00 s (train.py:7), but {others}: {SKIPPED_OR_FEWER}\n\nlane "
    )
    assert main(["trace", "diff", str(tmp_path / "job"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["hang"]
    assert (found["ranks"], found["waiting"], found["sequence"]) == ([1], [0, 2], 6)
    peer = Peer("", 0, "n1", 1 << 30, "", -1, 0)
    ranks = [Whereabouts(rank, peer, Account(rank, one, 60.0)) for rank, one in flights.items()]
    jobs_of_this_host = [Job(1, "", ()), Job(3, "", tuple(ranks))]
    assert overview(jobs_of_this_host) == [
        "0 of 1 ranks",
        f"3 of 3 ranks, pid {1 << 30}",
        f"  {verdict} 40.00 s (train.py:7), but {others}: {SKIPPED_OR_FEWER}",
    ]


def test_the_calls_of_a_rank_are_gone_through_once_however_often_lanes_are_asked_for() -> None:
    """They are not gone through for each unfinished call and each other rank."""

    class Counted(tuple[Call, ...]):
        __slots__ = ()
        times = 0

        def __iter__(self) -> Iterator[Call]:
            type(self).times += 1
            return super().__iter__()

    def times(unfinished: int) -> int:
        Counted.times = 0
        waiting = [call(place, lane="a", ended=0.0) for place in range(1, 1 + unfinished)]
        flights = {rank: recorded(rank, *waiting) for rank in range(3)}
        flights[1] = recorded(1, call(1, lane="b"))
        assert hang_of({rank: replace(one, calls=Counted(one.calls)) for rank, one in flights.items()})
        return Counted.times

    assert times(1) == times(50)


def test_who_is_missed_in_a_call_is_found_out_once_however_many_ranks_wait_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    reached = Flight.reached
    monkeypatch.setattr(Flight, "reached", lambda one, *lane: asked.append(one.rank) or reached(one, *lane))

    def times(size: int) -> int:
        asked.clear()
        flights = {rank: recorded(rank, call(1, ended=0.0), size=size) for rank in range(size)}
        flights[1] = recorded(1, size=size)
        assert hang_of(flights)
        return len(asked)

    assert times(40) <= 2 * times(20)


def test_of_a_thousand_ranks_a_verdict_is_short() -> None:
    size = 1000
    flights = {rank: recorded(rank, call(1, ended=0.0), size=size) for rank in range(size)}
    flights |= {rank: recorded(rank, size=size) for rank in (1, 7)}
    told = (
        "ranks 1, 7 have not called all_reduce #1 on lane 'default', in which ranks 0, 2-6, 8-999 have waited"
    )
    assert str(hang_of(flights)).startswith(told)
    ring = crossed(*((rank, "recv", (rank - 1) % size) for rank in range(size)))
    found = str(hang_of(ring, dict.fromkeys(ring, 60.0)))
    assert found.startswith("ranks 0-999 each wait for a message from another, and none has sent one: ")
    assert "and so on in 992 more waits" in found
    halves = [call(1, lane=lane, ended=0.0) for lane in "ab"]
    crossing = {rank: recorded(rank, halves[rank % 2], size=size) for rank in range(size)}
    assert "for ranks 1, 3, 5, 7, 9, 11, 13, 15 and 492 more, and" in str(hang_of(crossing))


def test_without_a_name_several_jobs_are_listed(monkeypatch, capsys) -> None:
    """Calls and stacks are shown only for a named job: on a shared machine, others belong to other users."""
    peer = Peer("", 0, "n1", 1 << 30, "", -1, 0)
    account = Account(0, recorded(0, call(1), size=1), 60.0, stacks={"": ("step (train.py:9)",)})
    several = [Job(1, meets, (Whereabouts(0, peer, account),)) for meets in ("n1:5", "")]
    monkeypatch.setattr(whereabouts, "find_jobs", lambda _what: several)
    assert main(["where"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 of 1 ranks, met at n1:5",
        f"1 of 1 ranks, pid {1 << 30}",
        "",
        "name one to see its calls and stacks: where its ranks met, or one of its processes",
    ]
    assert main(["where", "77"]) == 0
    assert capsys.readouterr().out.count("step (train.py:9)") == 2
    assert main(["where", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


# Dumps


def test_a_recording_is_no_dump_and_its_commands_are_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "rank-00000.jsonl").write_text("{}\n")
    assert main(["trace", "diff", str(tmp_path)]) == 2
    assert "`asynccoll trace merge` shows" in capsys.readouterr().err


def test_a_dump_is_no_job_that_can_be_asked(tmp_path: Path, capsys) -> None:
    dumps.write_dumps(tmp_path / "job", {0: recorded(0, call(1))})
    (tmp_path / "job" / "rank-1.json").write_text('{"of": "another program"}')
    assert main(["where", str(tmp_path / "job")]) == 2
    assert "for the dumps of a failure there is asynccoll trace diff" in capsys.readouterr().err


def test_a_dump_is_what_was_recorded(tmp_path: Path) -> None:
    flights = {0: recorded(0, call(1), call(2)), 1: recorded(1, call(1))}
    assert dumps.write_dumps(tmp_path / "job", flights)
    assert dumps.read_dumps(tmp_path / "job").flights == flights
    assert (tmp_path / "job").stat().st_mode & 0o077 == 0


def test_the_dumps_of_some_jobs_are_kept(tmp_path: Path) -> None:
    for number in range(25):
        job = tmp_path / f"{number:012x}"
        dumps.write_dumps(job, {0: recorded(0)})
        os.utime(job, (number, number))
    assert len(list(tmp_path.iterdir())) <= 21
    assert (tmp_path / f"{24:012x}").is_dir()


def test_what_the_user_keeps_beside_dumps_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any name, in a directory that was new or already full."""
    parent = tmp_path / "of a job" / "checkpoints"
    monkeypatch.setenv(dumps.VARIABLE, str(parent))
    for number in range(30):
        for name in (f"run{number}", f"{number:012x}"):
            (parent / name).mkdir(parents=True)
            (parent / name / "weights.pt").write_text("")
    for number in range(25):
        directory = dumps.directory_for(f"job {number}")
        assert directory is not None
        assert dumps.write_dumps(directory, {0: recorded(0)})
    assert len(list(parent.glob("*/weights.pt"))) == 60
    assert len(list(parent.glob("*/rank-0.json"))) <= 21


def test_a_lane_whose_calls_one_rank_has_overwritten_is_no_parting() -> None:
    """Its table of lanes says how far it has come on this one."""

    def of(rank: int, more: int) -> Flight:
        recorder = flight.Recorder(rank, 3)
        lane = recorder.lane("world", "init")
        text = recorder.learn(
            "init", ("world", "init", "init", "all_reduce", "float32[4] sum", "t.py:1"), None
        )
        recorder.ended(recorder.note(text, lane, 1, 1, -1, 16, 1.0, 1.0), 2.0)
        for _ in range(flight.RECORDS - 1 + more):  # messages have no place in the order
            recorder.note(text, -1, 0, 0, 1, 16, 3.0, 3.0)
        found = flight.read(recorder.buffer)
        recorder.close()
        assert found is not None
        assert found.reached("world", "init") == 1
        return found

    flights = {0: of(0, 1), 1: of(1, 0), 2: of(2, 0)}
    assert [sum(one.sequence > 0 for one in each.calls) for each in flights.values()] == [0, 1, 1]
    assert partings(flights) == []


def test_a_process_may_have_a_name_that_ends_within_a_letter() -> None:
    """The kernel cuts names after 15 bytes."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    try:
        comm.write_bytes(b"a" * 14 + "é".encode())
        assert shared_memory.process_state(os.getpid()) in "RSD"
        assert shared_memory.exit_code(os.getpid()) is None
        assert live._parents()[os.getpid()] == os.getppid()
    finally:
        comm.write_bytes(before.strip())


def test_what_cannot_be_written_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not dumps.write_dumps(tmp_path / "file" / "job", {0: recorded(0)})
    with pytest.raises(errors.InvalidArgumentError, match="there is no dump in"):
        dumps.read_dumps(tmp_path)


def test_a_failure_is_told_where_no_dump_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a temporary directory writes a file, and raises without descriptors or disk space."""

    def gettempdir() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.delenv(dumps.VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    assert dumps.directory_for("a job") is None


@pytest.mark.parametrize("content", ["", "[]", "{}", "5", "null", '"said"'])
def test_what_is_no_dump_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "rank-0.json").write_text(content)
    with pytest.raises(errors.InvalidArgumentError, match="there is no dump in"):
        dumps.read_dumps(tmp_path)


def test_no_secret_is_in_a_dump(tmp_path: Path) -> None:
    recorder = flight.Recorder(0, 2)
    recorder.say(host="n1", secret="of the job")
    dumps.write_dumps(tmp_path / "job", {0: flight.read(recorder.buffer)})
    recorder.close()
    (file,) = (tmp_path / "job").iterdir()
    assert "of the job" not in file.read_text()
    assert dumps.read_dumps(tmp_path / "job").flights[0].said == {"host": "n1"}


# Stragglers


def test_who_came_last_and_by_how_much(tmp_path: Path, capsys) -> None:
    """Counted over each operation: rank 1 is late by 0.5 and 1.5 s, rank 0 once by 0.25 s."""
    zero = recorded(0, call(1, called=10.0), call(2, called=20.0), call(3, called=30.25))
    one = recorded(1, call(1, called=10.5), call(2, called=21.5), call(3, called=30.0))
    dumps.write_dumps(tmp_path / "job", {0: zero, 1: one})
    lines = by_line(load_stragglers(tmp_path / "job").arrivals)
    assert [(line.rank, line.calls, line.last, line.total, line.median, line.longest) for line in lines] == [
        (1, 3, 2, 2.0, 1.0, 1.5),
        (0, 3, 1, 0.25, 0.25, 0.25),
    ]
    assert main(["trace", "stragglers", str(tmp_path / "job"), "--json", "-n", "1"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["rank"], shown["longest"]) == (1, 1.5)
    assert main(["trace", "stragglers", str(tmp_path / "job")]) == 0
    assert "who was last, of 3 operations" in capsys.readouterr().out


# A job that hangs

HANGS = """
    import ctypes, os, signal, sys, asynccoll as ac, torch
    ac.initialize()
    ac.all_reduce(torch.ones(4)).wait()
    if ac.get_rank() == 1:
        print(os.getpid(), flush=True)
        if sys.argv[1] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif sys.argv[1] == "native":
            ctypes.PyDLL(None).sleep(100)
        sys.stdin.read()
        __import__("time").sleep(100)
    try:
        ac.all_reduce(torch.ones(5), lane="gradients", timeout=1).wait()
    except ac.CollectiveTimeoutError as error:
        print(*str(error).splitlines(), flush=True)
    work = ac.all_reduce(torch.ones(5), lane="gradients")
    print("called again", flush=True)
    work.wait()
"""


@pytest.mark.parametrize("how", ["sleeping", "stopped", "native"])
def test_a_job_that_hangs_is_asked_from_outside(tmp_path: Path, capsys, how: str) -> None:
    script = jobs.writing(tmp_path)(HANGS)
    kept = tmp_path / "dumps"
    with jobs.starting(tmp_path) as start:
        job = start("run", "-n", 2, script, how, ASYNCCOLL_DUMPS=str(kept))
        pid, heard, _ = job.lines(3)
        code = main(["where", str(job.process.pid), "--json"])
        (asked,) = json.loads(capsys.readouterr().out)
        assert code == 0
        (met,) = {one.meets for one in find_jobs(pid)}
        assert [len(one.ranks) for one in find_jobs(met)] == [2]
        main(["where", met])
        shown = capsys.readouterr().out
        if how == "stopped":
            os.kill(int(pid), signal.SIGCONT)
    zero, one = asked["ranks"]
    assert (one["pid"], asked["world_size"], asked["command"]) == (int(pid), 2, f"{script} {how}")
    assert shown.startswith(f"2 of 2 ranks of {script} {how}, met at {met}\n")
    states = {"sleeping": "running", "stopped": "stopped", "native": "does not answer (native code?)"}
    assert (zero["state"], one["state"]) == ("running", states[how])
    assert [(c["operation"], c["of"], c["state"]) for c in one["calls"]] == [
        ("all_reduce", "float32[4] sum", "finished")
    ]
    assert (zero["calls"][-1]["lane"], zero["calls"][-1]["place"][-13:]) == ("gradients", "program.py:17")
    assert any("program.py" in frame for frame in zero["stacks"][0]["frames"])
    assert bool(one["stacks"]) is (how == "sleeping")
    assert [(p["lane"], p["kind"], p["agreed"]) for p in asked["partings"]] == [("gradients", "absent", 0)]
    assert "lane 'gradients': not all ranks have called at #1" in shown
    # The ranks are gone, but the directory that the error named still has their dumps.
    (directory,) = re.findall(r"asynccoll trace diff (\S+) shows", heard)
    assert Path(directory).parent == kept
    assert main(["trace", "diff", directory, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == [0, 1]
    (parting,) = found["partings"]
    assert parting["sides"][1] == {"ranks": [1], "called": "has not called"}


SPAWNS = """
import multiprocessing, os, sys

def told_until_the_end(receiver):
    print(os.getpid(), flush=True)  # it: while a process begins, it shows no command
    receiver.poll(None)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    context.Process(target=told_until_the_end, args=(receiver,)).start()
    sys.stdin.read()
"""


def test_a_rank_that_was_spawned_is_shown_as_the_program_that_spawned_it(tmp_path: Path) -> None:
    """`multiprocessing` starts it with a command of its own, which names no program."""
    script = tmp_path / "train.py"
    script.write_text(SPAWNS)
    with subprocess.Popen(
        [sys.executable, "-B", "-W", "ignore", script, "--epochs", "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        shown = live.command_of(pid)
        started.kill()
    assert shown == f"{script} --epochs 3"


def test_there_is_no_such_job(capsys, tmp_path: Path) -> None:
    assert main(["where", "1.2.3.4:5"]) == 1
    assert "no rank of this host has joined a job at 1.2.3.4:5" in capsys.readouterr().out
    for wrong, why in (("nonsense", "is not a job"), (str(tmp_path), "no rank has registered")):
        assert main(["where", wrong]) == 2
        assert why in capsys.readouterr().err
