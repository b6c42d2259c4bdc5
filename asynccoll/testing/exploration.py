"""``explore``: simulates many seeds until one goes wrong, shrinks that case, and makes a script of it."""

from __future__ import annotations

import inspect
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, fields, replace
from functools import partial
from io import StringIO
from itertools import islice
from typing import Any

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.endings import leaves
from asynccoll.host.misfits import check, check_count, check_function, fitting
from asynccoll.testing.faults import Fault
from asynccoll.testing.pool import begins, is_over, pool
from asynccoll.testing.report import Report
from asynccoll.testing.schedules import PCT, RandomWalk
from asynccoll.testing.shrinking import Case, Tried, smallest
from asynccoll.testing.simulation import simulate
from asynccoll.testing.strays import Stray, merged
from asynccoll.testing.targets import Target, of_function

__all__ = ["Exploration", "Faults", "explore", "explore_target"]

#: Draws the faults for each seed, from a random generator and the number of ranks.
Faults = Callable[[random.Random, int], Sequence[Fault]]
#: Follows "nothing was found" unless results are checked.
_NOT_CHECKED = " (no error, hang or mismatch; results are checked only with expect=, or --expect)"
#: How many seeds another process tries before it reports.
_AT_ONCE = 20
#: Called with how many schedules were tried, and with the strays in them.
_Told = Callable[[int, Sequence[Stray]], None]
#: A seed that went wrong, and how.
_Bad = tuple[int, str]


def schedules(number: int) -> str:
    """``1 schedule``, ``1,000 schedules``."""
    return f"{number:,} schedule{'s' * (number != 1)}"


@dataclass
class Exploration:
    """What was tried, and the first case that went wrong, if one did."""

    #: how many were simulated, and how long that took
    schedules: int = 0
    seconds: float = 0.0
    #: what was wrong; None if nothing was
    wrong: str | None = None
    #: calls that were paired although made from different lines (``Report.strays``), in the case that goes
    #: wrong, or else in all that were tried
    strays: list[Stray] = field(default_factory=list)
    #: the case that goes wrong, shrunk as far as possible
    world_size: int = 0
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    taken: dict[int, int] = field(default_factory=dict, repr=False)
    #: a program that reproduces it
    script: str = ""
    #: what the ranks of that case printed, if it was captured (``quiet``)
    printed: str = ""
    #: whether ``expect`` checked the results; otherwise only errors, hangs and mismatches were looked for
    results_checked: bool = True

    def check(self) -> None:
        """Raise AssertionError, with the script, if something was found."""
        if self.wrong is not None:
            raise AssertionError(f"{self}\n\n{self.script}")

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.verdict, self.wrong]))

    @property
    def verdict(self) -> str:
        """One line that says how many schedules were tried, and whether one went wrong."""
        tried = f"{schedules(self.schedules)} in {self.seconds:.{0 if self.seconds >= 10 else 1}f} s"
        if self.wrong is not None:
            return f"{tried}: seed {self.seed} goes wrong"
        return f"{tried}: nothing was found{'' if self.results_checked else _NOT_CHECKED}"


@fitting
def explore(
    main: Callable[[int], object] | Callable[[], object],
    *,
    seeds: Iterable[int] = range(1000),
    jobs: int = 1,
    faults: Sequence[Fault] | Faults = (),
    expect: Callable[[Report], object] | None = None,
    shrink_seconds: float = 30.0,
    fewest_ranks: int | None = None,
    quiet: bool = False,
    progress: Callable[[Exploration], object] | None = None,
    **options: object,
) -> Exploration:
    """Simulate ``main`` with one seed after another, and stop at the first that goes wrong.

    The case that went wrong is shrunk for up to ``shrink_seconds``: to fewer ranks, fewer faults, and fewer
    turns at which a thread other than the default one ran. ``Exploration.script`` reproduces it.

    >>> explore(main, seeds=range(10_000), world_size=3, jobs=2).check()

    Args:
        main: as for ``simulate``.
        seeds: the seeds, tried in this order.
        jobs: the number of processes, each of which must be able to import ``main``; 0 for one per core.
        faults: as for ``simulate``, or a function ``(random, world_size)`` that draws them for each seed.
        expect: raises AssertionError if a report is not as it should be. By default no rank may raise, all
            must end, and calls must match; with faults, ranks may also raise ``CollectiveError``, a
            cancellation or KeyboardInterrupt.
        shrink_seconds: for how long a case that went wrong is shrunk.
        fewest_ranks: the smallest number of ranks to which a case is shrunk. By default 1; with ``expect``,
            which may depend on the number of ranks, ``world_size``.
        quiet: do not show what ranks print to ``sys.stdout``; the output of the case that went wrong is in
            ``Exploration.printed``.
        progress: called now and then with the ``Exploration`` so far.
        options: those of ``simulate``. Without ``schedule``, odd seeds use ``PCT()``, and even ones
            ``RandomWalk()``.

    Raises:
        InvalidArgumentError: as for ``simulate``, or ``main`` cannot be imported by other processes.
        SpawnError: one of the processes of ``jobs`` has died, for want of memory, say.
    """
    return explore_target(
        of_function(main),
        seeds=seeds,
        jobs=jobs,
        faults=faults,
        expect=expect,
        shrink_seconds=shrink_seconds,
        fewest_ranks=fewest_ranks,
        quiet=quiet,
        progress=progress,
        **options,
    )


