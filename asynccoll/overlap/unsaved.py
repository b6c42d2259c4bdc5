"""Refuses to save, load or copy modules whose parameters are divided among the ranks.

Such a module has a part of each parameter, or none, so a checkpoint or a copy would silently lack the rest.
It is refused through a module that contains it, too. ``layerstates`` saves and loads whole parameters
instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import nn

from asynccoll.errors import InvalidArgumentError
from asynccoll.host.misfits import named_type

__all__ = ["Unsaved"]


class Unsaved:
    """The hook that refuses this, in some modules."""

    def __init__(self) -> None:
        self._is_lifted = False

    def refuse(self, module: nn.Module) -> None:
        """Refuse ``state_dict()`` and ``load_state_dict()`` of ``module`` from now on."""
        module.register_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a module whose parameters shard_layers has divided among the ranks cannot be copied or pickled "
            "(by torch.save, or for an AveragedModel): save `await layers.full_state_dict()`, and load it "
            "into a new one"
        )

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Allow both for the block, for what the modules have besides parameters."""
        self._is_lifted = True
        try:
            yield
        finally:
            self._is_lifted = False

    def __call__(self, module: nn.Module, *_: object) -> None:
        if not self._is_lifted:
            raise InvalidArgumentError(
                f"state_dict() or load_state_dict() of {named_type(module)}, whose parameters shard_layers "
                "has divided among the ranks, or of a module that contains it: save `await "
                "layers.full_state_dict()`, load it with layers.load_full_state_dict(state), and save and "
                "load the model's other modules one by one"
            )
