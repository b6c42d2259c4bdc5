"""Random programs that combine the library's features, in simulated worlds: on six transports, with faults.

Each program runs in a dozen orders. The programs of fixed seeds are the same on every run. Those of the day
differ every day; a failure is reported with the seed that reproduces it (``explore_simulated``).
"""

from __future__ import annotations

import datetime as dt

import pytest

from asynccoll.backends.memory.engine import Engine
from asynccoll.testing import network
from asynccoll.testing.shared_memory import Parking
from by_day import orders
from compositions import Program, from_json
from explore_simulated import Exploration
from simulated import complaints

MOST = len(orders(1500))
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
    """Results are still right, as a sleeper looks again after a tenth of a second, but they are late."""
    program = from_json(
        '{"ranks": 3, "tasks": [{"calls": [{"wait": "threads"}, {"wait": "plain thread"}]}], "loop": "none"}'
    )

    assert not found(program)
    monkeypatch.setattr(Parking, "wake", lambda self, place: None)
    told = found(program)
    assert told and all(one.startswith("[late]") for one in told), told


def test_what_a_rank_owes_while_it_waits_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 owes a part of a sum, but makes its last call only once the others have it, and does not look.

    Nothing else, such as the recording of the simulation, may make it look at the memory meanwhile.
    """
    program = from_json(
        '{"ranks": 3, "tasks": [{"calls": [{}, {"rests": 1}, {"payload": "long", "wait": "threaded"}, '
        '{"told": true, "root": 1}]}], "loop": "none"}'
    )
    assert not found(program)
    monkeypatch.setattr(Engine, "_goes_on_by_itself", lambda self: bool(self._listened))
    told = found(program)
    assert told and all(one.startswith("[late]") for one in told), told


def test_who_looks_again_and_again_and_does_not_sleep_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right and not late, but a processor stays busy for as long as rank 1 rests."""
    program = from_json('{"ranks": 2, "tasks": [{"calls": [{}, {"rests": 20, "seed": 2}]}], "loop": "none"}')
    monkeypatch.setattr(Engine, "_wait", lambda self, call, deadline: None)
    told = found(program)
    assert any(one.startswith("[busy]") for one in told), told


def test_what_is_left_of_a_world_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is its beacon, which tells the others that a rank is alive."""
    monkeypatch.setattr(network.Beacon, "close", lambda self: None)
    told, _ = complaints(from_json('{"ranks": 2, "tasks": [{"calls": [{}]}]}'), 1, again=True)
    assert told and all(one.startswith("[left]") for one in told), told


def found(program: Program) -> set[str]:
    """Return the complaints about a program in ten different orders."""
    return {one for seed in range(10) for one in complaints(program, seed, transport="memory")[0]}
