"""The programs of the how-to page run as a reader types them, on two ranks and on one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from jobs import Job
from patience import patient
from worlds import rank_environment

PAGE = (Path(__file__).parent.parent / "docs" / "how-to.md").read_text()
#: All in one job, one after the other: starting one takes longer than running most of them.
RUN = """
import sys, warnings
import asynccoll as ac
warnings.simplefilter("error", ac.UnawaitedWorkWarning)
for path in sys.argv[1:]:
    exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
    print("done:", path)
"""


def appended() -> str:
    """What the page says to append to a program."""
    found = re.search(r"append these lines.*?^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def programs() -> list[str]:
    """As a reader puts them into files."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [code if "asyncio.run(" in code else f"{code}\n{appended()}" for code in blocks]


def written(found: list[str], script: Callable[..., str]) -> list[str]:
    return [script(code, f"howto_{number}.py") for number, code in enumerate(found)]


def test_every_program_runs(start: Callable[..., Job], script: Callable[..., str]) -> None:
    """To its end, with what it asserts, on two ranks."""
    names = written(programs(), script)
    assert len(names) >= 16
    code, said, error = start("run", "-n", "2", script(RUN, "run.py"), *names).wait()
    assert code == 0, f"{said}\n{error[-3000:]}"
    done = [line for line in said.splitlines() if line.startswith("done: ")]
    assert sorted(done) == sorted(f"done: {name}" for name in names * 2)


def test_every_program_runs_without_a_launcher(tmp_path: Path, script: Callable[..., str]) -> None:
    """But those that say that they take two ranks."""
    names = written([code for code in programs() if "# two ranks" not in code], script)
    assert len(names) >= 12
    done = subprocess.run(
        [sys.executable, script(RUN, "run.py"), *names],
        cwd=tmp_path,
        env=rank_environment(),
        timeout=patient(60),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.count("done: ") == len(names)
