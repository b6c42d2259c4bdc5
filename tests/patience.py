"""How long tests wait for what has to come.

What passes costs none of it, so a machine that is slow for an hour needs only more of it:
``ASYNCCOLL_TEST_PATIENCE=4`` multiplies every time limit by four.
"""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("ASYNCCOLL_TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """These seconds, on a machine as quick as they were chosen for."""
    return seconds * FACTOR
