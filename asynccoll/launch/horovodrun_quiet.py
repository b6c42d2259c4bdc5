"""horovodrun without a traceback of its own at the end: ``python horovodrun_quiet.py ARGS...``.

When a rank has failed, or at Ctrl-C, horovodrun ends with an uncaught exception, whose twenty lines would be
the last that a user sees. ``asynccoll run`` tells what happened. Started by its path, in the Python that has
Horovod; what ranks print and how they end are untouched.
"""

from __future__ import annotations

import sys

#: Horovod's words for ranks that ended with another code than 0.
_RANK_FAILED = "one or more processes exited with non-zero"
_INTERRUPTED = 130


def main() -> int:
    """What the program ``horovodrun`` does; its exit code."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's directory, with modules that are not top-level ones
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
