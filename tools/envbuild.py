"""Build virtual environments such that a half-built one is never mistaken for a complete one.

An environment lives outside the checkout, in a directory named by a hash of everything it is built from, so
checkouts share equal environments and never disturb each other. A lock file lets one process build at a time;
a marker, written last, says that the build is complete. ``envs.py`` lists the environments; this module must
not know them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tools" / "requirements"
OLDEST_PYTHON = (3, 11)  # the version for which the pins are resolved

_MARKER = ".complete"
_STALE_AFTER_S = 14 * 86400


@dataclass(frozen=True)
class Environment:
    """One row of the table: requirement groups that are installed together under one set of pins."""

    name: str
    groups: tuple[str, ...]
    download: str
    constraints: str = "constraints.txt"
    #: scripts in this directory, run by the environment's interpreter; each builds a wheel and installs it
    steps: tuple[str, ...] = ()

    def files(self) -> list[Path]:
        """Return the requirement files, with the pins first."""
        names = (self.constraints, *(f"{group}.txt" for group in self.groups))
        return [REQUIREMENTS / name for name in names]

    def scripts(self) -> list[Path]:
        """Return the scripts to run once the requirements are installed."""
        return [ROOT / "tools" / name for name in self.steps]


def say(text: str) -> None:
    """Print a message for the user to standard error; standard output is for scripts to read."""
    print(f"envs: {text}", file=sys.stderr, flush=True)


def cache_root() -> Path:
    """Return the directory of all environments."""
    chosen = os.environ.get("ASYNCCOLL_CACHE")
    if chosen:
        return Path(chosen).absolute() / "envs"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "asynccoll" / "envs"


def directory(row: Environment) -> Path:
    """Return the directory of this environment: its name, and a hash of what it is built from."""
    parts = [sys.implementation.name, platform.python_version(), sys.base_prefix]
    parts += [platform.machine(), *(path.read_text() for path in row.files() + row.scripts())]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return cache_root() / f"{row.name}-{digest}"


def is_complete(path: Path) -> bool:
    """Whether a build was completed here and its interpreter is still executable."""
    return (path / _MARKER).is_file() and os.access(path / "bin" / "python", os.X_OK)


def ensure(row: Environment) -> Path:
    """Return the interpreter of the environment, which is built first if it is missing."""
    path = directory(row)
    if not is_complete(path):
        with locked(path.with_name(path.name + ".lock")) as lock_file:
            if not is_complete(path):
                _delete_stale(row, keep=path)
                _build(row, path, lock_file)
    os.utime(path / _MARKER)
    return path / "bin" / "python"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a lock that the kernel releases when its holder dies. Yields its file descriptor.

    Children that inherit the descriptor hold the lock too, so an orphaned pip still keeps others out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is building {path.stem}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build(row: Environment, path: Path, lock_file: int) -> None:
    if sys.version_info[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        given = platform.python_version()
        raise SystemExit(f"envs: Python {wanted} or newer is needed, this is {given};"
                         " name another one: make PYTHON=/path/to/python3.11 ...")  # fmt: skip
    say(f"building '{row.name}' in {path}: downloads {row.download} unless pip has it cached")
    began = time.monotonic()
    shutil.rmtree(path, ignore_errors=True)
    pins, *requirements = row.files()
    venv = [sys.executable, "-m", "venv", str(path)]
    _check(venv, "python3-venv may have to be installed", lock_file)
    install = [str(path / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-input"]
    install += ["--disable-pip-version-check", "-c", str(pins)]
    for file in requirements:
        install += ["-r", str(file)]
    advice = "what pip said is above; a second try continues from its download cache"
    _check(install, advice, lock_file)
    for script in row.scripts():
        _check([str(path / "bin" / "python"), str(script), "--install"], "the reason is above", lock_file)
    (path / _MARKER).write_text(json.dumps({"built": time.time(), "groups": row.groups}))
    say(f"built '{row.name}' in {time.monotonic() - began:.0f} s")


def _check(command: list[str], advice: str, lock_file: int) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, pass_fds=(lock_file,), check=False)
    code = done.returncode
    if code:
        raise SystemExit(f"envs: '{' '.join(command[:4])} ...' ended with {code}: {advice}")


def _delete_stale(row: Environment, keep: Path) -> None:
    """Make room: delete builds of this environment that have not been used for two weeks."""
    for path in cache_root().glob(f"{row.name}-*/"):
        marker = path / _MARKER
        if path != keep and marker.is_file():
            age_s = time.time() - marker.stat().st_mtime
            if age_s > _STALE_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


def lock(row: Environment) -> None:
    """Resolve the newest versions of everything that ``row`` names, and write them as its pins."""
    pins, *requirements = row.files()
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
    command += ["--report", "-", "--disable-pip-version-check"]
    for file in requirements:
        command += ["-r", str(file)]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    found = {item["metadata"]["name"]: item["metadata"]["version"] for item in report["install"]}
    lines = [f"{name}=={version.partition('+')[0]}" for name, version in found.items()]
    heading = "# Every version, resolved together by `python tools/envs.py lock`.\n"
    pins.write_text(heading + "\n".join(sorted(lines, key=str.lower)) + "\n")
    say(f"wrote {len(lines)} pins to {pins.relative_to(ROOT)}")
