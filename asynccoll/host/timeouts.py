"""What may be passed as ``timeout=`` to a call and to a wait."""

from __future__ import annotations

from datetime import timedelta

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import misfit

#: Effectively no timeout: ten years. The clocks of native libraries and threads do not accept infinity.
NEVER_SECONDS = 3650 * 86_400.0


def check_timeout(timeout: object, *, optional: bool = True) -> None:
    """Raise unless ``timeout`` is a positive number of seconds, or None if it is ``optional``."""
    if timeout is None and optional:
        return
    if not (isinstance(timeout, (int, float)) and timeout > 0):
        instead = f"; write timeout={timeout.total_seconds():g}" if isinstance(timeout, timedelta) else ""
        raise InvalidArgumentError(
            f"timeout must be {'None or ' * optional}a positive number of seconds, got {timeout!r}{instead}"
        )


def check_patience(timeout: object) -> None:
    """Raise unless ``timeout`` is None or a number of seconds to wait; with 0 or less, a wait only polls."""
    if not (timeout is None or (isinstance(timeout, (int, float)) and timeout == timeout)):  # noqa: PLR0124  # nan
        seconds = f"write timeout={timeout.total_seconds():g}" if isinstance(timeout, timedelta) else ""
        raise misfit("timeout", "None or a number of seconds", timeout, seconds)
