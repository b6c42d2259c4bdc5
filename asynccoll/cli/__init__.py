"""The command line: ``asynccoll run | info | explain``.

Parses and prints; the work is done elsewhere.
"""

from asynccoll.cli.commands import main

__all__ = ["main"]
