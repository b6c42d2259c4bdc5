"""Hooks on parameters that backward calls, before and after it adds to their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

__all__ = [
    "after_accumulation",
    "before_accumulation",
    "is_returned",
    "is_returned_at",
    "no_hook",
    "remove_all",
]


def after_accumulation(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> object:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def before_accumulation(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> object:
    """Call ``hook`` before backward adds to ``.grad``, and also if the gradient ``is_returned``.

    The hook is on the parameter, not on the node that accumulates, which ``model.to(...)`` drops with its
    hooks.
    """
    hook = unserializable_hook(hook)  # type: ignore[no-untyped-call]  # or torch warns when it is pickled
    return parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def is_returned(parameter: torch.Tensor) -> bool:
    """Whether ``torch.autograd.grad`` will return this gradient, so that it is not accumulated."""
    if not parameter.requires_grad:  # frozen since the forward: backward does not accumulate it either
        return True
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return is_returned_at(view.grad_fn.next_functions[0][0])


def is_returned_at(leaf: Any) -> bool:
    """Whether the gradient that reaches ``leaf``, a node of the running backward, is returned."""
    try:
        torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # raised by torch for a leaf whose gradient is returned
        return True
    return False


def no_hook() -> Callable[..., None]:
    """Return a hook that does nothing: what a hook of ours becomes in a copied or unpickled module."""
    return _nothing


def _nothing(*_: object) -> None:
    pass


def remove_all(hooks: list[object]) -> None:
    for hook in hooks:
        if hasattr(hook, "remove"):
            hook.remove()
    hooks.clear()
