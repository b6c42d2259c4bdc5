"""Runs a script or module as one rank, as plain ``python`` would, and records how it died.

    python child.py script PATH ARGS...
    python child.py module NAME ARGS...
    python child.py program PATH ARGS...    (any program: this only makes it die with the launcher)

The launcher starts this file by its path, and it imports the standard library only: what the
user's program sees, including ``sys.path`` and the moment torch is imported, is up to the program.
An uncaught exception goes into the error file that torch elastic names, with the time, so that the
launcher can show the first failure once; without such a file it is printed as usual.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import types
from pathlib import Path
from typing import NoReturn

#: Next to the error file: the stack of a rank that crashed in native code.
CRASH_FILE = "crash.txt"
#: Next to the error file: the pid of a rank that the launcher has not started itself.
PID_FILE = "pid.txt"
#: Next to the error file: the program has finished, and has only to exit.
ENDED_FILE = "ended.txt"

#: Names the process that started this one. Removed once read: our own children have another parent.
LAUNCHER = "ASYNCCOLL_LAUNCHER"
#: Names variables meant only for the launcher in between: a program may start another launcher itself.
NOT_FOR_RANKS = "ASYNCCOLL_NOT_FOR_RANKS"
_PR_SET_PDEATHSIG = 1
_CANNOT_EXECUTE = 126

#: Names the job's directory, as in ``flight.registry``, which cannot be imported here. Ranks of
#: launchers that name no error file leave their pid there, and how they failed.
JOB_DIRECTORY = "ASYNCCOLL_JOB_DIRECTORY"
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK")

_HERE = str(Path(__file__).parent)

#: What ``python -m`` itself calls; the public functions of runpy put ``__main__`` back afterwards.
_run_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]


def main() -> None:
    """Run what the command line names; this process ends the same way as the program."""
    kind, target, *arguments = sys.argv[1:]
    die_with_launcher()
    if kind == "program":
        _become(target, arguments)
    forget_launcher()
    pid, error_file = os.getpid(), _error_file()

    def own_file() -> str | None:
        """Return the rank's error file, but None in a child that it has forked."""
        return error_file if os.getpid() == pid else None

    if error_file and not faulthandler.is_enabled():
        faulthandler.enable(Path(error_file).with_name(CRASH_FILE).open("w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whole lines, PYTHONUNBUFFERED or not: ranks share the stream, and must not mix within a line.
            stream.reconfigure(line_buffering=True, write_through=False)
    try:
        (_run_script if kind == "script" else _run_module)(target, arguments)
        _exits(SystemExit(), own_file())
    except KeyboardInterrupt:
        _set_excepthook(quiet=True)  # reported once by the launcher, not by every rank
        raise
    except SystemExit as stop:
        _exits(stop, own_file())
        raise
    except BaseException as error:
        error.with_traceback(own_frames_removed(error.__traceback__))
        error_file = own_file()
        quiet = bool(error_file) and not _restarts_left() and _hook_is_common()
        if error_file:
            record(Path(error_file), error, shown=not quiet)
        _set_excepthook(quiet=quiet)
        raise


def _become(program: str, arguments: list[str]) -> NoReturn:
    """Replace this process by another program; if that fails, exit with the code that a shell would."""
    try:
        os.execv(program, [program, *arguments])  # noqa: S606 - becoming it is the purpose
    except OSError as error:
        print(f"asynccoll run: {program} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(_CANNOT_EXECUTE)


def die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies, in whatever way, even if it is dead already."""
    launcher = os.environ.pop(LAUNCHER, "")
    if sys.platform != "linux":
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or (launcher and _is_gone(launcher)):
        os._exit(128 + signal.SIGKILL)


def forget_launcher() -> None:
    """Remove variables that were meant only for the launcher in between."""
    for name in os.environ.pop(NOT_FOR_RANKS, "").split():
        os.environ.pop(name, None)


def launching() -> dict[str, str]:
    """Return what to add to the environment of a process that is to die with this one."""
    return {LAUNCHER: f"{os.getpid()} {_numbering()}"}


def _is_gone(launcher: str) -> bool:
    """Whether that process has ended; one that cannot be seen from here, in another container, has not."""
    pid, numbering = launcher.split()
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return numbering == _numbering()
    except OSError:  # another user's
        pass
    return False


def _numbering() -> str:
    """Name this process's PID namespace, as ``host.handing`` does, which cannot be imported here."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    return "?"


def _run_script(path: str, arguments: list[str]) -> None:
    """Do what ``python PATH ARGS...`` does."""
    sys.argv[:] = [path, *arguments]
    module = _fresh_main()
    if Path(path).is_dir() or path.endswith((".zip", ".pyz")):
        _replace_first_path(str(Path(path).absolute()))
        _run_as_main("__main__", alter_argv=False)
        return
    _replace_first_path(str(Path(path).resolve().parent))
    absolute = str(Path(path).absolute())
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    module.__dict__.update(__file__=absolute, __cached__=None, __loader__=loader)
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - running the program is the purpose


def _run_module(name: str, arguments: list[str]) -> None:
    """Do what ``python -m NAME ARGS...`` does."""
    sys.argv[:] = ["-m", *arguments]
    _replace_first_path(str(Path.cwd()))
    _fresh_main()
    _run_as_main(name)


def _fresh_main() -> types.ModuleType:
    """Install and return a ``__main__`` without anything of ours, also for pickle and multiprocessing."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if "__annotations__" in globals():  # a fresh one has it up to Python 3.13
        module.__annotations__ = {}
    sys.modules["__main__"] = module
    return module


def _replace_first_path(directory: str) -> None:
    """Put ``directory`` where Python put ours, unless Python was told to put nothing there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory


def own_frames_removed(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return ``trace`` from the user's first frame on."""
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(filename: str) -> bool:
    return filename.startswith(_HERE) or filename in {"<frozen runpy>", runpy.__file__}


def _error_file() -> str | None:
    """Return the file in which the launcher looks for how this rank failed.

    torch elastic names a file for each rank; other launchers can only give all ranks one directory.
    """
    directory = os.environ.get(JOB_DIRECTORY)
    rank = next(filter(None, map(os.environ.get, _RANKS)), None)
    if not directory or not rank or "TORCHELASTIC_ERROR_FILE" in os.environ:
        return os.environ.get("TORCHELASTIC_ERROR_FILE")
    Path(directory, f"{rank}.pid").write_text(str(os.getpid()))
    return str(Path(directory, f"{rank}.json"))


def abort_mpi(code: int) -> None:
    """Have MPI abort the job when this process exits: other ranks would wait for it in MPI_Finalize."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        mpi._set_abort_status(code)


def _exits(stop: SystemExit, error_file: str | None) -> None:
    """Record how the program ends before it exits: another rank's failure may stop it meanwhile."""
    tell_peers(_exit_code(stop))
    if not error_file:
        return
    if stop.code not in (None, 0):
        record(Path(error_file), stop, shown=True)
        abort_mpi(stop.code if isinstance(stop.code, int) else 1)
    else:
        with contextlib.suppress(OSError):
            Path(error_file).with_name(ENDED_FILE).touch()


def tell_peers(code: int) -> None:
    """Have the exit code recorded with how this rank ends: the code that closes its worlds cannot see it."""
    exits = sys.modules.get("asynccoll.host.exits")
    if exits is not None:
        exits.exit_code = code  # type: ignore[attr-defined]  # a module's


def _restarts_left() -> bool:
    """Whether the launcher will restart the ranks, and so never shows what happened this time."""
    done = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return done < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def record(path: Path, error: BaseException, *, shown: bool) -> None:
    """Write the error in torch elastic's format, with an entry for what only we know."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    now = time.time()
    data = {
        "message": {
            "message": _told(error),
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
        },
        "asynccoll": {
            "host": socket.gethostname(),
            "exited": isinstance(error, SystemExit),
            "code": _exit_code(error),
            "lost": _lost(error),
            "left": _lost(error, left=True),
            "shown": shown,
            "time": now,
        },
    }
    with contextlib.suppress(OSError):
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(data))
        unfinished.replace(path)


def _told(error: BaseException) -> str:
    """Return the error in a line; a group by the errors in it, since its own text does not name the cause."""
    try:
        text = str(error)
    except Exception:  # the error's own ``__str__`` raises
        text = "<exception str() failed>"  # as Python prints it
    own = f"{type(error).__name__}: {text}"
    inside = getattr(error, "exceptions", ())  # by its attribute: Python 3.10 has no such class
    if not (isinstance(inside, tuple) and inside and isinstance(inside[0], BaseException)):
        return own
    return f"{'; '.join(map(_told, inside))} (in {own})"


def _lost(error: BaseException, *, left: bool = False) -> list[int]:
    """Return the ranks that had died before, as the library names them (it is not imported here).

    Without those that had ``left`` in order, or only those: the launcher may end these later because of this
    error.
    """
    if type(error).__name__ == "PeerLostError":
        ranks, gone = getattr(error, "ranks", ()), getattr(error, "left", ())
        return [rank for rank in ranks if isinstance(rank, int) and (rank in gone) is left]
    inside = getattr(error, "exceptions", ())
    return [rank for one in inside for rank in _lost(one, left=left)] if isinstance(inside, tuple) else []


def _exit_code(error: BaseException) -> int:
    """Return the code that Python exits with after ``error``, unless it is killed on the way out."""
    code = error.code if isinstance(error, SystemExit) else 1
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1  # the system keeps only these bits: -1 becomes 255


def read_record(path: Path) -> dict[str, object] | None:
    """Return what a rank has recorded, if anything."""
    try:
        found: dict[str, object] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def _hook_is_common() -> bool:
    """Whether only Python or torch would print an uncaught exception: then the launcher may do it instead."""
    module = getattr(sys.excepthook, "__module__", None) or ""
    return sys.excepthook is sys.__excepthook__ or module.partition(".")[0] == "torch"


def _set_excepthook(*, quiet: bool) -> None:
    """Have the uncaught exception printed without our frames, or not at all."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if not quiet:
            users = own_frames_removed(trace)
            before(kind, error.with_traceback(users), users)

    sys.excepthook = hook


if __name__ == "__main__":
    main()
