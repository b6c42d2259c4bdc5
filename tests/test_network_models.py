"""Network models against figures worked out by hand, and real overhead in a simulated world."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import asynccoll as ac
import scripts
from asynccoll.testing import Link
from asynccoll.testing.network_models import Step, best_bucket_bytes, hierarchical, ring, tree

SLOW = Link(latency=1.0, bandwidth=4.0)
FAST = Link(latency=0.5, bandwidth=8.0)


def test_a_fit_finds_the_link_again() -> None:
    """Times are twice the latency, plus all bytes over the bandwidth: 2.25 for 1, 4 for 8, 34 for 128."""
    link = Link.fit([(1, 2.25), (8, 4.0), (128, 34.0)])
    assert link.latency == pytest.approx(1.0)
    assert link.bandwidth == pytest.approx(4.0)


def test_a_fit_never_goes_below_nothing() -> None:
    """If noise makes the larger message the faster one, the fit has no bandwidth, not a negative one."""
    link = Link.fit([(1, 4.0), (64, 2.0)])
    assert link.bandwidth == math.inf
    assert link.seconds(1e9) == link.seconds(0) > 0
    assert Link.fit([(1, 1.0), (2, 3.0)]).latency == 0.0


def test_a_fit_needs_two_sizes() -> None:
    """One size says nothing about the slope."""
    with pytest.raises(ValueError, match="two sizes"):
        Link.fit([(8, 4.0), (8, 4.5)])


@pytest.mark.parametrize(
    ("ranks", "in_ring", "in_tree"),
    [
        (2, 2 * 1 * (1 + 0.25 * 32), 2 * 1 * (1 + 0.25 * 64)),  # 18 and 34
        (4, 2 * 3 * (1 + 0.25 * 16), 2 * 2 * (1 + 0.25 * 64)),  # 30 and 68
        (5, 2 * 4 * (1 + 0.25 * 12.8), 2 * 3 * (1 + 0.25 * 64)),  # 33.6 and 102
        (64, 2 * 63 * (1 + 0.25 * 1), 2 * 6 * (1 + 0.25 * 64)),  # 157.5 and 204
    ],
)
def test_ring_and_tree(ranks: int, in_ring: float, in_tree: float) -> None:
    """64 bytes over a link of one second and a quarter of a second a byte."""
    assert ring(SLOW, ranks)(64) == pytest.approx(in_ring)
    assert tree(SLOW, ranks)(64) == pytest.approx(in_tree)


def test_a_tree_is_for_small_and_many() -> None:
    """One byte on 64 ranks: 12 hops against 126; a thousand of them: the ring shares them out."""
    assert tree(SLOW, 64)(1) < ring(SLOW, 64)(1)
    assert tree(SLOW, 64)(1000) > ring(SLOW, 64)(1000)


def test_hierarchical() -> None:
    """8 ranks on nodes of 4, 64 bytes: 2 x 3 messages of 16 inside (15 s), 2 x 1 of 32 outside (18 s)."""
    seconds = hierarchical(FAST, SLOW, ranks=8, ranks_per_node=4)
    assert seconds(64) == pytest.approx(6 * (0.5 + 0.125 * 16) + 2 * (1 + 0.25 * 32))
    assert hierarchical(FAST, SLOW, ranks=8, ranks_per_node=1)(64) == pytest.approx(ring(SLOW, 8)(64))
    assert hierarchical(FAST, SLOW, ranks=4, ranks_per_node=4)(64) == pytest.approx(ring(FAST, 4)(64))
    with pytest.raises(ac.InvalidArgumentError, match="nodes of 3"):
        hierarchical(FAST, SLOW, ranks=8, ranks_per_node=3)


def test_a_step() -> None:
    """10 s forward, 8 s backward, 16 bytes, 3 s per bucket of 8: ready at 14 and 18, done at 17 and 21."""
    step = Step(forward_seconds=10, backward_seconds=8, gradient_bytes=16)
    assert step.seconds(lambda _: 3.0, 8) == 21
    assert step.seconds(lambda _: 6.0, 8) == 14 + 6 + 6  # the second bucket has to wait for the first
    assert step.seconds(lambda _: 3.0, 100) == 18 + 3  # one bucket, and nothing is hidden
    assert step.seconds(lambda _: 3.0, 12) == 19 + 3  # 12 are ready at 16 and sent by 19, then the other 4
    assert Step(10, 8, 0).seconds(lambda _: 3.0, 8) == 18
    with pytest.raises(ac.InvalidArgumentError, match="bucket_bytes"):
        step.seconds(lambda _: 3.0, 0)


def test_the_best_bucket_grows_with_the_latency() -> None:
    """Without latency the smallest hides most; with nothing but latency one bucket is best."""
    step = Step(1.0, 2.0, float(100 << 20))
    assert best_bucket_bytes(step, lambda size_bytes: size_bytes * 1e-9) == 1 << 16
    assert best_bucket_bytes(step, lambda _: 10.0) == 128 << 20


SIMULATED = """
    import json, sys
    from pathlib import Path
    sys.path.insert(0, "BENCHMARKS")
    import growth
    growth.simulate(WORLD, calls=2, rounds=1)
    print("fine")
"""


def test_a_call_in_a_world_of_hundreds(tmp_path: Path) -> None:
    """Every collective of the benchmark starts and ends on torch's fake process group, which we adopt."""
    where = str(Path(__file__).parents[1] / "benchmarks")
    text = SIMULATED.replace("BENCHMARKS", where).replace("WORLD", "300")
    (ended,) = scripts.run(tmp_path, text, launched=False)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["fine"]
