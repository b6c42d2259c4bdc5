"""Programs that combine the features of `asynccoll`, as plain values: which task calls what, in which blocks.

A `Program` contains everything that a run needs: it can be written as JSON, compared, reduced and run again.
`compositions_drawn` draws programs, `compositions_run` runs one on a rank, `compositions_expected` computes
what each rank must get, and `compositions_reduced` looks for the smallest program that still fails.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

#: The torch modes that a block can enter.
MODES = ("no_grad", "inference", "autocast", "default device")
SHORTEST_REST_SECONDS = 1e-4
#: This many shortest rests outlast the watchdog, which goes to sleep after a second without waiting calls.
LONG_RESTS = 12_000


@dataclass(frozen=True)
class Call:
    """One collective: its payload, its form, the blocks around it, and how it is waited for."""

    operation: str = "all_reduce"
    payload: str = "tensor"
    form: str = "plain"
    dtype: str = "float32"
    op: str = "sum"
    layout: str = "contiguous"
    #: The dimension along which results are joined, or inputs split.
    dim: int = 0
    #: Adjacent coalesced calls share one block.
    coalesced: bool = False
    #: The blocks around the call, outermost first.
    around: tuple[str, ...] = ()
    wait: str = "now"
    #: A mode that the waiter has entered but the call has not.
    waited_in: str = ""
    #: How often the task yields to others, before the call and after it.
    pauses: int = 0
    #: How long the task sleeps before the call, in shortest rests; some ranks longer (``rest_seconds``).
    rests: int = 0
    #: Whether the root makes the call only once the threads of all others have their results; none waits
    #: there.
    told: bool = False
    #: Global ranks; empty means the world.
    group: tuple[int, ...] = ()
    #: The group rank of the root, of the rank that is cancelled, or of the one that passes something invalid.
    root: int = 0
    seed: int = 0

    def rest_seconds(self, rank: int) -> float:
        """Return how long this rank rests before the call, which differs between ranks."""
        longer = 3.0 if self.rests < LONG_RESTS else 1.4
        return self.rests * SHORTEST_REST_SECONDS * longer ** ((rank + self.seed) % 4)

    @property
    def refusable(self) -> bool:
        """Whether some rank may refuse it."""
        return (
            self.one_sided
            or self.form == "in place twice"
            or self.payload.startswith(("wrong", "keyed", "no leaf", "differing", "refused", "overwritten"))
        )

    @property
    def detached_first(self) -> bool:
        """Whether the first of two in-place calls is detached before the second is made."""
        return self.form == "in place twice" and bool(self.seed % 2)

    @property
    def one_sided(self) -> bool:
        """Whether only some of the ranks may refuse it, or later calls in flight may fail with it."""
        return (
            self.payload == "wrong on one"
            or self.payload.startswith("differing")
            or self.payload.endswith("None elsewhere")
            or self.detached_first
            or (self.form == "out" and self.payload.startswith("tracked"))
        )


@dataclass(frozen=True)
class Task:
    """Calls made one after the other, and the blocks around them."""

    calls: tuple[Call, ...]
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """Concurrent tasks, and how they are started."""

    ranks: int
    tasks: tuple[Task, ...]
    start: str = "alone"
    #: Modes that the starting task has entered, but leaves before its children run.
    inherited: tuple[str, ...] = ()
    #: Whether odd ranks start the tasks in reverse order.
    turned: bool = False
    loop: str = "asyncio"

    @property
    def calls(self) -> list[Call]:
        """The calls of all tasks."""
        return [call for task in self.tasks for call in task.calls]

    @property
    def one_sided(self) -> bool:
        """Whether a call may be refused by some ranks only: later ones may then fail with it, on any rank."""
        return any(call.one_sided for call in self.calls)

    def to_json(self) -> str:
        """Return JSON for `from_json`, without the fields that have their default value."""
        return json.dumps(_told(self))

    def script(self) -> str:
        """Return a script for ``asynccoll run -n RANKS``, with ``tests`` on PYTHONPATH."""
        return (
            f"# {self.ranks} ranks: PYTHONPATH=tests python -m asynccoll run -n {self.ranks} this_file.py\n"
            f"from compositions_run import main\n\nmain('''{self.to_json()}''')\n"
        )


def from_json(text: str) -> Program:
    """Return the program that `Program.to_json` wrote."""
    said = json.loads(text)
    tasks = tuple(
        Task(tuple(Call(**_tuples(call)) for call in task.pop("calls")), **_tuples(task))
        for task in said.pop("tasks")
    )
    return Program(tasks=tasks, **_tuples(said))


def _tuples(said: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(one) if isinstance(one, list) else one for name, one in said.items()}


def _told(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_told(one) for one in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
    return {field.name: _told(getattr(value, field.name)) for field in fields}
