"""New memory for results; for large results, the kernel is asked for huge pages.

The kernel clears pages one by one when they are first written. For 64 MiB in pages of 4 KiB, that takes
longer than the collective that writes to them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch

#: Huge pages pay off from this size on: smaller tensors come from memory that the process has used before.
_LARGE_BYTES = 4 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # only Linux has it

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def fresh(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return a new, uninitialized tensor of that shape, with the dtype and on the device of ``like``."""
    made = torch.empty(shape, dtype=like.dtype, device=like.device)
    if _ADVICE is not None and made.device.type == "cpu" and made.nbytes >= _LARGE_BYTES:
        start = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (made.data_ptr() + made.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _ADVICE)  # may fail, harmlessly
    return made
