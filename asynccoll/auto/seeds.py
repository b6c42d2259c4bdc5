"""Seeds of random numbers: the same on all ranks, or one per rank."""

from __future__ import annotations

import random
import sys

import torch

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import fitting, integer
from asynccoll.runtime.process import get_rank

#: NumPy takes only seeds below this.
_SEEDS = 1 << 32


@fitting
def manual_seed(seed: int, *, by_rank: bool = False) -> int:
    """Seed torch (also on devices), ``random`` and, if it is loaded, NumPy; return the seed that was used.

    The seed is the same on all ranks, for what must be the same there, such as a model that is not broadcast.
    With ``by_rank=True`` it is ``seed`` plus the rank, for what must differ, such as augmentation or dropout:

    >>> ac.manual_seed(7)                # on two ranks: 7, 7
    >>> model = Net()
    >>> ac.manual_seed(7, by_rank=True)  # 7, 8

    Nothing is sent. The replicas of torch_xla are threads of one process, and share its random numbers.

    Raises:
        InvalidArgumentError: the seed is not between 0 and 2**32 - 1, NumPy's range.
    """
    first = integer(seed)
    if first is None:
        raise InvalidArgumentError(f"a seed must be an int, got {seed!r}")
    used = first + get_rank() if by_rank else first
    if not 0 <= first <= used < _SEEDS:
        raise InvalidArgumentError(
            f"a seed must be from 0 to {_SEEDS - 1}, also with the rank added, got {used}"
        )
    random.seed(used)
    torch.manual_seed(used)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(used)
    return used
