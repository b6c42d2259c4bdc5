"""The page of a trace in a real browser, the command ``asynccoll trace``, and ``top`` next to it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

import asynccoll as ac
from asynccoll import trace
from asynccoll.cli import main
from asynccoll.trace.merged import Trace
from browser import started
from test_trace_merged import call, compute, part


@pytest.fixture(scope="module")
def browser():
    """One browser for all pages, as it takes seconds to start."""
    with started() as one:
        yield one


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """Two ranks: rank 0 computes during its call; rank 1 is late twice and does not make the last call."""
    parts = [
        part(
            0,
            [
                call(0.1, 0.9, 0, "train.py:14", size_bytes=1 << 20),
                call(1.1, 1.6, 5, "train.py:14"),
                compute("backward", 0.0, 0.5),
                call(1.0, None, 1, "</script><b>train.py:20"),
            ],
            steps=(0.95,),
            seconds=2.0,
        ),
        part(
            1,
            [
                compute("load", 0.0, 0.8),
                call(0.8, 0.9, 0, "train.py:14"),
                call(1.5, 1.6, 5, "train.py:14"),
            ],
            steps=(0.95,),
            seconds=2.0,
        ),
    ]
    return Trace(parts).to_html(tmp_path_factory.mktemp("page") / "trace.html")


def text(browser, selector):
    return browser.run(f"document.querySelector({selector!r}).innerText")


def test_the_page_says_what_the_trace_says(browser, html, tmp_path):
    browser.open(html)
    cards = text(browser, "#cards")
    assert "27 % hidden" in cards  # of completed calls: 0.4 of 1.3 s on one rank, 0 of 0.2 s on the other
    assert "rank 1 is late" in cards
    assert "it takes longer in load" in cards
    assert "1 operation unfinished" in cards
    assert "backward" in text(browser, "#keys") and "end of a step" in text(browser, "#keys")
    hang = text(browser, "#hangs")
    assert "rank 0: all_reduce #1 on lane default has been in flight for 1.00 s" in hang
    assert "rank 1 has not called it" in hang
    assert "</script><b>train.py:20" in hang
    assert "train.py:14" in text(browser, "#waits")
    stragglers = text(browser, "#stragglers")
    assert "2 of 2" in stragglers and "0 of 2" in stragglers
    assert "backward" in text(browser, "#keys")
    rows = browser.run("trace.bars.map(bar => [bar.rank.rank, bar.row.name, bar.spans.length])")
    assert rows == [
        [0, "MainThread", 1],
        [0, "default", 2],
        [0, "default", 1],  # next to the one that hangs
        [1, "MainThread", 1],
        [1, "default", 2],
    ]
    assert browser.errors == []
    assert browser.shot(tmp_path / "page.png").stat().st_size > 10_000


def test_a_bar_tells_what_it_is_under_the_pointer(browser, html):
    browser.open(html)
    spot = browser.run("trace.place(1, 0)")
    browser.move(spot["x"], spot["y"])
    tip = text(browser, "#tip")
    for said in ("all_reduce 1.0 MiB", "0 on host", "800 ms", "train.py:14", "waited for\t400 ms (50 %)"):
        assert said in tip, tip
    browser.move(spot["x"], 5)
    assert browser.run("document.getElementById('tip').style.display") == "none"


def test_the_lanes_are_drawn_and_can_be_zoomed(browser, html):
    """Colors are where the bars are; Ctrl and the wheel narrow the view around the pointer."""
    colour = """(place => {
        const c = document.getElementById('lanes'), box = c.getBoundingClientRect(), s = devicePixelRatio;
        const x = (place.x - box.left) * s, y = (place.y - box.top - 5) * s;
        return [...c.getContext("2d").getImageData(x, y, 1, 1).data];
    })"""
    browser.open(html)
    assert browser.run(f"{colour}(trace.place(0, 0))")[:3] == [0x56, 0xB4, 0xE9]
    spot = browser.run("trace.place(1, 0)")
    assert browser.run(f"{colour}({{x: {spot['x'] - 60}, y: {spot['y']}}})")[:3] == [0xE6, 0x9F, 0x00]
    assert browser.run(f"{colour}({{x: {spot['x'] + 60}, y: {spot['y']}}})")[:3] == [0xD5, 0x5E, 0x00]
    browser.wheel(spot["x"], spot["y"], -100)
    view = browser.run("trace.view")
    assert view["end"] - view["start"] == pytest.approx(1.6)
    assert view["start"] < 0.5 < view["end"]
    browser.run("document.querySelector('#steps tr.go').click()")
    assert browser.run("[trace.view.start, trace.view.end]") == pytest.approx([0.0, 0.95], abs=0.03)


def test_nothing_marked_is_said(browser, tmp_path):
    bare = Trace([part(rank, [call(0, 1)], seconds=1.0) for rank in range(2)])
    browser.open(bare.to_html(tmp_path / "bare.html"))
    cards = text(browser, "#cards")
    assert "nothing marked" in cards
    assert "% hidden" not in cards
    assert text(browser, "#keys") == "communication"
    assert browser.errors == []


def test_ranks_that_wait_in_one_call_are_named_together(browser, tmp_path):
    waiting = [part(rank, [call(0.1, None, row="a lane with a long name")], ranks=3) for rank in (0, 2)]
    browser.open(Trace([*waiting, part(1, [], ranks=3)]).to_html(tmp_path / "hang.html"))
    advised, hang = browser.run("[...document.querySelectorAll('#hangs div')].map(one => one.innerText)")
    assert hang.startswith("ranks 0, 2: all_reduce #0 on lane a lane with a long name has been in flight")
    assert hang.endswith("rank 1 has not called it")
    assert advised.startswith("rank 1 has not called all_reduce on lane 'a lane with a long name', for which")
    assert browser.run("GUTTER - RANK > pen.measureText('lane a lane with a long name').width")


def test_where_nothing_is_over_no_share_is_shown(browser, tmp_path):
    stuck = [part(rank, [call(0.1, None), compute("forward", 0.0, 0.1)]) for rank in range(2)]
    browser.open(Trace(stuck).to_html(tmp_path / "stuck.html"))
    cards = text(browser, "#cards")
    assert "nothing has finished" in cards and "% hidden" not in cards
    assert browser.errors == []


def test_an_empty_trace_is_a_page_too(browser, tmp_path):
    browser.open(Trace([part(0, [], ranks=1)]).to_html(tmp_path / "empty.html"))
    assert "no operation" in text(browser, "#cards")
    assert browser.errors == []


# --- the command ------------------------------------------------------------------------------------

TRAIN = """
    import asyncio, os, torch, asynccoll as ac
    ac.initialize("gloo")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    async def main():
        for _ in range(23):
            model(torch.ones(8, 64)).sum().backward()
            for parameter in model.parameters():
                await ac.all_reduce(parameter.grad, op="avg", out=parameter.grad)
            optimizer.step()

    asyncio.run(main())
    ac.finalize()
