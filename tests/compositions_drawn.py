"""Draws `compositions.Program`s: any combination that is valid, and some that must be refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

import oracle
from compositions import LONG_RESTS, MODES, Call, Program, Task

_TENSORS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
    "reduce",
    "gather",
    "scatter",
)
_FLOATS = ("float32", "float64", "bfloat16")
_DTYPES = (*_FLOATS, "float16", "int32", "int64", "uint8", "int16", "bool", "complex64")
_ALONG = ("all_gather", "gather", "reduce_scatter")

#: The operations to which each payload can be passed.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "tensor": _TENSORS,
    "tracked": _TENSORS,
    "large": ("all_reduce",),
    "number": ("all_reduce", "broadcast", "all_gather", "reduce", "gather"),
    "text": ("broadcast", "all_gather", "gather"),
    "tree": ("all_reduce", "broadcast", "all_gather", "reduce", "gather"),
    "tracked tree": ("all_reduce", "broadcast", "all_gather"),
    "tree of tensors": ("all_reduce", "broadcast", "reduce_scatter", "all_gather"),
    "tracked tree of tensors": ("all_reduce", "broadcast", "reduce_scatter"),
    "no leaf": ("all_reduce", "broadcast", "all_gather"),
    "tensor, None elsewhere": ("broadcast",),
    "number, None elsewhere": ("broadcast",),
    "text, None elsewhere": ("broadcast",),
    "tree, None elsewhere": ("broadcast",),
    "uneven": ("all_gather", "all_to_all"),
    "message": ("recv",),
    "message object": ("recv_object",),
    "nothing": ("barrier",),
    "object": ("all_gather_object", "broadcast_object", "gather_object", "scatter_object"),
    "keyed by sets": ("all_reduce", "broadcast", "all_gather"),
    "keyed by objects": ("all_reduce", "broadcast"),
    "keyed by tuples": ("all_reduce", "broadcast"),
    "wrong": ("all_reduce",),
    "wrong on one": ("all_reduce",),
    "refused message": ("recv",),
    "overwritten": ("all_reduce",),
    "long": _TENSORS,
    "long uneven": ("all_to_all", "all_gather"),
    "long message": ("recv",),
    "differing": ("all_reduce",),
    "differing splits": ("all_to_all",),
}
#: The payloads of bursts: small ones, ones larger than a slot of simulated memory, messages, and calls of
#: several native calls, behind which others queue. A burst has one of these kinds, or any.
_KINDS_IN_BURSTS = (
    ("tensor", "tensor", "number", "nothing", "uneven"),
    ("long", "long", "long uneven", "long uneven"),
    ("message", "message object", "long message"),
    ("object", "object", "text", "uneven", "tensor"),
)
_IN_BURSTS = (*_KINDS_IN_BURSTS, sum(_KINDS_IN_BURSTS, ()), sum(_KINDS_IN_BURSTS, ()))
#: Common payloads are drawn more often than special ones.
_PAYLOADS = (
    *("tensor", "tracked", "tree", "tree of tensors") * 3,
    *(one for one in OPERATIONS if not one.startswith(("long", "differing"))),
)
#: Drawn for simulated worlds only, which are more numerous, and where these cannot harm a process.
_SIMULATED = ("refused message", "overwritten")
_BLOCKS = [*MODES, "scope", "scope", "lane", "closed lane", "shared lane", "shared scope"]
#: The blocks that several threads may enter: a scope object belongs to the tasks of one thread.
_BLOCKS_IN_THREADS = [block for block in _BLOCKS if block != "shared scope"]
#: Blocks that run one call in a separate task.
_CHILDREN = ["child", "isolated"]
_WAITS = [
    *("now", "now", "later", "twice", "both", "thread", "result", "host", "dropped"),
    *("future", "callback", "completed", "late", "cancelled", "scope cancelled"),
    *("plain thread", "threads", "two futures", "concurrent", "exception", "cut short", "deadline"),
    *("gathered", "gathered"),
]
#: The ways of waiting in a plain thread.
_WAITS_IN_THREADS = [
    *("now", "now", "later", "twice", "both", "thread", "result", "dropped", "callback", "late", "threads"),
    *("concurrent", "exception", "cut short", "deadline", "gathered"),
]
_PREPARED = frozenset({"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"})


def _forms(payload: str, operation: str, dtype: str) -> list[str]:
    scaled = ["scaled", "compressed"] if operation == "all_reduce" and dtype in (*_FLOATS, "float16") else []
    if payload in ("object", "message", "message object", "nothing"):
        return ["plain"]
    if payload == "tracked tree of tensors":
        return ["plain", "mapped", *scaled]
    if payload.startswith("tracked tree") or payload in ("tree", "no leaf", "large"):
        return ["plain", "mapped"]
    both = operation in ("all_reduce", "broadcast")
    if payload == "tree of tensors":
        return ["plain", "mapped", *scaled, *(("out", "in place", "prepared") if both else ())]
    if payload not in ("tensor", "tracked"):
        return ["plain"]
    forms = ["plain", "plain", "mapped", "out"]
    if both and payload == "tensor":
        forms.append("in place")
    if operation in _PREPARED and payload == "tensor":
        forms.append("prepared")
    if operation == "broadcast":
        forms.append("safe")
    return forms + scaled


def _reductions(payload: str, dtype: str, form: str) -> list[str]:
    if payload.startswith(("tree", "tracked tree", "keyed")):
        return ["sum", "max"] if not payload.startswith("tracked") else ["sum"]
    if payload == "large":
        return ["avg"]
    if payload == "number" or form in ("scaled", "compressed"):
        return ["sum"]
    if payload == "tracked":
        return ["sum", "avg", "sum", "max"]
    if payload == "tensor":
        return [op for op in oracle.reductions(oracle.DTYPES[dtype]) if op != "product"]
    return ["sum"]


@st.composite
def calls(draw: Any, ranks: int, start: str, payloads: Sequence[str], loop: str, simulated: bool) -> Call:
    """Draw one call of a task of such a program, with one of these payloads."""
    payload = draw(st.sampled_from(payloads))
    known = OPERATIONS[payload]
    operation = draw(st.sampled_from([*known, *known[:1] * (len(known) // 2)]))
    tracked = payload.startswith("tracked")
    floats = (*_FLOATS, "float16") if "tree" in payload else _FLOATS
    dtype = draw(st.sampled_from(floats if tracked or "tree" in payload else _DTYPES))
    form = draw(st.sampled_from(_forms(payload, operation, dtype)))
    op = draw(st.sampled_from(_reductions(payload, dtype, form)))
    layouts = ["contiguous"] * 3
    strided = payload in ("tensor", "tracked") and form != "prepared"
    if strided:
        layouts += ["transposed", "strided", "offset"]
    groups = _groups(ranks) if payload not in _SIMULATED else [()]
    group = draw(st.sampled_from([*groups, (ranks - 1,)] if simulated else groups))
    size = len(group) or ranks
    threaded = start == "threads" or loop == "none"
    held = start in ("alone", "task group", "threads")
    waits = _WAITS_IN_THREADS if threaded else [*_WAITS, "blocking"] if start == "alone" else _WAITS
    call = Call(
        operation=operation,
        payload=payload,
        form=form,
        dtype=dtype,
        op=op,
        layout=draw(st.sampled_from(layouts)),
        dim=draw(st.integers(0, 1)) if strided and operation in _ALONG else 0,
        coalesced=start != "crossed" and draw(st.integers(0, 3)) == 0 and payload not in _SIMULATED,
        around=draw(_arounds(threaded, closes=not group)) if start != "crossed" else (),
        wait=draw(st.sampled_from(waits)),
        waited_in=draw(st.sampled_from(["", "", *MODES])) if held else "",
        pauses=draw(st.integers(0, 2)),
        group=group,
        root=draw(st.integers(0, size - 1)),
        seed=draw(st.integers(0, 5)),
    )
    if call.form == "in place" and call.operation == "all_reduce" and draw(st.booleans()):
        call = replace(call, form="in place twice")
    if call.wait == "scope cancelled" and call.coalesced:
        call = replace(call, wait="twice")
    if call.wait == "deadline" and (call.coalesced or "message" in payload or tracked):
        # Backward inherits the deadline of its call, so it would have to be repeated as well.
        call = replace(call, wait="cut short")
    if call.wait.endswith("cancelled") and (size == 1 or call.refusable):
        call = replace(call, wait="later")
    if size == 1 and "message" in payload:
        call = replace(call, payload="tensor", operation="permute")
    if size == 1 and payload == "overwritten":
        call = replace(call, payload="tensor")
    if size == 1 and payload == "wrong on one":
        call = replace(call, payload="wrong")
    return call


@st.composite
def _arounds(draw: Any, threaded: bool, closes: bool) -> tuple[str, ...]:
    """Draw the blocks around a call. ``closes``: all ranks make it, so they may close its lane afterwards."""
    known = _BLOCKS_IN_THREADS if threaded else _BLOCKS
    known = known if closes else [block for block in known if block != "closed lane"]
    blocks = draw(st.lists(st.sampled_from(known), max_size=2))
    if not threaded and draw(st.integers(0, 5)) == 0:
        blocks.insert(draw(st.integers(0, len(blocks))), draw(st.sampled_from(_CHILDREN)))
    return tuple(blocks)


def _groups(ranks: int) -> list[tuple[int, ...]]:
    if ranks == 1:
        return [()]
    groups: list[tuple[int, ...]] = [(), (), (), (), (0, 1)]
    return [*groups, (ranks - 2, ranks - 1), tuple(range(0, ranks, 2))] if ranks > 2 else groups


@st.composite
def programs(draw: Any, ranks: int, messages: bool = True, simulated: bool = False) -> Program:
    """Draw a program of two to eight calls by one to three tasks; ``messages``: also point-to-point ones.

    ``simulated``: in some programs the ranks pause for seconds, which take no real time there.
    """
    loop = draw(st.sampled_from(["asyncio", "asyncio", "asyncio", "trio", "trio", "none"]))
    starts = ["alone", "threads"]
    if loop != "none":
        starts += ["alone", "task group", "task group", "task group", "lanes", "lanes"]
        starts += ["crossed"] if ranks > 1 else []
    start = draw(st.sampled_from(starts))
    count = 1 if start == "alone" else 2 if start == "crossed" else draw(st.integers(1, 3))
    most = 8 // count
    held = start in ("alone", "task group", "threads")
    known = _BLOCKS_IN_THREADS if start == "threads" or loop == "none" else _BLOCKS
    blocks = [block for block in known if block != "closed lane" and (held or block not in MODES)]
    # Half of the programs contain nothing that is refused, and so must end as soon as their messages have.
    calm = draw(st.booleans())
    payloads = [one for one in _PAYLOADS if messages or "message" not in one]
    payloads = [one for one in payloads if simulated or one not in _SIMULATED]
    payloads = [one for one in payloads if not (calm and Call(payload=one).refusable)]
    one = calls(ranks, start, payloads, loop, simulated)
    one = one.map(lambda call: replace(call, form="plain") if calm and call.refusable else call)
    tasks = []
    for _ in range(count):
        own = draw(st.lists(one, min_size=2 if count == 1 else 1, max_size=most))
        around = draw(st.lists(st.sampled_from(blocks), max_size=2)) if start != "crossed" else []
        if start != "crossed" and draw(st.integers(0, 2)) == 0:
            own = _in_a_row(own * draw(st.sampled_from([1, 4]) if count == 1 else st.just(1)))
        tasks.append(Task(tuple(own), tuple(around)))
    if start == "crossed":
        tasks = [_on_the_world(task) for task in tasks]
    elif simulated and draw(st.integers(0, 4)) == 0:
        tasks[0] = _resting(tasks[0], draw(st.integers(0, len(tasks[0].calls) - 1)))
    program = Program(
        ranks=ranks,
        tasks=tuple(tasks),
        start=start,
        inherited=tuple(draw(st.lists(st.sampled_from(MODES), max_size=1))) if start == "task group" else (),
        turned=draw(st.booleans()),
        loop=loop,
    )
    if program.one_sided:
        program = replace(program, tasks=tuple(map(_calmer, program.tasks)))
    return program


def bursts(chance: random.Random, ranks: int) -> Program:
    """Draw a program of many consecutive calls on one lane or a few, which the ranks make at different times.

    Threads wait for some of them from the start; or one rank makes a call only once the threads of all others
    have their results, while nothing waits on that rank.
    """
    loop = chance.choice(["asyncio", "trio", "none", "none"])
    start = chance.choice(["alone", "alone", "threads", "threads" if loop == "none" else "lanes"])
    payloads = chance.choices(chance.choice(_IN_BURSTS), k=2)
    count = 1 if start == "alone" else chance.randint(2, 3)
    around = ("closed lane",) if start == "alone" and chance.random() < 0.2 else ()
    most = max(4, chance.choice([6, 12, 20, 30]) // count)
    tasks = [Task(_burst(chance, ranks, payloads, most, bool(around)), around) for _ in range(count)]
    return Program(ranks, tuple(tasks), start, turned=chance.random() < 0.5, loop=loop)


#: The ways of waiting in one burst.
_BURST_WAITS = (
    ("threaded",),
    ("threaded", "later"),
    ("threaded", "later", "later", "dropped"),
    ("threaded", "now"),
    ("later", "dropped"),
    ("gathered",),
    ("now",),
)


def _burst(
    chance: random.Random, ranks: int, payloads: Sequence[str], count: int, closed: bool
) -> tuple[Call, ...]:
    """Draw ``count`` calls of few kinds; the first ones may be complete before the others are made."""
    few = [_small(chance, chance.choice(payloads), ranks) for _ in range(chance.randint(1, 4))]
    waits = [wait for wait in chance.choice(_BURST_WAITS) if not closed or wait != "dropped"]
    resting = chance.choice([0.0, 0.1, 0.4])
    calls = [
        replace(
            chance.choice(few),
            wait=chance.choice(waits),
            rests=int(chance.random() < resting),
            pauses=int(chance.random() < resting),
            seed=number % 6,
        )
        for number in range(count)
    ]
    begun = chance.choice([0, 1, 2, 2])
    calls[:begun] = [replace(call, wait="now", rests=number) for number, call in enumerate(calls[:begun])]
    calls[begun] = replace(calls[begun], rests=int(begun > 0))
    if chance.random() < 0.3:
        kinds = _REFUSED_IN_MEMORY if chance.random() < 0.2 else _REFUSED
        for place in chance.sample(range(count // 2, count), min(chance.choice([1, 1, 2, 3]), count // 2)):
            refused = replace(chance.choice(kinds), wait=calls[place].wait, root=chance.randrange(ranks))
            calls[place] = replace(refused, seed=chance.randrange(6))
    elif waits[0] == "threaded" and count > begun + 1 and chance.random() < 0.7:
        root = chance.randrange(ranks)
        told = min(chance.choice([1, 2, 5]), count - begun - 1)
        for number in chance.sample(range(begun + 1, count), told):
            calls[number - 1] = replace(calls[number - 1], wait="threaded")
            calls[number] = replace(calls[number], told=True, root=root)
    return tuple(calls)


#: Only ranks that share memory notice these, so no other transport carries a burst with one.
_REFUSED_IN_MEMORY = (Call(payload="differing"), Call("all_to_all", "differing splits"))
_REFUSED = (
    Call(payload="wrong on one"),
    Call("recv", "refused message"),
    Call(payload="overwritten"),
)


def _small(chance: random.Random, payload: str, ranks: int) -> Call:
    known = OPERATIONS[payload]
    operation = chance.choice([*known, *known[:1] * (len(known) // 2)])
    dtype = chance.choice(_DTYPES)
    tensor = payload in ("tensor", "long")
    forms = ["plain", "plain", "out", *(["in place"] if operation in ("all_reduce", "broadcast") else [])]
    form = chance.choice(forms) if tensor else "plain"
    op = chance.choice(_reductions("tensor", dtype, form)) if tensor else "sum"
    return Call(operation, payload, form, dtype, op, root=chance.randrange(ranks))


def _in_a_row(calls: list[Call]) -> list[Call]:
    """Return the calls without waiting before the last, so that they queue on their lane, or on two."""
    return [
        replace(
            call,
            wait=call.wait if call.wait in ("later", "dropped") else "gathered",
            group=(),
            around=tuple(block for block in call.around if block == "lane"),
            pauses=min(call.pauses, 1),
            seed=(call.seed + number) % 6,
        )
        for number, call in enumerate(calls)
    ]


def _resting(task: Task, number: int) -> Task:
    """Return the same task, but with a long rest of the ranks before that call."""
    calls = [replace(call, rests=LONG_RESTS * (place == number)) for place, call in enumerate(task.calls)]
    return replace(task, calls=tuple(calls))


def _calmer(task: Task) -> Task:
    """Remove what only its result can tell: where one rank refuses a call, later ones may fail on others."""
    calls = tuple(
        replace(
            call,
            form="in place" if call.form == "in place twice" else call.form,
            wait="later" if call.wait.endswith("cancelled") else call.wait,
        )
        for call in task.calls
    )
    return replace(task, calls=calls)


def _on_the_world(task: Task) -> Task:
    """Put a task on the world's lane: two tasks must not share it, so the second task's calls are refused."""
    plain = [
        replace(
            call,
            operation=call.operation if call.operation in _TENSORS else "permute",
            group=(),
            wait="now",
            form="plain",
            payload="tensor",
            coalesced=False,
            op="sum",
        )
        for call in task.calls
    ]
    return Task(tuple(plain))
