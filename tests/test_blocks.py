"""Every block of Python on the pages runs, except those that say why not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import needs
import pages
from jobs import Job
from pages import BLOCKS
from patience import patient
from ports import free_port
from worlds import rank_environment

PROGRAM = str(Path(__file__).with_name("preludes.py"))
#: Pages that other tests run as a whole.
ELSEWHERE = {"how-to.md": "test_howtos", "inside.md": "test_inside", "simulation.md": "test_simulated"}
SUITE = "pytest.md"
#: What the backend of a page needs, and which make target has it.
NATIVE = {
    "mpi": ("mpi4py", "mpi", "make mpi"),
    "horovod": ("horovod", "horovod", "make horovod"),
    "xla": ("torch_xla", "xla-tpu", "make xla"),
}
NOT_RUN = re.compile(r"Not run by the tests: it needs (a TPU|a GPU|a cluster)\.")


def by_hand(name: str) -> bool:
    """Return whether the block runs in processes that no launcher has started."""
    return bool(re.search(r"ac\.spawn\(|init_method=|nnodes=", BLOCKS[name].code))


def those(page: str) -> list[str]:
    return [name for name, block in BLOCKS.items() if block.page == page and not block.comment]


def launched() -> list[str]:
    """Return the blocks of pages that are about no backend and are no test suite."""
    names = [name for page in {block.page for block in BLOCKS.values()} for name in those(page)]
    apart = {*ELSEWHERE, SUITE, *(f"backends/{name}.md" for name in NATIVE)}
    return sorted(name for name in names if BLOCKS[name].page not in apart and not by_hand(name))


def test_a_block_that_does_not_run_says_why() -> None:
    """The reason has one form, stands right before the block, and is something the test machines lack."""
    marked = 0
    for page in pages.PAGES:
        for block in pages.blocks(page, "python", "yaml"):
            if block.comment or block.language != "python":
                assert NOT_RUN.fullmatch(block.comment), f"{block.name}: {block.comment!r}"
                marked += 1
        marked -= len(re.findall("^ *<!-- Not run by the tests", page.read_text(), re.MULTILINE))
    assert marked == 0, "a comment stands before no block"


def test_every_page_is_run_somewhere() -> None:
    """That includes a page that is added later."""
    known = {name.partition(":")[0] for name in [*launched(), *those("launch.md")]}
    known |= {*ELSEWHERE, SUITE, *(f"backends/{name}.md" for name in NATIVE)}
    assert {block.page for block in BLOCKS.values() if not block.comment} == known


def test_every_block_runs(start: Callable[..., Job]) -> None:
    """On two ranks, every block runs to its end."""
    names = launched()
    assert len(names) >= 38
    code, said, error = start("run", "-n", "2", PROGRAM, *names).wait()
    assert code == 0, f"{said}\n{error[-3000:]}"
    done = [line for line in said.splitlines() if line.startswith("done: ")]
    assert sorted(done) == sorted(f"done: {name}" for name in names * 2)
    assert "Exception ignored" not in error, error


def programs(directory: Path, names: list[str], count: int = 1) -> None:
    """Run the blocks in processes that no launcher starts."""
    variables = rank_environment() | {"PORT": str(free_port()), "ANOTHER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, PROGRAM, *names],
            cwd=directory,
            env=variables | {"NODE": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(count)
    ]
    try:
        for process in started:
            said, _ = process.communicate(timeout=patient(60))
            assert process.returncode == 0, said
            done = [line for line in said.splitlines() if line.startswith("done: ")]
            assert done == [f"done: {name}" for name in names], said
    finally:
        for process in started:
            process.kill()


def test_hosts_that_start_scripts(tmp_path: Path) -> None:
    """Two processes run the blocks, each as if on its own host."""
    names = [name for name in those("launch.md") if by_hand(name)]
    assert len(names) == 2
    programs(tmp_path, names, count=2)


@pytest.mark.parametrize("backend", NATIVE)
def test_blocks_of_a_backend(backend: str, tmp_path: Path, start: Callable[..., Job]) -> None:
    """The blocks run in the environment that has the backend."""
    package, name, target = NATIVE[backend]
    if not needs.has_package(package, name):
        pytest.skip(f"`{target}` has an environment with {package}")
    found = those(f"backends/{backend}.md")
    alone = [name for name in found if by_hand(name)]
    assert alone
    programs(tmp_path, alone)
    if rest := [name for name in found if name not in alone]:
        code, said, error = start("run", "--backend", backend, "-n", "2", PROGRAM, *rest).wait()
        assert code == 0, f"{said}\n{error[-3000:]}"
        assert said.count("done: ") == 2 * len(rest)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_suite_passes(backend: str, tmp_path: Path) -> None:
    """The page's files for pytest pass; one of the tests is about mpi."""
    if backend == "mpi" and not needs.has_package("mpi4py", "mpi"):
        pytest.skip("`make mpi` has environments with mpi4py")
    first, plugin, second = (BLOCKS[name].code for name in those(SUITE))
    tmp_path.joinpath("conftest.py").write_text(plugin)
    tmp_path.joinpath("test_suite.py").write_text(first + second)
    chosen = "on_mpi" if backend == "mpi" else "not on_mpi"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", "-k", chosen],
        cwd=tmp_path,
        env=rank_environment(),
        timeout=patient(60),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("1 passed" if backend == "mpi" else "2 passed") in done.stdout, done.stdout + done.stderr
