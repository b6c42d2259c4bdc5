"""Shared by the collectives of this package: checking payloads, and sending a tree leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence, ValuesView
from itertools import chain, groupby
from typing import Any, TypeVar

import torch

from asynccoll import tensors
from asynccoll.errors import AsyncCollError, InvalidArgumentError, PayloadTypeError
from asynccoll.host.misfits import integer, named_type
from asynccoll.memory.plain import all_plain, plain_tensor, sharing, writable
from asynccoll.memory.unwritten import beside
from asynccoll.order.lane import Lane
from asynccoll.payload.kinds import is_number, is_value, kind_name
from asynccoll.payload.messages import (
    Message,
)
from asynccoll.payload.values import as_number, check_number_reduction, from_message, to_message
from asynccoll.plan.spec import Op, ReduceOp
from asynccoll.plan.tree_texts import Outline, leaf_path
from asynccoll.plan.trees import TreeSpec, flatten, unflatten
from asynccoll.tensors import autograd
from asynccoll.tensors.bucketing import kind_of
from asynccoll.waiting.started import Started, together
from asynccoll.waiting.work import Work

T = TypeVar("T")

_EXPECTED = (
    "a tensor, a number, a str, a pathlib.Path, or a dict, list, tuple or dataclass of these; other "
    "objects are sent by the *_object functions"
)


def refuse(name: str, x: object, expected: str = _EXPECTED) -> PayloadTypeError:
    """Return the error for a payload that the collective ``name`` cannot send."""
    hint = ""
    if isinstance(x, Work):
        hint = ", whose result has to be waited for first: was an await forgotten?"
    elif hasattr(x, "filled"):
        hint = " (call its filled(), or send what is not masked)"
    elif hasattr(x, "__array__") and getattr(getattr(x, "dtype", None), "kind", "f") in "biufc":
        hint = " (convert it with torch.as_tensor)"
    elif isinstance(x, (Iterator, set, frozenset, range, KeysView, ValuesView)):
        hint = " (make a list of it, in an order that is the same on every rank)"
    return PayloadTypeError(f"{name} got {named_type(x)}{hint}; expected {expected}")


def no_out(name: str, out: object) -> None:
    if out is not None:
        raise InvalidArgumentError(
            f"{name}: out= is for a result that is known to be one tensor; omit it, and use what is returned"
        )


def require_tensor(name: str, x: object, role: str = "a tensor") -> torch.Tensor:
    """Return ``x`` as a tensor that native code may read (``plain_tensor``); refuse anything else."""
    if not isinstance(x, torch.Tensor):
        raise nothing_to_send(name, x) if x is None else refuse(name, x, role)
    return plain_tensor(name, x)


def check_filled(name: str, out: object, x: torch.Tensor | None = None) -> None:
    """Refuse an ``out=`` that cannot be filled. The callers check its shape, once they know the result's.

    ``x`` is the input, which was checked to be plain memory: if ``out`` is ``x``, that is not checked again.
    """
    if isinstance(out, torch.Tensor):
        writable(name, out if out is x else plain_tensor(f"{name}: out=", out))


#: Starts the collective for all tensors of a tree, given these and their ``out`` tensors (or None). The
#: result is the list of their results.
OfTensors = Callable[[list[torch.Tensor], Any], Started[list[Any]]]
#: Starts the collective for all numbers, strings and paths of a tree; the result is that of OfTensors.
OfValues = Callable[[list[Any]], Started[list[Any]]]


def over_tree(
    lane: Lane,
    name: str,
    x: object,
    of_tensors: OfTensors,
    of_values: OfValues | None,
    check: Callable[[object], object],
    *,
    out: object = None,
    alike: bool = False,
    uneven: bool = False,
    here: bool = True,
) -> Started[object]:
    """Start the collective ``name`` for all leaves of the tree ``x``: its tensors, and its values together.

    Every leaf passes ``check`` before any is sent, and all leaves share one number in the lane's order. So a
    tree is refused as a whole, here and for the peers. A ``check`` that refuses all values needs no
    ``of_values``. ``alike`` says that ``check`` depends only on the dtype, device and layout of a tensor;
    then only one tensor of each is checked. ``uneven``: the shape of a leaf may differ between ranks.
    ``here``: whether this rank has a result.
    """
    leaves, spec = leaves_of(name, x)
    of_each(spec, _one_of_each(leaves) if alike else range(len(leaves)), lambda i: check(leaves[i]))
    outs = None if out is None else tree_out(name, leaves, spec, out)
    outline = Outline.of(spec, [_compared(name, leaf, uneven) for leaf in leaves])
    with lane.together(what=(name, outline, *_placed(leaves)), name=name):
        leaf_results = _start_leaves(leaves, outs, of_tensors, of_values)

    def whole(parts: list[Any]) -> Any:
        return unflatten(spec, parts[-1]) if out is None else out

    started = together([leaf_results], whole if here else lambda _: None)
    started.leaves = leaves if outs is None else beside(leaves, outs)
    return started


def leaves_of(name: str, x: object) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of ``x`` (``sendable``), and the structure of the tree.

    A tree without leaves is refused: other ranks may have some, and would wait for this rank.
    """
    leaves, spec = flatten(x)
    if not leaves:
        raise nothing_to_send(name, x)
    return sendable(name, leaves, spec), spec