"""


@pytest.mark.slow
def test_a_program_is_recorded_as_it_is(browser, start, script, tmp_path, capsys):
    """All ranks are in one page and in one file for Perfetto, and a table shows the lines."""
    script(TRAIN)
    job = start("trace", "run", "-o", "out", "-n", 2, "program.py")
    code, output, errors = job.wait()
    assert (code, errors) == (0, "")
    assert re.search(r"^2 ranks, .* 92 operations: \d+% of the communication is hidden", output)
    assert re.search(
        r"^all_reduce +default +88 .*program.py:11$", output, re.MULTILINE
    )  # without the first step
    assert re.search(r"steps, means over ranks \(the first 20 of 23\)\nstep .*\n +0 .*\n +1 .*\n +2 ", output)
    assert main(["trace", "stragglers", str(tmp_path / "out"), "--json"]) == 0
    assert sum(one["last"] for one in json.loads(capsys.readouterr().out)) == 44  # of 23 steps, not the first
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    browser.open(tmp_path / "out" / "trace.html")
    assert browser.run("document.title") == "asynccoll: trace of 2 ranks"
    names = browser.run("[...new Set(trace.bars.flatMap(bar => bar.spans.map(span => span.name)))].sort()")
    assert names == ["all_reduce", "backward", "forward", "optimizer"]


@pytest.mark.slow
def test_a_hung_job_is_seen_from_outside_and_shown_as_far_as_it_came(start, script, tmp_path, capsys):
    """`top` looks at the ranks below the given process, once in a pipe and as JSON.

    After Ctrl-C in the terminal, `trace run` names the rank that does not join, and the line at which the
    others wait.
    """

    def top(*arguments):
        code = main(["top", *arguments, "-i", "0.1", str(job.process.pid)])
        return code, *capsys.readouterr()

    script("""
        import os, signal, sys, torch, asynccoll as ac
        ac.initialize("gloo")
        ac.all_reduce(torch.ones(4)).wait()
        if ac.get_rank() == 1:
            print("apart")
            signal.pause()
        work = ac.all_reduce(torch.ones(4), lane="gradients")
        print("called")
        work.wait()
    """)
    job = start("trace", "run", "-o", "out", "-n", 2, "program.py")
    assert job.lines(2) == ["apart", "called"]
    code, output, errors = top("--json")
    assert (code, errors) == (0, "")
    first, second = json.loads(output)
    assert (first["rank"], first["lane"], first["in_flight"], first["behind"]) == (0, "gradients", 1, 0)
    assert first["place"].endswith("program.py:8")
    assert (second["rank"], second["in_flight"], second["behind"]) == (1, 0, 1)
    code, output, _ = top()
    assert code == 0
    assert output.splitlines()[0].split()[:4] == ["job", "rank", "pid", "state"]
    assert re.search(r" 0/2 .* all_reduce #1 +gradients +.*program.py:8$", output, re.MULTILINE)

    job.process.send_signal(signal.SIGINT)
    code, output, errors = job.wait()
    assert code == 130
    assert "interrupted" in errors
    assert "rank 1 has not called all_reduce #1 on lane 'gradients', in which rank 0 " in output
    assert main(["trace", "merge", str(tmp_path / "out"), "-o", str(tmp_path), "--json"]) == 0
    (hang,) = json.loads(capsys.readouterr().out)["unfinished"]
    assert (hang["rank"], hang["operation"], hang["sequence"], hang["missing"]) == (0, "all_reduce", 1, [1])
    assert hang["place"].endswith("program.py:8")
    code, _, errors = top()
    assert code == 2
    assert f"there is no process {job.process.pid}" in errors


@pytest.mark.slow
def test_worlds_are_recorded_one_by_one_and_a_forked_child_in_none(start, script, tmp_path):
    script("""\
        import os, sys
        import asynccoll as ac
        for turn in range(3):
            ac.initialize()
            for _ in range(2 + turn):
                ac.all_reduce(1.0).wait()
            if turn == 0 and os.fork() == 0:
                with ac.trace.span("child"):
                    sys.exit()
            if turn == 0:
                os.wait()
            ac.finalize()
        """)
    code, output, errors = start("trace", "run", "-o", tmp_path / "told", "-n", 1, "program.py").wait()
    assert code == 0, errors
    assert "for the next, up to world-3: asynccoll trace merge told/world-2" in output
    worlds = [ac.trace.load(tmp_path / "told" / which) for which in ("", "world-2", "world-3")]
    assert [trace.findings.operations for trace in worlds] == [2, 3, 4]
    assert all(span.name != "child" for part in worlds[0].parts for span in part.spans)


@pytest.mark.slow
def test_a_process_is_recorded_in_each_world_by_the_rank_that_it_has_there(start, script, tmp_path):
    """It is an elastic job: one rank is lost, another takes over its number, and a new one joins."""
    script("""\
        import os, pathlib, sys
        import asynccoll as ac
        here, worlds = int(os.environ["RANK"]), ([0, 1], [1, 2])
        os.environ.pop("WORLD_SIZE"), os.environ.pop("RANK"), os.environ.pop("LOCAL_RANK")
        for turn, members in enumerate(worlds):
            if here in members:
                meeting = f"file://{pathlib.Path.cwd()}/world{turn}"
                ac.initialize("gloo", init_method=meeting, rank=members.index(here), world_size=2)
                for _ in range(2 + turn):
                    ac.all_reduce(1.0).wait()
                ac.finalize()
        """)
    code, _, errors = start("trace", "run", "-o", tmp_path / "told", "-n", 3, "program.py").wait()
    assert code == 0, errors
    first, second = (ac.trace.load(tmp_path / "told" / which) for which in ("", "world-2"))
    assert [trace.findings.operations for trace in (first, second)] == [4, 6]
    assert [part.rank for trace in (first, second) for part in trace.parts] == [0, 1, 0, 1]
    assert second.parts[0].pid == first.parts[1].pid
    assert second.parts[1].pid not in {part.pid for part in first.parts}


@pytest.mark.slow
def test_no_rank_waits_for_rank_0_to_adopt_the_world_of_torch(start, script, tmp_path):
    """Each adopts it in its own first call, and rank 0 may wait for another rank before that."""
    script("""\
        import torch, torch.distributed as dist
        import asynccoll as ac
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), 1)
        work = ac.all_reduce(1)
        if dist.get_rank() == 1:
            dist.send(torch.ones(1), 0)
        assert work.wait() == 2
        ac.finalize()
        dist.destroy_process_group()
        """)
    code, _, errors = start("trace", "run", "-o", tmp_path / "told", "-n", 2, "program.py").wait()
    assert code == 0, errors
    assert "rank 0 is not recorded" not in errors
    trace = ac.trace.load(tmp_path / "told")
    assert [(part.rank, part.is_whole) for part in trace.parts] == [(0, True), (1, True)]
    assert trace.findings.operations == 2


@pytest.mark.slow
def test_the_document_stands_alone_whatever_the_program_prints(start, script):
    script("""
        import torch, asynccoll as ac
        ac.initialize("gloo")
        ac.barrier().wait()
        print("epoch 1")
        ac.finalize()
    """)
    code, output, errors = start("trace", "run", "--json", "-n", 1, "program.py").wait()
    assert (code, json.loads(output)["ranks"]) == (0, 1)
    assert "epoch 1" in errors


@pytest.mark.slow
def test_what_cannot_be_recorded_is_told(start, script, capsys, tmp_path):
    script("print('no world')")
    code, output, errors = start("trace", "run", "-n", 1, "program.py").wait()
    assert (code, output) == (1, "no world\n")
    assert "nothing was recorded: did a rank call ac.initialize()?" in errors
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "world-2").touch()
    script(
        "import asynccoll as ac\nfor _ in range(2):\n    ac.initialize()\n    ac.finalize()\nprint('done')"
    )
    code, output, errors = start("trace", "run", "-o", "taken", "-n", 1, "program.py").wait()
    assert (code, output.split()[0]) == (0, "done")
    assert "rank 0 is not recorded: [Errno 17] File exists" in errors
    assert main(["trace", "merge", "nowhere"]) == 2
    assert "there is no recording in 'nowhere'" in capsys.readouterr().err


def test_an_earlier_trace_is_replaced_and_said_and_nobody_elses_file_is(
    start, script, tmp_path, capsys, monkeypatch
):
    script("import asynccoll as ac\n\nac.initialize()\nac.barrier().wait()\nac.finalize()\n")
    theirs = tmp_path / "trace.json"
    theirs.write_text('{"traceEvents": []}')
    code, output, _ = start("trace", "run", "-o", "out", "-n", 1, "program.py").wait()
    assert code == 0
    assert "replaced" not in output
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "merge", "out"]) == 0
    told = capsys.readouterr().out
    assert "trace.html: open it in a browser; asynccoll-trace.json: for ui.perfetto.dev\n" in told
    assert "replaced" not in told
    assert theirs.read_text() == '{"traceEvents": []}'
    assert json.loads((tmp_path / "asynccoll-trace.json").read_text())["traceEvents"]
    theirs.unlink()
    for replaced in ("trace.html", "trace.html, trace.json"):
        assert main(["trace", "merge", "out"]) == 0
        assert f"replaced from an earlier trace: {replaced}; with -o DIR" in capsys.readouterr().out


def _luminance(color: str) -> float:
    """Return the relative luminance of ``#rrggbb``, as WCAG 2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_labels_can_be_read_on_every_bar() -> None:
    """WCAG asks for a contrast of 4.5 between text and what is behind it."""
    page = Path(trace.__file__).with_name("page.html").read_text()
    compute = re.findall("#[0-9A-F]{6}", page.partition("const COMPUTE = ")[2].partition("\n")[0])
    calls = re.findall("--(?:hidden|waited): (#[0-9A-F]{6})", page)
    (dark,) = re.findall('const DARK = "(.*)";', page)
    assert len(compute) == 6
    assert len(calls) == 2
    for color in (*compute, *calls):
        text = 1.0 if color == dark else 0.0
        low, high = sorted((text, _luminance(color)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, color
