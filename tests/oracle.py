"""What every collective must return, in plain Python and NumPy.

Each function takes the inputs of all ranks, in rank order, and returns the result
of each, in rank order. Nothing here calls a collective or any code of `asynccoll`:
inputs are made from (rank, shape, dtype, seed) alone, so every rank can compute
the expected results of all ranks by itself.

Data that only moves is compared as bytes. Data to be reduced consists of small
whole numbers, so every order of summation gives the same exact result.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

INTEGERS = {
    name: getattr(torch, name)
    for name in ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
}
FLOATS = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
}
COMPLEX = {name: getattr(torch, name) for name in ("complex64", "complex128")}
DTYPES: dict[str, torch.dtype] = {"bool": torch.bool, **INTEGERS, **FLOATS, **COMPLEX}

OPS = ("sum", "avg", "product", "min", "max", "and", "or", "band", "bor", "bxor")

#: The reductions that are defined, by kind of element.
MEANINGFUL = {
    "bool": {"sum", "product", "min", "max", "and", "or", "band", "bor", "bxor"},
    "integer": {"sum", "product", "min", "max", "and", "or", "band", "bor", "bxor"},
    "float": {"sum", "avg", "product", "min", "max", "and", "or"},
    "complex": {"sum", "avg", "product", "and", "or"},
}


def kind(dtype: torch.dtype) -> str:
    """Return the row of `MEANINGFUL` for a dtype."""
    if dtype is torch.bool:
        return "bool"
    if dtype in COMPLEX.values():
        return "complex"
    return "float" if dtype in FLOATS.values() else "integer"


def reductions(dtype: torch.dtype) -> list[str]:
    """Return the reductions that are defined for tensors of this dtype."""
    return [op for op in OPS if op in MEANINGFUL[kind(dtype)]]


def refusals(dtype: torch.dtype) -> list[str]:
    """Return the reductions that are not defined for this dtype, and are refused."""
    return [op for op in OPS if op not in MEANINGFUL[kind(dtype)]]


# ---------------------------------------------------------------- inputs


def seeded(*key: Any) -> random.Random:
    """Return a random generator that is the same on every rank and in every run."""
    return random.Random(repr(key))


def moving(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random bit patterns, including NaN payloads and infinities, for data that only moves."""
    count = math.prod(shape)
    source = seeded("moving", rank, tuple(shape), str(dtype), seed)
    if dtype is torch.bool:
        data = [source.random() < 0.5 for _ in range(count)]
        return torch.tensor(data, dtype=torch.bool).reshape(tuple(shape))
    raw = np.frombuffer(source.randbytes(count * dtype.itemsize), np.uint8)
    return from_bytes(raw.reshape(*shape, dtype.itemsize), dtype)


def counting(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return small whole numbers: sums and products over four ranks are exact in every dtype."""
    base = torch.complex128 if dtype in COMPLEX.values() else torch.float64
    return torch.tensor(_counted(rank, tuple(shape), dtype, seed), dtype=base).to(dtype).reshape(tuple(shape))


@functools.lru_cache(4096)  # ranks and repetitions ask for the same ones, and to seed a generator takes long
def _counted(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Any]:
    source = seeded("counting", rank, shape, str(dtype), seed)
    count = math.prod(shape)
    low, high = (0, 5) if str(dtype).startswith("torch.uint") else (-3, 3)
    if dtype.itemsize == 1 and dtype in FLOATS.values():
        low, high = -2, 2
    if dtype is torch.bool:
        return [source.random() < 0.5 for _ in range(count)]
    if dtype in COMPLEX.values():
        return [complex(source.randint(-2, 2), source.randint(-2, 2)) for _ in range(count)]
    return [source.randint(low, high) for _ in range(count)]


def by_rank(make: Callable[..., Tensor], size: int, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Return the inputs of `size` ranks."""
    return [make(rank, *args, **kwargs) for rank in range(size)]


#: Ways to lay out the same values in memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x], dim=-1).flatten(-2)[..., ::2],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "expanded": lambda x: x[:1].expand(x.shape),
}


# ---------------------------------------------------------------- bytes


def to_bytes(x: Tensor) -> np.ndarray:
    """Return the bytes of a tensor, one row of `itemsize` per element."""
    if x.numel() == 0:
        return np.empty((*x.shape, x.dtype.itemsize), np.uint8)
    plain = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    flat = plain.reshape(-1).view(torch.uint8)
    return flat.numpy().reshape(*x.shape, x.dtype.itemsize).copy()


