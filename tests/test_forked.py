"""What is reported about a test that hangs because its forked child hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import forked


def hang_here() -> None:
    while True:
        signal.pause()


def test_the_line_of_a_forked_child_is_told() -> None:
    child = os.fork()
    if child == 0:
        hang_here()
    try:
        told = ""
        while "hang_here" not in told:  # the child may not have got that far
            told = forked.stacks(0.2)
        assert f"{Path(__file__).name}" in told
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert forked.stacks(0.0) == ""
