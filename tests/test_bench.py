"""``asynccoll bench``: what a size means, what each rank must receive, and a comparison as table and JSON."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import asdict
from xml.etree import ElementTree as ET

import pytest
import torch

import asynccoll as ac
from asynccoll.bench import operations, picture, starting
from asynccoll.bench.request import BenchRequest, Row
from asynccoll.bench.sidebyside import Series
from asynccoll.cli import main
from asynccoll.host import words
from test_pages import fields_on

CPU = torch.device("cpu")
#: What torchrun tells the first of four ranks on a host.
ONE_OF_FOUR = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}


def case(name, *, rank=0, ranks=3, size_bytes=4 * 3 * 7, dtype="float", reduction="sum"):
    return operations.make_case(
        name, size_bytes, dtype=dtype, reduction=reduction, rank=rank, ranks=ranks, device=CPU
    )


@pytest.mark.parametrize(
    ("written", "size_bytes"), [("4", 4), ("4K", 4096), ("4 KiB", 4096), ("16m", 16 << 20), ("1GB", 1 << 30)]
)
def test_sizes_as_people_write_them(written, size_bytes):
    assert operations.parse_size(written) == size_bytes


@pytest.mark.parametrize("written", ["", "K", "4.5K", "-4", "4T"])
def test_what_is_no_size(written):
    with pytest.raises(ac.InvalidArgumentError, match="expected a number of bytes"):
        operations.parse_size(written)


def test_no_bytes_are_no_size():
    """One element would be measured in its place, and reported with its own size."""
    with pytest.raises(ac.InvalidArgumentError, match="size '0K' is not possible; expected at least 1 byte"):
        operations.parse_size("0K")


def test_the_sizes_of_a_run():
    assert list(operations.sizes_between(4, 100, 5)) == [4, 20, 100]
    for wrong in ((0, 4, 2), (8, 4, 2), (4, 8, 1)):
        with pytest.raises(ac.InvalidArgumentError, match="factor of at least 2"):
            list(operations.sizes_between(*wrong))


#: name: elements that each of 3 ranks sends and receives of a total of 21, and the bus factor; as nccl-tests
#: defines them.
SHARES = {
    "all_reduce": (21, 21, 4 / 3),
    "all_gather": (7, 21, 2 / 3),
    "reduce_scatter": (21, 7, 2 / 3),
    "all_to_all": (21, 21, 2 / 3),
    "broadcast": (21, 21, 1.0),
    "reduce": (21, 21, 1.0),
    "gather": (7, 21, 2 / 3),
    "scatter": (21, 7, 2 / 3),
    "sendrecv": (21, 21, 1.0),
}


@pytest.mark.parametrize("name", SHARES)
def test_what_a_size_means(name):
    sent, received, bus = SHARES[name]
    found = case(name)
    assert (found.input().numel(), found.output().numel(), found.size_bytes) == (sent, received, 84)
    assert found.operation.bus_factor(3) == pytest.approx(bus)
    assert found.count == (7 if min(sent, received) == 7 or name == "all_to_all" else 21)


def test_every_operation_is_covered():
    assert SHARES.keys() == operations.OPERATIONS.keys()


@pytest.mark.parametrize("reduction", operations.REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat16", "int32", "double"])
def test_what_has_to_arrive_of_a_reduction(reduction, dtype):
    """It agrees with plain Python on the inputs of all ranks, and can be computed exactly in every dtype."""
    inputs = [
        case("all_reduce", rank=rank, dtype=dtype, reduction=reduction).input().tolist() for rank in range(3)
    ]
    combine = {
        "sum": sum,
        "min": min,
        "max": max,
        "avg": lambda column: sum(column) / 3,
        "prod": lambda column: column[0] * column[1] * column[2],
    }[reduction]
    expected = [combine(column) for column in zip(*inputs, strict=True)]
    assert len(set(expected)) > 1
    assert case("all_reduce", dtype=dtype, reduction=reduction).expected().tolist() == pytest.approx(expected)
    for rank in range(3):
        scattered = case("reduce_scatter", rank=rank, dtype=dtype, reduction=reduction)
        part = expected[scattered.count * rank :][: scattered.count]
        assert scattered.expected().tolist() == pytest.approx(part)


def test_what_has_to_arrive_of_an_exchange():
    sent = [case("all_to_all", rank=rank).input().tolist() for rank in range(3)]
    assert case("all_to_all", rank=1).expected().tolist() == [n for row in sent for n in row[7:14]]
    assert case("sendrecv", rank=0).expected().tolist() == case("sendrecv", rank=2).input().tolist()
    assert case("gather", rank=1).expected() is None
    assert case("scatter", rank=1).expected().tolist() == case("scatter", rank=0).input().tolist()[7:14]
    parts = [case("all_gather", rank=rank).input().tolist() for rank in range(3)]
    assert case("all_gather").expected().tolist() == [n for part in parts for n in part]


def test_wrong_elements_are_counted():
    expected = case("all_reduce").expected()
    right = expected.float()
    assert operations.wrong_elements(right, expected) == 0
    right[3] += 1
    right[5] = float("nan")
    assert operations.wrong_elements(right, expected) == 2
    assert operations.wrong_elements(right[:5], expected) == 21
    assert operations.wrong_elements(None, expected) == 21
    assert operations.wrong_elements(None, None) == 0


def test_what_was_not_measured_is_null():
    row = asdict(Row("all_reduce", 4, 1, "int32", "avg", -1, "torch", "in-place", error="RuntimeError: no"))
    figures = ("median_us", "low_us", "algbw_gbs", "busbw_gbs", "over_torch", "wrong")
    assert [row[name] for name in figures] == [None] * 6


def test_ratios_are_those_of_the_same_round():
    mine, theirs = Series("a", [1.0, 20.0, 3.0]), Series("b", [2.0, 10.0, 6.0])
    assert mine.ratio_to(theirs) == 0.5
    assert mine.median == 3.0


# --- the command --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_as_json_beside_the_peers(start, tmp_path):
    """The run includes every installed peer, reports no error, and plots all of them.

    Under a launcher this process is one of the measured ranks, and only the first one prints.
    """
    options = ("--sizes", "4,1K", "-n", 2, "--rounds", 3, "--json", "--plot", "out.svg")
    job = start("run", "-n", 2, "-m", "asynccoll", "bench", "all_reduce", "all_gather", *options)
    code, output, errors = job.wait()
    assert code == 0, errors
    found = json.loads(output)
    assert found.keys() == fields_on("json.md")["`bench`"]
    assert (found["ranks"], found["backend"], found["rounds"]) == (2, "gloo", 3)
    assert {"asynccoll", "torch", "functional"} <= set(found["peers"])
    assert set(found["absent"]).isdisjoint(found["peers"])
    rows = found["rows"]
    assert all(row["wrong"] == 0 and not row["error"] for row in rows)
    ours = [row for row in rows if row["peer"] == "asynccoll"]
    assert [(row["operation"], row["size_bytes"], row["count"], row["way"]) for row in ours] == [
        (name, size, size // 4 // parts, way)
        for name, parts in (("all_reduce", 1), ("all_gather", 2))
        for size in ((4, 1024) if parts == 1 else (8, 1024))
        for way in ("out-of-place", "in-place")
    ]
    for row in rows:
        assert row["algbw_gbs"] == pytest.approx(row["size_bytes"] / row["median_us"] / 1e3)
        assert row["busbw_gbs"] == pytest.approx(
            row["algbw_gbs"] * (1.0 if row["operation"] == "all_reduce" else 0.5)
        )
        assert 0 < row["low_us"] <= row["median_us"]
    assert {row["over_torch"] for row in rows if row["peer"] == "torch"} == {1.0}
    text = " ".join(ET.parse(tmp_path / "out.svg").getroot().itertext())
    for row in rows:
        assert f"{row['peer']} {row['way']}" in text


@pytest.mark.slow
def test_a_run_as_a_table(start):
    """In a pipe it is plain text: one heading, the columns of nccl-tests, a line for each size and peer.

    What a peer cannot do is reported, and the run continues: we refuse an average of whole numbers.
    """
    sizes_and_rounds = ("-b", 8, "-e", 128, "-f", 16, "-n", 1, "--rounds", 1)
    job = start(
        *("bench", "all_reduce", "all_gather", *sizes_and_rounds),
        *("--peers", "asynccoll,torch", "-d", "int32", "-o", "avg"),
    )
    code, output, errors = job.wait()
    assert (code, errors) == (0, "")
    heading, title, columns, *lines = output.splitlines()
    assert heading.startswith("# asynccoll") and "2 ranks on 1 host" in heading
    assert title.startswith("all_reduce")
    assert columns.split()[:7] == ["size", "count", "type", "redop", "root", "peer", "place"]
    peers = [(peer, place) for peer in ("asynccoll", "torch") for place in ("out", "in")]
    refused, (title, _, *told) = lines[:8], lines[8:]
    assert [line.split()[:8] for line in refused] == [
        [size, "B", str(int(size) // 4), "int32", "avg", "-1", peer, place]
        for size in ("8", "128")
        for peer, place in peers
    ]
    assert all(line.split()[8:] == ["-"] * 5 for line in refused)
    assert title.startswith("all_gather")
    assert [line.split()[:8] for line in told[:8]] == [
        [size, "B", str(int(size) // 8), "int32", "none", "-1", peer, place]
        for size in ("8", "128")
        for peer, place in peers
    ]
    assert all(
        re.search(r" 0 +1\.00$" if " torch " in line else r" 0 +\d+\.\d\d$", line) for line in told[:8]
    )
    assert [re.search(r"^# (asynccoll|torch) cannot all_reduce: \w+: ", line)[1] for line in told[8:]] == [
        "asynccoll",
        "torch",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["all_reduse"], "operation 'all_reduse' is none of all_reduce"),
        (["-d", "float31"], "type 'float31' is none of"),
        (["-o", "mean"], "reduction 'mean' is none of sum"),
        (["-b", "x"], "size 'x' cannot be read"),
        (["-f", "1"], "factor of at least 2"),
        (["--peers", "nccl"], "peer 'nccl' is none of asynccoll"),
        (["--plot", "/dev/null/x.svg"], "cannot write to '/dev/null'"),
        (["--plot", "bench.txt"], "'bench.txt' has to end in one of"),
    ],
)
def test_a_wrong_command_line_is_told(capsys, arguments, said):
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launched", "gpus", "backend"),
    [({}, 1, "gloo"), ({}, 2, "nccl"), (ONE_OF_FOUR, 2, "gloo"), (ONE_OF_FOUR, 4, "nccl")],
    ids=["one-for-both", "one-for-each", "too-few-for-the-launchers", "enough-for-the-launchers"],
)
def test_nccl_is_the_default_with_a_gpu_for_each_rank(monkeypatch, launched, gpus, backend):
    """Under a launcher its ranks count, and ``--ranks`` has no effect."""
    asked = []
    monkeypatch.setattr(starting, "bench", lambda request, _report, **_: asked.append(request.backend) or 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert main(["bench"]) == 1
    assert asked == [backend]


def test_a_backend_may_be_spelled_in_any_case(monkeypatch):
    """Its ranks are started as those of the same name in lower case."""
    asked = []
    monkeypatch.setattr(starting, "run", lambda request: asked.append(request) or 1)
    assert main(["bench", "--backend", "SERIAL", "--peers", "asynccoll,mpi4py"]) == 1
    assert (asked[0].backend, asked[0].engine) == ("serial", None)


def test_the_same_rows_give_the_same_picture(tmp_path):
    header = {"ranks": 2, "backend": "gloo", "memory": True}
    row = {"operation": "all_reduce", "size_bytes": 4, "peer": "torch", "way": "in-place", "error": ""}
    rows = [
        row | {"median_us": 5.0, "busbw_gbs": 1e-3},
        row | {"size_bytes": 64, "median_us": 6.0, "busbw_gbs": 1e-2},
    ]
    first = picture.draw(header, rows, tmp_path / "a.svg").read_text()
    assert picture.draw(header, rows, tmp_path / "b.svg").read_text() == first
    assert "torch in-place" in first
    assert "2 ranks on gloo (ours: memory)" in first


@pytest.mark.filterwarnings("error")
def test_what_no_peer_can_do_is_an_empty_picture(tmp_path):
    header = {"ranks": 1, "backend": "gloo", "memory": False}
    rows = [
        {"operation": "all_reduce", "size_bytes": 4, "peer": "torch", "way": "in-place", "error": "no avg"}
    ]
    assert "1 rank on gloo" in picture.draw(header, rows, tmp_path / "a.svg").read_text()


def test_what_is_broken_off_shows_what_was_measured(monkeypatch, capsys, tmp_path):
    row = {
        "operation": "all_reduce", "size_bytes": 4, "count": 1, "dtype": "float", "reduction": "sum",
        "root": -1, "peer": "asynccoll", "way": "in-place", "median_us": 12.5, "low_us": 12.0,
        "algbw_gbs": 0.5, "busbw_gbs": 0.25, "over_torch": None, "wrong": 0, "error": "",
    }  # fmt: skip
    header = {
        "asynccoll": "1", "torch": "2", "backend": "gloo", "memory": True, "ranks": 2, "nodes": 1, "cores": 2,
        "device": "cpu", "rounds": 3, "absent": {}, "steps": 9,
    }  # fmt: skip

    def interrupted(_request, report, *, ranks):
        report("start", header)
        for _ in range(ranks):
            report("step", {})
        report("row", row)
        return 130

    monkeypatch.setattr(starting, "bench", interrupted)
    assert main(["bench"]) == 130
    shown = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r" *4 B .*asynccoll +in +12\.5 +0\.500 +0\.250 +0", shown[-2])
    assert shown[-1] == "# not everything was measured: 2 of 9 rounds"
    assert main(["bench", "--json"]) == 130
    assert capsys.readouterr().out == ""
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.svg"
    assert main(["bench", "--plot", str(file)]) == 130
    assert capsys.readouterr().err.endswith(f"drawn: {file} (not everything was measured: 2 of 9 rounds)\n")
    text = " ".join(ET.parse(file).getroot().itertext())
    assert "asynccoll in-place" in text
    assert "not everything was measured: 2 of 9 rounds" in text


def test_who_waits_for_a_picture_is_told_where_nothing_was_measured(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(starting, "bench", lambda *_, **__: 143)
    file = tmp_path / "out.svg"
    assert main(["bench", "--plot", str(file)]) == 143
    assert capsys.readouterr().err == f"nothing was measured, so nothing is drawn: {file}\n"
    assert not file.exists()


def test_a_reader_who_has_seen_enough_ends_the_run(monkeypatch):
    """``| head -1`` does that. Otherwise the first rank would wait for room in a pipe that has no reader."""
    stopped = []

    def ranks(request):
        events = os.open(request.arguments[1], os.O_WRONLY)
        try:
            while not stopped:
                os.write(events, b'["step", {}]\n')
        finally:
            os.close(events)
        return 130

    def nobody_reads(_kind, _what):
        raise BrokenPipeError

    before = signal.signal(signal.SIGINT, lambda number, _frame: stopped.append(number))  # as launchers do
    monkeypatch.setattr(starting, "run", ranks)
    request = BenchRequest(("all_reduce",), (4,), peers=("asynccoll",), backend="gloo")
    try:
        with pytest.raises(BrokenPipeError):
            starting.bench(request, nobody_reads, ranks=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped


def test_a_backend_that_is_not_there_is_told_before_ranks_are_started(capsys):
    assert main(["bench", "--backend", "glou"]) == 2
    assert "unknown backend 'glou'" in capsys.readouterr().err


def test_a_size_that_is_all_but_the_next_unit_is_written_in_it():
    assert [words.size(one) for one in (1023, 1024, (1 << 20) - 4)] == ["1023 B", "1.0 KiB", "1.0 MiB"]
