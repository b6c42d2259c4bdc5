"""The command line: a file for each command of ``asynccoll``, and the table of them.

Parses and prints; the work is done elsewhere, and what is heavy is imported when a command is carried out.
"""

from asynccoll.cli.entry import main

__all__ = ["main"]
