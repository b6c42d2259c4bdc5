"""``asynccoll run``: torchrun's options, and the program whose ranks are to be started."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from asynccoll.cli.common import USAGE_ERROR, Commands
from asynccoll.launch.engines import run
from asynccoll.launch.request import RunRequest

#: torchrun's options by topic: names, what the value is (None: a switch), help.
_RUN_OPTIONS: dict[str, tuple[tuple[tuple[str, ...], str | None, str], ...]] = {
    "how many ranks": (
        (("-n", "--nproc-per-node"), "N", "ranks on this host: a number, auto, cpu or gpu"),
        (("--nnodes",), "N|MIN:MAX", "number of hosts (default 1), or a range for elastic jobs"),
        (("--node-rank",), "RANK", "this host's number, where --master-addr is used"),
        (("--max-restarts",), "N", "start over at most this often when a rank fails (default 0)"),
        (("--kill-on-bad-exit",), "0|1", "0: ranks go on when another fails; 1, the default: they are ended"),
    ),
    "where the hosts meet (one host needs none of these)": (
        (("--rdzv-endpoint",), "HOST:PORT", "where to meet"),
        (("--rdzv-backend",), "NAME", "how to meet: c10d, static, etcd-v2"),
        (("--rdzv-id",), "ID", "the job's name, the same on all hosts"),
        (("--rdzv-conf",), "K=V,...", "further rendezvous settings"),
        (("--master-addr",), "HOST", "address of the first host"),
        (("--master-port",), "PORT", "port there"),
        (("--local-addr",), "HOST", "address of this host"),
        (("--standalone",), None, "one host, any free port (the default for one host)"),
    ),
    "output": (
        (("--log-dir",), "DIR", "keep logs and error files of the ranks here"),
        (("-r", "--redirects"), "WHAT", "streams that go to files: 1 stdout, 2 stderr, 3 both"),
        (("-t", "--tee"), "WHAT", "streams that go both to files and here"),
        (("--local-ranks-filter",), "0,1,...", "show only these ranks' output"),
    ),
    "further": (
        (("--monitor-interval",), "SECONDS", "how often to check the ranks (default 0.1)"),
        (("--role",), "NAME", "name of this kind of worker"),
        (("--no-python",), None, "the program is not a Python script"),
    ),
}

#: What is left of mpiexec's and horovodrun's ``-np 2``, ``-np2`` and ``-np=2`` after the option ``-n``.
_NP = re.compile(r"p=?(\d*)")

_RUN_TEXT = """\
Start N ranks of a program on this host, or on each of several hosts.

  asynccoll run -n 4 train.py --epochs 3
  asynccoll run -n 4 -m package.train
  asynccoll run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29400 -n 8 train.py
"""
_RUN_NOTES = """\
torch elastic does the work, so options and PET_* variables mean what they mean to torchrun. On one
host everything stays on the loopback address (a GLOO_SOCKET_IFNAME of yours wins). The exit code is
that of the first rank that failed, 128 + N if signal N ended it. Ctrl-C and SIGTERM end all ranks;
a second one kills them.
"""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves the spellings with underscores, which torchrun also knows, out of the help."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [name for name in action.option_strings if "_" not in name]
        if not shown:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {action.metavar}"
        return ", ".join(shown) + value


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="start the ranks of a program",
        example="asynccoll run -n 4 train.py --epochs 3",
        usage="asynccoll run [options] script.py [args ...]",
        description=_RUN_TEXT,
        epilog=_RUN_NOTES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(carry_out=_run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, the program, and its own arguments."""
    for title, options in _RUN_OPTIONS.items():
        group = parser.add_argument_group(title)
        for names, value, text in options:
            spellings = list(dict.fromkeys([*names, f"--{names[-1][2:].replace('-', '_')}"]))
            if value is None:
                group.add_argument(*spellings, action="store_true", help=text)
            else:
                group.add_argument(*spellings, metavar=value, help=text)
    group = parser.add_argument_group("the program")
    group.add_argument("--backend", metavar="NAME", help="what `initialize()` uses: gloo, nccl ...")
    group.add_argument("-m", "--module", action="store_true", help="it is a module, as with python -m")
    group.add_argument(
        "program", nargs=argparse.PARSER, action=_Program, help="script or module, and its own arguments"
    )


class _Program(argparse.Action):
    """Takes the program and everything after it: between two positionals argparse would drop a ``--``."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        given: argparse.Namespace,
        words: Any,
        _option: str | None = None,
    ) -> None:
        ours = words[:1] == ["--"] and len(words) > 1  # the end of our options; newer Pythons remove it
        given.program, *given.arguments = words[1:] if ours else words


def _run(given: argparse.Namespace) -> int:
    wrong = missing_program(given)
    return run(request(given)) if wrong is None else wrong


def missing_program(given: argparse.Namespace) -> int | None:
    """If there is nothing to run, say why and return the exit code."""
    if np := _NP.fullmatch(given.nproc_per_node or ""):
        told = np[1] or given.program
        print(f"asynccoll run: -np {told} is mpiexec's and horovodrun's: write -n {told}", file=sys.stderr)
        return USAGE_ERROR
    if given.module or given.no_python or os.access(given.program, os.R_OK):
        return None
    is_there = os.access(given.program, os.F_OK)
    why = f"{given.program!r} cannot be read" if is_there else f"there is no {given.program!r} to run"
    print(f"asynccoll run: {why}", file=sys.stderr)
    return USAGE_ERROR


def request(given: argparse.Namespace) -> RunRequest:
    """Return what the command line asks for."""
    return RunRequest(
        given.program,
        tuple(given.arguments),
        module=given.module,
        backend=given.backend,
        options=_given_options(given),
    )


def _given_options(given: argparse.Namespace) -> dict[str, str | bool]:
    """Return the torchrun options that the user gave; torchrun knows its own defaults."""
    found: dict[str, str | bool] = {}
    for options in _RUN_OPTIONS.values():
        for names, _, _ in options:
            value = getattr(given, names[-1][2:].replace("-", "_"))
            if value not in (None, False):
                found[names[-1]] = value
    return found
