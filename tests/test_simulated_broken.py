"""Broken programs on every transport: each rank that cannot continue is told why, and no wait is endless."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import torch

import asynccoll as ac
from asynccoll.testing import simulate
from asynccoll.testing.transports import TRANSPORTS

SIZE = 3
#: Seconds. Once a peer is lost or differs, waits must end well before the operation timeout of 20 seconds.
SOON = 10.0


async def calls_another(rank: int) -> None:
    x = torch.ones(4)
    await (ac.all_gather(x) if rank == 1 else ac.all_reduce(x))


async def has_another_shape(rank: int) -> None:
    await ac.all_reduce(torch.ones(5 if rank == 1 else 4))


async def has_another_root(rank: int) -> None:
    await ac.broadcast(torch.ones(4), src=int(rank == 1))


async def goes_in_another_order(rank: int) -> None:
    names = [ac.all_reduce, ac.all_gather]
    for call in reversed(names) if rank == 1 else names:
        await call(torch.ones(4))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("main", [calls_another, has_another_shape, goes_in_another_order])
def test_ranks_that_differ_are_told_so(main: Callable[[int], Awaitable[None]], transport: str) -> None:
    """Every rank is told, even if another one has already ended because of the mismatch."""
    for seed in range(3):
        report = simulate(main, world_size=SIZE, seed=seed, transport=transport)
        assert report.deadlock is None
        assert sorted(report.errors) == [0, 1, 2], report.errors
        told = report.errors.values()
        assert all(isinstance(error, ac.CollectiveMismatchError) for error in told), told
        assert report.virtual_seconds < SOON


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_differ_in_the_root_are_told_where_they_need_anybody(transport: str) -> None:
    """On MPI and nccl a root waits for no peer, and its peers do not miss a rank whose root differs."""
    for seed in range(3):
        report = simulate(has_another_root, world_size=SIZE, seed=seed, transport=transport)
        assert report.deadlock is None
        some = TRANSPORTS[transport].ends_alone and report.errors
        assert some or report.errors.keys() == {0, 1, 2}, report.errors
        assert all(isinstance(error, ac.CollectiveError) for error in report.errors.values()), report.errors
        assert report.virtual_seconds < SOON


async def leaves(rank: int) -> None:
    await ac.all_reduce(torch.ones(4))
    if rank != 1:
        await ac.all_reduce(torch.ones(4))


async def calls_once_more(rank: int) -> None:
    for _ in range(3 if rank == 1 else 2):
        await ac.all_reduce(torch.ones(4))


async def raises(rank: int) -> None:
    await ac.all_reduce(torch.ones(4))
    if rank == 1:
        raise ValueError("of its own")
    await ac.all_reduce(torch.ones(4))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("main", "lost"), [(leaves, {0: {1}, 2: {1}}), (calls_once_more, {1: {0, 2}}), (raises, {0: {1}, 2: {1}})]
)
def test_who_waits_for_one_that_left_is_told_who(
    main: Callable[[int], Awaitable[None]], lost: dict[int, set[int]], transport: str
) -> None:
    for seed in range(3):
        report = simulate(main, world_size=SIZE, seed=seed, transport=transport)
        assert report.deadlock is None
        errors = {rank: error for rank, error in report.errors.items() if not isinstance(error, ValueError)}
        assert errors.keys() == lost.keys(), errors
        for rank, error in errors.items():
            assert isinstance(error, ac.PeerLostError), error
            assert set(error.ranks) & lost[rank], error
        assert report.virtual_seconds < SOON