def sendable(name: str, leaves: list[Any], spec: TreeSpec) -> list[Any]:
    """Return the leaves of a tree as they are sent: tensors as native code may read them, and values."""
    if _only_tensors(leaves) and all_plain(leaves):
        return leaves
    return of_each(spec, range(len(leaves)), lambda i: _sendable(name, leaves[i]))


def _sendable(name: str, leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return plain_tensor(name, leaf)
    leaf = as_number(leaf)
    if not is_value(leaf):
        raise refuse(name, leaf)
    return leaf


def of_each(spec: TreeSpec, places: Iterable[int], found: Callable[[int], T]) -> list[T]:
    """Return what is ``found`` for the leaves at ``places`` of a tree; an error in it names the leaf."""
    results = []
    for place in places:
        try:
            results.append(found(place))
        except AsyncCollError as error:
            error.args = (f"{error} (leaf {leaf_path(spec, place)})",)
            raise
    return results


def nothing_to_send(name: str, x: object) -> PayloadTypeError:
    """Return the error for None, and for a tree without leaves."""
    got = "None" if x is None else f"a {type(x).__name__} without leaves ({x!r:.60})"
    cure = "pass at least one tensor or number on every rank, or skip the call on every rank"
    if name == "broadcast":
        cure = (
            "pass safe_mode=True on every rank; then the others may pass anything, even None. Without it "
            "every rank has to pass the structure, shapes and dtypes that src sends. For an object that "
            "only src has, use ac.broadcast_object"
        )
    return PayloadTypeError(f"{name} got {got}, which sends nothing, so others would wait; {cure}")


def _only_tensors(leaves: list[object]) -> bool:
    return all(issubclass(kind, torch.Tensor) for kind in set(map(type, leaves)))


def _placed(leaves: list[object]) -> tuple[str, ...]:
    """Return which leaves are tensors, if only some are: the parts of the call do not show that.

    If it differed between ranks, tensors of different leaves would be matched, and so would numbers.
    """
    if _only_tensors(leaves):
        return ()
    places, _ = _places(leaves)
    return (f"tensors are leaves {places}",) if places else ()


def _compared(name: str, leaf: object, uneven: bool) -> torch.Tensor | str:
    """Return the leaf if it is a tensor that must be alike on all ranks, else a text for what must be."""
    return leaf if isinstance(leaf, torch.Tensor) and not uneven else message_kind(name, leaf)


def _one_of_each(leaves: list[Any]) -> list[int]:
    """Return the places of the first tensor of each dtype, device and layout, and of all values."""
    tensors_at, values_at = _places(leaves)
    backwards = tensors_at[::-1]
    kinds = map(kind_of, [leaves[i] for i in backwards])
    return sorted([*dict(zip(kinds, backwards, strict=True)).values(), *values_at])


def _places(leaves: list[Any]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the places of the tensors, and those of the values."""
    every = range(len(leaves))
    if _only_tensors(leaves):
        return every, ()
    tensors_at = [i for i in every if isinstance(leaves[i], torch.Tensor)]
    return tensors_at, [i for i in every if not isinstance(leaves[i], torch.Tensor)]


def tree_out(name: str, leaves: list[Any], spec: TreeSpec, out: object) -> list[torch.Tensor]:
    """Return the tensors of the tree ``out``, each checked to fit the result for one of ``leaves``."""
    outs, filled = flatten(out)
    if not (_only_tensors(leaves) and all(isinstance(one, torch.Tensor) for one in outs)):
        raise InvalidArgumentError(
            f"{name}: out= of a tree is for trees of tensors; numbers cannot be filled"
        )
    if filled != spec:
        raise InvalidArgumentError(f"{name}: out is the tree {filled}; expected one like the input: {spec}")
    every = range(len(outs))
    if not all_plain(outs):
        of_each(spec, every, lambda i: plain_tensor(f"{name}: out=", outs[i]))
    others = [i for i in every if outs[i] is not leaves[i]]
    of_each(spec, others, lambda i: tensors.check_out(outs[i], leaves[i], leaves[i].shape))
    of_each(spec, every, lambda i: writable(name, outs[i]))
    if (pair := sharing(leaves, outs)) is not None:
        one, other = (leaf_path(spec, i) for i in pair)
        raise InvalidArgumentError(
            f"{name}: leaf {one} of out= shares memory with the input or result of leaf {other}, which would "
            "be overwritten; each leaf of out= needs memory of its own"
        )
    return outs


def _start_leaves(
    leaves: list[Any], outs: object, of_tensors: OfTensors, of_values: OfValues | None
) -> Started[list[object]]:
    """Start the collective for all leaves; its result is the list of their results, in the same order."""
    if _only_tensors(leaves):
        return of_tensors(leaves, outs)
    tensors_at, values_at = _places(leaves)
    parts = [of_tensors([leaves[i] for i in tensors_at], None)] if tensors_at else []
    assert of_values is not None, f"the check of {leaves} let pass what is no tensor"
    parts.append(of_values([leaves[i] for i in values_at]))

    def in_order(results: list[Any]) -> list[object]:
        found = dict(zip([*tensors_at, *values_at], chain.from_iterable(results), strict=True))
        return [found[i] for i in range(len(leaves))]

    return together(parts, in_order)


def one_by_one(start: Callable[[torch.Tensor], Started[object]]) -> OfTensors:
    """Return an ``OfTensors`` that starts one call per tensor, for a collective that is not elementwise."""
    return lambda xs, _: together([start(x) for x in xs], list)


def check_reducible(lane: Lane, name: str, op: Op, x: object, reduce: ReduceOp) -> None:
    """Refuse a leaf that cannot be reduced."""
    if isinstance(x, torch.Tensor):
        tensors.plan_for(lane, op, x, reduce)
    else:
        check_number(name, x, reduce)
        to_message(x)


def check_number(name: str, x: object, reduce: ReduceOp) -> None:
    """Refuse ``x`` if it is not a number, or not one for which ``reduce`` is defined."""
    if not is_number(x):
        raise refuse(name, x, "a tensor, a number, or a dict, list, tuple or dataclass of these")
    check_number_reduction(x, reduce)


def check_sendable(lane: Lane, op: Op, x: object) -> None:
    """Refuse a leaf that cannot be sent as it is, without a reduction."""
    if isinstance(x, torch.Tensor):
        tensors.plan_for(lane, op, x)
    else:
        to_message(x)


def message_kind(name: str, x: object) -> str:
    """Return how the call's signature describes a payload sent as a message; refuse one that cannot be."""
    if isinstance(x, torch.Tensor):
        return "tensor of any dtype and shape"
    if not is_value(x):
        raise refuse(name, x)
    return "number" if is_number(x) else kind_name(x)  # an int may meet a float, a str one of its subclasses


def message_kinds(name: str, values: Sequence[object]) -> str:
    """Return the same for the values of a tree, which are sent in one message."""
    runs = [(kind, len(list(run))) for kind, run in groupby(message_kind(name, x) for x in values)]
    return ", ".join(kind if length == 1 else f"{length} {kind}s" for kind, length in runs)


def columns(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return, from the values that each rank sent, the list of all ranks' values for each leaf."""
    return list(map(list, zip(*rows, strict=True)))


def values_of(lane: Lane, rows: Sequence[Message]) -> list[Any]:
    device = lane.world.device
    return [from_message(row, device) for row in rows]


def no_gradient(started: Started[Any], x: object, name: str, instead: str) -> Started[Any]:
    """If autograd records ``x``, mark the results: their backward raises instead of being silently wrong."""
    if not autograd.any_tracked([leaf for leaf in flatten(x)[0] if isinstance(leaf, torch.Tensor)]):
        return started

    def marked(y: object) -> object:
        return autograd.without_gradient(y, name, instead) if isinstance(y, torch.Tensor) else y

    def all_marked(y: object) -> object:
        found, spec = flatten(y)
        return unflatten(spec, list(map(marked, found)))

    return started.then(all_marked)


def normal_dim(name: str, x: torch.Tensor, dim: int) -> int:
    """Return ``dim`` counted from the front; refuse one that ``x`` does not have."""
    number = integer(dim)
    if number is None or not -x.dim() <= number < x.dim():
        raise InvalidArgumentError(
            f"{name}: dim={dim!r} is not a dimension of a tensor of shape {list(x.shape)}"
        )
    return number % x.dim()
