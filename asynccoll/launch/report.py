"""The report on a job whose ranks failed: which failed first, where, and its traceback, once.

It only makes text out of what the ranks recorded; they are started and stopped elsewhere.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from asynccoll.flight import Flight, partings
from asynccoll.health.blame import last_words
from asynccoll.host.endings import in_words
from asynccoll.host.words import listed
from asynccoll.launch.folding import folded, raised_at

#: The exit code after SIGABRT, as ``subprocess``, shells and MPI launchers give it.
_ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT, signal.SIGABRT)
_LAST_WORDS = "Extension modules:"
_RUNNER = str(Path("asynccoll", "launch", "child.py"))
#: Room for an error of ours about a lost rank: which rank, its last call with the line, where the dump is.
_WIDTH = 480
#: Room for where the dump is, at the end of such an error.
_LAST = 240
#: What ``child`` appends to the errors of a group.
_IN_A_GROUP = re.compile(r" \(in \w*ExceptionGroup: .*\)$")
#: What differs between ranks that failed in the same way: numbers (seconds, pids, addresses), which rank
#: reports it, how far its call was. Not the ranks that the error is about.
_OF_A_RANK = re.compile(
    r"this is rank \d+|(?<= ago, )(?:queued|in flight|finished|failed)|0x[0-9a-f]+"
    r"|(?P<named>\branks? \d+(?:, \d+)*)|\d+(?:\.\d+)?"
)
#: The state of a handle when its text was made, which says nothing about what went wrong.
_STATE_OF_A_WORK = re.compile(r"(?<=: )(?:in flight|done)(?=>)")
_NO_GRADIENT = "does not require grad and does not have a grad_fn"
_LOOPS = ("asyncio", "anyio", "trio")


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended. ``time`` is when it recorded an error, ``None`` if it could not."""

    rank: int
    pid: int
    code: int
    host: str
    time: float | None = None
    message: str = ""
    trace: str = ""
    shown: bool = False
    #: the ranks that this one found to be gone
    lost: tuple[int, ...] = ()
    #: the ranks that it found to have left their world, in order or because of an error
    left: tuple[int, ...] = ()
    #: its program had finished: whatever ended the process did so while it exited
    ended: bool = False

    @property
    def how(self) -> str:
        """The exit code or signal, in words."""
        return in_words(self.code)


def read_failure(
    rank: int, pid: int, code: int | None, host: str, recorded: Mapping[str, object], crash: str
) -> Failure:
    """Build a failure from the rank's error file (empty if it wrote none) and its crash stack.

    ``code``: its exit code; None if only the rank itself has recorded it.
    """
    message = recorded.get("message")
    ours = recorded.get("asynccoll")
    if not isinstance(message, Mapping):
        text = message if isinstance(message, str) else ""
        trace = _crash_stack(crash)
        return Failure(rank, pid, 1 if code is None else code, host, message=text, trace=trace)
    extra = message.get("extraInfo", {})
    if not isinstance(ours, Mapping):  # the script's own `record` decorator wrote it
        ours = {}
    if code is None or code == -signal.SIGTERM:  # stopped on its way out: its own failure counts
        code = int(ours.get("code", code or 1))
    return Failure(
        rank,
        pid,
        code,
        host=str(ours.get("host", host)),
        time=float(ours.get("time", extra.get("timestamp", 0))),
        message=str(message.get("message", "")),
        trace="" if ours.get("exited") else folded(str(extra.get("py_callstack", "")).strip()),
        shown=bool(ours.get("shown")),
        lost=tuple(ours.get("lost", ())),
        left=tuple(ours.get("left", ())),
    )


def _crash_stack(text: str) -> str:
    """Return the Python stack a crash left, without the runner's frames and the list of extensions."""
    kept = [line for line in text.partition(_LAST_WORDS)[0].splitlines() if _RUNNER not in line]
    return "\n".join(kept).strip()


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others followed from.

    A rank that died without recording an error (killed, crashed) makes its peers raise, hardly ever the
    other way round. Among those that recorded one, the earliest counts. SIGTERM comes last: that is how the
    launcher stops the peers of a failed rank. But if the earliest error is that another rank was gone, that
    rank counts instead: something else had stopped it, or it told its peers of its error and then recorded it
    later than they did. (A rank that left in order counts only if it recorded an error of its own.)
    """

    def order(failure: Failure) -> tuple[int, float]:
        if failure.time is not None:
            return 1, failure.time
        return (2 if failure.code == -signal.SIGTERM else 0), 0.0

    first = min(failures, key=order)
    return next(
        (
            one
            for one in failures
            if one.rank in first.lost or (one.rank in first.left and one.time is not None)
        ),
        first,
    )


def exit_code(failure: Failure) -> int:
    """Return the exit code that stands for ``failure``, as shells count signals."""
    return failure.code if failure.code >= 0 else 128 - failure.code


def what_aborted(code: int, flights: Mapping[int, Flight]) -> str:
    """Explain that native code ended a rank (SIGABRT), and what to do; "" for other exit codes.

    ``flights``: what the ranks had recorded.
    """
    if code not in _ABORTED:
        return ""
    different = [one for one in partings(flights) if one.kind == "different"]
    todo = (
        "make the same call on all ranks; with ASYNCCOLL_CHECK=full, such calls are refused with an error "
        "on each rank before anything is sent"
    )
    if different:
        return f"native code gave up because ranks called different things: {different[0]}; {todo}"
    return (
        "native code gave up; its output is above. In a collective the usual cause is tensors of different "
        f"sizes: {todo}"
    )


def what_leaked(failure: Failure) -> str:
    """Explain torch's error about a loss without gradients in a program with tasks; "" for others."""
    if _NO_GRADIENT not in failure.message or not any(loop in failure.trace for loop in _LOOPS):
        return ""
    return (
        "if the model's parameters do require grad: a task's torch.no_grad() leaks into other tasks at an "
        "await inside it; run such a task in ac.create_task_group(), or in ac.isolated(...)"
    )


