"""Adding a backend, a launcher, a kind of value or a command takes one new file and rows in one table.

Each test adds one to a copy of the package, uses it there, and counts the lines that changed elsewhere.
"""

from __future__ import annotations

import difflib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import asynccoll
import scripts

TOYS = Path(__file__).parent / "toys"
PACKAGE = Path(asynccoll.__file__).parent


@dataclass(frozen=True)
class Addition:
    """Rows by file and by the line before them, new files, and a program that prints `told`."""

    rows: dict[str, tuple[tuple[str, str], ...]]
    program: str
    told: str
    files: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)


BACKEND = """
    import asyncio, dataclasses, torch, asynccoll as ac
    from asynccoll.backends import mailbox
    from asynccoll.backends.api import Op

    async def main():
        ac.initialize("mailbox")
        rank, size = ac.get_rank(), ac.get_world_size()
        async with ac.scope():
            summed = ac.all_reduce({"x": torch.full((2,), rank + 1.0), "n": rank})
            last = ac.broadcast(torch.full((2, 2), rank), src=2)
        texts = await ac.all_gather(f"rank {rank}")
        objects = await ac.all_gather_object({"rank": rank})
        with ac.lane("other"):
            await ac.barrier()
        for lacking in (
            lambda: ac.all_to_all(torch.ones(3)),
            lambda: ac.reduce_scatter(torch.ones(3)),
            lambda: ac.scatter(torch.ones(3) if rank == 0 else None, src=0),
            lambda: ac.gather_object({"rank": rank}, dst=0),
            lambda: ac.scatter_object([1, 2, 3] if rank == 0 else None, src=0),
        ):
            try:
                lacking()
            except ac.UnsupportedOpError as error:
                assert "is not supported on mailbox" in str(error), error
            else:
                raise AssertionError("it has that?")
        assert summed.result()["x"].tolist() == [6.0, 6.0] and summed.result()["n"] == 3
        assert last.result().tolist() == [[2, 2], [2, 2]]
        assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        await boasted()
        print(ac.backend(), texts)
        ac.finalize()

    async def boasted():
        # The next life of the same ranks, at the same place; and a call that the backend only says it has.
        ac.finalize()
        known = mailbox.CAPABILITIES
        mailbox.CAPABILITIES = dataclasses.replace(known, ops=known.ops | {Op.GATHER})
        ac.initialize("mailbox", timeout=20)
        rank = ac.get_rank()
        assert (await ac.all_gather(rank)) == [0, 1, 2]
        for missing in (
            lambda: ac.gather(torch.ones(1), dst=0),
            lambda: ac.gather_object("too long for the first round" * 100, dst=0),
        ):
            try:
                await missing()
            except (ac.UnsupportedOpError, ac.PeerRefusedError) as error:  # its own, or who was first says it
                assert "returned nothing from it" in str(error), error
            else:
                raise AssertionError("it has that?")
            assert (await ac.all_gather(rank)) == [0, 1, 2]

    asyncio.run(main())
"""
LAUNCHER = """
    import asynccoll as ac
    ac.initialize(timeout=30)
    print(ac.backend(), ac.get_world_size(), ac.all_reduce(ac.get_rank() + 1).wait())
    ac.finalize()
"""
KIND = """
    import uuid, asynccoll as ac
    run = uuid.UUID(int=7)
    assert ac.broadcast({"run": run, "n": [run]}).wait() == {"run": run, "n": [run]}
    print(ac.all_gather(run).wait())
"""
COMMAND = """
    import sys
    from asynccoll.cli import main
    sys.exit(main(["hello", "world"]))
"""

ADDITIONS = {
    "backend": Addition(
        {
            "backends/table.py": (
                (
                    "ROWS: dict[str, Row] = {",
                    '    "mailbox": Row("asynccoll.backends.mailbox:create", lambda: True, ""),',
                ),
            )
        },
        BACKEND,
        "mailbox ['rank 0', 'rank 1', 'rank 2']",
        {"backends/mailbox.py": "mailbox.py"},
        ranks=3,
    ),
    "launcher": Addition(
        {"environment/detection.py": (("_LAUNCHERS = (", '    _siblings("drum", "DRUM", "the drummer"),'),)},
        LAUNCHER,
        "gloo 1 1",
        env={"DRUM_RANK": "0", "DRUM_SIZE": "1", "DRUM_LOCAL_RANK": "0", "DRUM_LOCAL_SIZE": "1"},
    ),
    "kind of value": Addition(
        {
            "payload/kinds.py": (
                ("import struct", "from uuid import UUID"),
                (
                    '    Kind((type(None),), lambda _: b"", lambda _: None),',
                    "    Kind((UUID,), lambda x: x.bytes, lambda x: UUID(bytes=x)),",
                ),
            )
        },
        KIND,
        "[UUID('00000000-0000-0000-0000-000000000007')]",
    ),
    "command": Addition(
        {
            "cli/entry.py": (
                ("from asynccoll import __version__", "from asynccoll.cli import hello"),
                ("COMMANDS = (", "COMMANDS += (hello,)"),
            )
        },
        COMMAND,
        "hello world",
        {"cli/hello.py": "hello.py"},
    ),
}


def copy_with(addition: Addition, home: Path) -> Path:
    """Return a copy of the package with the addition applied."""
    copy = home / "asynccoll"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path, toy in addition.files.items():
        shutil.copy(TOYS / toy, copy / path)
    for path, rows in addition.rows.items():
        lines = (copy / path).read_text().splitlines()
        for before, row in rows:
            (at,) = (number for number, line in enumerate(lines) if line.startswith(before))
            lines.insert(at + 1, row)
        (copy / path).write_text("\n".join(lines) + "\n")
    return copy


def lines_changed(copy: Path) -> dict[str, int]:
    """Return how many lines of each file of the package differ in the copy."""
    changed: dict[str, int] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        lines = difflib.ndiff(file.read_text().splitlines(), (copy / path).read_text().splitlines())
        count = sum(line[0] in "+-" for line in lines)
        if count:
            changed[str(path)] = count
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("what", ADDITIONS)
def test_touches_one_table(tmp_path: Path, what: str) -> None:
    """An addition needs one row (and an import) in one table, and everything that lists its kind knows it."""
    addition = ADDITIONS[what]
    copy = copy_with(addition, tmp_path)
    assert lines_changed(copy) == {path: len(rows) for path, rows in addition.rows.items()}
    env = {"PYTHONPATH": f"{tmp_path}:{scripts.rank_environment()['PYTHONPATH']}", **addition.env}
    ended = scripts.run(
        tmp_path, addition.program, ranks=addition.ranks, launched=addition.ranks > 1, env=env
    )
    for one in ended:
        assert one.code == 0, one.err
        assert one.out.strip() == addition.told
