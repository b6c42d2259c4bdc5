"""What one rank does: joins the world, and measures every case next to the peers.

The command starts it as ``python -m asynccoll.bench.ranks REQUEST EVENTS``; rank 0 writes what happens to the
file EVENTS, one event a line, because launchers pass standard output on as they like.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch

import asynccoll as ac
from asynccoll.backends.api.meeting import agree_on_store
from asynccoll.backends.table import starting
from asynccoll.bench.operations import Case, make_case, wrong_elements
from asynccoll.bench.peers import ALL, IN, OUT, Library, Way
from asynccoll.bench.request import BenchRequest, Report, Row, operations_in_a_round
from asynccoll.bench.sidebyside import Series, side_by_side
from asynccoll.environment.detection import MPI_LAUNCHERS, detect

_BASE = "torch"


def measure(request: BenchRequest, report: Report) -> None:
    """Join the world that the launcher's environment describes, and measure. All ranks call it.

    ``report`` is called on rank 0 only.
    """
    with _joined(request.backend), ExitStack() as peers:
        tell = report if ac.get_rank() == 0 else lambda _kind, _what: None
        libraries, absent = _wanted(request)
        for library in libraries:
            peers.callback(library.join())
        tell("start", _start(request, libraries, absent))
        asyncio.run(_measure_all(request, libraries, tell))


@contextmanager
def _joined(backend: str | None) -> Iterator[None]:
    place = detect(os.environ)
    if place.launcher in MPI_LAUNCHERS and backend and starting(backend) == "processes":
        _join_by_mpi(backend)
    else:
        ac.initialize(backend)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, ac.get_nproc_per_node())))
    try:
        yield
    finally:
        ac.finalize()


def _join_by_mpi(backend: str) -> None:
    """Join a torch world of ranks that mpiexec started: MPI distributes the address."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    one_host = comm.Split_type(MPI.COMM_TYPE_SHARED).size == comm.size
    store = agree_on_store(
        comm.rank, lambda text: str(comm.bcast(text, 0)), timedelta(seconds=60), one_host=one_host
    )
    ac.initialize(backend, store=store, rank=comm.rank, world_size=comm.size)


def _wanted(request: BenchRequest) -> tuple[list[Library], dict[str, str]]:
    """Return the libraries that take part, and why others do not; what one rank lacks, all leave out."""
    asked = [one for one in ALL if not request.peers or one.name in request.peers]
    told = ac.all_gather_object({one.name: one.missing() for one in asked}).wait()
    absent = {one.name: next(filter(None, (each[one.name] for each in told)), "") for one in asked}
    return [one for one in asked if not absent[one.name]], {name: why for name, why in absent.items() if why}


def _start(request: BenchRequest, libraries: list[Library], absent: dict[str, str]) -> dict[str, object]:
    return {
        "asynccoll": ac.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backend": ac.backend(),
        "memory": ac.explain("all_reduce", 1).backend == "memory",
        "device": str(ac.device()),
        "ranks": ac.get_world_size(),
        "nodes": ac.get_nnodes(),
        "host": ac.hostname(),
        "cores": os.cpu_count(),
        "rounds": request.rounds,
        "peers": [library.name for library in libraries],
        "absent": absent,
        "steps": len(request.operations) * len(request.sizes) * request.rounds,
    }


async def _measure_all(request: BenchRequest, libraries: list[Library], report: Report) -> None:
    for name in request.operations:
        for size_bytes in request.sizes:
            case = make_case(
                name,
                size_bytes,
                dtype=request.dtype,
                reduction=request.reduction,
                rank=ac.get_rank(),
                ranks=ac.get_world_size(),
                device=ac.device(),
            )
            for row in await _measure(request, case, libraries, report):
                report("row", asdict(row))


async def _measure(request: BenchRequest, case: Case, libraries: list[Library], report: Report) -> list[Row]:
    ways = {
        (library.name, way): call
        for library in libraries
        if case.operation.name in library.ways
        for way, call in library.ways[case.operation.name](case).items()
    }
    wrong, failed = await _tried(case, ways)
    for tensor in case.made:
        tensor.zero_()
    able = {" ".join(key): call for key, call in ways.items() if key not in failed}
    series = await side_by_side(
        able,
        rounds=request.rounds,
        operations=operations_in_a_round(request.iterations, case.size_bytes),
        warmup=request.warmup,
        settle=torch.cuda.synchronize if case.device.type == "cuda" else lambda: None,
        after_round=lambda: report("step", {}),
    )
    await _average(list(series.values()))
    return [_row(request, case, key, series, wrong[key], failed.get(key, "")) for key in ways]


async def _tried(
    case: Case, ways: dict[tuple[str, str], Way]
) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], str]]:
    """Return the wrong elements of each way, on all ranks; and the errors of ways that cannot do it."""
    expected = case.expected()
    wrong: dict[tuple[str, str], int] = {}
    failed: dict[tuple[str, str], str] = {}
    for key, call in ways.items():
        said, count = "", 0
        try:
            count = wrong_elements(await call(), expected)
        except Exception as error:  # a peer that lacks the reduction or type is reported, and left out
            said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        told = await ac.all_gather_object((count, said))
        wrong[key] = sum(count for count, _ in told)
        if any(said for _, said in told):
            failed[key] = next(said for _, said in told if said)
    return wrong, failed


async def _average(series: list[Series]) -> None:
    """Make each time the mean over all ranks, as nccl-tests does."""
    if not series:
        return
    times = torch.tensor([one.seconds for one in series], dtype=torch.float64, device="cpu")
    mean = await ac.all_reduce(times.to(ac.device()))
    for one, seconds in zip(series, (mean / ac.get_world_size()).tolist(), strict=True):
        one.seconds = seconds


def _row(
    request: BenchRequest,
    case: Case,
    key: tuple[str, str],
    series: dict[str, Series],
    wrong: int,
    error: str,
) -> Row:
    operation, (peer, way) = case.operation, key
    about = (
        operation.name,
        case.size_bytes,
        case.count,
        request.dtype,
        request.reduction if operation.reduces else "none",
        case.root if operation.rooted else -1,
        peer,
        way,
    )
    if error:
        return Row(*about, error=error)
    one = series[" ".join(key)]
    base = series.get(f"{_BASE} {way}") or series.get(f"{_BASE} {IN if way == OUT else OUT}")
    bandwidth = case.size_bytes / one.median / 1e9
    return Row(
        *about,
        median_us=one.median * 1e6,
        low_us=one.low * 1e6,
        algbw_gbs=bandwidth,
        busbw_gbs=bandwidth * operation.bus_factor(case.ranks),
        over_torch=None if base is None else one.ratio_to(base),
        wrong=wrong,
    )


def _write_to(path: Path) -> Report:
    file = path.open("a")

    def report(kind: str, what: dict[str, object]) -> None:
        file.write(json.dumps([kind, what]) + "\n")
        file.flush()

    return report


if __name__ == "__main__":
    measure(BenchRequest.from_json(sys.argv[1]), _write_to(Path(sys.argv[2])))
