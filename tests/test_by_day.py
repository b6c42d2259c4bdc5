"""Which tests run only at night: some cases of every test remain by day."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import by_day

SIZES, WAYS = (1, 2, 3, 4), ("asyncio", "trio", "blocking")


@dataclass(frozen=True)
class Case:
    """The attributes of a pytest item that the selection looks at."""

    name: str
    values: dict[str, Any] = field(hash=False)
    marks: tuple[str, ...] = ()

    @property
    def nodeid(self) -> str:
        said = "-".join(map(str, self.values.values()))
        return f"{self.name}[{said}]"

    @property
    def path(self) -> Path:
        return Path(self.name.partition("::")[0])

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.values)

    def get_closest_marker(self, name: str) -> object:
        return name if name in self.marks else None


def cases(name: str, backend: str) -> list[Case]:
    return [
        Case(name, {"world": (backend, size), "runner": way}) for size, way in itertools.product(SIZES, WAYS)
    ]


def stay(items: list[Case]) -> list[tuple[int, str]]:
    """Return the cases that run by day: numbers of ranks and ways to wait."""
    out = by_day.left_out(items)  # type: ignore[arg-type]  # see Case
    return [(one.values["world"][1], one.values["runner"]) for one in items if one not in out]


@pytest.fixture(autouse=True)
def _by_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_day, "ONLY", "day")


@pytest.mark.parametrize(("backend", "several"), [("gloo", 2), ("memory", 2), ("mpi", 1)])
def test_a_backend_has_few_of_them_and_no_two_tests_need_have_the_same(backend: str, several: int) -> None:
    found = set()
    for number in range(40):
        kept = stay(cases(f"test_x.py::test_{number}", backend))
        assert kept[0] == (1, "asyncio")
        assert len(kept) == 1 + several
        found.update(kept)
    assert found == {*((size, "asyncio") for size in SIZES), (2, "trio"), (2, "blocking")}


def test_backends_need_not_have_the_same() -> None:
    found = [
        tuple(stay(cases(f"test_x.py::test_{number}", backend)[3:]))
        for number in range(10)
        for backend in ("mpi", "horovod")
    ]
    assert any(one != other for one, other in zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize(("count", "by_day_run"), [(1, 1), (2, 1), (3, 1), (5, 2)])
def test_a_test_that_starts_jobs_runs_a_third_of_its_cases(count: int, by_day_run: int) -> None:
    found = set()
    for number in range(30):
        jobs = [Case(f"test_cli.py::test_{number}", {"how": how}) for how in range(count)]
        kept = set(jobs) - by_day.left_out(jobs)  # type: ignore[type-var, operator]  # see Case
        assert len(kept) == by_day_run
        found.update(case.values["how"] for case in kept)
    assert found == set(range(count))  # tests differ in which


def test_simulations_run_a_third_of_their_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(by_day.orders(count)) for count in (1, 30, 40)] == [1, 10, 14]
    monkeypatch.setattr(by_day, "ONLY", "all")
    assert by_day.orders(40) == range(40)


def test_by_night_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = Case("test_x.py::test_y", {"world": ("gloo", 2), "runner": "asyncio"}, ("nightly",))
    assert stay([marked]) == []
    monkeypatch.setattr(by_day, "ONLY", "all")
    assert stay([marked]) == [(2, "asyncio")]
    assert len(stay(cases("test_x.py::test_y", "mpi"))) == len(SIZES) * len(WAYS)
