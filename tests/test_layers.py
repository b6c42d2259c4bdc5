"""Who may depend on whom: code on top of the operations uses only what users have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import asynccoll as ac

PACKAGE = Path(ac.__file__).parent


#: Exceptions: threads and clocks, which have a single entry point; what tells peers of calls that will never
#: be made (``overlap.turns``); how a user who forgot to await is warned (``overlap.pending``); the user's
#: line that hooks of backward send for; how ranks are named in a text; where tensors lie in flat memory,
#: the same as in fused calls; which tensors have addresses at all; the lane name by which errors know that a
#: state is gathered there; how a copy is refused; and ``error.pending``, for an error of any type.
TAKEN = {
    ("asynccoll", "host"),
    ("asynccoll.errors", "still_pending"),
    ("asynccoll.flight", "FULL_STATE"),
    ("asynccoll.host.call_site", "Spot"),
    ("asynccoll.memory.aligned", "Layout"),
    ("asynccoll.memory.aliasing", "has_memory"),
    ("asynccoll.host.call_site", "caller"),
    ("asynccoll.host.call_site", "on_behalf_of"),
    ("asynccoll.host.uncopied", "Uncopied"),
    ("asynccoll.host.words", "by_text"),
    ("asynccoll.host.words", "listed"),
    ("asynccoll.waiting.forgotten", "NotItsResult"),
    ("asynccoll.waiting.forgotten", "warn"),
    ("asynccoll.ops.collectives", "refuse"),
    ("asynccoll.plan.trees", "flatten"),
    ("asynccoll.order.lane", "Lane"),
    ("asynccoll.runtime.process", "current"),
    ("asynccoll.world.resolving", "resolve_group"),
}


#: Further exceptions: the modules that report wrong arguments in the library's usual words.
ARGUMENTS = ("asynccoll.host.misfits", "asynccoll.host.timeouts")


def imported(source: Path) -> Iterator[tuple[str, str]]:
    """Yield each name that a module imports from the package, with the module it comes from."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asynccoll"):
            for name in node.names:
                yield str(node.module), name.name


@pytest.mark.parametrize("source", sorted(PACKAGE.glob("overlap/*.py")), ids=lambda path: path.stem)
def test_overlap_uses_public_names_alone(source: Path) -> None:
    """Apart from `TAKEN`, all of it could be written outside the package."""
    others = [
        (module, name)
        for module, name in imported(source)
        if not module.startswith(("asynccoll.overlap", *ARGUMENTS)) and (module, name) not in TAKEN
    ]
    assert [pair for pair in others if pair[1] not in ac.__all__] == []
