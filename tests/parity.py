"""Compares the same call on ``ignite.distributed`` and on ``asynccoll.sync``, with the same inputs.

It runs inside the ranks of a test world, where both use the same torch default group.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

import oracle


class Outcome:
    """What a call returned or raised, and its arguments afterwards."""

    def __init__(self, idist: Any, call: Any, args: tuple[Any, ...]) -> None:
        self.args = copy.deepcopy(args)
        self.result: Any = None
        self.error: Exception | None = None
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                self.result = call(idist, *self.args)
            except Exception as error:
                self.error = error
        told = [str(one.message) for one in heard if one.category is UserWarning]
        self.warned = [
            text for text in told if not text.startswith("Using a non-tuple")
        ]  # by torch, because of ignite's code

    @property
    def aliased(self) -> list[bool]:
        """For each argument, whether the result is that argument."""
        return [self.result is arg and isinstance(arg, torch.Tensor) for arg in self.args]


def modules() -> tuple[Any, Any]:
    """Return ignite's module and ours."""
    import ignite.distributed as theirs

    import asynccoll.sync as ours

    return theirs, ours


def told(me: Any) -> None:
    """Tell both modules the local rank, as a launcher would: otherwise ignite warns in its first call."""
    for idist in modules():
        idist.set_local_rank(me.rank)
        idist.sync()


def compare(me: Any, label: str, call: Any, *args: Any, fails: bool = False, texts: bool = True) -> None:
    """Check that ``call(idist, *args)`` has the same result with both; with ``fails``, the same error."""
    theirs, ours = modules()
    with me.case(label):
        expected = Outcome(theirs, call, args)
        got = Outcome(ours, call, args)
        assert fails or expected.error is None, f"ignite raised {expected.error!r}: nothing is compared"
        assert expected.error is not None or not fails, f"ignite gave {expected.result!r}, which is no error"
        if expected.error is not None:
            assert got.error is not None, f"ours gave {got.result!r}, ignite raised {expected.error!r}"
            kind = type(expected.error)
            assert isinstance(got.error, kind), f"ours {got.error!r}, ignite {expected.error!r}"
            assert not texts or str(got.error) == str(expected.error), f"{got.error!s} != {expected.error!s}"
            return
        if got.error is not None:
            raise got.error
        same(got.result, expected.result)
        same(got.args, expected.args, "the arguments")
        assert got.aliased == expected.aliased, f"ours is its argument: {got.aliased}"
        assert got.warned == expected.warned, f"ours warned {got.warned}, ignite {expected.warned}"


def same(got: Any, expected: Any, where: str = "the result") -> None:
    """Check that both are equal in type, value, shape, dtype and ``requires_grad``."""
    assert type(got) is type(expected), f"{where}: {got!r} is no {type(expected).__name__}: {expected!r}"
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{where}: {got!r} != {expected!r}"
        for index, (mine, real) in enumerate(zip(got, expected, strict=True)):
            same(mine, real, f"{where}[{index}]")
    elif isinstance(expected, dict):
        assert list(got) == list(expected), f"{where}: {got!r} != {expected!r}"
        for key, value in expected.items():
            same(got[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, torch.Tensor):
        assert got.requires_grad == expected.requires_grad, where
        oracle.same(got.detach(), expected.detach(), where=where)
    else:
        assert got == expected, f"{where}: {got!r} != {expected!r}"
