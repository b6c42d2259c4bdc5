"""Programs that combine what `asynccoll` offers, as plain values: which task calls what, inside which blocks.

A `Program` says everything that a run needs: it can be written down as JSON, compared, made smaller and
run again. `compositions_drawn` draws them, `compositions_run` runs one on a rank, `compositions_expected`
says what each rank must get, and `compositions_reduced` looks for the smallest that still fails.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

#: What a block can put a task's torch into.
MODES = ("no_grad", "inference", "autocast", "default device")
SHORTEST_REST_SECONDS = 1e-4
#: So many shortest rests outlast what looks after waiting calls, which sleeps after a second without any.
LONG_RESTS = 12_000


@dataclass(frozen=True)
class Call:
    """One collective: what it is given, in which form, inside which blocks, and how it is waited for."""

    operation: str = "all_reduce"
    payload: str = "tensor"
    form: str = "plain"
    dtype: str = "float32"
    op: str = "sum"
    layout: str = "contiguous"
    #: Along which results are joined, or inputs cut.
    dim: int = 0
    #: Neighbours that are coalesced share one block.
    coalesced: bool = False
    #: From the outermost block to the innermost.
    around: tuple[str, ...] = ()
    wait: str = "now"
    #: A mode that the waiter has entered and the call has not.
    waited_in: str = ""
    #: How often the task lets others run, before the call and after it.
    pauses: int = 0
    #: For how many shortest rests it sleeps before the call, or several times as long (``rest_seconds``).
    rests: int = 0
    #: Whether the root makes it only once all others have got what their threads wait for. None waits there.
    told: bool = False
    #: Global ranks; none are the world.
    group: tuple[int, ...] = ()
    #: Position in the group of the root, of who is cancelled, of who passes something wrong.
    root: int = 0
    seed: int = 0

    def rest_seconds(self, rank: int) -> float:
        """For how long this rank rests before the call: others rest for a time of their own."""
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
        """Of two calls in place, whether nobody waits for the first any more when the second is made."""
        return self.form == "in place twice" and bool(self.seed % 2)

    @property
    def one_sided(self) -> bool:
        """Whether only some of the ranks may refuse it, or it may take along those in flight behind it."""
        return (
            self.payload == "wrong on one"
            or self.payload.startswith("differing")
            or self.payload.endswith("None elsewhere")
            or self.detached_first
            or (self.form == "out" and self.payload.startswith("tracked"))
        )


@dataclass(frozen=True)
class Task:
    """Calls one after the other, inside blocks of their own."""

    calls: tuple[Call, ...]
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """Tasks that overlap, and how they are started."""

    ranks: int
    tasks: tuple[Task, ...]
    start: str = "alone"
    #: Modes that the starting task has entered, and left before its children run.
    inherited: tuple[str, ...] = ()
    #: Whether odd ranks start the tasks the other way round.
    turned: bool = False
    loop: str = "asyncio"

    @property
    def calls(self) -> list[Call]:
        """All of them."""
        return [call for task in self.tasks for call in task.calls]

    @property
    def one_sided(self) -> bool:
        """Whether a call is refused by some ranks only: later ones may then fail with it, on any rank."""
        return any(call.one_sided for call in self.calls)

    def to_json(self) -> str:
        """What `from_json` reads; what is as ever is left out."""
        return json.dumps(_told(self))

    def script(self) -> str:
        """A script for ``asynccoll run -n RANKS``, with ``tests`` on PYTHONPATH."""
        return (
            f"# {self.ranks} ranks: PYTHONPATH=tests python -m asynccoll run -n {self.ranks} this_file.py\n"
            f"from compositions_run import main\n\nmain('''{self.to_json()}''')\n"
        )


def from_json(text: str) -> Program:
    """The program that `Program.to_json` wrote."""
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
