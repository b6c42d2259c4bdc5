"""Models and optimizers of training programs, small enough for one process to train on all data."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint


class Small(nn.Module):
    """A model on rows of six numbers: `loss(x)` is a scalar."""

    #: whether backward recomputes the forward instead of keeping its activations
    recomputed = False

    def loss(self, x: Tensor) -> Tensor:
        out = checkpoint(self, x, use_reentrant=False) if self.recomputed else self(x)
        return out.square().mean()

    def at(self, step: int) -> None:
        """Called before each step."""


class Stack(Small):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Dropping(Stack):
    """Layers of one shape, of which each rank leaves out a different one in each step (LayerDrop)."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(6, 6) for _ in range(4)))
        self.step = 0

    def at(self, step: int) -> None:
        self.step = step

    def drops(self, index: int, rank: int) -> bool:
        return index == (rank + self.step) % 4

    def forward(self, x: Tensor) -> Tensor:
        rank = x.rank  # type: ignore[attr-defined]
        for index, layer in enumerate(self.layers):
            if not self.drops(index, rank):
                x = layer(x).tanh()
        return x


class Tied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Reused(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(checkpoint(self.layer, x, use_reentrant=False).tanh())


class Unused(Small):
    """A model with one head that is never used, and one that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        trunk = self.trunk(x).tanh()
        out = self.heads[0](trunk)
        return out + self.heads[1](trunk) if x[0, 0] > 0 else out


class Thawed(Small):
    """A model with a layer that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.first.requires_grad_(False)

    def at(self, step: int) -> None:
        self.first.requires_grad_(step > 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Freezing(Thawed):
    """A model with a layer that is frozen at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(True)

    def at(self, step: int) -> None:
        self.first.requires_grad_(step < 2)


class Shapes(Small):
    """Parameters that are scalar, empty, transposed and of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3, 0))
        self.transposed = nn.Parameter(torch.ones(4, 6).t())
        self.single = nn.Parameter(torch.ones(4, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.transposed) * self.scalar + self.single.to(x.dtype) + self.empty.sum()


class Complex(Small):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(self.weight.dtype) @ self.weight).tanh()


class Picture(Small):
    """Convolutions in channels_last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        pictures = x[:, :, None, None].expand(-1, -1, 3, 3).reshape(-1, 2, 3, 9)
        return self.second(self.first(pictures).tanh())


class Recurrent(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(len(x), 2, 3))[0]


class Attentive(Small):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[None], x[None], x[None], need_weights=False)[0]


def hooked_weight_norm(layer: nn.Module) -> nn.Module:
    """Apply the older weight_norm, whose forward pre-hook reads the parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def three(changed: Callable[[nn.Linear], nn.Module] = lambda layer: layer) -> Stack:
    """Return three layers, the fewest for which a loop that ends early skips one; ``changed`` the first."""
    return Stack(changed(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


MODELS: dict[str, Callable[[], Small]] = {
    "plain": three,
    "deep": lambda: Stack(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh()))),
    "LayerDrop": Dropping,
    "tied": Tied,
    "reused, checkpointed": Reused,
    "unused": Unused,
    "thawed": Thawed,
    "freezing": Freezing,
    "shapes": Shapes,
    "complex": Complex,
    "channels_last": Picture,
    "weight_norm": lambda: three(weight_norm),
    "weight_norm by hooks": lambda: three(hooked_weight_norm),
    "LSTM": Recurrent,
    "attention": Attentive,
    "batch norm": lambda: three(lambda layer: nn.Sequential(layer, nn.BatchNorm1d(8))),
    "bfloat16": three,
}


def made(name: str, seed: int, dtype: torch.dtype) -> Small:
    """Return the model with parameters of this seed, without torch's generator, which ranks may share."""
    model = MODELS[name]().double()
    if name == "shapes":
        model.single.data = model.single.data.float()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
        parameter.data.copy_(values)
    return model if dtype is torch.float64 else model.to(dtype)


def rows(rank: int, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + part)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1),
    "SGD foreach": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.05, weight_decay=0.1),
    "Adam foreach": lambda given: torch.optim.Adam(given, lr=0.05, foreach=True),
    "Adam fused": lambda given: torch.optim.Adam(given, lr=0.05, fused=True),
    "RMSprop foreach": lambda given: torch.optim.RMSprop(given, lr=0.01, foreach=True),
    "Adagrad fused": lambda given: torch.optim.Adagrad(given, lr=0.05, fused=True),
}
