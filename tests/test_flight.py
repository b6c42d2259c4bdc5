"""The flight recorder: what each call writes, and what other processes read."""

from __future__ import annotations

import os
import struct
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
from asynccoll import flight
from asynccoll.flight import layout
from asynccoll.flight.layout import lane_id
from asynccoll.flight.reading import text_at
from asynccoll.health.accounts import Account
from asynccoll.health.blame import Awaited, blame
from asynccoll.host import shared_memory
from asynccoll.host.words import lane_name
from asynccoll.order.records import Records
from ranks import Rank
from worlds import World


def note(recorder: flight.Recorder, place: int, *, name: str = "all_reduce", lane: int = -1) -> int:
    text = recorder.texts.get(name) or recorder.learn(
        name, ("world", "default", "default", name, "float32[4] sum", "train.py:7"), None
    )
    return recorder.note(text, lane, place, 1, -1, 16, 100.0 + place, 100.5 + place)


def read(recorder: flight.Recorder) -> flight.Flight:
    found = flight.read(recorder.buffer)
    assert found is not None
    return found


@pytest.fixture
def recorder():
    made = flight.Recorder(1, 3)
    yield made
    made.close()


def test_a_lane_is_named_with_the_ranks_of_its_group() -> None:
    """A long group is cut when it is recorded, and is named with its last ranks."""
    assert lane_name("eval", "world") == "lane 'eval'"
    assert lane_name("eval", "0-12") == "lane 'eval' of ranks [0, 12]"
    for count in (100, 101, 1000):
        group, _ = lane_id("-".join(map(str, range(count))), "eval")
        told = lane_name("eval", group).removeprefix("lane 'eval' of ranks [..., ").removesuffix("]")
        ranks = list(map(int, told.split(", ")))
        assert ranks == list(range(count - len(ranks), count)), group
        assert len(ranks) > 5
        parting = flight.Parting("absent", group, "eval", 0, {})
        assert parting.where == f"lane 'eval' of ranks ..., {told}"


def test_what_was_written_is_read(recorder):
    recorder.say(host="n1", port=7)
    ticket = note(recorder, 41)
    recorder.waited(ticket, 142.0)
    recorder.ended(ticket, 143.0)
    late = note(recorder, 42, name="broadcast")
    recorder.failed(late, "rank 2 is gone", 150.0)
    found = read(recorder)
    assert (found.rank, found.world_size, found.pid, found.ending) == (1, 3, os.getpid(), "running")
    assert found.said == {"host": "n1", "port": 7}
    assert found.calls == (
        flight.Call(
            1, "world", "default", "default", "all_reduce", "float32[4] sum", "train.py:7",
            41, 1, -1, 16, 141.0, 141.5, 143.0, 142.0, "",
        ),
        flight.Call(
            2, "world", "default", "default", "broadcast", "float32[4] sum", "train.py:7",
            42, 1, -1, 16, 142.0, 142.5, 150.0, 0.0, "rank 2 is gone",
        ),
    )  # fmt: skip
    assert [call.state for call in found.calls] == ["finished", "failed"]
    assert found.calls[0].name == "all_reduce #41 on lane 'default'"


def test_the_last_1024_are_kept_and_how_far_each_lane_is(recorder):
    first, second = recorder.lane("world", "rare"), recorder.lane("world", "default")
    note(recorder, 3, lane=first)
    for place in range(1, 2001):
        note(recorder, place, lane=second)
    found = read(recorder)
    assert [call.sequence for call in found.calls] == list(range(977, 2001))
    assert found.reached("world", "rare") == 3
    assert found.reached("world", "default") == 2000
    assert found.reached("world", "other") == 0


def test_how_far_a_lane_came_is_known_once_it_is_closed_and_where_there_is_no_room_for_it(recorder):
    """Otherwise waiting ranks would blame a rank that has made its calls on a lane and closed it."""
    closed = recorder.lane("world", "closed")
    note(recorder, 3, lane=closed)
    recorder.forget_lane(closed)
    others = [recorder.lane("world", f"lane {number}") for number in range(layout.LANES)]
    assert others[-2:] == [layout.LANES - 1, closed]  # its row was reused only when no other was left
    text = recorder.learn(
        "late", ("world", "late", "late", "all_reduce", "float32[4] sum", "train.py:7"), None
    )
    recorder.note(text, recorder.lane("world", "late"), 2, 1, -1, 16, 100.0, 100.0)
    found = read(recorder)
    assert found.reached("world", "late") == 2
    assert found.reached("world", "closed") == 0
    awaited = Awaited("all_reduce", "world", "late", "late", 2)
    for sequence, ranks in ((2, ()), (3, (1,))):
        account = Account(1, found, 102.0, "S", near=True, answers=True)
        assert blame(replace(awaited, sequence=sequence), {1: account}, (), str).ranks == ranks


