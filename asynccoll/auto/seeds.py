"""The random numbers of a rank: the same on all, or its own."""

from __future__ import annotations

import random
import sys

import torch

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import fitting
from asynccoll.runtime.process import get_rank

__all__ = ["manual_seed"]

#: NumPy takes no larger ones.
_SEEDS = 1 << 32


@fitting
def manual_seed(seed: int, *, by_rank: bool = False) -> int:
    """Seed torch (its devices as well), ``random`` and, where it is loaded, NumPy; the seed that was used.

    The seed is equal on all ranks for what has to be equal there, such as a model that is not broadcast; with
    ``by_rank=True`` it is ``seed`` plus the rank, for what has to differ, such as augmentation and dropout:

    >>> ac.manual_seed(7)                # on two ranks: 7, 7
    >>> model = Net()
    >>> ac.manual_seed(7, by_rank=True)  # 7, 8

    It sends nothing. The replicas of torch_xla are threads of one process, and share its random numbers.

    Raises:
        InvalidArgumentError: the seed is not within 0 and 2**32 - 1, NumPy's range.
    """
    if not isinstance(seed, int):
        raise InvalidArgumentError(f"a seed is an int, got {seed!r}")
    used = seed + get_rank() if by_rank else seed
    if not 0 <= seed <= used < _SEEDS:
        raise InvalidArgumentError(f"a seed is within 0 and {_SEEDS - 1}, also with the rank, got {used}")
    random.seed(used)
    torch.manual_seed(used)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(used)
    return used
