"""Training steps of three models on the ranks of one host: ``overlap_gradients`` compared with torch's DDP.

    python -m asynccoll run -n 2 benchmarks/models.py [--only one_layer] [--rounds 9]

- ``one_layer``: a linear layer of 25 million parameters, with a batch of four rows: nearly all communication.
- ``resnet50``: He et al. 2015, 25.6 million parameters, with two images of 96 x 96.
- ``gpt2``: 12 layers of width 768 and a vocabulary of 50,257 words, as in GPT-2 small, with 64 words.

Both use their default buckets. Every round runs each way once, in an order that changes; the ratios are
medians of the ratios within a round. Rank 0 prints a line of JSON for each model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import asynccoll as ac
from asynccoll.bench.sidebyside import Peer, side_by_side

#: A model, and the input of a step.
Made = tuple[nn.Module, Tensor]


def one_layer() -> Made:
    return nn.Linear(5000, 5000, bias=False), torch.randn(4, 5000)


# ResNet-50


class Bottleneck(nn.Module):
    """Three convolutions with a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.inner = nn.Sequential(
            *_convolution(channels, width, 1), nn.ReLU(),
            *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, wide, 1),
        )  # fmt: skip
        same = stride == 1 and channels == wide
        self.beside = nn.Identity() if same else nn.Sequential(*_convolution(channels, wide, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x) + self.beside(x))


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]


def resnet50() -> Made:
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 1 if block else stride))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers), torch.randn(2, 3, 96, 96)


# GPT-2


class GPT2(nn.Module):
    """A decoder whose head shares its weights with the embedding."""

    def __init__(self, words: int = 50257, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(1024, width)
        layer = nn.TransformerEncoderLayer(
            width, 12, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places.weight[: x.shape[1]]
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y: Tensor = self.layers(h, mask=causal, is_causal=True) @ self.words.weight.T
        return y


def gpt2() -> Made:
    return GPT2(), torch.randint(0, 50257, (1, 64))


# A step


def ddp(made: Callable[[], Made]) -> Peer:
    inner, x = made()
    return stepping(DistributedDataParallel(inner), x)


def overlapped(made: Callable[[], Made]) -> Peer:
    model, x = made()
    return stepping(model, x, ac.overlap_gradients(model))


def alone(made: Callable[[], Made]) -> Peer:
    return stepping(*made())


def stepping(model: nn.Module, x: Tensor, gradients: Awaitable[object] | None = None) -> Peer:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    async def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if gradients is not None:
            await gradients
        optimizer.step()

    return step


MODELS = {one.__name__: one for one in (one_layer, resnet50, gpt2)}


async def measure(name: str, rounds: int) -> None:
    made = MODELS[name]
    peers = {"DDP": ddp(made), "overlap_gradients": overlapped(made), "no communication": alone(made)}
    for step in peers.values():  # DDP rebuilds its buckets in the second step
        await step()
    found = await side_by_side(peers, rounds=rounds, operations=2)
    told = {
        who: {"ms": round(one.median * 1e3, 1), "of DDP": round(one.ratio_to(found["DDP"]), 3)}
        for who, one in found.items()
    }
    if ac.get_rank() == 0:
        print(json.dumps({"model": name, **told}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(MODELS), action="append", help="this model; default all")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ac.initialize("gloo")
    for name in given.only or MODELS:
        asyncio.run(measure(name, given.rounds))
    ac.finalize()
