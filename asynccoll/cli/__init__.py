"""The command line: a file for each command of ``asynccoll``, and the table of them.

Parses and prints; the work is done elsewhere, and imported only by the command that needs it.
"""

from asynccoll.cli.entry import main

__all__ = ["main"]
