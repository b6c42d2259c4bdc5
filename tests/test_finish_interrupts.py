"""Ctrl-C at any moment of a finish: the next wait has the same result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch.utils._device import DeviceContext

import asynccoll as ac
from asynccoll.testing import simulate
from ranks import Rank
from struck import Strike
from worlds import World

#: Calls between those after which Ctrl-C strikes in turn, and the number of these.
APART, TIMES = 5, 24


def tensors(rank: int, numel: int) -> list[torch.Tensor]:
    """Values whose average over 2 and 3 ranks is exact, unlike that of an average divided once more."""
    return [torch.full((numel,), 6.0 * (rank + 1)), torch.arange(4.0) * 12 * rank]


Make = Callable[[list[torch.Tensor]], ac.Work]


def whole(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]


def struck(me: Rank, numel: int, make: Make, expected: list[torch.Tensor]) -> int:
    """Return how often Ctrl-C came while a finish had not ended."""
    caught = 0
    for turn in range(TIMES):
        work = make(tensors(me.rank, numel))
        while not work.done():
            pass
        try:
            with Strike(1 + turn * APART):
                work.wait()
        except KeyboardInterrupt:
            caught += 1
        got = whole(work.wait())
        for mine, wanted in zip(got, expected, strict=True):
            assert torch.equal(mine, wanted), f"struck behind call {1 + turn * APART}: {mine[:4]}"
    return caught


CALLS: dict[str, Make] = {
    "tensor": lambda xs: ac.all_reduce(xs[0], op="avg"),
    "in place": lambda xs: ac.all_reduce(xs[0], op="avg", out=xs[0]),
    "sum in place": lambda xs: ac.all_reduce(xs[0], out=xs[0]),
    "tree": lambda xs: ac.all_reduce(xs, op="avg"),
    "tree in place": lambda xs: ac.all_reduce(xs, op="avg", out=xs),
    "scattered": lambda xs: ac.reduce_scatter(xs[0], op="avg"),
}


def average(size: int, numel: int, name: str) -> list[torch.Tensor]:
    """What plain Python says: the mean of 6 (rank + 1), and of 12 rank times 0, 1, 2, 3."""
    ranks = range(size)
    first = sum(6.0 * (rank + 1) for rank in ranks)
    if name != "sum in place":
        first /= size
    rows = numel // size if name == "scattered" else numel
    second = [sum(12.0 * rank * i for rank in ranks) / size for i in range(4)]
    return [torch.full((rows,), first)] + ([torch.tensor(second)] if name.startswith("tree") else [])


def everywhere(me: Rank, name: str) -> None:
    for numel in (12, 60_000):
        caught = struck(me, numel, CALLS[name], average(me.size, numel, name))
        assert caught > 2


@pytest.mark.parametrize("name", CALLS)
def test_a_finish_that_is_cut_short_and_run_again_divides_and_adds_once(several: World, name: str) -> None:
    several.run(everywhere, name)


def test_a_mode_of_torch_has_no_average_divided_twice() -> None:
    """A mode is Python code, in which Ctrl-C strikes between the division and the note that it was made."""
    code = DeviceContext.__torch_function__.__code__

    async def main(rank: int) -> None:
        x = torch.full((12,), 6.0 * (rank + 1), dtype=torch.float16)
        with torch.device("cpu"):
            for left in range(1, 150):
                work = ac.reduce(x, dst=0, op="avg")
                with contextlib.suppress(KeyboardInterrupt), Strike(left, code, at="opcode"):
                    work.wait()
                assert rank or work.wait().tolist() == [9.0] * 12

    simulate(main, world_size=2, transport="gloo").check()


def test_a_prepared_start_that_is_cut_short_lets_no_later_one_share_its_memory() -> None:
    """In a world of one rank, so that ranks need not be struck alike."""
    outcomes = set()
    for turn in range(5 * TIMES):
        x = torch.tensor([1.0])
        prepared = ac.prepare("all_reduce", like=x)
        with contextlib.suppress(KeyboardInterrupt), Strike(1 + turn * APART):
            prepared.start().wait()
        x.fill_(10.0)
        try:
            result = prepared.start().wait()
        except ac.InvalidArgumentError as error:
            outcomes.add("cut off" if "was cut off (Ctrl-C?)" in str(error) else "not awaited")
        else:
            assert result.tolist() == [10.0]
            outcomes.add("right")
    assert outcomes >= {"right", "cut off"}


def adopted_again(me: Rank) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    gradients = ac.overlap_gradients(model)
    for step, struck in enumerate((False, True, False), start=1):
        model.zero_grad()
        model(torch.full((1, 2), float(step * (me.rank + 1)))).sum().backward()
        if struck:
            adopt, gradients._adopt = gradients._adopt, interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                gradients.wait()
            gradients._adopt = adopt  # type: ignore[method-assign]
        gradients.wait()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[step * 1.5] * 2]
    gradients.close()


def interrupted() -> None:
    raise KeyboardInterrupt


def test_gradients_that_ctrl_c_kept_from_being_handed_over_are_so_by_the_next_wait(pair: World) -> None:
    """It began another step, for which the other rank had no gradients."""
    pair.run(adopted_again)
