"""Forwards without a backward, by which ranks notice a step that only some of them skipped.

A rank that gets a non-finite loss and skips to the next batch (``continue``) makes the same collectives as
the others, but one step later. From then on gradients of different steps are averaged, and nothing fails
before the end. But that rank has run a forward that no backward followed. The ranks tell each other whether
they have, so they notice in the next reduction. If all ranks have run such forwards, as with two forwards
for one loss, that is intended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch.utils.hooks import RemovableHandle

from asynccoll.host.words import listed
from asynccoll.overlap.hooks import no_hook

__all__ = ["Forwards", "forwards_seen", "left_out"]


class Forwards:
    """Counts a module's forwards in training mode with gradients enabled: no backward follows others."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._open = 0  # forwards since backward last produced a gradient
        #: whether, since the last reduction, a forward had no backward although a later one had
        self.unanswered: bool = False
        self.handle: RemovableHandle = module.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, _: object) -> None:
        """Count a forward that begins."""
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self._open += 1

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        """Become a hook that does nothing in a copied or unpickled module."""
        return no_hook, ()

    def answered(self) -> None:
        """Note a gradient. It belongs to the latest forward, so earlier ones had no backward."""
        if self._open:
            self.unanswered = self.unanswered or self._open > 1
            self._open = 0

    def begin(self) -> None:
        """Begin the next step: gradients were reduced."""
        self._open, self.unanswered = 0, False


def forwards_seen(model: object) -> TypeGuard[torch.nn.Module]:
    """Whether forwards of ``model`` can be counted: it is a module, but no script, which takes no hooks."""
    return isinstance(model, torch.nn.Module) and not isinstance(model, torch.jit.ScriptModule)


def left_out(unanswered: Sequence[bool], reduction: int, lane: str, place: object) -> str:
    """Return the warning if some ranks, but not all, have run a forward without a backward; else "".

    ``unanswered``: by rank, whether it has. ``place``: the line that awaits the gradients.
    """
    ranks = [rank for rank, has in enumerate(unanswered) if has]
    if len(ranks) in (0, len(unanswered)):
        return ""
    return (
        f"before reduction {reduction} on lane {lane!r} ({place}) {listed(ranks)} (of the group) ran the "
        "model's forward without a backward, and the others did not: if a step was skipped there "
        "(`continue` after a loss that is not finite), gradients of different steps are averaged from now "
        "on. Such a rank has to await its gradients even without a backward; run a forward that is not for "
        "training under torch.no_grad()"
    )
