"""The torch modes of a task, as a value to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

DEVICE = torch.device("meta")


class Modes(NamedTuple):
    """The torch modes that a task may have changed."""

    grad: bool = True
    inferring: bool = False
    autocast: bool = False
    device: str = "cpu"


def modes_now() -> Modes:
    """Return the modes that torch is in now."""
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.empty(0).device.type,  # ``get_default_device`` takes ten times as long
    )


#: How to enter each mode, and how it changes the modes before.
ENTER: dict[str, tuple[Callable[[], Any], Callable[[Modes], Modes]]] = {
    "no_grad": (torch.no_grad, lambda modes: modes._replace(grad=False)),
    "inference": (torch.inference_mode, lambda modes: modes._replace(grad=False, inferring=True)),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda modes: modes._replace(autocast=True),
    ),
    "default device": (lambda: DEVICE, lambda modes: modes._replace(device="meta")),
}
