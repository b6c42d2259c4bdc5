"""torch's modes as values: grad and inference taken at a call, these and autocast and device kept by task.

Must not know what is called in them.
"""

from asynccoll.modes.captured import as_called, uncast
from asynccoll.modes.isolation import isolated

__all__ = ["as_called", "isolated", "uncast"]
