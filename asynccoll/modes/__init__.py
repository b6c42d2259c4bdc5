"""torch's modes (grad, inference, autocast, default device, ...), noted at a call, or kept by task.

Must not know what is called in them.
"""

from asynccoll.modes.captured import as_called, uncast
from asynccoll.modes.isolation import isolated
from asynccoll.modes.unseen import unseen, with_data

__all__ = ["as_called", "isolated", "uncast", "unseen", "with_data"]
