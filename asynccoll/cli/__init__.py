"""The command line: a file for each command of ``asynccoll``, and the table of them.

Parses and prints; must not do the work, which is done elsewhere, and imports what is heavy (torch) when a
command is carried out.
"""

from asynccoll.cli.entry import main

__all__ = ["main"]
