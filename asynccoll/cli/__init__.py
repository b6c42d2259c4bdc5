"""The command line: a file for each command of ``asynccoll``, and the table of them.

It parses and prints; it must not do the work, which is done elsewhere, and it imports heavy packages (torch)
only when a command is carried out.
"""

from asynccoll.cli.entry import main

__all__ = ["main"]
