"""The data and the network of ``train_digits.py``. Nothing in this module communicates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

Samples = tuple[Tensor, Tensor]  # standardised images (n, 1, 8, 8), labels (n,)


class Digits(NamedTuple):
    """One rank's share of the 1,797 handwritten digits that ship inside scikit-learn."""

    train: Samples
    test: Samples


def digits(rank: int, world_size: int) -> Digits:
    """Load the digits: every fifth is for testing; all ranks get equally many training samples."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    x = torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1)
    x = (x - x.mean()) / x.std()
    y = torch.tensor(loaded.target, dtype=torch.int64)
    testing = torch.arange(len(y)) % 5 == 0
    even = int((~testing).sum()) // world_size * world_size
    train = x[~testing][:even], y[~testing][:even]
    test = x[testing], y[testing]
    share = slice(rank, None, world_size)
    return Digits((train[0][share], train[1][share]), (test[0][share], test[1][share]))


class Batches:
    """A rank's samples, reshuffled for each epoch, with the epoch as the seed."""

    def __init__(self, samples: Samples, size: int) -> None:
        self.x, self.y = samples
        self.size = min(size, len(self.y))
        self.per_epoch = len(self.y) // self.size

    def of(self, epoch: int) -> Iterator[Samples]:
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(self.y), generator=generator)
        for number in range(self.per_epoch):
            chosen = order[number * self.size : (number + 1) * self.size]
            yield self.x[chosen], self.y[chosen]


def network() -> nn.Module:
    """Return a model of about 0.5 million parameters: five convolutions (8x8 to 2x2), then a linear layer."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256 * 2 * 2, 10)),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model
