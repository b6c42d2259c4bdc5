"""What each rank puts into a call of a `compositions.Program`, and what it must get out of it.

All of it follows from the program, the rank and plain torch in one process: values, gradients, whether
autograd records the result, and where an error is due.
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

#: Operations that have a gradient, for these reductions.
DIFFERENTIABLE = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "permute"}
LINEAR = frozenset({"sum", "avg"})
#: What may be said of something that has no meaning, and what its peers hear.
REFUSED = (ac.PayloadTypeError, ac.InvalidArgumentError, ac.UnsupportedOpError)
#: Reduces where each rank's share of it would not fit the dtype's range if summed up first.
LARGE = 40_000.0
#: Rows of what is long, for each rank.
_LONG = 12


class Key:
    """A key without an order, and without a name that other ranks could know."""

    def __deepcopy__(self, memo: object) -> Key:
        return self


_KEYS: dict[str, list[Any]] = {
    "keyed by sets": [frozenset(pair) for pair in ("az", "by", "cx", "dw")],
    "keyed by objects": [Key() for _ in range(4)],
    "keyed by tuples": [(1, "a"), ("a", 1), (2, "b"), ("b", 2)],
}


@dataclass
class Case:
    """One call as one rank makes it."""

    call: Call
    #: What is passed: on this rank, and (before anything else happened to it) on all.
    x: Any
    out: Any
    want: Any
    #: What is raised instead on this rank: always, or if it is not as wanted.
    must_raise: tuple[type[Exception], ...]
    may_raise: tuple[type[Exception], ...]
    rtol: float
    #: The weights of this rank's loss, and the gradient of all ranks' losses together.
    weights: list[Tensor]
    gradients: list[Tensor]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that autograd records."""
        return [leaf for leaf in leaves(self.x) if leaf.requires_grad]


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a tree, from left to right, by key where there is one."""
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
    """More than a slot of memory that simulated ranks share."""
    return oracle.counting(rank, (_LONG * size, 3), oracle.DTYPES[call.dtype], call.seed)


def _more(call: Call, rank: int) -> int:
    """How many rows more than few this rank has of what is long on the root alone."""
    return 4 * _LONG * (call.payload == "long uneven" and rank == call.root)


def _splits(call: Call, rank: int, size: int) -> list[int]:
    """How many rows this rank sends to each."""
    few = [(rank + 2 * other + call.seed) % 3 for other in range(size)]
    few[(rank + 1) % size] += _more(call, rank)
    return few


def _few(call: Call, rank: int) -> int:
    return (rank + call.seed) % 3 + _more(call, rank)


def _uneven(call: Call, rank: int, size: int) -> Tensor:
    """As many rows as only this rank knows."""
    rows = sum(_splits(call, rank, size)) if call.operation == "all_to_all" else _few(call, rank)
    return oracle.counting(rank, (rows, 2), oracle.DTYPES[call.dtype], call.seed)


def splits(call: Call, rank: int, size: int) -> tuple[list[int], list[int] | None]:
    """What ``all_to_all`` is told: how many rows go to each, and (not always) how many come."""
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
    """What the rank of the group at this position has for the call."""
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
    """What each rank gets of one leaf, by what each puts in."""
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
    """What each rank gets, by what each puts in: one process that has it all."""
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
    """By rank: the weights of its loss, and the gradients of the sum of all losses."""
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
    """Whether the input asks for gradients."""
    return call.payload.startswith("tracked")


def has_gradient(call: Call) -> bool:
    """Whether there is one for what autograd records; else backward raises."""
    if call.form in ("out", "in place", "safe"):
        return False
    return call.operation in DIFFERENTIABLE and (
        call.operation not in ("all_reduce", "reduce_scatter") or call.op in LINEAR
    )


def _errors(
    call: Call, rank: int, size: int
) -> tuple[tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """What must be raised on this rank, and what may be instead of the value."""
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
    """What is no payload, or ``out=`` that does not fit; else it is the reduction that has no meaning."""
    return [(x, None), ({1, 2}, None), (x, torch.ones(5))][call.seed % 3]


class Whole(NamedTuple):
    """What all ranks must get out of a call, by rank."""

    want: list[Any]
    weights: list[list[Tensor]]
    gradients: list[list[Tensor]]


# Simulated in one process, the same program is run in many orders, by all ranks. What comes of this is only
# compared with; inputs are made anew.
@functools.lru_cache(256)
def whole(call: Call, size: int) -> Whole:
    """Let one process that has it all make the call."""
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
    """The call as the rank at this position of a group of so many makes it."""
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
        x = None  # only the root knows what it is, and whether autograd records it
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
    """This rank's loss."""
    loss = torch.zeros((), dtype=torch.float64)
    for y, weight in zip(results, weights, strict=True):
        if y.requires_grad:
            loss = loss + (y * weight).double().sum()
    return loss
