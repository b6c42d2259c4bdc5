"""all_to_all, permute, send and recv: payloads that go from some ranks to some others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from asynccoll import tensors
from asynccoll.errors import AsyncCollError, InvalidArgumentError, PayloadTypeError
from asynccoll.host.misfits import integer
from asynccoll.order.lane import Lane
from asynccoll.order.needs import Members
from asynccoll.payload.common import (
    check_filled,
    no_gradient,
    no_out,
    one_by_one,
    over_tree,
    require_tensor,
)
from asynccoll.payload.parts import join_messages, part_message, part_of, parts_of, split_messages, tensors_of
from asynccoll.plan.spec import Op
from asynccoll.plan.trees import is_tree
from asynccoll.tensors import autograd
from asynccoll.waiting.started import Started


def all_to_all(
    lane: Lane,
    x: object,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
    out: torch.Tensor | None,
    timeout: float | None,
) -> Started[Any]:
    if isinstance(x, (list, tuple)):
        no_out("all_to_all of a list", out)
        _no_splits(input_split_sizes, output_split_sizes)
        return _all_to_all_list(lane, x, timeout)
    expected = "a tensor whose dim 0 is split among the ranks, or a list with a part for each rank"
    x = require_tensor("all_to_all", x, expected)
    check_filled("all_to_all", out)
    size = lane.group.size
    in_splits = splits_of(x.shape, input_split_sizes, size)
    out_splits = check_splits("output_split_sizes", output_split_sizes, size, None)
    if input_split_sizes is None and out_splits is None:
        return autograd.all_to_all(lane, x, in_splits, in_splits, out, timeout, even=True)
    if out_splits is not None:
        return autograd.all_to_all(lane, x, in_splits, out_splits, out, timeout)
    if out is not None or autograd.tracked(x):
        raise InvalidArgumentError(
            f"all_to_all: with {'gradients' if out is None else 'out='}, output_split_sizes is needed with "
            "input_split_sizes"
        )
    return tensors.all_to_all_call(lane, x, in_splits, None).begin(lane, timeout)


def _no_splits(*splits: object) -> None:
    if any(each is not None for each in splits):
        raise InvalidArgumentError(
            "all_to_all: split sizes are for one tensor; of a list, each whole part is sent to its rank"
        )


def _all_to_all_list(lane: Lane, x: Sequence[object], timeout: float | None) -> Started[list[object]]:
    """Send part j to rank j. Parts may differ in shape: each one's message says what it is."""
    parts = parts_of("all_to_all", x, lane.group.size)
    joined, lengths = join_messages([part_message(part) for part in parts])
    device = lane.world.device
    received = tensors.all_to_all_call(lane, joined, lengths, None).begin(lane, timeout)
    came = received.then(lambda raw: [part_of(message, device) for message in split_messages(raw)])
    came.leaves = leaves = tensors_of(parts)
    return no_gradient(came, leaves, "all_to_all of a list", "all_to_all of one tensor")


