"""Tracebacks that are shown to users: what is theirs stays, what is ours is a line."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

import pytest

import asynccoll as ac
from asynccoll.launch import folding

OURS = Path(ac.__file__).parent


def frame(file: str | Path, name: str) -> str:
    return f'  File "{file}", line 3, in {name}\n    {name}()\n    ^^^^^^\n'


def stack(*frames: str, error: str) -> str:
    return "Traceback (most recent call last):\n" + "".join(frames) + error


USER = frame("train.py", "main")
START = frame(OURS / "ops" / "collectives.py", "_start")
LEAVES = frame(OURS / "payload" / "trees.py", "leaves_of")
RUN = frame(Path(asyncio.__file__).parent / "runners.py", "run")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ((USER, RUN, RUN, USER), (USER, "  [... 2 frames in asyncio]\n", USER)),
        ((USER, RUN, START, LEAVES, USER), (USER, "  [... 3 frames in asyncio, asynccoll]\n", USER)),
        ((USER, RUN, USER), (USER, RUN, USER)),  # a line for one would tell less and save nothing
        ((USER, START, LEAVES), (USER, START, LEAVES)),  # raised in the library, by mistake
        ((START, LEAVES), (START, LEAVES)),
    ],
)
def test_runs_of_frames_of_libraries_are_a_line(given: tuple[str, ...], shown: tuple[str, ...]) -> None:
    error = "KeyError: 'x'\n  two spaces, in its text"
    assert folding.folded(stack(*given, error=error)) == stack(*shown, error=error)


def test_errors_of_ours_say_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is shown where the variable says so."""

    def program() -> None:
        ac.all_reduce(object()).wait()

    with pytest.raises(ac.AsyncCollError) as refused:
        program()
    whole = "".join(traceback.format_exception(refused.value))
    told = folding.folded(whole)
    assert "in program" in told
    assert "in _start" not in told
    assert " frames in asynccoll]" in told
    assert told.splitlines()[-1] == whole.splitlines()[-1]
    monkeypatch.setenv(folding.FULL_VARIABLE, "1")
    assert folding.folded(whole) == whole


def test_groups_keep_their_margin() -> None:
    inside = "".join(f"    | {line}\n" for line in (USER + START + LEAVES).splitlines())
    text = f"  + Exception Group Traceback:\n{inside}    | asynccoll.errors.PeerLostError: gone\n    +---"
    told = folding.folded(text).splitlines()
    assert "    |   [... 2 frames in asynccoll]" in told
    assert told[-2:] == ["    | asynccoll.errors.PeerLostError: gone", "    +---"]
