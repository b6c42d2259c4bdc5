"""horovodrun without its own traceback at the end: ``python horovodrun_quiet.py ARGS...``.

When a rank has failed, or at Ctrl-C, horovodrun ends with an uncaught exception, whose twenty lines would be
the last that a user sees. ``asynccoll run`` reports what happened. This file is started by its path, in the
Python that has Horovod; it does not change what ranks print and how they end.
"""

from __future__ import annotations

import sys

#: Horovod's error text when ranks exited with a code other than 0.
_RANK_FAILED = "one or more processes exited with non-zero"
_INTERRUPTED = 130


def main() -> int:
    """Do what the program ``horovodrun`` does; return its exit code."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's directory, whose modules are not top-level ones
    sys.argv[0] = "horovodrun"
    try:
        from horovod.runner import launch

        launch.run_commandline()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except RuntimeError as error:
        if _RANK_FAILED not in str(error):
            raise
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
