"""Plants mistakes into copies of the library, one in each, and reports how soon simulated worlds find them.

``python tests/planted.py SECONDS [COUNT [SEED] | training [NUMBER]]``: each mistake gets at most this many
seconds of processor time, so that a busy machine finds as many (in trainings: of wall time). It plants the
hand-written mistakes, ``COUNT`` mechanical ones, or those of training (or one of them, counted from 1), which
drawn trainings look for. ``SCHEDULES_EACH`` is the most schedules to try, ``JOBS`` the number of mistakes to
look for at a time.

A mistake that is not found must be argued away (``mistakes.EQUIVALENT``), or be reached by drawn programs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path

from mistakes import EQUIVALENT, LIBRARY, SEEDED, TRAINING, Mistake, mechanical

HERE = Path(__file__).parent
#: The dependencies of simulated worlds, apart from the library: imported once, and inherited by every child.
STAND_ON = ("torch", "torch.distributed", "hypothesis", "anyio", "trio", "numpy", "outcome", "sniffio")
MOST_SCHEDULES = int(os.environ.get("SCHEDULES_EACH", "100000"))
#: The extra processor time, and the wall time per second of it, after which a child counts as stuck: a hang
#: outside of what the simulation controls.
STUCK_SECONDS, STUCK_TIMES = 60.0, 20.0


#: Explores the library, given the module with the mistake and the seconds, and prints what it finds.
Explore = Callable[[str, float], object]


def found(mistake: Mistake, seconds: float, explore: Explore) -> str:
    """Explore a copy of the library that has this mistake. Returns what was found."""
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / "asynccoll"
        shutil.copytree(LIBRARY, copied, ignore=shutil.ignore_patterns("__pycache__"))
        (copied / mistake.file).write_text(mistake.text)
        told = Path(directory) / "told"
        child = os.fork()
        if child == 0:
            most = round(seconds + STUCK_SECONDS)
            resource.setrlimit(resource.RLIMIT_CPU, (most, most))
            with contextlib.suppress(BaseException):
                told.write_text(_explored(directory, partial(explore, _module(mistake.file), seconds)))
            os._exit(0)
        return _outcome(child, told, time.monotonic() + STUCK_TIMES * (seconds + STUCK_SECONDS))


def _module(file: str) -> str:
    return f"asynccoll.{file.removesuffix('.py').replace('/', '.')}"


def _outcome(child: int, told: Path, deadline: float) -> str:
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "stuck"
        time.sleep(0.05)
    if told.exists():
        return told.read_text()
    return "stuck" if os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) == signal.SIGKILL else "crash"


def _explored(directory: str, explore: Callable[[], object]) -> str:
    """Explore the copy in this directory; runs in a child."""
    sys.path[:0] = [directory, str(HERE)]
    output = io.StringIO()
    told: object = ""
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            told = explore()
        except BaseException as error:
            return f"crash: {error!r:.200}"
    at = re.search(r"^=== (.*)\n(.*)", output.getvalue(), re.MULTILINE)
    return f"{at[1]}: {at[2]:.100}" if at else f"not found: {told}"


def schedules(module: str, seconds: float) -> object:
    """Try programs of collectives.

    Two of four seeds have switch points before the module's statements, which makes a schedule take twice as
    long. Not so in memory, where each read of a word is a switch point already: there, three of four seeds
    draw bursts, two of them without any fault.
    """
    os.environ |= {"REDUCING": "0"}
    explorer, statements = map(import_module, ("explore_simulated", "asynccoll.testing.statements"))
    explorer.SCHEDULES = 4  # revealing programs are rarer than revealing orders
    in_memory = module.startswith("asynccoll.backends.memory.")
    if in_memory:
        explorer.TRANSPORTS, explorer.SPREAD = ("memory",), False
    faults = explorer.FAULTS
    in_turn = (faults, (), ("interrupt",), ()) if in_memory else (faults,)
    exploration = explorer.Exploration(seconds, MOST_SCHEDULES, clock=time.process_time)
    number = 1
    while not exploration.over:
        in_bursts = number % 4 > 0 if in_memory else number % 2 == 0
        explorer.FAULTS = in_turn[number % len(in_turn)]
        pointed = () if in_memory or number % 4 > 1 else statements.sources((module,))
        with statements.instrumented(pointed):  # once for all programs: it visits every function
            for program in explorer.drawn(3 if number % 3 else 2, number, in_bursts=in_bursts):
                exploration.look_at(program)
        number += 1
    return exploration


def trainings(_: str, seconds: float) -> object:
    """Try training programs until one fails."""
    os.environ |= {"SIMULATED": "1", "STOP": "1"}
    explorer = import_module("explore_training")
    exploration = explorer.Exploration(seconds)
    explorer.explore(exploration, [2, 3], number=1)
    return f"{exploration.drawn.total()} programs"


def main() -> int:
    """Plant all mistakes; return 1 if less than 95 % of those that make a difference are found."""
    seconds, *drawn = sys.argv[1:]
    for name in STAND_ON:
        import_module(name)
    explore: Explore = schedules
    if drawn[:1] == ["training"]:
        planted, explore = TRAINING(), trainings
        planted = [planted[int(number) - 1] for number in drawn[1:]] or planted
    else:
        planted = mechanical(*map(int, [*drawn, "1"][:2])) if drawn else SEEDED()
    missed = equivalent = 0
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "1"))) as pool:
        for mistake, said in zip(
            planted, pool.map(lambda one: found(one, float(seconds), explore), planted), strict=True
        ):
            told = said
            if told.startswith("not found"):
                why = EQUIVALENT.get((mistake.file, mistake.what))
                equivalent += why is not None
                missed += why is None
                told = f"EQUIVALENT: {why}" if why else told
            print(f"{mistake.file}:{mistake.line}, {mistake.what:.160}: {told}", flush=True)
    counted = len(planted) - equivalent
    print(f"{counted - missed} of {counted} were found; {equivalent} make no difference")
    return 1 if missed > 0.05 * counted else 0


if __name__ == "__main__":
    sys.exit(main())
