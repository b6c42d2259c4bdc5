#!/usr/bin/env python3
"""Install the Debian packages that some tests need, if run as root.

    python tools/system.py            install the missing packages, and print what each is for
    python tools/system.py --check    only print what is missing

Without root, or without apt-get, nothing is installed: the tests that need these programs then skip and say
how to get them. This script needs only the standard library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

#: Keeps Debian's packages from starting services when they are installed; the tests start their own.
_QUIET = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
_LIMIT_S = 600
#: Waits if another process is installing packages.
_APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120")


@dataclass(frozen=True)
class Package:
    """One package, the programs that show whether it is installed, and what the tests use it for."""

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
    Package("chromium", ("chromium",), "a browser without a window, in which the page of a trace is opened"),
)

#: Includes the directories of daemons, which are not on every user's path.
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def say(text: str) -> None:
    """Print a message for the user."""
    print(f"system: {text}", file=sys.stderr, flush=True)


def missing() -> list[Package]:
    """Return the packages that lack a program here."""
    return [one for one in PACKAGES if not all(shutil.which(name, path=SEARCH) for name in one.programs)]


def command(packages: list[Package]) -> str:
    """Return the command with which a user installs ``packages``."""
    return f"apt-get install {' '.join(one.name for one in packages)}"


def main(arguments: list[str]) -> int:
    """Install what is missing, if possible; the tests report what is still missing afterwards."""
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
    say(f"{command(packages)}: about 10 MB, with chromium 150; remove them again as you like")
    if why := _install(packages):
        say(f"apt-get could not, so these tests skip: {why}")
    return 0


def _install(packages: list[Package]) -> str:
    """Install the packages. Returns why that failed, if it did.

    Fresh machines have no package lists yet, so a failed installation is retried after an update.
    """
    names = [one.name for one in packages]
    line = [*_APT, "install", "-y", "--no-install-recommends", *names]
    return _run(line) and (_run([*_APT, "update"]) or _run(line))


def _run(line: list[str]) -> str:
    """Run a command. Returns its error output if it fails, else an empty string."""
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
        return f"{' '.join(line)} took more than {_LIMIT_S} s"
    if done.returncode == 0:
        return ""
    return f"{' '.join(line)}: {(done.stderr or done.stdout).strip()[-1500:] or done.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
