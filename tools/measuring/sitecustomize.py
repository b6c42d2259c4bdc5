"""Start measuring coverage in every process of a test run: `tools/covered.py` puts this on PYTHONPATH.

Ranks are processes that tests, launchers, mpiexec and horovodrun start, so that no test runner sees them;
each interpreter imports this module before anything of its program.
"""

import contextlib

with contextlib.suppress(ImportError):  # an interpreter that is not that of the tests, as of a tool
    import coverage

    coverage.process_startup()
