"""Everything public is documented, and what the documents name can be typed: names, arguments, commands."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asynccoll
import asynccoll.sync
from asynccoll.cli import entry as cli
from pages import DOCS, PAGES, ROOT, blocks

API = sorted(DOCS.glob("reference/*.md"))


def test_every_public_name_is_on_a_page_of_the_reference():
    text = "\n".join(page.read_text() for page in API)
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)
    modules = re.findall(r"^\.\. py:module:: asynccoll\.(\w+)$", text, re.MULTILINE)
    inside = {name for module in modules for name in getattr(asynccoll, module).__all__}
    assert sorted({*listed, *modules} - (inside - {*asynccoll.__all__})) == sorted(asynccoll.__all__)
    assert inside <= {*listed}


def test_every_logger_is_in_the_table_of_what_is_logged():
    sources = "\n".join(file.read_text() for file in (ROOT / "asynccoll").rglob("*.py"))
    made = re.findall(r'getLogger\("(asynccoll[\w.]*)"\)', sources)
    table = (DOCS / "troubleshooting.md").read_text().split("## What is logged")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([\w.]+)`", " ".join(rows))) == sorted(set(made))


#: A type alias cannot have a docstring: a comment documents it, and the reference shows that.
ALIASES = {"GroupLike", "ReduceOpLike"}


@pytest.mark.parametrize("name", sorted({*asynccoll.__all__} - ALIASES))
def test_every_public_name_says_what_it_is(name):
    text = getattr(asynccoll, name).__doc__
    assert text
    assert text.split("\n\n")[0].strip().endswith((".", ":", "``"))


# Code


def spans(page: Path) -> list[str]:
    """Return what is in backticks in the text, on one line or across two."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def parsed(code: str) -> ast.AST | None:
    """Parse code as the body of a coroutine; return None if it is not Python."""
    try:
        return ast.parse("async def example():\n" + textwrap.indent(code, "    "))
    except SyntaxError:
        return None


def meant(node: ast.AST, known: dict[str, Any]) -> Any:
    """Return what a dotted name refers to if it begins with one of ours, else None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := meant(node.value, known)) is not None:
        return getattr(owner, node.attr)
    return None


def wrong(tree: ast.AST) -> Iterator[str]:
    """Yield names of ours that do not exist, and calls with arguments that they do not take."""
    known: dict[str, Any] = {"ac": asynccoll, "asynccoll": asynccoll, "idist": asynccoll.sync}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("asynccoll"):
            module = importlib.import_module(str(node.module))
            known |= {name.asname or name.name: getattr(module, name.name) for name in node.names}
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute):
                meant(node, known)
            if isinstance(node, ast.Call) and callable(called := meant(node.func, known)):
                keywords = {one.arg: None for one in node.keywords if one.arg is not None}
                signature = inspect.signature(called)
                if not any(isinstance(argument, ast.Starred) for argument in node.args):
                    signature.bind(*node.args, **keywords)
        except (AttributeError, TypeError) as error:
            yield f"{ast.unparse(node)}: {error}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_names_what_there_is(page):
    """Every block is Python; every name of ours in blocks and text exists and takes the given arguments."""
    found = []
    for block in blocks(page, "python"):
        tree = parsed(block.code)
        assert tree is not None, block.name
        found += wrong(tree)
    for span in spans(page):
        tree = parsed(span) if re.match(r"(await )?(ac|idist)\.", span) else None
        found += wrong(tree) if tree is not None else []
    assert found == []


def test_wrong_code_would_be_found():
    for code in (
        "ac.all_reduse(x)",
        "ac.all_reduce(x, dim=0)",
        "from asynccoll.testing.network_models import Step\nStep(1)",
    ):
        assert list(wrong(parsed(code))), code


# Commands


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command line that a page gives."""
    for block in blocks(page, "console", "bash"):
        for line in block.code.replace("\\\n", " ").splitlines():
            typed = shlex.split(line.removeprefix("$ "), comments=True)
            yield list(itertools.takewhile(lambda word: word not in (">", "|"), typed))
    for span in spans(page):
        if span.startswith("make ") or re.match(r"python (tools|benchmarks|examples)/", span):
            yield span.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_can_be_typed(page):
    """Make targets, programs of this repository, and command lines of asynccoll exist."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(page):
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in targets, words
        for word in words:
            if re.match(r"(tools|benchmarks|examples)/.*\.(py|txt)$", word):
                assert (ROOT / word).is_file(), words
        if "asynccoll" in words and "pip" not in words:
            cli._parser().parse_args(words[words.index("asynccoll") + 1 :])
