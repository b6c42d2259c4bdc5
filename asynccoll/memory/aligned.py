"""Where tensors lie in flat memory: one after the other, each at an address that kernels may rely on.

CUDA's kernels read 16 bytes at a time, and not all of them look first whether they may: a bias in the middle
of flat memory ends cuBLASLt in "misaligned address" (pytorch#194497), after which the device is lost to the
process. FSDP aligns the parameters in its flat ones for this reason, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

__all__ = ["Layout"]

#: Bytes, as FSDP's. Every allocation starts at a multiple of more.
ALIGNMENT = 16


class Layout:
    """The places of tensors of these numbers of elements, and how many elements flat memory of them has.

    >>> layout = Layout([3, 5], itemsize=4, parts=3)
    >>> layout.starts, layout.elements   # 3 and a gap of 1, then 5; 12 are three parts of 4 each
    ([0, 4], 12)
    """

    def __init__(self, counts: Sequence[int], itemsize: int, parts: int = 1) -> None:
        """``parts``: into how many equal parts the memory can be cut, each of them aligned as well."""
        step = max(1, ALIGNMENT // itemsize)
        self.counts: list[int] = list(counts)
        self.starts: list[int] = [0, *accumulate(count + -count % step for count in counts)]
        end = self.starts.pop()
        self.elements: int = end + -end % (step * parts)
        #: Elements left free behind each.
        self.gaps: list[int] = [-count % step for count in counts]
        if self.gaps:
            self.gaps[-1] += self.elements - end

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors' elements, as views of flat memory, which may go on behind them."""
        # One call, so that backward joins their gradients once.
        pieces = [size for pair in zip(self.counts, self.gaps, strict=True) for size in pair]
        return list(torch.split(flat[: self.elements], pieces)[::2])
