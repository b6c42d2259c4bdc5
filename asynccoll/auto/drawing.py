"""Random numbers of one thread's own: ranks may be threads of one process, which share those of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from asynccoll import host
from asynccoll.host.forks import renew

_WITH_A_GENERATOR = frozenset(
    {
        "_sample_dirichlet",
        "_standard_gamma",
        "bernoulli",
        "bernoulli_",
        "binomial",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "randint",
        "randn",
        "random_",
        "randperm",
        "uniform_",
    }
)
#: They take one since torch 2.10 or later.
_WITHOUT_ONE = frozenset({"rand_like", "randint_like", "randn_like"})

#: Held while torch's own numbers are replaced, for one call.
_replaced = host.RLock()
renew(_replaced)


class Drawing(TorchFunctionMode):
    """Within it torch's functions draw on the CPU from ``generator``, unless they are given another one.

    Neither what this thread draws elsewhere changes, nor what other threads draw at the same time.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if given.get("generator") is None and _is_on_cpu(args, given):
            if func.__name__ in _WITH_A_GENERATOR:
                given["generator"] = self._generator
            elif func.__name__ in _WITHOUT_ONE:
                return self._draw_from_torchs(func, args, given)
        return func(*args, **given)

    def _draw_from_torchs(
        self, func: Callable[..., object], args: tuple[object, ...], given: dict[str, object]
    ) -> object:
        with _replaced, torch.random.fork_rng(devices=()):
            torch.default_generator.set_state(self._generator.get_state())
            drawn = func(*args, **given)
            self._generator.set_state(torch.default_generator.get_state())
        return drawn


def _is_on_cpu(args: tuple[object, ...], given: Mapping[str, Any]) -> bool:
    device = given.get("device") or next((one.device for one in args if isinstance(one, torch.Tensor)), None)
    return torch.device(device or torch.get_default_device()).type == "cpu"
