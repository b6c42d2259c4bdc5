"""Every fault of `faults_matrix` is reported as its table says: one cell of each; `make faults` tries all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import faults_matrix
import worlds
from faults_matrix import CULPRIT, FAULTS, PLACES, Cell
from patience import patient

PLACES_HERE = tuple(name for name, (backend, _, _) in PLACES.items() if backend in worlds.BACKENDS)
CELLS = list(faults_matrix.cells(PLACES_HERE))
TRIED = {"all": CELLS, "some": faults_matrix.some(CELLS, len(FAULTS))}.get(
    os.environ.get("ASYNCCOLL_TEST_FAULTS", "some"), []
)


@pytest.mark.processes
@pytest.mark.parametrize("one", TRIED, ids=str)
def test_a_fault_is_told_as_the_table_says(one: Cell) -> None:
    fault = FAULTS[one.fault]
    backend, options, apart = PLACES[one.place]
    nodes = {"nodes": tuple(range(one.size))} if apart else {}
    with worlds.fresh(backend, one.size, **options, **nodes, **fault.options) as world:
        dies = [CULPRIT] if fault.dies else []
        results = world.run(
            faults_matrix.cell, one.fault, one.operation, runner=one.way, dies=dies, timeout=patient(20)
        )
        world.kill()
    own = results.pop(CULPRIT)
    others = tuple(rank for rank in range(one.size) if rank != CULPRIT)
    if fault.dies:
        assert own in (worlds.Died(0), worlds.Died(1), worlds.Died(-signal.SIGKILL))
    elif not (own and own[0] == "" and faults_matrix.may_have_sent(one)):
        assert (own and own[0]) == fault.own, own
        if fault.own == "CollectiveTimeoutError":
            assert set(own[1]) <= set(others), own
    for error, ranks, seconds, text in results:
        if one.operation == "broadcast" and error == "":
            continue  # the sender need not wait for receivers, nor they for each other
        assert error == fault.error, text
        if fault.names and error:
            assert ranks == (CULPRIT,), text
            assert f"rank {CULPRIT} " in text or f"rank {CULPRIT}:" in text
        assert seconds < fault.seconds + patient(1.0) - 1.0, text


def test_the_page_is_what_the_table_says() -> None:
    page = Path(__file__).parent.parent / "docs" / "faults.md"
    assert faults_matrix.table() in page.read_text(), "put in what python tests/faults_matrix.py prints"


def test_there_are_enough_cells() -> None:
    assert len(list(faults_matrix.cells())) >= 200
    assert {
        one.fault for one in faults_matrix.some(list(faults_matrix.cells()), len(FAULTS))
    } == FAULTS.keys()
