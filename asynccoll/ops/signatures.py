"""Errors for calls whose arguments do not fit, which show how to write the call that was meant.

Users of torch.distributed pass ``op``, roots and groups by position, memory for the results first, and
``async_op=True``. Python's own error only says how many arguments it expected. This module must not know what
a call does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from asynccoll.errors import InvalidArgumentError, InvalidCallError
from asynccoll.host import misfits
from asynccoll.payload.codecs import Codec
from asynccoll.plan.spec import ReduceOp
from asynccoll.waiting.suspending import in_loop
from asynccoll.world.group import Group, GroupLike

Function = TypeVar("Function", bound=Callable[..., object])


class Misfit(NamedTuple):
    """The error for a call that does not fit, its group, and the arguments that were understood, by name."""

    error: InvalidCallError
    group: GroupLike
    meant: Mapping[str, Any]


class _Meaning(NamedTuple):
    """A parameter, which positional arguments may be meant for it, and how to write these by name."""

    name: str
    fits: Callable[[Any], bool]
    shown: Callable[[Any], str]


def _is_reduction(x: object) -> bool:
    try:
        return isinstance(x, (str, dist.ReduceOp, dist.ReduceOp.RedOpType)) and bool(ReduceOp.parse(x))
    except InvalidArgumentError:  # some other string
        return False


def _is_group(x: object) -> bool:
    return isinstance(x, (Group, dist.ProcessGroup)) or (hasattr(x, "mesh") and hasattr(x, "get_group"))


def _is_rank(x: object) -> bool:
    return misfits.integer(x) is not None


def _are_ranks(x: object) -> bool:
    return _is_rank(x) or (isinstance(x, (list, tuple)) and all(map(_is_rank, x)))


#: A positional argument is taken for the first of these that it fits, if the function has that parameter and
#: the call has not passed it otherwise.
_MEANINGS = (
    _Meaning("op", _is_reduction, lambda op: repr(ReduceOp.parse(op).value)),
    _Meaning("group", _is_group, lambda _: "group"),
    _Meaning("src", _is_rank, repr),
    _Meaning("dst", _is_rank, repr),
    _Meaning("sources", _are_ranks, lambda x: repr([x] if isinstance(x, int) else list(x))),
    _Meaning("tag", _is_rank, repr),
    _Meaning("codec", lambda x: isinstance(x, (str, Codec)), lambda x: repr(getattr(x, "name", x))),
)
#: Names of parameters in Horovod, mpi4py, NumPy and torch, and our names for them.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "root": ("src", "dst"),
    "root_rank": ("src", "dst"),
    "source": ("src",),
    "dest": ("dst",),
    "axis": ("dim",),
    "average": ("op",),
    "reduce_op": ("op",),
}
#: torch's functions of these names change the tensor that they are given.
_IN_PLACE_IN_TORCH = ("all_reduce", "broadcast", "reduce", "recv")
#: Functions whose result differs in shape from what torch fills.
_OTHER_SHAPES = {"all_gather": ", one tensor, concatenated; y.chunk(world_size) are torch's list"}
#: What to pass instead of torch's first argument, in functions that take memory for the result there.
_SENT_IN_TORCH = {
    "reduce_scatter": "torch.cat(input_list)",
    "all_to_all": "input_tensor_list",
    "scatter": "scatter_list if ac.get_rank() == {src} else None",
}
_NO_ASYNC_OP = "every call starts at once and returns a Work: drop async_op"
_BY_POSITION = "data is passed by position"
_RETURNED = "the result is returned: pass only what this rank sends"


def _raised(_: str, wrong: Misfit) -> NoReturn:
    raise wrong.error


def fitting(function: Function, refuse: Callable[[str, Misfit], NoReturn] = _raised) -> Function:
    """Wrap ``function`` so that arguments that do not fit raise an error which shows how to write the call.

    ``refuse`` is called with the function's name to raise it, for functions whose peers have to be notified.
    """

    def refuse_misfit(
        called: Callable[..., object], args: Sequence[object], given: Mapping[str, object], said: TypeError
    ) -> NoReturn:
        refuse(called.__name__, _misfit(called, args, given, said))

    return misfits.fitting(function, refuse_misfit, name=function.__name__)


def _misfit(
    function: Callable[..., object],
    args: Sequence[object],
    given: Mapping[str, object],
    said: TypeError,
) -> Misfit:
    """Return what is wrong with ``function(*args, **given)``; ``said`` is Python's own error."""
    parameters = inspect.signature(function).parameters.values()
    first = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    either = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    written = {name: "..." for name in given if name in named}
    said_by_name: dict[str, Any] = {name: x for name, x in given.items() if name in named}
    advice, understood = [], True
    for name in sorted({*given} - {*named, *either}):
        text, meant_by_name = _on_name(name, given[name], named)
        advice.append(text)
        written |= meant_by_name or {}
        understood = understood and meant_by_name is not None
    for x in args[len(first) :]:
        meant = next((one for one in _MEANINGS if _takes(one, x, named, written)), None)
        if meant is not None:
            written[meant.name] = meant.shown(x)
            said_by_name[meant.name] = x
        else:
            advice.append(_NO_ASYNC_OP if isinstance(x, bool) else _RETURNED)
    if understood and any(one == _RETURNED or one.startswith(_BY_POSITION) for one in advice):
        first = _sent_in_torch(function.__name__, written) or first
    right = ", ".join([*first, *(f"{name}={value}" for name, value in written.items())])
    text = "; ".join([str(said), *dict.fromkeys(advice)])
    if understood:  # otherwise the suggested call would mean something else
        text += _to_write(function, right)
    return Misfit(InvalidCallError(text), said_by_name.get("group"), said_by_name)


