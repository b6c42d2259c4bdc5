"""Lists on pages match the code: error texts, environment variables, calls of torch.distributed."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest
import torch.distributed as dist

import asynccoll
import needs
from asynccoll.backends.table import usual_device
from asynccoll.bench.request import Row
from asynccoll.cli import main
from asynccoll.flight import Call, Hang, Parting, Unmet
from asynccoll.health.accounts import Account, Peer
from asynccoll.jobs.live import RankNow
from asynccoll.jobs.whereabouts import Job, Whereabouts
from asynccoll.ops.explaining import explain_offline
from asynccoll.plan.spec import Wire
from asynccoll.trace import findings
from asynccoll.trace.stragglers import Straggling
from patience import patient

DOCS = Path(__file__).parent.parent / "docs"
#: They say where a group is stored, or what a build of torch has; no program calls them.
NO_CALLS = {
    "get_pg_count",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_debug_level",
    "supports_complex",
}


def constants() -> set[str]:
    """Return every string of the source; adjacent ones are joined, f-strings give their fixed parts."""
    trees = [ast.parse(path.read_text()) for path in Path(asynccoll.__file__).parent.rglob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_texts_of_errors_that_are_explained_exist() -> None:
    """Each text in quotation marks at the start of a row is part of one of our error texts."""
    rows = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r'"([^"]+)"', row)]
    known = constants()
    assert len(quoted) >= 8
    assert [text for text in quoted if not any(text in one for one in known)] == []


def test_every_environment_variable_is_listed() -> None:
    """The page lists the variables that the source knows, and no others."""
    variables = {name for text in constants() for name in re.findall(r"ASYNCCOLL_[A-Z_]+[A-Z]", text)}
    listed = set(re.findall(r"ASYNCCOLL_[A-Z_]+[A-Z]", (DOCS / "environment.md").read_text()))
    assert listed == variables


def first_column(page: str, heading: str = "") -> set[str]:
    """Return every word in the first column of the tables under a heading, or before the first one."""
    text = (DOCS / page).read_text()
    section = text.partition(f"\n## {heading}\n")[2] if heading else text
    rows = re.findall(r"^\| (.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    return {word for cell in rows for word in re.findall(r"\w+", cell)}


def test_every_call_of_torch_distributed_has_a_row() -> None:
    """Each function that a program may call there is in the table."""
    module = dist.distributed_c10d
    calls = {name for name in module.__all__ if type(vars(module)[name]) is types.FunctionType} - NO_CALLS
    assert len(calls) > 40
    missing = calls - first_column("coming-from.md", "torch.distributed")
    assert {name for name in missing if not name.startswith("is_")} == set()


#: Prints names of a library, in its own process: one that has loaded mpi4py cannot start an MPI program.
NAMES_OF = {
    "horovod": "from horovod import torch as owner",
    "mpi4py": "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI as owner",
    "ignite": "import ignite.distributed as owner",
}
PUBLIC = """
import inspect
classes = ("Intracomm", "Request", "Prequest", "Status")
owners = [owner, *(getattr(owner, name) for name in classes if hasattr(owner, name))]
for name in {name for one in owners for name in dir(one) if not name.startswith("_")}:
    found = [getattr(one, name) for one in owners if hasattr(one, name)]
    if any(inspect.isclass(one) or callable(one) and hasattr(one, "__name__") for one in found):
        print(name)
