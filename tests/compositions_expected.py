"""Computes the inputs of each rank for a call of a `compositions.Program`, and the expected results.

All of it follows from the program, the rank, and plain torch in one process: values, gradients, whether
autograd records the result, and where an error is expected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import asynccoll as ac
import oracle
from compositions import Call

#: The operations that have a gradient, and the reductions for which they do.
DIFFERENTIABLE = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "permute"}
LINEAR = frozenset({"sum", "avg"})
#: The errors that an unsupported call may raise.
REFUSED = (ac.PayloadTypeError, ac.InvalidArgumentError, ac.UnsupportedOpError)
#: The average of such values fits the range of float16, but their sum does not.
LARGE = 40_000.0
#: Rows per rank in a long payload.
_LONG = 12


class Key:
    """A key that has no order, and no name that other ranks could know."""

    def __deepcopy__(self, memo: object) -> Key:
        return self


_KEYS: dict[str, list[Any]] = {
    "keyed by sets": [frozenset(pair) for pair in ("az", "by", "cx", "dw")],
    "keyed by objects": [Key() for _ in range(4)],
    "keyed by tuples": [(1, "a"), ("a", 1), (2, "b"), ("b", 2)],
}


@dataclass
class Case:
    """A call as one rank makes it."""

    call: Call
    #: The input of this rank.
    x: Any
    out: Any
    want: Any
    #: What the call must raise on this rank, or may raise instead of returning the expected result.
    must_raise: tuple[type[Exception], ...]
    may_raise: tuple[type[Exception], ...]
    rtol: float
    #: The weights of this rank's loss, and the gradients of the sum of all ranks' losses.
    weights: list[Tensor]
    gradients: list[Tensor]

    @property
    def inputs(self) -> list[Tensor]:
        """The input tensors that require gradients."""
        return [leaf for leaf in leaves(self.x) if leaf.requires_grad]


def leaves(value: Any) -> list[Tensor]:
    """Return the tensors of a tree from left to right, and of dicts in the order of their keys."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=repr) for leaf in leaves(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return []


# ---------------------------------------------------------------- inputs


def _shape(call: Call, size: int) -> tuple[int, ...]:
    if call.dim:
        return 3, 2 * size
    return [(2 * size,), (size, 3), (size, 2, 2), (0, 3), (), (size, 0)][call.seed % _shapes(call)]


def _shapes(call: Call) -> int:
    if call.layout != "contiguous" or call.operation not in ("all_reduce", "broadcast"):
        return 3
    return 6


def _tensor(call: Call, rank: int, size: int, more: int = 0) -> Tensor:
    dtype = oracle.DTYPES[call.dtype]
    shape = (size, 3) if call.layout == "transposed" and not call.dim else _shape(call, size)
    x = oracle.LAYOUTS[call.layout](oracle.counting(rank, shape, dtype, call.seed + more))
    if call.payload.startswith("tracked"):
        x = x.detach().requires_grad_()
    return x


def _tree(call: Call, rank: int, size: int) -> Any:
    items: list[tuple[str, Any]] = [
        ("weight", _tensor(call, rank, size)),
        ("deep", [_tensor(call, rank, size, more=1), None]),
        ("bias", _tensor(call, rank, size, more=2)),
    ]
    if call.form == "plain" and call.operation != "reduce_scatter" and "tensors" not in call.payload:
        items.append(("count", rank + 1 + call.seed))
        items.append(("steps", oracle.counting(rank, (2,), torch.int64, call.seed)))
    return dict(reversed(items)) if rank % 2 else dict(items)


def _long(call: Call, rank: int, size: int) -> Tensor:
    """Return a tensor larger than a slot of the memory that simulated ranks share."""
    return oracle.counting(rank, (_LONG * size, 3), oracle.DTYPES[call.dtype], call.seed)


def _more(call: Call, rank: int) -> int:
    """Return how many more rows the root has if the payload is long on the root only."""
    return 4 * _LONG * (call.payload == "long uneven" and rank == call.root)


