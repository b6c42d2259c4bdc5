"""SLURM's compressed notations: host lists such as ``gpu[01-03,7],login`` and ``2(x3),1``.

The parsers are pure. ``expand_with_scontrol`` asks SLURM itself, which knows its own notation
best, and falls back on the parser where ``scontrol`` is absent or fails.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
from collections.abc import Iterator

from asynccoll.errors import LaunchEnvironmentError

#: More hosts than this are a typo such as ``n[1-1000000000]``, not a cluster.
MAX_HOSTS = 1_000_000

_SCONTROL_TIMEOUT_S = 10.0
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of a SLURM host list, in its order: ``n[1-2],m`` gives ``n1``, ``n2``, ``m``.

    Several brackets in one name multiply out, the last one varying fastest; leading zeros
    are kept, so ``n[08-10]`` gives ``n08``, ``n09``, ``n10``.

    Raises:
        LaunchEnvironmentError: the text is not a host list.
    """
    hosts: list[str] = []
    for entry in _split_outside_brackets(text):
        parts = [_alternatives(bracket, literal, text) for bracket, literal in _pieces(entry, text)]
        hosts.extend("".join(combination) for combination in _product(parts, text))
    if not hosts:
        raise _malformed(text, "it names no host")
    return hosts


def expand_with_scontrol(text: str) -> list[str]:
    """Return the hosts of a SLURM host list as SLURM itself sees them, or else as the parser does."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return expand_hostlist(text)
    try:
        done = subprocess.run(
            [scontrol, "show", "hostnames", text],
            capture_output=True,
            text=True,
            check=True,
            timeout=_SCONTROL_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return expand_hostlist(text)
    return done.stdout.split() or expand_hostlist(text)


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: ``2(x3),1`` gives ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for entry in text.split(","):
        match = _TASKS.fullmatch(entry.strip())
        if match is None:
            raise LaunchEnvironmentError(
                f"tasks per node {text!r} cannot be read at {entry!r}; expected something like"
                " '2(x3),1', as SLURM writes SLURM_TASKS_PER_NODE"
            )
        repeat = int(match[2] or 1)
        if len(counts) + repeat > MAX_HOSTS:
            raise _malformed(text, f"it stands for more than {MAX_HOSTS} nodes")
        counts += [int(match[1])] * repeat
    return counts


def _split_outside_brackets(text: str) -> Iterator[str]:
    """Yield the comma-separated entries of ``text``; a comma within brackets does not separate."""
    depth = begin = 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _malformed(text, "its brackets do not match")
        if character == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    if depth:
        raise _malformed(text, "its brackets do not match")
    yield text[begin:]


def _pieces(entry: str, text: str) -> Iterator[tuple[str | None, str | None]]:
    """Yield the literal and bracketed parts of one entry."""
    entry = entry.strip()
    if not entry or any(character.isspace() for character in entry):
        raise _malformed(text, f"{entry!r} is not a host name")
    for match in _PIECE.finditer(entry):
        yield match[1], match[2]


def _alternatives(bracket: str | None, literal: str | None, text: str) -> list[str]:
    """Return what one part of a name can be: itself, or every number in its brackets."""
    if bracket is None:
        return [literal or ""]
    found: list[str] = []
    for entry in bracket.split(","):
        match = _RANGE.fullmatch(entry.strip())
        if match is None:
            raise _malformed(text, f"{entry!r} is not a number or range")
        first, last = match[1], match[2] or match[1]
        count = int(last) - int(first) + 1
        if count < 1:
            raise _malformed(text, f"the range {entry!r} runs backwards")
        if count > MAX_HOSTS:
            raise _malformed(text, f"it stands for more than {MAX_HOSTS} hosts")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _product(parts: list[list[str]], text: str) -> Iterator[tuple[str, ...]]:
    if math.prod(map(len, parts)) > MAX_HOSTS:
        raise _malformed(text, f"it stands for more than {MAX_HOSTS} hosts")
    return itertools.product(*parts)


def _malformed(text: str, why: str) -> LaunchEnvironmentError:
    return LaunchEnvironmentError(
        f"host list {text!r} cannot be read: {why}; expected something like 'gpu[01-04,7],login',"
        " as SLURM writes SLURM_JOB_NODELIST"
    )
