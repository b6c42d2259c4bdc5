"""The package as a user gets it: a wheel built from the checkout, unpacked next to an environment.

The directory is named by a hash of the sources. An unchanged checkout therefore builds nothing, and two
checkouts that share an environment never overwrite each other's package.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from envbuild import ROOT, say

_SOURCES = ("pyproject.toml", "README.md", "LICENSE")
_STALE_AFTER_S = 2 * 86400


def ensure(python: Path) -> Path:
    """Return the directory to put on the path: this checkout's wheel, unpacked."""
    home = python.parent.parent / "wheels"
    site = home / _source_hash()
    if not site.is_dir():
        _delete_stale(home)
        _build(python, site)
    os.utime(site)
    return site


def empty_directory(python: Path) -> Path:
    """Return an empty directory to start from, where no checkout can be imported by accident."""
    path = python.parent.parent / "empty"
    path.mkdir(exist_ok=True)
    return path


def _source_hash() -> str:
    files = [ROOT / name for name in _SOURCES if (ROOT / name).is_file()]
    files += sorted(p for p in (ROOT / "asynccoll").rglob("*") if p.suffix in {".py", ".typed"})
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _build(python: Path, site: Path) -> None:
    """Build and unpack in a temporary directory, then move the result into place atomically."""
    site.parent.mkdir(exist_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq"]
    with tempfile.TemporaryDirectory(dir=site.parent, prefix=".building-") as scratch:
        made, unpacked = Path(scratch, "dist"), Path(scratch, "site")
        make = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(made), str(ROOT)]
        subprocess.run(make, check=True, stdin=subprocess.DEVNULL)
        (wheel,) = made.glob("*.whl")
        unpack = [*pip, "install", "--no-deps", "--target", str(unpacked), str(wheel)]
        subprocess.run(unpack, check=True, stdin=subprocess.DEVNULL)
        try:
            unpacked.rename(site)
        except OSError:
            if not site.is_dir():  # otherwise another process has made the same one meanwhile
                raise
    say(f"built {wheel.name} from the checkout")


def _delete_stale(home: Path) -> None:
    for path in home.glob("*/"):
        if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)