def _splits(call: Call, rank: int, size: int) -> list[int]:
    """Return how many rows this rank sends to each rank."""
    few = [(rank + 2 * other + call.seed) % 3 for other in range(size)]
    few[(rank + 1) % size] += _more(call, rank)
    return few


def _few(call: Call, rank: int) -> int:
    return (rank + call.seed) % 3 + _more(call, rank)


def _uneven(call: Call, rank: int, size: int) -> Tensor:
    """Return a tensor whose number of rows only this rank knows."""
    rows = sum(_splits(call, rank, size)) if call.operation == "all_to_all" else _few(call, rank)
    return oracle.counting(rank, (rows, 2), oracle.DTYPES[call.dtype], call.seed)


def splits(call: Call, rank: int, size: int) -> tuple[list[int], list[int] | None]:
    """Return the arguments of ``all_to_all``: rows to send to each rank, and sometimes rows to receive."""
    coming = [_splits(call, other, size)[rank] for other in range(size)]
    if call.payload == "differing splits":
        coming[rank - 1] += rank == call.root
        return _splits(call, rank, size), coming
    return _splits(call, rank, size), coming if call.seed % 2 else None


def _object(call: Call, rank: int, size: int) -> Any:
    if call.operation == "scatter_object":
        return [f"from {rank} to {other}" for other in range(size)]
    return {"rank": rank, "x": oracle.counting(rank, (2,), torch.int32, call.seed), "text": "é" * rank}


def _keyed(call: Call, rank: int, _size: int) -> Any:
    keys = _KEYS[call.payload]
    items = [(key, torch.full((2,), 10.0 * place + rank)) for place, key in enumerate(keys)]
    return dict(reversed(items)) if rank % 2 else dict(items)


_MAKERS: dict[str, Callable[[Call, int, int], Any]] = {
    "tensor": _tensor,
    "tracked": _tensor,
    "large": lambda call, rank, size: torch.full((3,), LARGE, dtype=torch.float16),
    "number": lambda call, rank, size: [2**60 + rank + call.seed, rank + 0.5, rank % 2 == 0][call.seed % 3],
    "text": lambda call, rank, size: f"rank {rank} é {call.seed}" * (rank + 1),
    "tree": _tree,
    "tracked tree": _tree,
    "tree of tensors": _tree,
    "tracked tree of tensors": _tree,
    "no leaf": lambda call, rank, size: [None, {}, {"a": None, "b": []}][call.seed % 3],
    "long": _long,
    "uneven": _uneven,
    "long uneven": _uneven,
    "message": _tensor,
    "refused message": _tensor,
    "overwritten": lambda call, rank, size: torch.ones(3 + call.seed),
    "long message": _long,
    "message object": lambda call, rank, size: {"rank": rank, "text": "é" * (rank + 600 * (call.seed % 2))},
    "nothing": lambda call, rank, size: None,
    "object": _object,
    **dict.fromkeys(_KEYS, _keyed),
    "differing": lambda call, rank, size: torch.ones(3 + rank),
    "differing splits": _uneven,
    "wrong": lambda call, rank, size: torch.ones(3, dtype=torch.int32),
    "wrong on one": lambda call, rank, size: torch.ones(3, dtype=torch.int32),
}


def made(call: Call, rank: int, size: int) -> Any:
    """Return the payload of the rank at this position of the group."""
    kind = call.payload.removesuffix(", None elsewhere")
    return _MAKERS[kind](call, rank, size)


# ---------------------------------------------------------------- one process


def _reduced(xs: list[Any], op: str) -> Any:
    if not isinstance(xs[0], Tensor):
        return oracle.reduced_number(xs, op)
    if not any(x.requires_grad for x in xs):
        return oracle.reduced(xs, op)
    total = torch.stack(xs)
    if op in ("min", "max"):
        return torch.amin(total, 0) if op == "min" else torch.amax(total, 0)
    return total.sum(0) / (len(xs) if op == "avg" else 1)