def _sent_in_torch(name: str, written: dict[str, str]) -> list[str]:
    """Return what to pass instead of torch's memory for the result; empty for functions that take none."""
    sent = _SENT_IN_TORCH.get(name, "")
    if name == "scatter":
        written.setdefault("src", "0")
    return [sent.format_map(written)] if sent else []


def _to_write(function: Callable[..., object], right: str) -> str:
    """Return advice on how to write the call, and where its result is: torch users look in their arguments.

    Without an event loop it shows ``wait()``, since ``await`` would not even compile there.
    """
    name = getattr(function, "__name__", repr(function))
    gives = str(inspect.signature(function).return_annotation)
    if not gives.startswith("Work["):
        return f": write ac.{name}({right})"
    before, after = ("await ", "") if in_loop() else ("", ".wait()")
    text = f": write {'' if gives == 'Work[None]' else 'y = '}{before}ac.{name}({right}){after}"
    text += _OTHER_SHAPES.get(name, "")
    if name in _IN_PLACE_IN_TORCH and "out=" not in right:
        of_x = right.replace("like", "x", 1) if right.startswith("like") else right
        text += f", or {before}ac.{name}({of_x}, out=x){after} to change x itself, as torch does"
    return text


def _takes(meaning: _Meaning, x: object, named: Iterable[str], written: Mapping[str, str]) -> bool:
    return meaning.name in named and meaning.name not in written and meaning.fits(x)


def _on_name(name: str, value: object, named: Sequence[str]) -> tuple[str, dict[str, str] | None]:
    """Return advice on an argument with an unknown name, and what to write for it (None if not known)."""
    if name == "async_op":
        return _NO_ASYNC_OP, {}
    for ours in _OTHER_NAMES.get(name, ()):
        if ours in named:
            shown = repr("avg" if value else "sum") if name == "average" else repr(value)
            return f"{name}= is {ours}= here", {ours: shown}
    if meant := misfits.near(name, named):
        return f"did you mean {meant}=?", {meant: "..."}
    by_position = isinstance(value, (torch.Tensor, list, tuple, dict))
    return f"{_BY_POSITION}; keyword arguments: {', '.join(named)}", {} if by_position else None
