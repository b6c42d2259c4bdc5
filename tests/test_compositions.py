"""Random programs that combine the library's features: each rank gets what one process would have got.

`make compositions` draws further ones, for as long as it is asked to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import worlds
from compositions import Call, Program, Task
from compositions_drawn import programs
from compositions_tried import complaints, has_messages, report
from patience import patient
from worlds import World

#: Seconds for reducing a failing program.
REDUCING_SECONDS = 40
#: How many programs are drawn, by the number of ranks.
COUNTS = {1: 15, 2: 60, 3: 30, 4: 10, 5: 10}


def test_programs(world: World) -> None:
    """No program gets a wrong number, mode, lane or gradient, or hangs."""
    look_at_programs(world)


@pytest.mark.slow
@pytest.mark.processes  # replicas in one process are two or four
@pytest.mark.parametrize("backend", worlds.BACKENDS)
def test_programs_on_five_ranks(backend: str) -> None:
    """The same holds on five ranks, where groups have members in the middle."""
    look_at_programs(worlds.world(backend, 5))


def look_at_programs(world: World) -> None:
    @settings(max_examples=COUNTS[world.size])
    @given(st.data())
    def one(data: st.DataObject) -> None:
        program = data.draw(programs(world.size, has_messages(world.backend)))
        found = complaints(program, world.backend)
        if found:
            pytest.fail(report(program, found, world.backend, patient(REDUCING_SECONDS)), pytrace=False)

    one()


def alone(*calls: Call) -> Program:
    """Return a program of one task on two ranks."""
    return Program(2, (Task(calls),))


def overlapping(*tasks: Call, start: str = "task group") -> Program:
    """Return a program of tasks with one call each."""
    return Program(2, tuple(Task((call,)) for call in tasks), start=start)


def of(payload: str, operation: str = "all_reduce", **said: Any) -> Call:
    return Call(operation, payload, **said)


#: Programs that failed once, by description.
FOUND = {
    "a tree in a scope": alone(of("tree of tensors", around=("scope",))),
    "a prepared tree in a scope": alone(of("tree of tensors", form="prepared", around=("scope",))),
    "a coalescing block in a scope": Program(2, (Task((of("tensor", coalesced=True),) * 2, ("scope",)),)),
    "coalesced averages in a scope": Program(
        2, (Task((of("tensor", op="avg", coalesced=True),) * 2, ("scope",)),)
    ),
    "no_grad beside another task": overlapping(
        of("tensor", pauses=2, around=("no_grad",)), of("tracked", pauses=1)
    ),
    "a default device beside another task": overlapping(
        of("tensor", pauses=1, around=("default device",)), of("object", "broadcast_object", pauses=2)
    ),
    "modes of the parent": replace(overlapping(of("tracked"), of("tracked")), inherited=("no_grad",)),
    "sent by a block before a call that is refused": alone(
        of("tracked", "all_gather", coalesced=True, wait="later"), of("keyed by sets", coalesced=True)
    ),
    "None but on the root": alone(of("tensor, None elsewhere", "broadcast"), of("tensor")),
    "a root that waits for nothing": alone(
        of("number, None elsewhere", "broadcast", wait="dropped"), of("tracked", "broadcast", wait="later")
    ),
    "None but on the root, of a number": alone(
        of("number, None elsewhere", "broadcast", root=1), of("tensor")
    ),
    "keys that are sets": alone(of("keyed by sets")),
    "keys that are objects": alone(of("keyed by objects", "broadcast")),
    "keys that are tuples of several types": alone(of("keyed by tuples")),
    "factors, awaited in no_grad": alone(of("tracked", form="scaled", waited_in="no_grad")),
    "out= of what autograd records": alone(of("tracked", "all_gather", form="out"), of("tensor")),
    "safe mode of what autograd records": alone(
        of("tracked", "broadcast", form="safe", waited_in="inference"), of("tensor")
    ),
    "no gradient, awaited in inference mode": alone(of("tracked", "gather", waited_in="inference")),
    "an average beyond the range of float16": alone(of("large", op="avg")),
    "one lane object in two tasks": overlapping(
        of("tensor", wait="dropped", pauses=1, around=("shared lane",)),
        of("tensor", pauses=9, around=("shared lane",)),
    ),
    "one scope object in two tasks": overlapping(
        of("tensor", wait="later", around=("shared scope",)),
        of("tensor", wait="later", around=("shared scope",)),
    ),
    "one scope object in two tasks at a time": overlapping(
        of("tensor", wait="later", pauses=3, around=("shared scope",)),
        of("tensor", wait="later", pauses=2, around=("shared scope",)),
    ),
    "a coalescing block that an await in no_grad sends": alone(
        of("tracked", coalesced=True, waited_in="no_grad"),
    ),
    "plain threads, where ranks may be threads themselves": overlapping(
        of("number"), of("tensor", wait="threads"), start="threads"
    ),
    "a scope whose task is cancelled": alone(of("tensor", wait="scope cancelled")),
    "a coalescing block of calls in and out of no_grad": alone(
        of("tracked", coalesced=True, wait="later"),
        of("tracked", coalesced=True, wait="later", around=("no_grad",), seed=1),
    ),
    "a tensor twice in a coalescing block": alone(of("tensor", form="in place twice", coalesced=True)),
    "strides": alone(of("tensor", layout="transposed")),
    "float16 that is put together under autocast": alone(
        of("tree of tensors", dtype="float16", around=("autocast",)),
        of("tensor", "all_gather", dtype="float16", dim=1, around=("autocast",)),
        of("tensor", "reduce_scatter", dtype="float16", dim=1, waited_in="autocast", wait="thread"),
        of("tensor", "all_gather", dtype="float16", dim=1, waited_in="autocast"),
        of("tree of tensors", dtype="float16", form="prepared", around=("autocast",)),
    ),
    "one refused by a peer, and only looked at": alone(of("tensor"), of("wrong on one", wait="result")),
    "one refused in a coalescing block": alone(
        of("keyed by objects", coalesced=True), of("tensor", coalesced=True), of("tensor", seed=1)
    ),
    "one refused by one rank in a coalescing block": alone(
        *(of(payload, coalesced=True) for payload in ("tensor", "wrong on one", "tree of tensors")),
        of("tensor", seed=1),
    ),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("backend", worlds.BACKENDS)
def test_programs_that_failed_once(backend: str, name: str) -> None:
    """They no longer fail."""
    found = complaints(FOUND[name], backend)
    assert not found, "\n".join(found)
