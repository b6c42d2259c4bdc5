"""The parameter shapes of two well-known models, in the order in which the models list them."""

from __future__ import annotations

__all__ = ["GPT2_SMALL", "RESNET50", "SMALL_TENSORS"]

Shapes = list[tuple[int, ...]]

#: 1,000 tensors of 4 KiB.
SMALL_TENSORS: Shapes = [(1024,)] * 1000


def _resnet50() -> Shapes:
    """He et al. 2015: 161 tensors, 25.6 million elements."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [(width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, before, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]  # and its normalisation
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def _gpt2_small() -> Shapes:
    """Radford et al. 2019: 148 tensors, 124 million elements."""
    d = 768
    layer: Shapes = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    layer += [(d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *layer * 12, (d,), (d,)]


RESNET50 = _resnet50()
GPT2_SMALL = _gpt2_small()
