"""What may be passed as ``timeout=``."""

from __future__ import annotations

from datetime import timedelta

from asynccoll.errors import InvalidArgumentError

__all__ = ["check_timeout"]


def check_timeout(timeout: object, *, optional: bool = True) -> None:
    """Refuse what is no positive number of seconds, nor None where that is allowed."""
    if timeout is None and optional:
        return
    if not (isinstance(timeout, (int, float)) and timeout > 0):
        instead = f"; write timeout={timeout.total_seconds():g}" if isinstance(timeout, timedelta) else ""
        raise InvalidArgumentError(
            f"timeout must be {'None or ' * optional}a positive number of seconds, got {timeout!r}{instead}"
        )
