"""In a notebook, a real Jupyter kernel runs the cells; their functions are in no file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import asynccoll
import needs
from patience import patient

pytestmark = pytest.mark.slow

nbclient = needs.need_package_of("notebook", "nbclient")
nbformat = needs.need_package_of("notebook", "nbformat")

LIMIT_S = patient(90)

#: Like the first cell of most notebooks, it starts threads in the kernel before anything is forked.
FIRST = """
import os, torch
import asynccoll as ac
print(float((torch.ones(600, 600) @ torch.ones(600, 600)).sum()))

def train(local_rank, factor):
    x = torch.ones(600, 600) @ torch.ones(600, 600)
    total = ac.all_reduce(x * (local_rank + 1)).wait()
    assert (total == 600 * sum(range(1, ac.get_world_size() + 1))).all()
    # Not printed: what a forked process prints goes to the notebook, when its kernel likes.
    open(f"rank-{ac.get_rank()}", "w").write(f"{ac.get_world_size()} {float(total[0, 0]) * factor}")

def fail(local_rank):
    if local_rank == 1:
        raise LookupError("of a cell")
    ac.all_reduce(1).wait()
"""

Cell = Callable[[str], str]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """Run cells in the kernel; each returns its output, including an error's name and text."""
    directory = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook()
    client = nbclient.NotebookClient(
        notebook, timeout=LIMIT_S, allow_errors=True, resources={"metadata": {"path": str(directory)}}
    )
    paths = [str(Path(asynccoll.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JUPYTER_PLATFORM_DIRS": "1"}

    def run(source: str) -> str:
        made = nbformat.v4.new_code_cell(source)
        notebook.cells.append(made)
        client.execute_cell(made, len(notebook.cells) - 1)
        return "".join(
            str(one.get("text", "")) + "\n".join([one.get("ename", ""), one.get("evalue", "")])
            for one in made.outputs
        )

    with client.setup_kernel(env=environ):
        assert "216000000.0" in run(FIRST)
        run.directory = directory  # type: ignore[attr-defined]
        yield run


@pytest.mark.parametrize(
    "source",
    [
        "with ac.Parallel('gloo', nproc_per_node=2) as parallel:\n    parallel.run(train, 2)",
        "ac.spawn('gloo', train, (2,), nproc_per_node=2)",
    ],
    ids=["parallel", "spawn"],
)
def test_functions_of_a_cell_run_on_ranks(cell, source: str) -> None:
    """The ranks are forked, so no function has to be found by name; the notebook works afterwards."""
    assert cell(source) == ""
    for rank in (0, 1):
        path = cell.directory / f"rank-{rank}"
        assert path.read_text() == "2 3600.0"
        path.unlink()
    assert "False" in cell("print(ac.is_initialized())")


def test_an_error_of_a_rank_is_shown_in_the_notebook(cell) -> None:
    """The error shows the rank and the line of the cell."""
    shown = cell("ac.spawn('gloo', fail, nproc_per_node=2)")
    assert "SpawnError" in shown
    assert "rank 1 failed" in shown
    assert "LookupError: of a cell" in shown


def test_a_start_method_that_cannot_find_them_is_refused(cell) -> None:
    """It is refused before anything is started; the error says what to do."""
    shown = cell("ac.spawn('gloo', train, (2,), nproc_per_node=2, start_method='spawn')")
    assert "InvalidArgumentError" in shown or not shown  # with cloudpickle, functions are sent by value
    assert not shown or "cloudpickle" in shown


def test_a_world_of_one_needs_no_ranks(cell) -> None:
    """`await` works directly in a cell."""
    assert "[7]" in cell("print(await ac.all_gather(7))")
