"""Compares the outcome of a call of a `compositions.Program` with the expected one."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import asynccoll as ac
import compositions_expected as expected
import oracle

#: Records the kind of a complaint, and its text.
Complain = Callable[[str, str], None]


@dataclass
class Record:
    """A call that was made, and its outcome."""

    label: str
    case: expected.Case
    before: Any
    rank: int = 0
    recorded: bool = False
    work: Any = None
    #: For a message: the work of this rank's send, if it is waited for, too.
    sent: Any = None
    result: Any = None
    #: value, wrong or raised; empty if nothing has waited.
    outcome: str = ""
    #: The thread that has waited for it from the start, if any.
    waiter: Any = None


def raised(complain: Complain, record: Record, error: Exception) -> None:
    """Record that the call, or waiting for it, raised ``error``; complain if it was not expected."""
    record.outcome = "raised"
    allowed = (*record.case.must_raise, *record.case.may_raise)
    if not isinstance(error, allowed):
        text = "".join(traceback.format_exception(error, limit=-6))
        complain("error", f"{record.label} raised {error!r:.300}\n{text}")


def compare(complain: Complain, record: Record, when: str) -> None:
    """Complain unless the result is the expected one, also if it has changed since it was first compared."""
    case, result = record.case, record.result
    if case.must_raise:
        complain("not raised", f"{record.label}: no error, but {result!r}")
        return
    if case.call.form == "mapped":
        result = result[0]
    try:
        oracle.same(_plain(result), case.want, value=True, rtol=case.rtol)
    except AssertionError as error:
        kind = "value" if when == "at once" else "changed"
        complain(kind, f"{record.label}, {when}: {error}")
        record.outcome = "wrong"
        return
    if case.out is not None and result is not case.out and isinstance(case.out, torch.Tensor):
        complain("out", f"{record.label}: the result is not out")
    if case.call.operation in ("all_reduce", "broadcast") and case.call.form != "safe":
        _compare_strides(complain, record, result)
    _compare_recording(complain, record, result, when)


def _compare_strides(complain: Complain, record: Record, result: Any) -> None:
    x = record.case.x
    if (
        not isinstance(x, torch.Tensor)
        or record.case.call.layout != "transposed"
        or record.case.out is not None
    ):
        return
    if result.stride() != x.stride():
        complain("strides", f"{record.label}: {result.stride()}, not {x.stride()}")


def _compare_recording(complain: Complain, record: Record, result: Any, when: str) -> None:
    floating = [y for y in expected.leaves(result) if y.is_floating_point()]
    recorded = record.recorded and expected.tracked(record.case.call)
    if record.case.call.form == "in place twice":
        return
    for y in floating:
        if y.requires_grad != recorded:
            complain("gradient", f"{record.label}, {when}: requires_grad={y.requires_grad}, not {recorded}")
            return


def backward(complain: Complain, record: Record) -> None:
    """Run backward; complain unless the gradients are right, or it raises where there are none."""
    case = record.case
    if record.outcome != "value" or not record.recorded:
        return
    result = record.result[0] if case.call.form == "mapped" else record.result
    results = [y for y in expected.leaves(result) if y.is_floating_point()]
    if not results or not all(y.requires_grad for y in results):
        return  # already complained about
    weights = case.weights or [torch.ones_like(y) for y in results]
    floating = [weight for weight in weights if weight.is_floating_point()]
    loss = expected.weighted(results, floating)
    try:
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    except ac.UnsupportedOpError:
        if expected.has_gradient(case.call):
            complain("gradient", f"{record.label}: backward refused")
        return
    except Exception as error:
        if case.call.wait == "deadline" and isinstance(error, ac.CollectiveTimeoutError):
            return  # the collective in backward has the same deadline
        complain("gradient", f"{record.label}: backward: {traceback.format_exc(limit=-6)}")
        return
    if not expected.has_gradient(case.call):
        complain("gradient", f"{record.label} has none, and backward did not say so")
        return
    for x, want in zip(case.inputs, case.gradients, strict=True):
        rtol = max(case.rtol, 4 * oracle.epsilon(want.dtype))
        if x.grad is not None and torch.allclose(x.grad, want, rtol=0.0, atol=rtol):
            continue  # shares that cancel out may sum to zero, or to a rounding error
        try:
            oracle.same(x.grad, want, value=True, rtol=rtol)
        except AssertionError as error:
            complain("gradient", f"{record.label}: {error}")


def unchanged(complain: Complain, record: Record) -> None:
    """Complain if the call has changed its input."""
    call = record.case.call
    if call.form.startswith("in place") or call.payload == "overwritten":
        return
    try:
        oracle.same(_plain(record.case.x), _plain(record.before), value=True)
    except AssertionError as error:
        complain("input", f"{record.label}: {error}")


def _plain(value: Any) -> Any:
    """Return the value with all tensors detached."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return oracle.tree_map(lambda found: _plain(found[0]), [value]) if _is_tree(value) else value


def _is_tree(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