"""


def public(library: str) -> set[str]:
    """Return the functions and classes of a library, and the methods of a communicator and its results."""
    line = [sys.executable, "-c", f"{NAMES_OF[library]}\n{PUBLIC}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=patient(60), check=True)
    return {*done.stdout.split()}


def test_every_call_of_horovod_has_a_row() -> None:
    """The table covers `horovod.torch`, in the environment that has it."""
    needs.need_package("horovod", "horovod", "the environment horovod has it: make horovod")
    calls = public("horovod")
    assert len(calls) > 50
    assert calls - first_column("coming-from.md", "Horovod") == set()


def test_every_call_of_mpi4py_has_a_row() -> None:
    """The table covers `mpi4py.MPI`, its communicators and requests, in the environments that have it."""
    needs.need_package("mpi4py", "mpi", "`make mpi` has environments with mpi4py")
    calls = public("mpi4py")
    assert len(calls) > 200
    assert calls - first_column("coming-from.md", "mpi4py") == set()


def test_every_call_of_ignite_has_a_row() -> None:
    """The table covers `ignite.distributed`."""
    calls = public("ignite")
    assert len(calls) > 25
    assert calls - first_column("migrating-from-ignite.md") == set()


def fields_on(page: str) -> dict[str, set[str]]:
    """Return the first column of each heading's table."""
    found: dict[str, set[str]] = {}
    heading = ""
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| `"):
            found.setdefault(heading, set()).update(re.findall(r"`(\w+)`", line.split("|")[1]))
    return found


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def test_every_field_of_json_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """The page covers each kind of document that commands print."""
    job = Job(1, "", ()).to_dict(0)
    rank = Whereabouts(0, Peer("", 0, "", 0, "", -1, 0), Account(0)).to_dict(0)
    parting = Parting("absent", "world", "default", 0, {}).to_dict()
    send = Call(1, "world", "default", "default", "send", "", "", 0, 0, 1, 4, 1.0, 1.0, 0.0, 0.0, "")
    message = Unmet(0, 1, send).to_dict()
    documents = {
        "`trace run`, `trace merge`": names(findings.Findings) | {"clock_uncertain_seconds", "files"},
        "One of `steps`": names(findings.Step),
        "One of `waits`": names(findings.Wait),
        "One of `lateness`": names(findings.Lateness),
        "One of `unfinished`": names(findings.Unfinished),
        "`trace stragglers`": names(Straggling),
        "`hang`": names(Hang),
        "`trace diff`": {"ranks", "hang", "partings", "messages"},
        "One of `partings`": {*parting},
        "One of `messages`": {*message},
        "`where`": {*job},
        "One of its `ranks`": {*rank},
        "`top`": names(RankNow),
        "One of `rows`": names(Row),
    }
    for command in ("info --no-try", "explain all_reduce"):
        assert main([*command.split(), "--json"]) == 0
        documents[f"`{command.split()[0]}`"] = {*json.loads(capsys.readouterr().out)}
    explained = fields_on("json.md")
    assert explained.keys() - documents.keys() == {"`bench`", "`explore`"}
    assert {name: explained[name] for name in documents} == documents


def test_the_default_timeout_is_told() -> None:
    """The default is on the pages where readers learn of timeouts."""
    default = inspect.signature(asynccoll.initialize).parameters["timeout"].default
    for page in ("guide.md", "how-to.md"):
        assert f"{default:.0f}" in (DOCS / page).read_text(), page


def sent(backend: str, dtype: str) -> str:
    """Return how the elements of a sum are sent, as the table of dtypes says it."""
    on = "gloo" if backend == "memory" else backend
    where = {"backend": on, "device": usual_device(on), "world_size": 2, "memory": backend == "memory"}
    plan = explain_offline("all_reduce", shape=(1 << 20,), dtype=dtype, **where)
    if plan.via == "all_gather":
        return "gathered"
    named = {Wire.SAME: "unchanged", Wire.REAL: "pairs of reals"}
    return named.get(plan.wire) or str(plan.wire_dtype).removeprefix("torch.")


def test_the_table_of_dtypes_is_what_explain_says() -> None:
    page = (DOCS / "backends" / "support.md").read_text()
    table = page.partition("How the elements of an `all_reduce`")[2]
    lines = [row.split("|")[1:-1] for row in re.findall(r"^\|.*\|$", table, re.MULTILINE)]
    (_, *backends), _, *rows = ([cell.strip() for cell in line] for line in lines)
    told = {dtype: cells for first, *cells in rows for dtype in re.findall(r"`(\w+)`", first)}
    assert len(told) > 10
    assert {dtype: [sent(backend, dtype) for backend in backends] for dtype in told} == told


def test_the_how_tos_are_all_in_the_list_at_the_top() -> None:
    page = (DOCS / "how-to.md").read_text()
    plain = [title.replace("`", "") for title in re.findall(r"^## (.+)$", page, re.MULTILINE)]
    assert [listed.replace("`", "") for listed in re.findall(r"^- \[(.+)\]\(#", page, re.MULTILINE)] == plain


def test_what_a_reader_types_to_look_at_a_hanging_job_is_about_one_job() -> None:
    """Without an argument, the command reports all jobs on the machine."""
    typed = re.findall(r"^\$ asynccoll where(.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert typed
    assert all(typed)
