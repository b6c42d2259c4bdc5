"""What pages list is what there is: texts of errors, environment variables, calls of torch.distributed."""

from __future__ import annotations

import ast
import re
import types
from pathlib import Path

import torch.distributed as dist

import asynccoll

DOCS = Path(__file__).parent.parent / "docs"
#: They say where a group is kept, or what a build of torch has, and are nobody's calls.
NO_CALLS = {
    "get_pg_count",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_debug_level",
    "supports_complex",
}


def constants() -> set[str]:
    """Every text in the source, adjacent ones joined, f-strings in their fixed parts."""
    trees = [ast.parse(path.read_text()) for path in Path(asynccoll.__file__).parent.rglob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_texts_of_errors_that_are_explained_exist() -> None:
    """Each in quotation marks at the start of a row is a part of a text of ours."""
    rows = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r'"([^"]+)"', row)]
    known = constants()
    assert len(quoted) >= 8
    assert [text for text in quoted if not any(text in one for one in known)] == []


def test_every_environment_variable_is_listed() -> None:
    """Those that the source knows, and no others."""
    variables = {name for text in constants() for name in re.findall(r"ASYNCCOLL_[A-Z_]+[A-Z]", text)}
    listed = set(re.findall(r"ASYNCCOLL_[A-Z_]+[A-Z]", (DOCS / "environment.md").read_text()))
    assert listed == variables


def test_every_call_of_torch_distributed_has_a_row() -> None:
    """Whatever function a program may call there is in the table."""
    table = (DOCS / "coming-from.md").read_text().partition("## Horovod")[0]
    module = dist.distributed_c10d
    calls = {name for name in module.__all__ if type(vars(module)[name]) is types.FunctionType} - NO_CALLS
    assert len(calls) > 40
    missing = {name for name in calls if not re.search(rf"\b{name}\b", table)}
    assert {name for name in missing if not name.startswith("is_")} == set()
