"""Headers of calls: ranks that read each other's memory compare their next calls by them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynccoll.flight import Headers, Recorder
from asynccoll.flight.layout import HALF_BYTES, HEADER_WORDS, HEADERS
from asynccoll.host.call_number import CHILD, ROUND

Pair = tuple[Headers, Headers, Recorder]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Yield the headers of two ranks of one lane, and the recorder of the second."""
    recorders = [Recorder(rank, 2) for rank in range(2)]
    numbers = [recorder.lane("world", "default") for recorder in recorders]
    one, other = (
        Headers(recorders[k], numbers[k], "world", "default", {1 - k: recorders[1 - k].buffer})
        for k in range(2)
    )
    yield one, other, recorders[1]
    for recorder in recorders:
        recorder.close()


@pytest.mark.parametrize("child", [0, 1, 4, 40, 70])
def test_alike_is_no_difference_and_another_call_is_one(pair: Pair, child: int) -> None:
    one, other, _ = pair
    first = child * CHILD
    for place in (first + 1, first + 2):
        assert one.write(7, 0, place, 1) == {}
        assert other.write(7, 0, place, 1) == {}
    assert one.write(7, 0, first + 3, 1) == {}
    assert other.write(8, 0, first + 3, 1) == {0: (first + 3, 1)}


def test_the_text_of_a_call_is_found_where_the_memory_for_texts_begins_anew(pair: Pair) -> None:
    """Text numbers wrap around below its size, even after months of shapes that never recur."""
    one, other, recorder = pair
    for place in range(1, 6):
        if place == 3:
            recorder._written = 2 * HALF_BYTES - 10
        other.write(9, recorder.write(b"call %d" % place, None), place, 1)
        one.write(8, 256, place, 1)
        assert one.text(1) == f"call {place}"


def test_calls_of_before_the_last_joins_are_not_compared(pair: Pair) -> None:
    """Each rank continues at the next multiple; the other's calls from four joins ago are still in memory."""
    one, other, _ = pair
    for joined in range(1, 9):
        places = [joined * ROUND + call for call in ((1, 2, 3) if joined % 4 == 1 else (1,))]
        for headers in (one, other):
            headers.restart(joined * ROUND)
        assert [one.write(joined, 0, place, 1) for place in places] == [{}] * len(places)
        assert [other.write(joined, 0, place, 1) for place in places] == [{}] * len(places)
    assert other.write(7, 0, 8 * ROUND + 2, 1) == {}
    assert one.write(8, 0, 8 * ROUND + 2, 1) == {1: (8 * ROUND + 2, 1)}


@pytest.mark.parametrize("child", [0, 1, 4, 40, 70])
@pytest.mark.parametrize("lap", [0, 1])
def test_what_is_just_being_written_is_no_difference(pair: Pair, child: int, lap: int) -> None:
    """A header's number is visible before the header; the writing rank will compare both later."""
    one, other, recorder = pair
    calls = lap * HEADERS + 3
    for place in range(child * CHILD + 1, child * CHILD + calls):
        one.write(7, 0, place, 1)
        other.write(7, 0, place, 1)
    last = child * CHILD + calls
    other.write(8, 0, last, 1)
    at = calls % HEADERS * HEADER_WORDS
    written = recorder.headers[at]
    recorder.headers[at] = 0
    assert one.write(7, 0, last, 1) == {}
    recorder.headers[at] = written
    assert one.write(7, 0, last + 1, 1) == {}  # the slot is empty


def test_calls_of_an_earlier_child_are_told_where_the_ranks_part(pair: Pair) -> None:
    """Rank 0 has started the next child; rank 1 has not."""
    one, other, _ = pair
    assert one.write(7, 0, CHILD + 1, 1) == {}
    assert other.write(7, 0, CHILD + 1, 1) == {}
    assert one.write(7, 0, 2 * CHILD + 1, 1) == {}
    assert other.write(7, 0, CHILD + 2, 1) == {0: (CHILD + 2, 1)}