def from_bytes(raw: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return the tensor whose `to_bytes` is `raw`."""
    shape = raw.shape[:-1]
    if raw.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw.reshape(-1).copy()).view(dtype).reshape(shape)


# ---------------------------------------------------------------- reductions


def reduced(inputs: Sequence[Tensor], op: str) -> Tensor:
    """Return `op` over the tensors of all ranks."""
    dtype = inputs[0].dtype
    row = kind(dtype)
    assert op in MEANINGFUL[row], f"{op} of {dtype} means nothing"
    if row == "bool":
        rows = np.stack([x.numpy() for x in inputs])
        if op in ("sum", "max", "or", "bor"):
            result = rows.any(axis=0)
        elif op == "bxor":
            result = rows.sum(axis=0) % 2 == 1
        else:
            result = rows.all(axis=0)
        return torch.as_tensor(np.asarray(result))
    if row == "integer":
        rows = np.stack([x.contiguous().numpy() for x in inputs])
        with np.errstate(over="ignore"):
            result = INTEGER_OPS[op](rows)
        return torch.as_tensor(np.asarray(result, rows.dtype))
    wide = torch.complex128 if row == "complex" else torch.float64
    rows = np.stack([x.to(wide).numpy() for x in inputs])
    return torch.as_tensor(np.asarray(FLOAT_OPS[op](rows))).to(dtype)


INTEGER_OPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sum": lambda rows: np.add.reduce(rows, axis=0, dtype=rows.dtype),
    "product": lambda rows: np.multiply.reduce(rows, axis=0, dtype=rows.dtype),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
    "and": lambda rows: (rows != 0).all(axis=0),
    "or": lambda rows: (rows != 0).any(axis=0),
    "band": lambda rows: np.bitwise_and.reduce(rows, axis=0),
    "bor": lambda rows: np.bitwise_or.reduce(rows, axis=0),
    "bxor": lambda rows: np.bitwise_xor.reduce(rows, axis=0),
}
FLOAT_OPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sum": lambda rows: rows.sum(axis=0),
    "avg": lambda rows: rows.sum(axis=0) / len(rows),
    "product": lambda rows: rows.prod(axis=0),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
    "and": lambda rows: (rows != 0).all(axis=0),
    "or": lambda rows: (rows != 0).any(axis=0),
}


def reduced_number(values: Sequence[Any], op: str) -> Any:
    """Return `op` over the Python numbers of all ranks."""
    if op in ("sum", "product") and type(values[0]) is bool:
        values = [int(one) for one in values]
    total: Any = functools.reduce(operator.add, values)
    if op == "sum":
        return total
    if op == "avg":
        return total / len(values)
    if op == "product":
        return functools.reduce(operator.mul, values)
    if op in ("min", "max"):
        return min(values) if op == "min" else max(values)
    if op in ("and", "or"):
        truth = all(values) if op == "and" else any(values)
        return type(values[0])(truth)
    bitwise = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}
    return functools.reduce(bitwise[op], values)


# ---------------------------------------------------------------- collectives


def all_reduce(inputs: Sequence[Tensor], op: str) -> list[Tensor]:
    """All ranks get the reduction."""
    return [reduced(inputs, op)] * len(inputs)


def reduce(inputs: Sequence[Tensor], op: str, dst: int) -> list[Tensor | None]:
    """`dst` gets the reduction, the others None."""
    return [reduced(inputs, op) if rank == dst else None for rank in range(len(inputs))]


def broadcast(inputs: Sequence[Any], src: int) -> list[Any]:
    """All ranks get the input of `src`."""
    return [inputs[src]] * len(inputs)


def concatenated(inputs: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate the tensors along `dim`; 0-d tensors become a vector."""
    if inputs[0].dim() == 0:
        rows = np.stack([to_bytes(x) for x in inputs])
    else:
        rows = np.concatenate([to_bytes(x) for x in inputs], axis=dim % inputs[0].dim())
    return from_bytes(rows, inputs[0].dtype)


def all_gather(inputs: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
    """All ranks get all tensors, concatenated along `dim`."""
    return [concatenated(inputs, dim)] * len(inputs)


def gather(inputs: Sequence[Tensor], dst: int, dim: int = 0) -> list[Tensor | None]:
    """`dst` gets all tensors, concatenated along `dim`, the others None."""
    return [concatenated(inputs, dim) if rank == dst else None for rank in range(len(inputs))]


def parts(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """Split `x` into `size` equal parts along `dim`."""
    dim %= x.dim()
    return [from_bytes(raw, x.dtype) for raw in np.split(to_bytes(x), size, axis=dim)]


def reduce_scatter(inputs: Sequence[Tensor], op: str, dim: int = 0) -> list[Tensor]:
    """Rank r gets the r-th part of the reduction along `dim`."""
    return parts(reduced(inputs, op), len(inputs), dim)


def all_to_all(inputs: Sequence[Tensor], splits: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """Rank r gets the r-th piece of every rank's tensor; `splits[a][b]` rows go from a to b."""
    size = len(inputs)
    if splits is None:
        splits = [[len(x) // size] * size for x in inputs]
    pieces = [
        np.split(to_bytes(x), np.cumsum(row)[:-1], axis=0) for x, row in zip(inputs, splits, strict=True)
    ]
    return [
        from_bytes(np.concatenate([pieces[a][b] for a in range(size)]), inputs[0].dtype) for b in range(size)
    ]


def permute(inputs: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The destination of a pair gets the source's tensor; ranks that receive nothing get zeros."""
    source = {b: a for a, b in pairs}
    return [
        inputs[source[rank]] if rank in source else torch.zeros_like(inputs[rank])
        for rank in range(len(inputs))
    ]


# ---------------------------------------------------------------- comparing


def snapshot(value: Any) -> Any:
    """Return a deep copy, which later changes of the original do not affect."""
    if type(value) is Tensor and value.is_contiguous() and not value.requires_grad:
        return value.clone()  # a deep copy of a tensor runs much Python
    return copy.deepcopy(value)


def same(got: Any, want: Any, *, where: str = "", value: bool = False, rtol: float = 0.0) -> None:
    """Raise AssertionError unless `got` equals `want`: same type, structure, dtype, shape and bits.

    `value=True` treats 0.0 and -0.0, and all NaNs, as equal; `rtol` is a tolerance for floats.
    """
    at = f" at {where}" if where else ""
    if isinstance(want, Tensor):
        _same_tensor(got, want, at, value=value, rtol=rtol)
        return
    if type(got) is not type(want):
        raise AssertionError(f"type{at}: got {got!r} ({type(got)}), want {want!r} ({type(want)})")
    deeper = functools.partial(same, value=value, rtol=rtol)
    if isinstance(want, dict):
        if got.keys() != want.keys():
            raise AssertionError(f"keys{at}: got {list(got)}, want {list(want)}")
        for key in want:
            deeper(got[key], want[key], where=f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        if len(got) != len(want):
            raise AssertionError(f"length{at}: got {got!r}, want {want!r}")
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            deeper(one, other, where=f"{where}[{index}]")
    elif dataclasses.is_dataclass(want) and not isinstance(want, type):
        for field in dataclasses.fields(want):
            deeper(
                getattr(got, field.name),
                getattr(want, field.name),
                where=f"{where}.{field.name}",
            )
    elif isinstance(want, float | complex):
        if not _same_number(complex(got), complex(want), value=value, rtol=rtol):
            raise AssertionError(f"value{at}: got {got!r}, want {want!r}")
    elif got != want:
        short_got, short_want = repr(got)[:200], repr(want)[:200]
        raise AssertionError(f"value{at}: got {short_got}, want {short_want}")


def _same_number(got: complex, want: complex, *, value: bool, rtol: float) -> bool:
    for one, other in ((got.real, want.real), (got.imag, want.imag)):
        if struct.pack("d", one) == struct.pack("d", other):
            continue
        alike = one == other or (math.isnan(one) and math.isnan(other))
        if not (value and alike) and not (rtol and math.isclose(one, other, rel_tol=rtol)):
            return False
    return True


def _same_tensor(got: Any, want: Tensor, at: str, *, value: bool, rtol: float) -> None:
    if not isinstance(got, Tensor):
        raise AssertionError(f"type{at}: got {got!r} ({type(got)}), want a tensor {want!r}")
    for name in ("dtype", "shape", "device"):
        one, other = getattr(got, name), getattr(want, name)
        if one != other:
            raise AssertionError(f"{name}{at}: got {one}, want {other}")
    if value and torch.equal(got, want):
        return
    if np.array_equal(to_bytes(got), to_bytes(want)):
        return
    row = kind(want.dtype)
    if (value or rtol) and row in ("float", "complex"):
        wide = torch.complex128 if row == "complex" else torch.float64
        if np.allclose(
            got.detach().to(wide).numpy(),
            want.detach().to(wide).numpy(),
            rtol=rtol,
            atol=0.0,
            equal_nan=True,
        ):
            return
    raise AssertionError(f"values{at}: got {_short(got)}, want {_short(want)}")


def _short(x: Tensor) -> str:
    return repr(x) if x.numel() <= 40 else f"{x.reshape(-1)[:20]!r} ... {tuple(x.shape)}"


def epsilon(dtype: torch.dtype) -> float:
    """Return the rounding error of this dtype, by which an average may be off."""
    return float(torch.finfo(dtype).eps)


# ---------------------------------------------------------------- trees


def tree_map(fn: Callable[[list[Any]], Any], trees: Sequence[Any]) -> Any:
    """Return the tree whose leaves are `fn` of the list of corresponding leaves in all trees."""
    first = trees[0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: tree_map(fn, [tree[key] for tree in trees]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(tree_map(fn, list(one)) for one in zip(*trees, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(tree_map(fn, list(one)) for one in zip(*trees, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: tree_map(fn, [getattr(tree, name) for tree in trees]) for name in names})
    return fn(list(trees))


def reduced_leaf(leaves: list[Any], op: str) -> Any:
    """Return the reduction of one leaf of a tree over all ranks."""
    if isinstance(leaves[0], Tensor):
        return reduced(leaves, op)
    return reduced_number(leaves, op)


def gathered_leaf(leaves: list[Any], dim: int = 0) -> Any:
    """Concatenate a tensor leaf over the ranks; return any other leaf as a list of all."""
    return concatenated(leaves, dim) if isinstance(leaves[0], Tensor) else leaves
