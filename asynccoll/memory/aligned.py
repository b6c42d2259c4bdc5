"""The layout of tensors in flat memory: one after another, each at an aligned address.

CUDA kernels read 16 bytes at a time, and not all of them check the alignment first: with a bias in the middle
of flat memory, cuBLASLt fails with "misaligned address" (pytorch#194497), after which the process can no
longer use the device. FSDP aligns the parameters inside its flat parameters for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

#: In bytes, the same as FSDP's. Every allocation is aligned more strictly than this.
ALIGNMENT = 16


class Layout:
    """The offsets of tensors with ``counts`` elements in flat memory, and its total number of elements.

    >>> layout = Layout([3, 5], itemsize=4, parts=3)
    >>> layout.starts, layout.elements   # 3 and a gap of 1, then 5; 12 are three parts of 4 each
    ([0, 4], 12)
    """

    def __init__(self, counts: Sequence[int], itemsize: int, parts: int = 1) -> None:
        """``parts``: the memory can be cut into that many equal parts, each of which is aligned as well."""
        step = max(1, ALIGNMENT // itemsize)
        self.counts: list[int] = list(counts)
        self.starts: list[int] = [0, *accumulate(count + -count % step for count in counts)]
        end = self.starts.pop()
        self.elements: int = end + -end % (step * parts)
        #: The number of unused elements after each tensor.
        self.gaps: list[int] = [-count % step for count in counts]
        if self.gaps:
            self.gaps[-1] += self.elements - end

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each tensor's elements as a 1-d view of ``flat``, which may be longer than needed."""
        # A single call of split, so that backward concatenates the gradients once.
        pieces = [size for pair in zip(self.counts, self.gaps, strict=True) for size in pair]
        return list(torch.split(flat[: self.elements], pieces)[::2])
