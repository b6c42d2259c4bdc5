"""Which frames are of this library or of an event loop: how a task is run is the same in every program."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["is_installed", "library_in", "library_of", "line_for", "with_library"]

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
    """The library whose frames are folded that ``file`` belongs to; "" for the program's, and all others'."""
    for folder, name in _FOLDERS.items():
        if file.startswith(folder + os.sep):
            return name
    if file == contextlib.__file__:  # it leaves blocks for others: by itself its frames say nothing
        return "contextlib"
    found = _INSTALLED.search(file)
    return found[1] if found is not None else ""


def is_installed(file: str) -> bool:
    """Whether ``file`` comes with Python or with an installed package, so that it is hardly the program's."""
    return file.startswith(_STANDARD) or _ANY_INSTALLED.search(file) is not None


def with_library(file: str) -> str:
    """``asyncio/events.py`` of a loop's file, ``loaders/__init__.py`` of a package, else the file's name."""
    path, library = Path(file), library_of(file)
    if library in ("", "asynccoll", "contextlib"):
        return f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name
    return f"{library}/{path.name}"


def line_for(libraries: Iterable[str]) -> str:
    """The line in place of successive frames, of these libraries: ``[... 3 frames in asyncio]``."""
    each = list(libraries)
    return f"[... {len(each)} frames in {', '.join(dict.fromkeys(each))}]"


def library_in(frame: str) -> str:
    """The event loop or pool that a frame, as "function (asyncio/events.py:80)", is of; "" for all others."""
    found = _TOLD.search(frame)
    return found[1] if found is not None else ""