def last_call(rank: int, flights: Mapping[int, Flight]) -> str:
    """Return the last call of a rank that could not report itself where it ended; "" if it is not known.

    Its memory outlives it, whereas its peers may have been stopped before they could report.
    """
    flight = flights.get(rank)
    return "" if flight is None else last_words(flight, flight.ended, "before it ended")


def report(
    failures: Sequence[Failure],
    *,
    program: str = "asynccoll run",
    flights: Mapping[int, Flight] | None = None,
) -> str:
    """Return the first failure with its traceback, then a line for all others that failed in the same way.

    ``flights``: what the ranks had recorded, which explains an abort, and where a killed rank was.
    """
    flights = flights or {}
    first = first_failure(failures)
    head = f"{program}: rank {first.rank} failed on {first.host} (pid {first.pid}): {first.how}"
    lines = [head]
    if first.trace and not first.shown:
        lines += ["", first.trace, ""]
    if first.time is None and (words := last_call(first.rank, flights)):
        lines.append(f"{program}: rank {first.rank}: {words}")
    if meant := what_aborted(first.code, flights):
        lines.append(f"{program}: {meant}")
    if meant := what_leaked(first):
        lines.append(f"{program}: {meant}")
    stopped: list[int] = []
    ways: dict[str, list[Failure]] = {_way(first): []}
    for failure in failures:
        if failure is first:
            continue
        if failure.time is None and failure.code in (-signal.SIGTERM, -signal.SIGKILL):
            stopped += [] if failure.ended else [failure.rank]
        else:
            ways.setdefault(_way(failure), []).append(failure)
    alike = ways.pop(_way(first))
    lines += _alike(program, first, alike)
    for way in ways.values():
        told = _shortened(way[0].message) or way[0].how
        (place, *others) = {_line(one) for one in way}
        there = f" at {place}" if place and not others else ""
        lines.append(f"{program}: {listed(sorted(one.rank for one in way))} failed too{there}: {told}")
    if stopped:
        lines.append(f"{program}: stopped {listed(sorted(stopped))}")
    return "\n".join(lines)


def _way(failure: Failure) -> str:
    """Return what is the same on all ranks that failed in the same way."""
    return _OF_A_RANK.sub(lambda found: found["named"] or "#", _without_states(failure)) or failure.how


def _without_states(failure: Failure) -> str:
    return _STATE_OF_A_WORK.sub("", failure.message)


def _alike(program: str, first: Failure, others: Sequence[Failure]) -> list[str]:
    """Return a line for the ranks that failed as the first did; one for each line of the program."""
    told, of_first = [], _line(first)
    for place, failures in groupby(sorted(others, key=_line), key=_line):
        those = list(failures)
        same = all(_without_states(one) == _without_states(first) for one in those)
        but = "" if same else " (other numbers in its error)"
        there = f", at {place}" if place and place != of_first else ""
        told.append(
            f"{program}: {listed(sorted(one.rank for one in those))} failed in the same way{there}{but}"
        )
    return told


def _line(failure: Failure) -> str:
    """Return the line of the program on which it failed, as far as known."""
    return str(raised_at(failure.trace) or "")


def _shortened(text: str) -> str:
    """Return the first line of ``text``, cut if too long; a remark in parentheses at its end is kept."""
    line = text.partition("\n")[0].strip()
    if len(line) <= _WIDTH:
        return line
    line = _IN_A_GROUP.sub("", line)
    start = line.rfind(" (") if line.endswith(")") else -1
    last = line[start:] if start > 0 and len(line) - start <= _LAST else ""
    kept = line[: _WIDTH - len(last)]
    whole = max(kept.rfind(end) for end in ("; ", ". "))
    return f"{kept[: whole + 1] if whole > len(kept) // 2 else kept} ...{last}"
