"""Programs that combine what there is, drawn and run in simulated worlds: on six transports, with faults.

Every program in a dozen orders. Those of fixed seeds are the same on every run; those of the day are others
every day, and what they find is said with the seed that finds it again (``explore_simulated``).
"""

from __future__ import annotations

import datetime as dt

import pytest

from asynccoll.testing.shared_memory import Parking
from compositions import from_json
from explore_simulated import Exploration
from simulated import complaints

MOST = 1000
RANKS = [2, 3, 2, 3, 5]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["fixed", "of the day"])
def test_drawn_programs(which: str) -> None:
    today = dt.datetime.now(dt.timezone.utc).date()
    first = 20261124 if which == "fixed" else 1000 * int(f"{today:%Y%m%d}")
    print(f"seed {first}")
    exploration = Exploration(3600.0, MOST)
    exploration.explore(RANKS, first)
    assert not exploration.found, f"seed {first}, {exploration}:\n" + "\n".join(exploration.found)
    assert exploration.schedules >= MOST


def test_a_wake_up_that_is_lost_is_noticed_by_the_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right: who sleeps looks again after a tenth of a second."""
    program = from_json(
        '{"ranks": 3, "tasks": [{"calls": [{"wait": "threads"}, {"wait": "plain thread"}]}], "loop": "none"}'
    )

    def found() -> set[str]:
        return {one for seed in range(10) for one in complaints(program, seed, transport="memory")[0]}

    assert not found()
    monkeypatch.setattr(Parking, "wake", lambda self, place: None)
    told = found()
    assert told and all(one.startswith("[late]") for one in told), told
