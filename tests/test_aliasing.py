"""Which tensors share bytes, checked by writing to one and looking at the other."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from asynccoll.memory import unfilled
from asynccoll.memory.aliasing import Claims


class Held:
    """A claim that holds until `claims` is set to False."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out
        self.claims = True


def view(base: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Return rows, a column, a block, a slice of three dimensions, or every few elements of ``base``."""
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
    """This also holds for tensors that interleave."""
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
    """Each pair of columns is compared by arithmetic: masks of the whole matrix took 30 s for 64 columns."""
    matrix, claims = torch.zeros(4096, 200), Claims()
    held = []
    for column in matrix.unbind(1):
        assert claims.find((column,)) is None
        held.append(Held(column))
        claims.add(held[-1])
    assert claims.find((matrix[7, 40:41],)) is held[40]
    held[40].claims = False
    assert claims.find((matrix[7, 40:41],)) is None


def test_views_of_one_memory_that_came_from_elsewhere_share_it() -> None:
    """Each of these views has its own storage, which begins where the view does."""
    array = np.zeros(100, dtype=np.float32)
    whole, tail = torch.from_numpy(array), torch.from_numpy(array[10:])
    inner = torch.frombuffer(memoryview(array), dtype=torch.float32, offset=40, count=5)
    exported = torch.from_dlpack(whole[20:40])
    claims = Claims()
    held = [Held(tail)]
    claims.add(held[0])
    assert [claims.find((x,)) for x in (whole, tail, inner, exported)] == held * 4
    assert [claims.find((x,)) for x in (whole[:10], whole[50:50])] == [None, None]


def test_claims_come_and_go() -> None:
    """Claims are compared with a list of the claimed bytes: many at a time, released in any order."""
    draw, base, claims = random.Random(1), torch.zeros(4000), Claims()
    held: list[tuple[Held, set[int]]] = []
    for _ in range(5000):
        start = draw.randrange(3990)
        step, count = draw.choice([(1, draw.randrange(1, 30)), (draw.randrange(2, 9), draw.randrange(1, 10))])
        x = base[start : start + step * count : step]
        taken = set(range(start, min(start + step * count, 4000), step))
        expected = [one for one, bytes_ in held if bytes_ & taken]
        found = claims.find((x,))
        assert found in expected if expected else found is None
        if not expected:
            held.append((Held(x), taken))
            claims.add(held[-1][0])
        if len(held) > draw.randrange(150):
            one, _ = held.pop(draw.randrange(len(held)))
            one.claims = False


def test_no_tensor_is_kept_alive() -> None:
    """Neither is a claim that its owner has dropped."""
    claims = Claims()
    held = Held(torch.zeros(5))
    claims.add(held)
    assert claims.find((torch.zeros(3),)) is None
    gone = weakref.ref(held.out)
    del held
    gc.collect()
    assert gone() is None
    assert claims.find((torch.zeros(3),)) is None


class Unwaited:
    """A work in flight and part of a cycle; when it is collected, the next one becomes garbage."""

    left = 60

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        Unwaited.left -= 1
        unfilled.let_go(torch.empty(0), (flying,))
        if Unwaited.left:
            Unwaited()


flying: Any = SimpleNamespace(
    done=lambda: not Unwaited.left, completion=SimpleNamespace(writing=lambda: False)
)


def test_a_work_that_is_dropped_while_another_call_looks_for_dropped_ones_is_one_more() -> None:
    """The pairs of a dict are allocated as it is read, which may collect garbage."""
    for _ in range(3000):  # more pairs than Python keeps for reuse
        unfilled.let_go(torch.empty(0), (flying,))
    Unwaited()
    usual = gc.get_threshold()
    gc.set_threshold(1, 1000, 1000)
    try:
        unfilled.refuse_unfilled("x", ())
    finally:
        gc.set_threshold(*usual)
        Unwaited.left = min(Unwaited.left, 1)
        gc.collect()
    unfilled.refuse_unfilled("x", ())
    assert not unfilled._kept
