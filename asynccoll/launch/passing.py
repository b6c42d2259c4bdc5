"""How a job is stopped: signals to this process are passed on to its ranks, or to a launcher that it started.

If this process cannot notice them (it blocks in native code), another thread ends it; what blocks of the main
thread would have undone then is undone by that thread (``undoing``).

This module does not know what the ranks do on a signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from asynccoll.launch import child, processes

#: Ctrl-C, ``kill``, terminal hangup, Ctrl-\\: the last two stay ignored if they already are (``nohup``).
_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_STOPPING = (*_ALWAYS, signal.SIGHUP, signal.SIGQUIT)
#: How soon terminal input is passed on after a shell has put this process in the foreground.
_LOOK_SECONDS = 0.1

_undos: list[Callable[[], object]] = []


@contextlib.contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` after the block, or in ``give_up``, whichever comes first."""
    _undos.append(undo)
    try:
        yield
    finally:
        if undo in _undos:
            _undos.remove(undo)
            undo()


@contextlib.contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """Yield a temporary directory."""
    made = Path(tempfile.mkdtemp(prefix=prefix))
    with undoing(partial(shutil.rmtree, made, ignore_errors=True)):
        yield made


def give_up(number: signal.Signals) -> NoReturn:
    """End this process from another thread, while the main one waits in native code."""
    try:
        processes.kill_children()
        while _undos:
            _undos.pop()()
        say_stopped(number)
    finally:
        os._exit(128 + number)


@contextlib.contextmanager
def launched(
    line: Sequence[str], environ: Mapping[str, str], stdin: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run another launcher, by its command line; it dies with this process and is stopped on an error.

    It has its own session: otherwise Ctrl-C on a terminal would reach it in addition to the signal that is
    passed on, and at a second one mpiexec exits immediately, before ranks have cleaned up. The terminal does
    not belong to the new session, so terminal input is passed on as well. (Only on Linux: elsewhere processes
    outside of this session could not be found, see ``processes``.)
    """
    apart = sys.platform == "linux"
    typed = apart and stdin is None and os.isatty(0)
    running = subprocess.Popen(
        [sys.executable, child.__file__, "program", *line],
        env={**environ, **child.launching()},
        stdin=subprocess.PIPE if typed else stdin,
        bufsize=0,
        start_new_session=apart,
    )
    if typed:
        threading.Thread(target=_type, args=(running,), name="asynccoll-typed", daemon=True).start()
    try:
        yield running
    except BaseException:  # Ctrl-C, say: nothing waits for the ranks any longer
        _end(running)
        raise


def _type(running: subprocess.Popen[bytes]) -> None:
    """Pass terminal input on to a launcher while it runs; in the background, input is not for this job."""
    assert running.stdin is not None
    with contextlib.suppress(OSError), running.stdin as pipe:  # that launcher, or the terminal, may be gone
        while running.returncode is None:
            if not _in_foreground():
                time.sleep(_LOOK_SECONDS)
            elif select.select([0], [], [], _LOOK_SECONDS)[0]:
                if not (text := os.read(0, 4096)):
                    return
                pipe.write(text)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # not the terminal of this session: no shell shares it with us
        return True


def pass_on(number: signal.Signals, running: subprocess.Popen[bytes]) -> None:
    """Have a launcher stop its ranks."""
    running.send_signal(for_ranks(number))


def for_ranks(number: signal.Signals) -> signal.Signals:
    """Return what ranks or their launcher get: SIGTERM for a hangup or quit, which they may not handle."""
    return number if number in _ALWAYS else signal.SIGTERM


def say_stopped(number: signal.Signals) -> int:
    """Say why all ranks were stopped, unless the terminal is gone; returns ``asynccoll run``'s exit code."""
    said = "interrupted" if number == signal.SIGINT else f"got {number.name}"
    with contextlib.suppress(OSError):  # the terminal has hung up
        print(f"asynccoll run: {said}; all ranks stopped", file=sys.stderr, flush=True)
    return 128 + number


def _end(running: subprocess.Popen[bytes]) -> None:
    """End a launcher: by SIGINT as at Ctrl-C, then by SIGTERM, and finally by SIGKILL."""
    try:
        for number in _ALWAYS:
            running.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(processes.INTERRUPT_GRACE_S)
    finally:
        running.kill()
        running.wait()


def on_stop_signals(
    first: Callable[[signal.Signals], None],
    *,
    stuck: Callable[[signal.Signals], None] | None = None,
) -> None:
    """Call ``first`` for the first signal that stops a job; kill all children at the second.

    Hangups do not count as a second: one may arrive twice, from the shell and the kernel, and with SIGTERM.
    A rank that blocks in native code does not notice SIGINT, so three seconds later what is left gets
    SIGTERM. (SIGTERM is never sent twice: a handler that saves a checkpoint would be entered again.) If this
    process itself blocks in native code, so that ``first`` has not been called by then, ``stuck`` is called
    on another thread.
    """
    noticed = threading.Event()
    arrived: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)
        if len(arrived) > 1:  # perhaps within the handler of the first, whose locks this one must not take
            if len(arrived) - arrived.count(signal.SIGHUP) > 1:
                processes.signal_children(signal.SIGKILL)
            return
        noticed.set()
        processes.continue_stopped()
        if number == signal.SIGINT:
            escalation = threading.Timer(
                processes.INTERRUPT_GRACE_S, processes.signal_children, [signal.SIGTERM]
            )
            escalation.daemon = True
            escalation.start()
        first(signal.Signals(number))

    for number in _STOPPING:
        if number in _ALWAYS or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handle)
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, _pause)
    if stuck is not None:
        _watch_for_signals(noticed, stuck)


def _pause(*_: object) -> None:
    """Stop (Ctrl-Z) and continue with all ranks: they are in their own sessions, which no shell stops."""
    processes.signal_descendants(signal.SIGSTOP)
    try:
        # By the default action, not SIGSTOP: the kernel ignores it if no shell could continue this process.
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # returns once this process is continued, as by ``fg``
    finally:  # the handler of a signal that arrived meanwhile may raise here
        signal.signal(signal.SIGTSTP, _pause)
        processes.continue_stopped()


def _watch_for_signals(noticed: threading.Event, stuck: Callable[[signal.Signals], None]) -> None:
    """Have ``stuck`` called if a stop signal arrives and is not ``noticed`` in time."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            (number,) = os.read(reader, 1)
            if number in _STOPPING and not noticed.wait(processes.INTERRUPT_GRACE_S):
                stuck(signal.Signals(number))

    threading.Thread(target=watch, name="asynccoll-signals", daemon=True).start()
