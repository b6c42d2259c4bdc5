"""The command line: ``asynccoll run | info | explain``.

Parses, prints and turns typed errors into one line and exit code 2; the work is done elsewhere and
imported only by the command that needs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from asynccoll import __version__, available_backends
from asynccoll.errors import AsyncCollError, InvalidArgumentError
from asynccoll.launch.commands import run
from asynccoll.launch.request import RunRequest

__all__ = ["main"]

_USAGE_ERROR = 2

#: torchrun's options by topic: names, what the value is (None: a switch), help.
_RUN_OPTIONS: dict[str, tuple[tuple[tuple[str, ...], str | None, str], ...]] = {
    "how many ranks": (
        (("-n", "--nproc-per-node"), "N", "ranks on this host: a number, auto, cpu or gpu"),
        (("--nnodes",), "N|MIN:MAX", "number of hosts (default 1), or a range for elastic jobs"),
        (("--node-rank",), "RANK", "this host's number, where --master-addr is used"),
        (("--max-restarts",), "N", "start over at most this often when a rank fails (default 0)"),
    ),
    "where the hosts meet (one host needs none of these)": (
        (("--rdzv-endpoint",), "HOST:PORT", "where to meet"),
        (("--rdzv-backend",), "NAME", "how to meet: c10d, static, etcd-v2"),
        (("--rdzv-id",), "ID", "the job's name, the same on all hosts"),
        (("--rdzv-conf",), "K=V,...", "further settings of the meeting"),
        (("--master-addr",), "HOST", "address of the first host"),
        (("--master-port",), "PORT", "port there"),
        (("--local-addr",), "HOST", "address of this host"),
        (("--standalone",), None, "one host, any free port (the default for one host)"),
    ),
    "output": (
        (("--log-dir",), "DIR", "keep logs and error files of the ranks here"),
        (("-r", "--redirects"), "WHAT", "streams that go to files: 1 stdout, 2 stderr, 3 both"),
        (("-t", "--tee"), "WHAT", "streams that go to files and here"),
        (("--local-ranks-filter",), "0,1,...", "show only these ranks' output"),
    ),
    "further": (
        (("--monitor-interval",), "SECONDS", "how often to look after the ranks (default 0.1)"),
        (("--role",), "NAME", "name of this kind of worker"),
        (("--no-python",), None, "the program is no Python script"),
    ),
}

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


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the spellings with underscores, which torchrun knows too, out of the help."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [name for name in action.option_strings if "_" not in name]
        if not shown:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {action.metavar}"
        return ", ".join(shown) + value


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line and return the exit code."""
    given = _parser().parse_args(argv)
    try:
        code: int = given.carry_out(given)
    except AsyncCollError as error:
        print(f"asynccoll: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asynccoll",
        description="Awaitable collectives for PyTorch.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asynccoll {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_info(commands)
    _add_explain(commands)
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for it


# --- run ------------------------------------------------------------------------------------


def _add_run(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="start the ranks of a program",
        usage="asynccoll run [options] script.py [args ...]",
        description=_RUN_TEXT,
        epilog=_RUN_NOTES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
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
    group.add_argument("-m", "--module", action="store_true", help="it is a module, as python -m")
    group.add_argument("program", help="script or module")
    group.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    parser.set_defaults(carry_out=_run)


def _run(given: argparse.Namespace) -> int:
    if not given.module and not given.no_python and not Path(given.program).exists():
        print(f"asynccoll run: there is no {given.program!r} to run", file=sys.stderr)
        return _USAGE_ERROR
    return run(
        RunRequest(
            given.program,
            tuple(given.arguments),
            module=given.module,
            backend=given.backend,
            options=_given_options(given),
        )
    )


def _given_options(given: argparse.Namespace) -> dict[str, str | bool]:
    """The torchrun options that the user gave; torchrun knows its own defaults."""
    found: dict[str, str | bool] = {}
    for options in _RUN_OPTIONS.values():
        for names, _, _ in options:
            value = getattr(given, names[-1][2:].replace("-", "_"))
            if value not in (None, False):
                found[names[-1]] = value
    return found


# --- info -----------------------------------------------------------------------------------


def _add_info(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("info", help="versions, backends, launcher and devices")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(carry_out=_info)


def _info(given: argparse.Namespace) -> int:
    from asynccoll.launch.describe import collect

    found = collect(__version__, available_backends)
    if given.json:
        print(json.dumps(found, indent=2))
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:{width}}  {value}")
    return 0


# --- explain --------------------------------------------------------------------------------


def _add_explain(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("explain", help="show what a collective would do on a backend, and why")
    parser.add_argument("operation", help="all_reduce, all_gather, reduce_scatter ...")
    parser.add_argument("--shape", default="", metavar="N,N,...", help="empty: a single number")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="default float32")
    parser.add_argument("--reduce-op", "--op", default="sum", metavar="NAME", help="default sum")
    parser.add_argument("--backend", default="gloo", metavar="NAME", help="default gloo")
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="of equally many ranks, default 1")
    parser.add_argument("--device", metavar="NAME", help="default cuda for nccl, else cpu")
    parser.add_argument("--check", action="store_true", help="with check='full'")
    parser.set_defaults(carry_out=_explain)


def _explain(given: argparse.Namespace) -> int:
    from asynccoll.ops.explaining import explain_offline

    plan = explain_offline(
        given.operation,
        backend=given.backend,
        world_size=_at_least_one(given.world_size, "world size"),
        shape=_shape(given.shape),
        dtype=given.dtype,
        device=given.device or ("cuda" if given.backend.lower() == "nccl" else "cpu"),
        op=given.reduce_op,
        check=given.check,
        nodes=_at_least_one(given.nodes, "a number of nodes of"),
    )
    print(plan)
    return 0


def _shape(text: str) -> tuple[int, ...]:
    """``4,4`` as a shape; nothing at all is the shape of a single number."""
    try:
        shape = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        shape = (-1,)
    if any(extent < 0 for extent in shape):
        raise InvalidArgumentError(
            f"shape {text!r} cannot be read; expected sizes with commas between, such as 4,4"
        )
    return shape


def _at_least_one(count: int, what: str) -> int:
    if count < 1:
        raise InvalidArgumentError(f"{what} {count} is not possible; it is at least 1")
    return count
