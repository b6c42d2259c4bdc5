"""Which tensors share bytes: as writing to one and looking at the other says."""

from __future__ import annotations

import gc
import random
import weakref

import torch

from asynccoll.aliasing import Claims


class Held:
    """A claim, until it is let go."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out
        self.claims = True


def view(base: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Rows, a column, a block, a slice of three dimensions, every second element."""
    rows = base.view(12, 20)
    low, high = sorted(draw.sample(range(13), 2))
    return draw.choice(
        [
            lambda: rows[low:high],
            lambda: rows[draw.randrange(3) : 12 - draw.randrange(3), draw.randrange(20)],
            lambda: rows[draw.randrange(3) :, low:high],
            lambda: base.view(4, 6, 10)[:, draw.randrange(6), : draw.randrange(1, 11)],
            lambda: base[draw.randrange(5) :: draw.choice([2, 3, 4, 5])],
            lambda: rows.t()[low:high],
            lambda: base[:1].expand(7),
        ]
    )()


def test_a_claim_is_found_where_bytes_are_shared_and_nowhere_else() -> None:
    """Also where tensors lie across each other."""
    draw = random.Random(0)
    shared = 0
    for _ in range(4000):
        base = torch.zeros(240, dtype=draw.choice([torch.uint8, torch.float32, torch.complex64]))
        x, y = view(base, draw), view(base, draw)
        claims, held = Claims(), Held(x)
        claims.add(held)
        x.fill_(1) if 0 not in x.stride() else base[:1].fill_(1)
        expected = held if bool((y != 0).any()) else None
        assert claims.find((y,)) is expected, (x.shape, x.stride(), y.shape, y.stride())
        shared += expected is not None
    assert 1000 < shared < 3000


def test_many_columns_are_told_apart() -> None:
    """Each pair of them by arithmetic: masks of the whole matrix took half a minute for 64 columns."""
    matrix, claims = torch.zeros(4096, 200), Claims()
    held = []
    for column in matrix.unbind(1):
        assert claims.find((column,)) is None
        held.append(Held(column))
        claims.add(held[-1])
    assert claims.find((matrix[7, 40:41],)) is held[40]
    held[40].claims = False
    assert claims.find((matrix[7, 40:41],)) is None


def test_no_tensor_is_kept_alive() -> None:
    """Nor a claim that its owner has dropped."""
    claims = Claims()
    held = Held(torch.zeros(5))
    claims.add(held)
    assert claims.find((torch.zeros(3),)) is None
    gone = weakref.ref(held.out)
    del held
    gc.collect()
    assert gone() is None
    assert claims.find((torch.zeros(3),)) is None
