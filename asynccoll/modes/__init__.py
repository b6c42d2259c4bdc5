"""torch's modes (grad, inference, autocast, default device) as values: taken at a call, kept by task.

Must not know what is called in them.
"""

from asynccoll.modes.captured import as_called, uncast
from asynccoll.modes.isolation import isolated

__all__ = ["as_called", "isolated", "uncast"]
