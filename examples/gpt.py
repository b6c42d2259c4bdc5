"""The text and the network of ``train_gpt.py``, scaled down from nanoGPT. Nothing here communicates."""

from __future__ import annotations

import math
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

CONTEXT = 64  # how many characters a prediction can see
WIDTH = 128
LAYERS = 4
HEADS = 4


class Corpus:
    """A text as a sequence of character indices; the last tenth is for testing.

    The text is that of Python's ``help()`` topics: 0.5 MB of English that ships with every interpreter.
    """

    def __init__(self) -> None:
        text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
        self.alphabet = sorted(set(text))
        number = {character: n for n, character in enumerate(self.alphabet)}
        numbers = torch.tensor([number[character] for character in text])
        self.train, self.test = numbers.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])

    def batch(self, samples: int, *, seed: int, test: bool = False) -> tuple[Tensor, Tensor]:
        """Return sequences from random places in the text and, for each character, the one after it."""
        numbers = self.test if test else self.train
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(numbers) - CONTEXT, (samples, 1), generator=generator)
        places = starts + torch.arange(CONTEXT)
        return numbers[places], numbers[places + 1]


class Block(nn.Module):
    """Causal attention, then a perceptron per character, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH, bias=False)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH, bias=False),
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before_attention(x))
        return x + self.perceptron(x)

    def attend(self, x: Tensor) -> Tensor:
        split = self.queries_keys_values(x).unflatten(2, (3, HEADS, WIDTH // HEADS))
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (samples, heads, context, width of a head)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """About 0.8 million parameters; the output layer shares its weights with the character embedding."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        self.head.weight = self.characters.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("projection.weight", "perceptron.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if adds else 0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of predicting ``y``, in nats per character."""
        hidden = self.characters(x) + self.positions(torch.arange(x.shape[1]))
        logits = self.head(self.last(self.blocks(hidden)))
        return cross_entropy(logits.flatten(0, 1), y.flatten())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer: weight matrices decay, the weights of norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [x for x in parameters if x.dim() >= 2], "weight_decay": 0.1},
        {"params": [x for x in parameters if x.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99))


def learning_rate(step: int, steps: int) -> float:
    """Return the rate at ``step``: a linear warm-up, then a cosine from the peak down to a tenth of it."""
    highest, warm_up = 1e-3, max(1, steps // 10)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return highest * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