def explore_target(
    target: Target,
    *,
    seeds: Iterable[int],
    jobs: int,
    faults: Sequence[Fault] | Faults = (),
    expect: Callable[[Report], object] | None = None,
    shrink_seconds: float = 30.0,
    fewest_ranks: int | None = None,
    quiet: bool = False,
    progress: Callable[[Exploration], object] | None = None,
    **options: Any,
) -> Exploration:
    """Explore a function that may be known by its file; otherwise the same as ``explore``."""
    instead = f"write range({seeds})" if isinstance(seeds, int) else ""
    check("seeds", seeds, Iterable, "an iterable of ints", instead)
    check_count("jobs", jobs, 0)
    for name, function in (("expect", expect), ("progress", progress)):
        if function is not None:
            check_function(name, function, "None or a function")
    if not callable(faults):
        check("faults", faults, Sequence, "a list of faults, or a function that draws them")
    look = _Looking(faults, expect, quiet, options)
    found = Exploration(world_size=options.get("world_size", 4), results_checked=expect is not None)
    begun = time.monotonic()

    def told(count: int, strays: Sequence[Stray]) -> None:
        found.schedules += count
        found.strays = merged([*found.strays, *strays])
        found.seconds = time.monotonic() - begun
        if progress is not None:
            progress(found)

    jobs = jobs or os.cpu_count() or 1
    if jobs > 1:
        bad = _first_by_others(target, look, iter(seeds), jobs, told)
    else:
        bad = _first_here(target, look, seeds, told)
    if bad is not None:
        found.seed, found.wrong = bad
        size, nodes = found.world_size, options.get("nodes", 1)
        fewest = fewest_ranks or (1 if expect is None else size)
        _shrink(target, look, shrink_seconds, range(-(-fewest // nodes) * nodes, size, nodes), found)
    return found


@dataclass(frozen=True)
class _Looking:
    """How one case is simulated and judged."""

    faults: Sequence[Fault] | Faults
    expect: Callable[[Report], object] | None
    quiet: bool
    options: dict[str, Any]

    def case(self, seed: int) -> Case:
        """Return the case of this seed."""
        size = self.options.get("world_size", 4)
        faults = self.faults
        if callable(faults):
            faults = faults(random.Random(f"{seed} faults"), size)  # noqa: S311  # not for secrets
        return Case(size, seed, tuple(faults))

    def at(self, main: Callable[..., object], case: Case) -> Tried:
        """Simulate ``case``, and return its outcome."""
        options = self.options | {"world_size": case.world_size, "seed": case.seed, "faults": case.faults}
        options["schedule"] = case.schedule or self.options.get("schedule") or _schedule(case.seed)
        printed = StringIO()
        with redirect_stdout(printed) if self.quiet else nullcontext():
            tried = self._judged(main, case, options)
        return replace(tried, printed=printed.getvalue()) if tried.wrong is not None else tried

    def _judged(self, main: Callable[..., object], case: Case, options: dict[str, Any]) -> Tried:
        try:
            report = simulate(main, **options)
        except TimeoutError as error:
            return Tried(f"seed {case.seed}: {error}", "waits for something that is not simulated", {})
        strays = tuple(report.strays)
        expect = self.expect or partial(Report.check, faults=bool(case.faults))
        try:
            expect(report)
        except AssertionError as error:
            return Tried(f"{error}", _kind(report, error), report.taken, strays)
        return Tried(None, strays=strays)


def _schedule(seed: int) -> RandomWalk | PCT:
    return PCT() if seed % 2 else RandomWalk()


def _kind(report: Report, error: AssertionError) -> str:
    """Return the kind of failure, which has to stay the same when the case is shrunk."""
    if report.deadlock is not None:
        return "deadlock"
    if report.mismatches:
        return "mismatch"
    cause = leaves(report.first_cause()[1])[0] if report.errors else error
    return type(cause).__name__


def _first_here(target: Target, look: _Looking, seeds: Iterable[int], told: _Told) -> _Bad | None:
    for seed in seeds:
        tried = look.at(target.function, look.case(seed))
        told(1, tried.strays)
        if tried.wrong is not None:
            return seed, tried.wrong
    return None


def _first_by_others(
    target: Target, look: _Looking, seeds: Iterator[int], jobs: int, told: _Told
) -> _Bad | None:
    """Return the first of ``seeds`` that goes wrong, tried by ``jobs`` processes."""
    sent = target.sendable()
    with pool(jobs) as submit:
        return _first_of(jobs, partial(_submitted, submit, sent, look), seeds, told)


def _first_of(
    jobs: int, submit: Callable[[list[int]], Any], seeds: Iterator[int], told: _Told
) -> _Bad | None:
    running: dict[Any, int] = {}  # by future: how many were submitted before it
    submitted = 0
    bad: dict[int, _Bad] = {}  # by the same number

    def hear(one: Any) -> None:
        tried, found, strays = one.result()
        told(tried, strays)
        number = running.pop(one)
        if found is not None:
            bad[number] = found

    while not bad:
        while len(running) < 2 * jobs and (some := list(islice(seeds, _AT_ONCE))):
            running[submit(some)] = submitted
            submitted += 1
        if not running:
            break
        for one in wait(running, return_when=FIRST_COMPLETED).done:
            hear(one)
    for one in list(running):
        if not one.cancel():  # already running: it may have an earlier seed
            hear(one)
    return bad[min(bad)] if bad else None


def _submitted(submit: Callable[..., Any], sent: bytes, look: _Looking, seeds: list[int]) -> Any:
    try:
        return submit(_tried_by_another, sent, look, seeds)
    except (AttributeError, TypeError) as error:
        raise InvalidArgumentError(f"jobs= needs faults= and expect= that can be sent: {error}") from error


def _tried_by_another(sent: bytes, look: _Looking, seeds: list[int]) -> tuple[int, _Bad | None, list[Stray]]:
    """Try ``seeds``; return how many were tried, the one that went wrong, and the strays."""
    main = Target.found(sent)
    strays: list[Stray] = []
    for count, seed in enumerate(seeds, 1):
        begins(seed)
        tried = look.at(main, look.case(seed))
        strays = merged([*strays, *tried.strays])
        if tried.wrong is not None:
            return count, (seed, tried.wrong), strays
        if is_over():
            return count, None, strays
    return len(seeds), None, strays


def _shrink(target: Target, look: _Looking, seconds: float, sizes: Sequence[int], found: Exploration) -> None:
    case = look.case(found.seed)
    failed = look.at(target.function, case)
    if failed.wrong is None:
        found.wrong = f"it did not go wrong when repeated: main is not deterministic. It was:\n{found.wrong}"
        return
    with warnings.catch_warnings():
        warnings.showwarning = lambda *_, **__: None  # the case that went wrong has shown its own
        case, failed = smallest(case, failed, lambda one: look.at(target.function, one), seconds, sizes)
    found.wrong, found.seed = failed.wrong, case.seed
    found.world_size, found.faults = case.world_size, case.faults
    found.strays, found.printed = list(failed.strays), failed.printed
    found.taken = dict(case.schedule.taken if case.schedule is not None else failed.taken or {})
    found.script = _script(target, look, case, found.taken)


def _script(target: Target, look: _Looking, case: Case, taken: dict[int, int]) -> str:
    """Return a program that reproduces the case; options that have their defaults are left out."""
    usual = {name: one.default for name, one in inspect.signature(simulate).parameters.items()}
    said = {
        name: value
        for name, value in look.options.items()
        if name not in ("schedule", "world_size") and value != usual.get(name)
    }
    given: dict[str, Any] = {"world_size": case.world_size, "seed": case.seed} | said
    told = [f"{name}={value!r}" for name, value in given.items()]
    if case.faults:
        told.append(f"faults=[{', '.join(map(_told, case.faults))}]")
    names = {"Replay", "simulate"} | {type(fault).__name__ for fault in case.faults}
    names |= {"Link"} if any("Link(" in one for one in told) else set()
    used = [target] if look.expect is None else [target, of_function(look.expect)]
    folders = dict.fromkeys(one.folder for one in used if one.folder)
    return "\n".join(
        [
            *(["import sys", ""] if folders else []),
            f"from asynccoll.testing import {', '.join(sorted(names))}",
            *(f"sys.path.insert(0, {folder!r})" for folder in folders),
            *(one.imported for one in used),
            "",
            f"report = simulate({target.name}, {', '.join(told)}, schedule=Replay({taken}))",
            _judged(used[1:], case),
            "",
        ]
    )


def _judged(expected: Sequence[Target], case: Case) -> str:
    """Return the statement by which a script judges the report as ``explore`` did."""
    if expected:
        return f"{expected[0].name}(report)"
    return "report.check(faults=True)" if case.faults else "report.check()"


def _told(fault: Fault) -> str:
    said = (
        f"{one.name}={value!r}" for one in fields(fault) if (value := getattr(fault, one.name)) != one.default
    )
    return f"{type(fault).__name__}({', '.join(said)})"
