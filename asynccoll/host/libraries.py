"""Which frames belong to this library or an event loop: how a task is run is the same in every program."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

_INSTALLED = re.compile(r"[/\\]site-packages[/\\](anyio|trio|outcome)[/\\]")
_ANY_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
_FOLDERS = {
    str(Path(__file__).parents[1]): "asynccoll",
    str(Path(asyncio.__file__).parent): "asyncio",
    str(Path(concurrent.futures.__file__).parent): "concurrent.futures",
}
_TOLD = re.compile(r"\((asyncio|concurrent\.futures|anyio|trio|outcome)/[^/]+:\d+\)$")


def library_of(file: str) -> str:
    """Return the library of ``file`` if its frames are folded; "" for the program and all other libraries."""
    for folder, name in _FOLDERS.items():
        if file.startswith(folder + os.sep):
            return name
    if file == contextlib.__file__:  # it leaves blocks for other code: its frames alone say nothing
        return "contextlib"
    found = _INSTALLED.search(file)
    return found[1] if found is not None else ""


def is_installed(file: str) -> bool:
    """Whether ``file`` comes with Python or an installed package, and so is hardly part of the program."""
    return file.startswith(_STANDARD) or _ANY_INSTALLED.search(file) is not None


def with_library(file: str) -> str:
    """Return ``asyncio/events.py`` for a loop, ``loaders/__init__.py`` for a package, or the file's name."""
    path, library = Path(file), library_of(file)
    if library in ("", "asynccoll", "contextlib"):
        return f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name
    return f"{library}/{path.name}"


def line_for(libraries: Iterable[str]) -> str:
    """Return the line that replaces successive frames of ``libraries``: ``[... 3 frames in asyncio]``."""
    each = list(libraries)
    return f"[... {len(each)} frames in {', '.join(dict.fromkeys(each))}]"


def library_in(frame: str) -> str:
    """Return the event loop or pool of a frame like "function (asyncio/events.py:80)"; "" for any other."""
    found = _TOLD.search(frame)
    return found[1] if found is not None else ""
