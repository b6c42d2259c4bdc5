"""Looks for the smallest `compositions.Program` that still fails, within a time limit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from compositions import Call, Program, Task
from compositions_drawn import OPERATIONS

#: The fields in the order in which they are reset to their defaults.
_PLAIN = (
    *("coalesced", "told", "wait", "waited_in", "rests", "pauses", "group"),
    *("layout", "dim", "form", "op", "dtype", "seed", "root"),
)
_DEFAULT = Call()


def reduced(program: Program, fails: Callable[[Program], bool], seconds: float) -> Program:
    """Return the smallest failing program found in ``seconds``."""
    deadline = time.monotonic() + seconds
    tried = {program}
    while True:
        for candidate in smaller(program):
            if time.monotonic() > deadline:
                return program
            if candidate not in tried:
                tried.add(candidate)
                if fails(candidate):
                    program = candidate
                    break
        else:
            return program


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs that are simpler in one respect, the much smaller ones first."""
    if len(program.tasks) > 1 and program.start != "crossed":
        for index in range(len(program.tasks)):
            yield replace(program, tasks=_without(program.tasks, index))
    for index, task in enumerate(program.tasks):
        for small in _smaller_tasks(task):
            yield replace(program, tasks=_with(program.tasks, index, small))
    if len(program.tasks) == 1 and program.start != "alone":
        yield replace(program, start="alone", inherited=())
    if program.ranks > 2:
        yield _on_two(program)
    yield from _plainer(program, ("inherited", "turned", "loop"), Program(2, ()))


def _smaller_tasks(task: Task) -> Iterator[Task]:
    if len(task.calls) > 1:
        for index in range(len(task.calls)):
            yield replace(task, calls=_without(task.calls, index))
    for index in range(len(task.around)):
        yield replace(task, around=_without(task.around, index))
    for index, call in enumerate(task.calls):
        for small in _smaller_calls(call):
            yield replace(task, calls=_with(task.calls, index, small))


def _smaller_calls(call: Call) -> Iterator[Call]:
    for index in range(len(call.around)):
        yield replace(call, around=_without(call.around, index))
    yield from _plainer(call, _PLAIN, _DEFAULT)
    if "tensor" in call.payload or call.payload.startswith("tracked"):
        yield from _plainer(call, ("payload",), _DEFAULT)
    if "all_reduce" in OPERATIONS[call.payload]:
        yield from _plainer(call, ("operation",), _DEFAULT)


def _plainer(value: Any, names: tuple[str, ...], default: Any) -> Iterator[Any]:
    """Yield copies with one of these fields reset to its default."""
    for field in dataclasses.fields(value):
        if field.name in names and getattr(value, field.name) != getattr(default, field.name):
            yield replace(value, **{field.name: getattr(default, field.name)})


def _on_two(program: Program) -> Program:
    tasks = [
        replace(task, calls=tuple(replace(call, group=(), root=call.root % 2) for call in task.calls))
        for task in program.tasks
    ]
    return replace(program, ranks=2, tasks=tuple(tasks))


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return items[:index] + items[index + 1 :]


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
