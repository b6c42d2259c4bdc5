"""Which GPU a rank uses, if its backend can use one."""

from __future__ import annotations

import torch


def own_device(local_rank: int) -> torch.device:
    """Return the GPU for this local rank, and make it the current device; the CPU if there is no GPU.

    If a node has more ranks than GPUs, ranks share them. A rank that sees only one GPU (SLURM's
    ``--gpus-per-task``) uses that one.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
