"""Training loops of your own whose communication disappears behind their compute.

Each module here is one way to overlap, on top of the public operations alone:

- ``gradients``: reduced bucket by bucket while backward runs (``overlap_gradients``);
- ``parameters``: what the ranks start from (``broadcast_parameters``).
"""

from asynccoll.overlap.gradients import GradientReducer, overlap_gradients
from asynccoll.overlap.parameters import broadcast_parameters

__all__ = ["GradientReducer", "broadcast_parameters", "overlap_gradients"]