def _joined(call: Call, xs: list[Any]) -> Any:
    if not isinstance(xs[0], Tensor) or call.payload.endswith("uneven"):
        return list(xs)
    return torch.cat(xs, call.dim) if xs[0].dim() else torch.stack(xs)


def _leaf(call: Call, xs: list[Any]) -> list[Any]:
    """Return each rank's result for one leaf, given the inputs of all."""
    size, root = len(xs), call.root
    match call.operation:
        case "all_reduce":
            return [_reduced(xs, call.op)] * size
        case "broadcast" | "broadcast_object":
            return [xs[root]] * size
        case "all_gather" | "all_gather_object":
            return [_joined(call, xs)] * size
        case "reduce":
            total = _reduced(xs, call.op)
            return [total if rank == root else None for rank in range(size)]
        case "gather":
            return [_joined(call, xs) if rank == root else None for rank in range(size)]
        case "reduce_scatter":
            return list(_reduced(xs, call.op).chunk(size, call.dim))
        case "all_to_all" if call.payload.endswith("uneven"):
            parts = [x.split(_splits(call, rank, size)) for rank, x in enumerate(xs)]
            return [torch.cat([part[rank] for part in parts]) for rank in range(size)]
        case "all_to_all":
            return [torch.cat([x.chunk(size)[rank] for x in xs]) for rank in range(size)]
        case "permute" | "recv":
            return [xs[rank - 1] for rank in range(size)]
        case "scatter":
            return list(xs[root].chunk(size))
    raise AssertionError(call.operation)


def model(call: Call, xs: list[Any]) -> list[Any]:
    """Return each rank's result, given the inputs of all, computed in one process."""
    size = len(xs)
    if "object" in call.operation:
        if call.operation == "all_gather_object":
            return [list(xs)] * size
        if call.operation == "gather_object":
            return [list(xs) if rank == call.root else None for rank in range(size)]
        if call.operation == "recv_object":
            return [xs[rank - 1] for rank in range(size)]
        return [xs[call.root]] * size if call.operation == "broadcast_object" else list(xs[call.root])
    if call.operation == "barrier":
        return [None] * size
    if call.payload == "no leaf":
        return list(xs)
    whole = [oracle.tree_map(lambda found, r=rank: _leaf(call, found)[r], xs) for rank in range(size)]
    if call.operation in ("reduce", "gather"):
        return [one if rank == call.root else None for rank, one in enumerate(whole)]
    return whole


