"""torch's modes (grad, inference, autocast, default device, ...): captured at a call, or kept per task.

This package must not know which functions run in them.
"""

from asynccoll.modes.captured import as_called, uncast
from asynccoll.modes.isolation import isolated
from asynccoll.modes.unseen import unseen, with_data

__all__ = ["as_called", "isolated", "uncast", "unseen", "with_data"]