def test_what_is_refused_on_a_closed_lane_is_no_call_on_the_one_that_has_its_row(recorder):
    closed = Records(recorder, "world", "closed", "closed")
    for _ in range(2):
        closed.forget()
    numbers = [recorder.lane("world", f"lane {number}") for number in range(layout.LANES + 1)]
    assert numbers == [*range(1, layout.LANES), 0, -1]
    closed.refused("all_reduce", 7, 1, -1, "AbortedError: it was closed")
    assert read(recorder).reached("world", "lane 255") == 0


def test_a_closed_lane_is_read_until_its_row_is_needed(recorder):
    lane = recorder.lane("world", "rare")
    note(recorder, 3, lane=lane)
    recorder.forget_lane(lane)
    for place in range(1, layout.RECORDS + 1):
        note(recorder, place)
    assert read(recorder).reached("world", "rare") == 3


def test_what_is_told_of_a_record_that_is_no_more_changes_nothing(recorder):
    old = note(recorder, 1)
    for place in range(2, 1500):
        note(recorder, place)
    recorder.ended(old, 5.0)
    recorder.failed(old, "late", 5.0)
    assert {call.state for call in read(recorder).calls} == {"in flight"}


def test_the_numbers_of_texts_stay_small(recorder):
    """Other ranks find a text by the low 32 bits of its number, even after months of new shapes."""
    for number in range(7000):  # 14 MB in a 12 MB area
        text = recorder.write(f"{number} {'x' * 2000}".encode(), None)
        assert 0 < text < 2 * layout.HALF_BYTES
        assert text_at(recorder.buffer, text).startswith(f"{number} x")


def test_a_long_failure_ends_with_a_word(recorder):
    recorder.failed(note(recorder, 1), "a rank has called something else; " * 100, 2.0)
    (only,) = read(recorder).calls
    assert len(only.failure) <= layout.TEXT_BYTES
    assert only.failure.endswith("a rank has called something else; ...")


def test_texts_without_end_leave_those_of_the_records_readable(recorder):
    for place in range(1, 12_000):  # about 5 MB of texts in 2 MB
        recorder.note(
            recorder.learn(place, ("g" * 300, f"k{place}", "l", "op", "of", "x" * 200 + f":{place}"), None),
            -1, place, 1, -1, 0, 1.0, 1.0,
        )  # fmt: skip
        recorder.failed(place, f"failure {place} " + "y" * 2000, 2.0)
    found = read(recorder)
    assert len(found.calls) == 1024
    assert all(call.lane_key == f"k{call.sequence}" for call in found.calls)
    assert all(call.place.endswith(f"x:{call.sequence}") for call in found.calls)
    assert all(call.failure.startswith(f"failure {call.sequence} y") for call in found.calls)
    assert len({call.group for call in found.calls}) == 1


def test_long_names_are_cut_and_stay_apart():
    one, other = layout.joined(["a" * 100 + "b" * 100]), layout.joined(["c" * 100 + "b" * 100])
    assert len(one) == len(other) == layout.PARTS[0]
    assert one != other
    assert layout.parted(layout.joined(["x\x1fy", "z"])) == ["x?y", "z"]


#: Its name is cut: the first ranks are missing from what is read.
_LARGE, _ = lane_id("-".join(map(str, range(0, 64, 2))), "default")


def _of_large(rank: int, *calls: flight.Call) -> flight.Flight:
    latest = max((call.sequence for call in calls), default=0)
    lanes = (flight.Progress(_LARGE, "default", latest),) if calls else ()
    return flight.Flight(rank, 64, 100 + rank, 0.0, 0.0, "running", 0.0, calls, lanes)


def _reduced(number: int, ended: float) -> flight.Call:
    return flight.Call(
        number, _LARGE, "default", "default", "all_reduce", "float32[4] sum", "train.py:8",
        number, 1, -1, 16, 1.0, 1.0, ended, 1.0, "",
    )  # fmt: skip


def test_a_rank_of_a_large_group_is_missed_although_its_name_is_cut() -> None:
    """Names are cut for groups of 24 or more ranks, except the world."""
    over, waits = _reduced(1, 1.5), _reduced(2, 0.0)
    flights = {rank: _of_large(rank, over, *[waits] * (rank != 4)) for rank in range(0, 64, 2)}
    flights[1] = _of_large(1)
    hang = flight.hang_of(flights, dict.fromkeys(flights, 5.0))
    assert hang is not None
    assert hang.ranks == (4,)
    (parting,) = flight.partings(flights)
    assert parting.missing == (4,)
    assert sorted(parting.calls) == list(range(0, 64, 2))


