"""Draws `compositions.Program`s: any combination that has a meaning, and some that must be refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

import oracle
from compositions import MODES, Call, Program, Task

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
_MOVING = ("broadcast", "all_gather", "all_to_all", "permute", "gather", "scatter")

#: What each payload can be passed to, and in which forms.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "tensor": _TENSORS,
    "tracked": _TENSORS,
    "large": ("all_reduce",),
    "number": ("all_reduce", "broadcast", "all_gather", "reduce", "gather"),
    "text": ("broadcast", "all_gather", "gather"),
    "tree": ("all_reduce", "broadcast", "all_gather", "reduce"),
    "tracked tree": ("all_reduce", "broadcast", "all_gather"),
    "tree of tensors": ("all_reduce", "broadcast", "reduce_scatter", "all_gather"),
    "tracked tree of tensors": ("all_reduce", "broadcast", "reduce_scatter"),
    "no leaf": ("all_reduce", "broadcast", "all_gather"),
    "tensor, None elsewhere": ("broadcast",),
    "number, None elsewhere": ("broadcast",),
    "text, None elsewhere": ("broadcast",),
    "tree, None elsewhere": ("broadcast",),
    "object": ("all_gather_object", "broadcast_object"),
    "keyed by sets": ("all_reduce", "broadcast", "all_gather"),
    "keyed by objects": ("all_reduce", "broadcast"),
    "keyed by tuples": ("all_reduce", "broadcast"),
    "wrong": ("all_reduce",),
    "wrong on one": ("all_reduce",),
}
#: Plain ones are drawn more often than those with a name of their own.
_PAYLOADS = (*("tensor", "tracked", "tree", "tree of tensors") * 3, *OPERATIONS)
_BLOCKS = [*MODES, "scope", "scope", "lane", "shared lane", "shared scope"]
_WAITS = [
    *("now", "now", "later", "twice", "thread", "result", "host", "dropped"),
    *("cancelled", "scope cancelled"),
]
_PREPARED = frozenset({"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"})


def _forms(payload: str, operation: str, dtype: str) -> list[str]:
    if payload.startswith("tracked tree") or payload in ("tree", "object", "no leaf", "large"):
        return ["plain", "mapped"] if payload != "object" else ["plain"]
    both = operation in ("all_reduce", "broadcast")
    if payload == "tree of tensors":
        return ["plain", "mapped", *(("out", "in place", "prepared") if both else ())]
    if payload not in ("tensor", "tracked"):
        return ["plain"]
    forms = ["plain", "plain", "mapped", "out"]
    if both and payload == "tensor":
        forms.append("in place")
    if operation in _PREPARED and payload == "tensor":
        forms.append("prepared")
    if operation == "broadcast":
        forms.append("safe")
    if operation == "all_reduce" and dtype in _FLOATS:
        forms.append("scaled")
    return forms


def _reductions(payload: str, dtype: str, form: str) -> list[str]:
    if payload.startswith(("tree", "tracked tree", "keyed")):
        return ["sum", "max"] if not payload.startswith("tracked") else ["sum"]
    if payload == "large":
        return ["avg"]
    if payload == "number" or form == "scaled":
        return ["sum"]
    if payload == "tracked":
        return ["sum", "avg", "sum", "max"]
    if payload == "tensor":
        return [op for op in oracle.reductions(oracle.DTYPES[dtype]) if op != "product"]
    return ["sum"]


@st.composite
def calls(draw: Any, ranks: int, start: str, alone: bool) -> Call:
    """One call of a task of such a program."""
    payload = draw(st.sampled_from(_PAYLOADS))
    known = OPERATIONS[payload]
    operation = draw(st.sampled_from([*known, *known[:1] * (len(known) // 2)]))
    tracked = payload.startswith("tracked")
    dtype = draw(st.sampled_from(_FLOATS if tracked or "tree" in payload else _DTYPES))
    form = draw(st.sampled_from(_forms(payload, operation, dtype)))
    op = draw(st.sampled_from(_reductions(payload, dtype, form)))
    layouts = ["contiguous"] * 3
    if payload in ("tensor", "tracked") and form != "prepared":
        layouts += ["transposed", "strided", "offset"]
    group = draw(st.sampled_from(_groups(ranks)))
    size = len(group) or ranks
    held = start in ("alone", "task group")
    waits = [*_WAITS, "blocking"] if alone else _WAITS
    wrong = payload.startswith("wrong")
    refusable = (
        wrong
        or payload.startswith(("keyed", "no leaf"))
        or payload.endswith("None elsewhere")
        or (tracked and form == "out")
    )
    call = Call(
        operation=operation,
        payload=payload,
        form=form,
        dtype=dtype,
        op=op,
        layout=draw(st.sampled_from(layouts)),
        coalesced=not wrong and start != "crossed" and draw(st.integers(0, 3)) == 0,
        around=tuple(draw(st.lists(st.sampled_from(_BLOCKS), max_size=2))) if start != "crossed" else (),
        wait=draw(st.sampled_from(waits)) if not refusable else "now",
        waited_in=draw(st.sampled_from(["", "", *MODES])) if held else "",
        pauses=draw(st.integers(0, 2)),
        group=group,
        root=draw(st.integers(0, size - 1)),
        seed=draw(st.integers(0, 5)),
    )
    if call.coalesced and call.form == "in place" and call.operation == "all_reduce" and draw(st.booleans()):
        call = replace(call, form="in place twice")
    if call.wait == "scope cancelled" and (call.coalesced or call.form == "in place twice"):
        call = replace(call, wait="twice")
    if size == 1 and call.wait.endswith("cancelled"):
        call = replace(call, wait="now")
    if size == 1 and payload == "wrong on one":
        call = replace(call, payload="wrong")
    return call


def _groups(ranks: int) -> list[tuple[int, ...]]:
    if ranks == 1:
        return [()]
    groups: list[tuple[int, ...]] = [(), (), (), (), (0, 1)]
    return [*groups, (ranks - 2, ranks - 1)] if ranks > 2 else groups


@st.composite
def programs(draw: Any, ranks: int) -> Program:
    """A program of two to eight calls by one to three tasks."""
    starts = ["alone", "task group", "task group", "lanes"] + (["crossed"] if ranks > 1 else [])
    start = draw(st.sampled_from(starts))
    count = 1 if start == "alone" else 2 if start == "crossed" else draw(st.integers(1, 3))
    most = 8 // count
    held = start in ("alone", "task group")
    tasks = []
    for _ in range(count):
        own = draw(st.lists(calls(ranks, start, count == 1), min_size=2 if count == 1 else 1, max_size=most))
        blocks = _BLOCKS if held else [block for block in _BLOCKS if block not in MODES]
        around = draw(st.lists(st.sampled_from(blocks), max_size=2)) if start != "crossed" else []
        tasks.append(Task(tuple(own), tuple(around)))
    if start == "crossed":
        tasks = [_on_the_world(task) for task in tasks]
    program = Program(
        ranks=ranks,
        tasks=tuple(tasks),
        start=start,
        inherited=tuple(draw(st.lists(st.sampled_from(MODES), max_size=1))) if start == "task group" else (),
        turned=draw(st.booleans()),
        loop=draw(st.sampled_from(["asyncio", "asyncio", "trio"])),
    )
    if program.one_sided:
        program = replace(program, tasks=tuple(_waited_at_once(task) for task in program.tasks))
    return program


def _waited_at_once(task: Task) -> Task:
    """What is refused by one rank may fail the next calls of others: each is looked at where it is made.

    They stay on the lanes that are used once more at the end, so that the next program finds them at peace.
    """
    calls = tuple(
        replace(
            call,
            form="in place" if call.form == "in place twice" else call.form,
            wait="now",
            coalesced=False,
            group=(),
            around=_plainer_blocks(call.around),
        )
        for call in task.calls
    )
    return Task(calls, _plainer_blocks(task.around))


def _plainer_blocks(around: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(block for block in around if "scope" not in block and block != "lane")


def _on_the_world(task: Task) -> Task:
    """The two tasks that must not: on the very same lane, where the second is refused each call."""
    plain = [
        replace(call, group=(), wait="now", form="plain", payload="tensor", coalesced=False, op="sum")
        for call in task.calls
    ]
    return Task(tuple(plain))