def _gradients(call: Call, size: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return, by rank, the weights of its loss, and the gradients of the sum of all losses."""
    xs = [made(call, rank, size) for rank in range(size)]
    results = model(call, xs)
    weights = [
        [oracle.counting(100 + rank, y.shape, y.dtype, place) for place, y in enumerate(leaves(result))]
        for rank, result in enumerate(results)
    ]
    loss = torch.zeros((), dtype=torch.float64)
    for result, own in zip(results, weights, strict=True):
        for y, weight in zip(leaves(result), own, strict=True):
            if y.requires_grad:
                loss = loss + (y * weight).double().sum()
    inputs = [[leaf for leaf in leaves(x) if leaf.requires_grad] for x in xs]
    flat = [leaf for own in inputs for leaf in own]
    found = iter(torch.autograd.grad(loss, flat, allow_unused=True))
    return weights, [[_or_zeros(next(found), leaf) for leaf in own] for own in inputs]


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.detach()


# ---------------------------------------------------------------- a case


def tracked(call: Call) -> bool:
    """Whether the input requires gradients."""
    return call.payload.startswith("tracked")


def has_gradient(call: Call) -> bool:
    """Whether the call has a gradient if autograd records it; otherwise backward raises."""
    if call.form in ("out", "in place", "safe"):
        return False
    return call.operation in DIFFERENTIABLE and (
        call.operation not in ("all_reduce", "reduce_scatter") or call.op in LINEAR
    )


def _errors(
    call: Call, rank: int, size: int
) -> tuple[tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """Return what the call must raise on this rank, and what it may raise instead of returning a value."""
    kind = call.payload
    if kind.startswith("differing"):
        return (ac.CollectiveMismatchError,), (ac.PeerRefusedError,)
    if kind == "overwritten":
        return (ac.InvalidArgumentError,), ()
    if kind == "refused message" and (call.root + 1) % size == rank:
        return (ac.PeerRefusedError,), ()
    if kind == "wrong" or (kind == "wrong on one" and rank == call.root):
        return REFUSED, ()
    if kind == "wrong on one":
        return (ac.PeerRefusedError,), ()
    if kind in _KEYS or "None elsewhere" in kind or kind == "no leaf":
        return (), (*REFUSED, ac.PeerRefusedError)
    if tracked(call) and call.form in ("out", "in place"):
        return (), (*REFUSED, ac.PeerRefusedError)
    if call.form == "in place twice":
        return (), (ac.InvalidArgumentError, ac.PeerRefusedError)
    return (), ()


def _out(call: Call, x: Any, want: Any) -> Any:
    if call.form in ("in place", "in place twice"):
        return x
    if call.form != "out" or want is None:
        return None
    return oracle.tree_map(lambda found: torch.full_like(found[0].detach(), 7), [want])


def _refused(call: Call, x: Any) -> tuple[Any, Any]:
    """Return an unsupported payload, or an ``out=`` that does not fit; else the reduction is undefined."""
    return [(x, None), ({1, 2}, None), (x, torch.ones(5))][call.seed % 3]


class Whole(NamedTuple):
    """The expected results of a call on all ranks, by rank."""

    want: list[Any]
    weights: list[list[Tensor]]
    gradients: list[list[Tensor]]


# In a simulation, all ranks run the same program in one process in many orders, so results are cached. They
# are only compared with; inputs are made afresh.
@functools.lru_cache(256)
def whole(call: Call, size: int) -> Whole:
    """Compute the call for all ranks in this process."""
    xs = [
        oracle.tree_map(lambda found: _detached(found[0]), [made(call, each, size)]) for each in range(size)
    ]
    want = model(call, xs)
    if call.form == "in place twice":
        want = [model(call, [one] * size)[rank] for rank, one in enumerate(want)]
    if tracked(call) and has_gradient(call):
        return Whole(want, *_gradients(call, size))
    return Whole(want, [[]] * size, [[]] * size)


def case(call: Call, rank: int, size: int) -> Case:
    """Return the call as made by the rank at this position of a group of ``size``."""
    must_raise, may_raise = _errors(call, rank, size)
    x, out = made(call, rank, size), None
    want: Any = None
    weights: list[Tensor] = []
    gradients: list[Tensor] = []
    if not must_raise and not call.payload.startswith(("wrong", "differing")):
        want, weights, gradients = (of_all[rank] for of_all in whole(call, size))
    if call.payload.endswith("None elsewhere") and rank != call.root:
        x = None
    if (call.operation == "scatter" or call.form == "safe") and rank != call.root:
        x = None  # only the root knows the value, and whether autograd records it
    if must_raise == REFUSED:
        x, out = _refused(call, x)
    exact = call.op != "avg" and call.form not in ("scaled", "compressed")
    dtype = oracle.DTYPES.get(call.dtype, torch.float32)
    rounded = not exact and (dtype.is_floating_point or dtype.is_complex)
    rtol = 4 * oracle.epsilon(dtype) if rounded else 0.0
    return Case(
        call,
        x,
        _out(call, x, want) if out is None else out,
        want,
        must_raise,
        may_raise,
        rtol,
        weights,
        gradients,
    )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def weighted(results: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return this rank's loss."""
    loss = torch.zeros((), dtype=torch.float64)
    for y, weight in zip(results, weights, strict=True):
        if y.requires_grad:
            loss = loss + (y * weight).double().sum()
    return loss
