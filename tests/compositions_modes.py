"""What a block puts a task's torch into, as a value to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

DEVICE = torch.device("meta")


class Modes(NamedTuple):
    """What torch does differently, for this task."""

    grad: bool = True
    inferring: bool = False
    autocast: bool = False
    device: str = "cpu"


def modes_now() -> Modes:
    """As torch says."""
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(torch.get_default_device()),
    )


#: How each is entered, and what it makes of those before.
ENTER: dict[str, tuple[Callable[[], Any], Callable[[Modes], Modes]]] = {
    "no_grad": (torch.no_grad, lambda modes: modes._replace(grad=False)),
    "inference": (torch.inference_mode, lambda modes: modes._replace(grad=False, inferring=True)),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda modes: modes._replace(autocast=True),
    ),
    "default device": (lambda: DEVICE, lambda modes: modes._replace(device="meta")),
}
