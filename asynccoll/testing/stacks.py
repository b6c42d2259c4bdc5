"""Where a coroutine that is not running stands."""

from __future__ import annotations

from typing import Any

__all__ = ["suspended"]


def suspended(coroutine: Any) -> str:
    """The lines at which it, and what it awaits, are suspended."""
    lines = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        code = frame.f_code
        lines.append(f'    File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
        coroutine = coroutine.cr_await
    return "".join(lines[-8:])
