"""Predicts from measurements on two ranks how long collectives take on many.

A message takes as long as its ``Link`` says, an algorithm is a sum of messages, and a training step is a
queue of buckets that become ready during backward. This is pure arithmetic; docs/scaling.md says what it
leaves out (contention, stragglers, the reduction itself).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from asynccoll.errors import InvalidArgumentError
from asynccoll.testing.links import Link

__all__ = ["AllReduce", "Step", "best_bucket_bytes", "hierarchical", "ring", "tree"]

#: From the bytes of an all_reduce, the seconds that it takes.
AllReduce = Callable[[float], float]


# all_reduce on ``ranks`` ranks


def ring(link: Link, ranks: int) -> AllReduce:
    """Reduce-scatter and all-gather around a ring: ``2 (n - 1)`` messages of an n-th of the bytes."""
    return lambda size_bytes: 2 * (ranks - 1) * link.seconds(size_bytes / ranks)


def tree(link: Link, ranks: int) -> AllReduce:
    """Up a binary tree and down again: ``2 ceil(log2 n)`` messages of all the bytes."""
    return lambda size_bytes: 2 * math.ceil(math.log2(ranks)) * link.seconds(size_bytes)


def hierarchical(local: Link, network: Link, ranks: int, ranks_per_node: int) -> AllReduce:
    """Reduce-scatter within each node, all_reduce between nodes, all-gather within each node.

    All ranks of a node send their parts over the network at the same time and share its bandwidth. So the
    all_reduce between nodes takes as long as a ring of nodes that carries all the bytes.
    """
    if ranks % ranks_per_node:
        raise InvalidArgumentError(f"{ranks} ranks cannot be divided into nodes of {ranks_per_node}")
    nodes = ranks // ranks_per_node

    def seconds(size_bytes: float) -> float:
        inside = 2 * (ranks_per_node - 1) * local.seconds(size_bytes / ranks_per_node)
        return inside + ring(network, nodes)(size_bytes)

    return seconds


# A training step


@dataclass(frozen=True, slots=True)
class Step:
    """A data-parallel step: how long it computes, and the size of the gradients that it averages."""

    forward_seconds: float
    backward_seconds: float
    gradient_bytes: float

    def seconds(self, all_reduce: AllReduce, bucket_bytes: float) -> float:
        """Return the step's seconds; buckets become ready evenly during backward, and are sent one by one."""
        if not bucket_bytes > 0:
            raise InvalidArgumentError(f"bucket_bytes must be positive, got {bucket_bytes!r}")
        now, left, seen = self.forward_seconds, self.gradient_bytes, 0.0
        while left > 0:
            size_bytes = min(bucket_bytes, left)
            left, seen = left - size_bytes, seen + size_bytes
            ready = self.forward_seconds + self.backward_seconds * seen / self.gradient_bytes
            now = max(now, ready) + all_reduce(size_bytes)
        return max(now, self.forward_seconds + self.backward_seconds)


def best_bucket_bytes(step: Step, all_reduce: AllReduce) -> int:
    """Return the bucket size with which the step is fastest: a power of two from 64 KiB to 256 MiB.

    Of equally good ones, it is the smallest.
    """
    sizes = [1 << power for power in range(16, 29)]
    return min(sizes, key=lambda size_bytes: (step.seconds(all_reduce, size_bytes), size_bytes))
