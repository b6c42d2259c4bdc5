#!/usr/bin/env python3
"""The Debian packages that some tests need, installed where this runs as root.

    python tools/system.py            install what is missing; say what, and what it is for
    python tools/system.py --check    only say what is missing

Without root, or without apt-get, nothing is installed: the tests that need these programs then skip
and say how to get them. The standard library is all this needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

#: Debian's packages start services when they are installed; the tests start their own.
_QUIET = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
_LIMIT_S = 600


@dataclass(frozen=True)
class Package:
    """One package, the programs that tell whether it is here, and what the tests do with it."""

    name: str
    programs: tuple[str, ...]
    purpose: str


PACKAGES = (
    Package(
        "slurm-wlm", ("slurmctld", "slurmd", "srun", "sbatch", "scontrol"), "a SLURM cluster of two nodes"
    ),
    Package("munge", ("munged",), "the authentication of that cluster"),
    Package("iproute2", ("ip", "tc"), "two network namespaces that stand for two hosts"),
    Package("util-linux", ("unshare",), "host names of their own for these"),
)

#: Where the daemons are, which is not on everybody's path.
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def say(text: str) -> None:
    """Tell the person something."""
    print(f"system: {text}", file=sys.stderr, flush=True)


def missing() -> list[Package]:
    """The packages of which a program is not here."""
    return [one for one in PACKAGES if not all(shutil.which(name, path=SEARCH) for name in one.programs)]


def command(packages: list[Package]) -> str:
    """What a person types to get ``packages``."""
    return f"apt-get install {' '.join(one.name for one in packages)}"


def main(arguments: list[str]) -> int:
    """Install what is missing, if that can be done; the tests tell of what is still missing then."""
    packages = missing()
    if not packages:
        return 0
    for one in packages:
        say(f"{one.name} is missing: {one.purpose}")
    if "--check" in arguments:
        return 1
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        say(f"not installed (that takes root and Debian), so these tests skip: {command(packages)}")
        return 0
    say(f"{command(packages)}: about 10 MB; remove them again as you like")
    if not (_apt(packages) or (_apt_update() and _apt(packages))):
        say("apt-get could not; what it said is above")
    return 0


def _apt(packages: list[Package]) -> bool:
    names = [one.name for one in packages]
    return _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names])


def _apt_update() -> bool:
    return _run(["apt-get", "update", "-qq"])


def _run(line: list[str]) -> bool:
    """Whether a command succeeded; quiet unless it fails."""
    try:
        done = subprocess.run(
            line,
            env={**os.environ, **_QUIET},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        say(f"{' '.join(line[:2])} took more than {_LIMIT_S} s")
        return False
    if done.returncode:
        say(f"{' '.join(line)}: {(done.stderr or done.stdout).strip()[-1500:]}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
