"""The programs of the how-to page run as a reader types them, on two ranks and on one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from jobs import Job
from pages import DOCS, blocks
from patience import patient
from worlds import rank_environment

PAGE = DOCS / "how-to.md"
#: All in one job, one after the other: starting a job takes longer than running most of them.
RUN = """
import sys, warnings
import asynccoll as ac
warnings.simplefilter("error", ac.UnawaitedWorkWarning)
for path in sys.argv[1:]:
    exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
    print("done:", path)
"""
#: As on the page, with real ranks.
SURVIVE = """
import asyncio, os, signal, sys
import asynccoll as ac

async def survive(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        return await ac.all_reduce(1)
    except ac.PeerLostError as error:
        alive = [one for one in range(ac.get_world_size()) if one not in error.ranks]
        return await ac.all_reduce(1, group=alive)

rank = int(sys.argv[1])
ac.initialize("gloo", init_method=sys.argv[2], rank=rank, world_size=3)
print(asyncio.run(survive(rank)))
ac.finalize()
"""


def appended() -> str:
    """Return the lines that the page says to append to a program."""
    found = re.search(
        r"append these lines.*?^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found[1]


def programs() -> list[str]:
    """Return the programs as a reader puts them into files."""
    codes = [block.code for block in blocks(PAGE, "python")]
    return [
        code if re.search(r"asyncio\.run\(|ac\.finalize\(", code) else f"{code}\n{appended()}"
        for code in codes
    ]


def written(found: list[str], script: Callable[..., str]) -> list[str]:
    return [script(code, f"howto_{number}.py") for number, code in enumerate(found)]


def test_every_program_runs(start: Callable[..., Job], script: Callable[..., str]) -> None:
    """Every program runs to its end, with its assertions, on two ranks."""
    names = written(programs(), script)
    assert len(names) >= 16
    code, said, error = start("run", "-n", "2", script(RUN, "run.py"), *names).wait()
    assert code == 0, f"{said}\n{error[-3000:]}"
    done = [line for line in said.splitlines() if line.startswith("done: ")]
    assert sorted(done) == sorted(f"done: {name}" for name in names * 2)


def alone(directory: Path, *arguments: str) -> str:
    """Return what a program prints if no launcher starts it."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=rank_environment(),
        timeout=patient(60),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_program_runs_without_a_launcher(tmp_path: Path, script: Callable[..., str]) -> None:
    """Programs that say that they need two ranks are left out."""
    names = written([code for code in programs() if "# two ranks" not in code], script)
    assert len(names) >= 14
    assert alone(tmp_path, script(RUN, "run.py"), *names).count("done: ") == len(names)


def test_a_checkpoint_of_two_ranks_is_resumed_by_one(
    tmp_path: Path, start: Callable[..., Job], script: Callable[..., str]
) -> None:
    """It resumes in the middle of an epoch, and reaches the same weight."""
    (code,) = [code for code in programs() if 'Path("checkpoint.pt")' in code]
    name = script(code, "resumable.py")
    ended, first, error = start("run", "-n", "2", name).wait()
    assert ended == 0, error[-3000:]
    assert first.startswith("after step 12 the weight is ")
    assert alone(tmp_path, name) == f"resumed after step 10\n{first}"


def test_a_sharded_optimizer_of_two_ranks_is_resumed_by_one(
    tmp_path: Path, start: Callable[..., Job], script: Callable[..., str]
) -> None:
    """It reaches the weight of one process without interruption."""
    (code,) = [code for code in programs() if 'Path("sharded.pt")' in code]
    name = script(code, "sharded.py")
    ended, first, error = start("run", "-n", "2", name).wait()
    assert ended == 0, error[-3000:]
    assert first.startswith("after step 3 the weight is ")
    without = script(code.replace("range(3)", "range(6)").replace("sharded.pt", "other.pt"), "without.py")
    assert alone(tmp_path, name) == f"resumed after step 3\n{alone(tmp_path, without)}"


def test_survivors_go_on_where_no_launcher_stops_them(tmp_path: Path, script: Callable[..., str]) -> None:
    """Even rank 0 may be lost if ranks are started by hand and meet at a file."""
    name = script(SURVIVE, "survive.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, name, str(rank), (tmp_path / "meet").as_uri()],
            cwd=tmp_path,
            env=rank_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=patient(60))[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 0, 0], said
    assert said[1:] == ["2\n", "2\n"]
