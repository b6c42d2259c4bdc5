"""A fixture for pytest: ``ranks``, a world of real ranks that is kept alive between tests.

    # conftest.py
    pytest_plugins = ["asynccoll.testing.pytest_plugin"]

    # test_loop.py
    async def total(rank):
        return await ac.all_reduce(rank)

    @pytest.mark.ranks(3)
    def test_total(ranks):
        assert ranks.run(total) == [3, 3, 3]

``--ranks-backend`` chooses the backend of all tests whose mark names none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asynccoll.testing.live import World

__all__ = ["ranks"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--ranks-backend``."""
    parser.addoption("--ranks-backend", default="gloo", help="the backend of the `ranks` fixture (gloo)")


def pytest_configure(config: pytest.Config) -> None:
    """Register ``@pytest.mark.ranks``."""
    config.addinivalue_line(
        "markers", "ranks(size=2, backend=None, **options): the world of the `ranks` fixture"
    )


@pytest.fixture(scope="session")
def _ranks_worlds() -> Iterator[dict[str, World]]:
    """The worlds that tests have used, closed once all tests are over."""
    worlds: dict[str, World] = {}
    yield worlds
    for one in worlds.values():
        one.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, _ranks_worlds: dict[str, World]) -> World:
    """Two real ranks, or as many as ``@pytest.mark.ranks(size, backend=..., **options)`` says."""
    mark = request.node.get_closest_marker("ranks")
    said: dict[str, Any] = {"size": 2, "backend": None} | (dict(mark.kwargs) if mark is not None else {})
    said |= dict(zip(("size", "backend"), mark.args, strict=False)) if mark is not None else {}
    said["backend"] = said["backend"] or request.config.getoption("--ranks-backend")
    key = repr(sorted(said.items()))
    if key not in _ranks_worlds:
        _ranks_worlds[key] = World(**said)
    return _ranks_worlds[key]
