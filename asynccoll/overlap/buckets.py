"""The memory that gradients are reduced in: flat buckets, and each ``.grad`` a view of one.

Knows nothing of when a bucket leaves or of what reduces it; that is ``gradients``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from asynccoll.errors import PayloadTypeError

__all__ = ["Bucket", "FlaggedBucket", "assign"]


class Bucket:
    """Gradients that travel together; ``tail`` elements more travel behind them."""

    def __init__(self, parameters: Sequence[torch.Tensor], tail: int = 0) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.parameters = parameters
        self.flat = torch.zeros(sum(sizes) + tail, dtype=parameters[0].dtype, device=parameters[0].device)
        self.views = self.cut(self.flat)
        self.begin()

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a tensor laid out as this one that are the parameters', in their shapes."""
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = torch.split(flat[: sum(sizes)], sizes)
        return [part.view(like.shape) for part, like in zip(parts, self.parameters, strict=True)]

    def begin(self) -> None:
        """Expect every gradient anew."""
        self.waiting = len(self.parameters)
        self.has = [False] * self.waiting

    def put(self, index: int, scale: float) -> None:
        """Take the gradient of the parameter at ``index``; from now on it lives here."""
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise PayloadTypeError(
                f"the gradient of a parameter of shape {list(parameter.shape)} is sparse, and buckets are "
                "dense: build the layer with sparse=False, or leave its parameters out of the reducer "
                "and all_reduce their .grad yourself"
            )
        torch.mul(gradient.detach(), scale, out=view)
        parameter.grad = view
        self.has[index] = True
        self.waiting -= 1

    def fill(self, scale: float) -> None:
        """Make it ready to leave: what backward has not brought is what had gathered before, or zeros."""
        if not self.waiting:
            return
        for index, parameter in enumerate(self.parameters):
            if self.has[index]:
                continue
            if parameter.grad is not None:
                self.put(index, scale)
            else:
                self.views[index].zero_()

    def adopt(self) -> None:
        """Hand over what the reduction has brought, where it is not in its place already."""


class FlaggedBucket(Bucket):
    """Gradients, and a flag for each: whether this rank has one.

    The flags are summed with the gradients, which tells a rank that has none whether another had.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters, tail=len(parameters))
        self.flags = self.flat[-len(parameters) :]

    def fill(self, scale: float) -> None:
        super().fill(scale)
        self.flags.fill_(1)
        if self.waiting:
            self.flags.copy_(torch.tensor(self.has))

    def adopt(self) -> None:
        """Give the parameters without a gradient here that of the ranks which had one."""
        if not self.waiting:
            return
        counts = self.flags.tolist()
        for index, parameter in enumerate(self.parameters):
            if not self.has[index] and counts[index] != 0:
                parameter.grad = self.views[index]


def assign(
    parameters: Sequence[torch.Tensor],
    first_bytes: int,
    limit_bytes: int,
    apart: Callable[[torch.Tensor], object] = lambda _: None,
) -> Iterator[list[torch.Tensor]]:
    """Which parameters travel together: neighbours of one dtype and device, up to the limit.

    Those of which ``apart`` says different things do not.
    """
    filling: dict[object, list[torch.Tensor]] = {}
    sizes: Counter[object] = Counter()
    limit = first_bytes
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, apart(parameter))
        filling.setdefault(kind, []).append(parameter)
        sizes[kind] += parameter.numel() * parameter.element_size()
        if sizes[kind] >= limit:
            yield filling.pop(kind)
            sizes[kind], limit = 0, limit_bytes
    yield from filling.values()