def test_messages_of_a_large_group_name_no_wrong_rank() -> None:
    """A cut name does not say which rank the other end is."""
    told = "default", "default", "send", "float32[4]", "train.py:8"
    send = flight.Call(1, _LARGE, *told, 0, 0, 1, 16, 1.0, 1.0, 0.0, 1.0, "")
    recv = send._replace(operation="recv", peer=0)
    assert send.peer_rank == -1
    assert send.title == "send"
    flights = {0: _of_large(0, send), 2: _of_large(2, recv)}
    assert flight.unmet(flights) == []
    assert flight.is_answered(flights[2], _LARGE, "default", "send", 0, 0)


def test_another_process_reads_it(recorder):
    note(recorder, 5)
    descriptors = list(shared_memory.find(os.getpid(), layout.NAME))
    assert recorder.descriptor in descriptors
    reader, writer = os.pipe()
    child = os.fork()
    if not child:  # reads it like another process of this host
        memory = shared_memory.look(os.getppid(), recorder.descriptor)
        found = flight.read(memory)
        os.write(writer, str(found.calls[-1].sequence).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 100) == b"5"
    os.close(reader)


def test_nobody_is_there_to_be_read():
    assert shared_memory.look(os.getpid(), 10_000) is None
    assert shared_memory.process_state(os.getpid()) == "R"
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitid(os.P_PID, gone, os.WEXITED | os.WNOWAIT)
    assert shared_memory.process_state(gone) == "Z"
    os.waitpid(gone, 0)
    assert shared_memory.process_state(gone) == ""
    assert list(shared_memory.find(gone, layout.NAME)) == []


def test_a_descriptor_is_given_back(recorder):
    before = len(os.listdir("/proc/self/fd"))
    other = flight.Recorder(0, 1)
    other.close()
    assert len(os.listdir("/proc/self/fd")) == before
    note(other, 1)  # a rank may still note a call then


def test_a_record_that_is_being_written_is_left_out(recorder):
    note(recorder, 1)
    note(recorder, 2)
    at = layout.RECORDS_AT + 2 * layout.RECORD.size
    memory = bytearray(recorder.buffer)
    struct.pack_into("=Q", memory, at, 2 + layout.RECORDS)  # its first word belongs to the next round
    found = flight.read(bytes(memory))
    assert [call.sequence for call in found.calls] == [1]


@given(st.data())
def test_any_bytes_are_read_without_failing(data):
    recorder = flight.Recorder(0, 2)
    lane = recorder.lane("world", "default")
    note(recorder, 1, lane=lane)
    memory = bytearray(recorder.buffer)
    recorder.close()
    for _ in range(20):
        at = data.draw(st.integers(40, layout.RECORDS_AT + 4 * layout.RECORD.size) | st.integers(0, 7))
        noise = data.draw(st.binary(min_size=1, max_size=64))
        memory[at : at + len(noise)] = noise
    assert len(memory) == layout.SIZE_BYTES
    found = flight.read(bytes(memory))
    assert found is None or all(call.state for call in found.calls)


def test_what_is_no_recorders_is_not_read():
    assert flight.read(b"") is None
    assert flight.read(bytes(layout.SIZE_BYTES)) is None


def test_a_recorder_remembers_a_bounded_number_of_kinds() -> None:
    """A program with new shapes in every step would keep them all; recorded texts stay readable."""
    with closing(flight.Recorder(0, 2)) as recorder:
        for number in range(3000):
            recorder.texts[number] = recorder.write(f"kind {number}".encode(), object())
        assert 0 < len(recorder.texts) <= 1024
        assert all(
            text_at(recorder.buffer, written) == f"kind {kind}" for kind, written in recorder.texts.items()
        )


def test_of_an_account_the_last_calls_are_told_and_those_in_flight(recorder):
    for place in range(1, 9):
        ticket = note(recorder, place)
        if place != 2:
            recorder.ended(ticket, 200.0)
    told = flight.from_plain(flight.to_plain(read(recorder), 3))
    assert [call.sequence for call in told.calls] == [2, 6, 7, 8]
    assert flight.from_plain(flight.to_plain(read(recorder))) == read(recorder)


def roots(me: Rank) -> list[str]:
    x, names = torch.ones(4), ("broadcast", "reduce")
    for root in (0, 1, 0):
        _ = ac.broadcast(x, src=root).wait()
        _ = ac.reduce(x, dst=root).wait()
    calls = read(ac.runtime.current().recorder).calls  # the latest ones of the process
    return [call.of for call in calls if call.operation in names][-6:]


def test_calls_of_one_line_are_told_apart_by_their_root(pair: World) -> None:
    """Regression: the root of the first was shown for all."""
    told = [f"float32[4] {words}={root}" for root in (0, 1, 0) for words in ("src", "sum dst")]
    assert pair.run(roots, runner="blocking") == [told, told]
