"""Hooks on parameters that backward calls, before and after it adds to their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["after_accumulation", "before_accumulation", "remove_all"]


def after_accumulation(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> object:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def before_accumulation(parameter: torch.Tensor, hook: Callable[..., None]) -> Sequence[object]:
    """Call ``hook`` before backward adds to ``.grad``; returns the handle, and the node that has the hook.

    Keep the node, too: the hook is lost with it.
    """
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    return node.register_prehook(hook), node


def remove_all(hooks: list[object]) -> None:
    for hook in hooks:
        if hasattr(hook, "remove"):
            hook.remove()
    hooks.clear()
