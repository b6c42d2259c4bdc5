"""Start coverage measurement in every process of a test run: `tools/covered.py` puts this on PYTHONPATH.

Ranks are processes started by tests, launchers, mpiexec and horovodrun, out of a test runner's reach; but
each interpreter imports this module before its program.
"""

import _thread
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

_start = _thread.start_new_thread


def _traced(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object] | None = None
) -> int:
    """Start a thread that is measured, since simulated ranks are threads that ``threading`` does not know."""

    def run() -> None:
        sys.settrace(threading.gettrace())
        function(*args, **(kwargs or {}))

    return _start(run, ())


with contextlib.suppress(ImportError):  # not the tests' interpreter, but e.g. a tool's
    import coverage

    # The package that this process imports, in the checkout or in a wheel.
    os.environ["ASYNCCOLL_MEASURED"] = next(
        (str(package) for entry in sys.path if (package := Path(entry, "asynccoll")).is_dir()), "asynccoll"
    )
    coverage.process_startup()
    _thread.start_new_thread = _traced
