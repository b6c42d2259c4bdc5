"""Forwards that no backward has followed: what tells a step that one rank alone has left out.

A rank that meets a loss which is not finite, and goes on with the next batch (``continue``), has made the
same collectives as the others, but one step later: from then on the gradients of different steps are
averaged, and nothing fails before the end. It has run a forward that no backward followed. Ranks that tell
each other so find it out in the next reduction. Where every rank has run some, as with two forwards for one
loss, they are meant.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch.utils.hooks import RemovableHandle

from asynccoll.host.words import listed

__all__ = ["Forwards", "forwards_seen", "left_out"]


class Forwards:
    """Those of one module that is trained, with gradients; others are not followed by a backward anyway."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._open = 0  # forwards since the last gradient came
        #: whether one had no backward since the last reduction, though a later one had
        self.unanswered: bool = False
        self.handle: RemovableHandle = module.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, _: object) -> None:
        """A forward begins."""
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self._open += 1

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        """In a copy of the module, or a pickled one, there is nobody to count for."""
        return _nobody, ()

    def answered(self) -> None:
        """A gradient has come: of the latest forward. Those before it had no backward."""
        if self._open:
            self.unanswered = self.unanswered or self._open > 1
            self._open = 0

    def begin(self) -> None:
        """Gradients were reduced: the next step begins."""
        self._open, self.unanswered = 0, False


def forwards_seen(model: object) -> TypeGuard[torch.nn.Module]:
    """Whether ``model`` is a module, and of Python: a compiled script takes no hooks."""
    return isinstance(model, torch.nn.Module) and not isinstance(model, torch.jit.ScriptModule)


def _nobody() -> Callable[[object, object], None]:
    return _ignore


def _ignore(module: object, inputs: object) -> None:
    pass


def left_out(unanswered: Sequence[bool], reduction: int, lane: str, place: object) -> str:
    """What is told at ``place`` where some ranks alone have run a forward without a backward; else ""."""
    ranks = [rank for rank, has in enumerate(unanswered) if has]
    if len(ranks) in (0, len(unanswered)):
        return ""
    return (
        f"before reduction {reduction} on lane {lane!r} ({place}) {listed(ranks)} (of the group) ran the "
        "model's forward without a backward, and the others did not: if a step was left out there "
        "(`continue` after a loss that is not finite), gradients of different steps are averaged "
        "from now on. Such a rank awaits its gradients all the same, without backward; a forward "
        "that is not for training goes under torch.no_grad()"
    )
