"""Tracebacks shown to users: their frames stay, and runs of our frames become one line."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
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
WITH = frame(contextlib.__file__, "__exit__")
RUN = frame(Path(asyncio.__file__).parent / "runners.py", "run")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ((USER, RUN, RUN, USER), (USER, "  [... 2 frames in asyncio]\n", USER)),
        ((USER, RUN, START, LEAVES, USER), (USER, "  [... 3 frames in asyncio, asynccoll]\n", USER)),
        ((USER, START, WITH, START, USER), (USER, "  [... 3 frames in asynccoll, contextlib]\n", USER)),
        ((USER, RUN, USER), (USER, RUN, USER)),  # a folded line would say less and save nothing
        ((USER, START, LEAVES), (USER, START, LEAVES)),  # raised by a bug in the library
        ((START, LEAVES), (START, LEAVES)),
    ],
)
def test_runs_of_frames_of_libraries_are_a_line(given: tuple[str, ...], shown: tuple[str, ...]) -> None:
    error = "KeyError: 'x'\n  two spaces, in its text"
    assert folding.folded(stack(*given, error=error)) == stack(*shown, error=error)


def test_errors_of_ours_say_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full traceback is shown if the variable asks for it."""

    def program() -> None:
        ac.all_reduce(object()).wait()

    def raised() -> str:
        with pytest.raises(ac.AsyncCollError) as refused:
            program()
        return "".join(traceback.format_exception(refused.value))

    monkeypatch.setenv(folding.FULL_VARIABLE, "1")
    whole = raised()
    monkeypatch.delenv(folding.FULL_VARIABLE)
    told = folding.folded(whole)
    assert "in program" in told
    assert "in _start" not in told
    assert "/asynccoll/" not in told  # not even a single frame
    assert told.splitlines()[-1] == whole.splitlines()[-1]
    assert "in program" in raised()  # also without a launcher
    assert "in _start" in whole
    assert "in _start" not in raised()
    monkeypatch.setenv(folding.FULL_VARIABLE, "1")
    assert folding.folded(whole) == whole


def test_frames_of_a_program_stay() -> None:
    """A codec's frames stay although it raises an error of ours."""

    def encode(_: object) -> bytes:
        raise ac.InvalidArgumentError("a codec's own")

    with pytest.raises(ac.InvalidArgumentError, match="own") as refused:
        ac.all_gather_object(1, codec=ac.Codec("own", encode, pickle.loads))
    assert "in encode" in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("group", ["ExceptionGroup", "BaseExceptionGroup", "exceptiongroup.ExceptionGroup"])
def test_frames_that_raise_a_group_are_folded(group: str) -> None:
    """The exceptions in the group are shown below it."""
    said = f"  | {group}: unhandled errors in a TaskGroup (1 sub-exception)"
    raised = "".join(f"  | {line}\n" for line in (USER + START + LEAVES).splitlines())
    assert folding.folded(f"{raised}{said}").splitlines()[-2:] == ["  |   [... 2 frames in asynccoll]", said]


def test_groups_keep_their_margin() -> None:
    inside = "".join(f"    | {line}\n" for line in (USER + START + LEAVES).splitlines())
    text = f"  + Exception Group Traceback:\n{inside}    | asynccoll.errors.PeerLostError: gone\n    +---"
    told = folding.folded(text).splitlines()
    assert "    |   [... 2 frames in asynccoll]" in told
    assert told[-2:] == ["    | asynccoll.errors.PeerLostError: gone", "    +---"]
