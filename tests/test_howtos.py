"""The programs of the how-to page run as they stand there, on two ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from jobs import Job

PAGE = Path(__file__).parent.parent / "docs" / "how-to.md"
#: All in one job, one after the other: starting one takes longer than running most of them.
RUN = """
import asyncio, sys, warnings
import asynccoll as ac
warnings.simplefilter("error", ac.UnawaitedWorkWarning)
ac.initialize()
for path in sys.argv[1:]:
    names = {"__name__": "howto"}
    exec(compile(open(path).read(), path, "exec"), names)
    asyncio.run(names["main"]())
    ac.barrier(timeout=60).wait()
    ac.print0("done:", path)
ac.finalize()
"""


def programs() -> dict[str, str]:
    """By the titles that they stand under."""
    sections = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    blocks = {
        title: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for title, text in sections
    }
    return {title: code for title, found in blocks.items() for code in found}


def starts_itself(code: str) -> bool:
    """Whether it makes torch's process group, and so is a job of its own."""
    return "init_process_group(" in code


def test_programs_that_make_their_group_run(start: Callable[..., Job], script: Callable[..., str]) -> None:
    found = [code for code in programs().values() if starts_itself(code)]
    assert found
    for number, code in enumerate(found):
        ended, said, error = start("run", "-n", "2", script(code, f"own_{number}.py")).wait()
        assert ended == 0, f"{said}\n{error[-3000:]}"


def test_every_program_runs(start: Callable[..., Job], script: Callable[..., str]) -> None:
    """To its end, with what it asserts, on two ranks."""
    found = {title: code for title, code in programs().items() if not starts_itself(code)}
    assert len(found) >= 12
    names = [script(code, f"howto_{number}.py") for number, code in enumerate(found.values())]
    code, said, error = start("run", "-n", "2", script(RUN, "run.py"), *names).wait()
    assert code == 0, f"{said}\n{error[-3000:]}"
    done = [line for line in said.splitlines() if line.startswith("done: ")]
    assert done == [f"done: {name}" for name in names]