def splits_of(shape: Sequence[int], input_split_sizes: Sequence[int] | None, size: int) -> list[int]:
    """Return how many rows go to each rank, by default evenly; refuse what does not fit ``shape``."""
    if not shape:
        raise InvalidArgumentError("all_to_all: a 0-d tensor has no dim 0 to split; pass x.reshape(1)")
    given = check_splits("input_split_sizes", input_split_sizes, size, shape[0])
    if given is None and shape[0] % size:
        raise InvalidArgumentError(
            f"all_to_all: dim 0 of shape {list(shape)} cannot be split evenly among {size} ranks; pass "
            "input_split_sizes"
        )
    return [shape[0] // size] * size if given is None else given


def check_splits(name: str, splits: Sequence[int] | None, size: int, total: int | None) -> list[int] | None:
    """Return the split sizes as a list with a count for each rank; refuse one that does not sum to ``total``.

    A ``total`` of None is not compared. Without ``splits`` the result is None.
    """
    if splits is None:
        return None
    listed = list(splits) if isinstance(splits, Iterable) else [splits]
    counts = [count for count in map(integer, listed) if count is not None and count >= 0]
    if not len(counts) == len(listed) == size or (total is not None and sum(counts) != total):
        wanted = f", adding up to {total}" if total is not None else ""
        raise InvalidArgumentError(
            f"all_to_all: {name}={listed!r}; expected {size} counts of rows, none negative{wanted}"
        )
    return counts


def permute(
    lane: Lane, x: Any, pairs: object, out: torch.Tensor | None, timeout: float | None
) -> Started[Any]:
    listed = check_pairs(lane.group, pairs)
    if is_tree(x):
        no_out("permute", out)
        return over_tree(
            lane,
            "permute",
            x,
            one_by_one(lambda leaf: permute(lane, leaf, listed, None, timeout)),
            None,
            lambda leaf: _check_permuted(lane, leaf),
        )
    x = _check_permuted(lane, x)
    check_filled("permute", out)
    places = [(lane.group.ranks.index(source), lane.group.ranks.index(target)) for source, target in listed]
    return autograd.permute(lane, x, sorted(places), out, timeout)


def _check_permuted(lane: Lane, x: object) -> torch.Tensor:
    tensor = require_tensor("permute", x)
    tensors.plan_for(lane, Op.PERMUTE, tensor)
    return tensor


def check_pairs(group: Members, pairs: Any) -> list[tuple[int, int]]:
    """Return the (source, destination) pairs as a list.

    Refuse a rank that is not in the group, or that is a source (or a destination) more than once.
    """
    try:
        listed = [(source, destination) for source, destination in pairs]
    except (TypeError, ValueError):
        raise PayloadTypeError(f"permute: pairs must be (source, destination) ranks, got {pairs!r}") from None
    for role, end in (("source", 0), ("destination", 1)):
        used = [pair[end] for pair in listed]
        for rank in used:
            group.index(rank, role)
            if used.count(rank) > 1:
                raise InvalidArgumentError(f"permute: rank {rank} is a {role} more than once in {listed}")
    return listed


def send(lane: Lane, x: object, dst: int, tag: int, timeout: float | None) -> Started[None]:
    peer, tag = peer_of(lane, dst, "dst"), check_tag(tag)
    x = require_tensor("send", x, "a tensor; ac.send_object takes anything else")
    return tensors.start_send(lane, x, peer, tag, timeout)


def recv(
    lane: Lane, like: object, src: int, tag: int, out: torch.Tensor | None, timeout: float | None
) -> Started[torch.Tensor]:
    peer, tag = peer_of(lane, src, "src"), check_tag(tag)
    expected = "a tensor like the one that is sent; ac.recv_object takes anything else"
    like = require_tensor("recv", like, expected)
    check_filled("recv", out)
    autograd.records("recv", (), None if out is None else (out,))
    return tensors.start_recv(lane, like, peer, tag, out, timeout)


def refuse_message(lane: Lane, name: str, rank: int, tag: int, error: BaseException) -> None:
    """Tell the peer that this rank refused a send or recv (``tensors.refuse_message``).

    Do nothing if ``rank`` or ``tag`` is itself wrong: then no message exists that could be refused.
    """
    with suppress(AsyncCollError):
        tensors.refuse_message(lane, name, peer_of(lane, rank, name), check_tag(tag), error)


def peer_of(lane: Lane, rank: int, role: str) -> int:
    """Return the index in the group of ``rank``, which must not be this rank itself."""
    index = lane.group.index(rank, role)
    if index == lane.group.rank:
        raise InvalidArgumentError(f"{role}={rank} is this rank itself; messages go to other ranks")
    return index


def check_tag(tag: int) -> int:
    """Return ``tag``; refuse one that a message cannot have."""
    number = integer(tag)
    if number is not None and 0 <= number < 2**31 - 1:
        return number
    raise InvalidArgumentError(f"tag must be an int from 0 to {2**31 - 2}, got {tag!r}")
