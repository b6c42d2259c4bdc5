"""What all commands share."""

from __future__ import annotations

import argparse
from typing import TypeAlias

__all__ = ["USAGE_ERROR", "Commands"]

#: The exit code of what was typed wrong.
USAGE_ERROR = 2

Commands: TypeAlias = (
    "argparse._SubParsersAction[argparse.ArgumentParser]"  # argparse has no public name for it
)
