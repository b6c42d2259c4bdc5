"""Which GPU a rank uses, where its backend lets it use one."""

from __future__ import annotations

import torch

__all__ = ["own_device"]


def own_device(local_rank: int) -> torch.device:
    """The GPU of the rank with this place on its node, from now on the current one; else the CPU.

    Ranks beyond the number of GPUs share them, and a rank that sees one alone (SLURM's ``--gpus-per-task``)
    uses that.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
