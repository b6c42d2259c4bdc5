"""Start measuring coverage in every process of a test run: `tools/covered.py` puts this on PYTHONPATH.

Ranks are processes that tests, launchers, mpiexec and horovodrun start, so that no test runner sees them;
each interpreter imports this module before anything of its program.
"""

import _thread
import contextlib
import sys
import threading
from collections.abc import Callable

_start = _thread.start_new_thread


def _traced(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object] | None = None
) -> int:
    """Start a thread that is measured: simulated ranks are threads of which ``threading`` does not know."""

    def run() -> None:
        sys.settrace(threading.gettrace())
        function(*args, **(kwargs or {}))

    return _start(run, ())


with contextlib.suppress(ImportError):  # an interpreter that is not that of the tests, as of a tool
    import coverage

    coverage.process_startup()
    _thread.start_new_thread = _traced
