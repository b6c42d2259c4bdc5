"""The frozen values that describe a collective before any backend is involved.

Everything here is hashable and immutable, so planning (``dispatch``) is a pure function that can be cached,
and tested without a process group. Knows torch's dtypes and reductions, but no backend and no process group.
``Cost`` is what collectives in a group cost (alpha + beta * bytes), and the bucket size that follows.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from asynccoll.errors import InvalidArgumentError


class Op(str, enum.Enum):
    """The collectives, spelled as torch spells them."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    PERMUTE = "permute"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"

    __hash__ = str.__hash__  # Enum's own is written in Python, and every call uses these as keys

    @property
    def reduces(self) -> bool:
        """Whether the operation does arithmetic, so its data cannot be sent as opaque bytes."""
        return self in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)

    @classmethod
    def parse(cls, name: object) -> Op:
        """Return the operation called ``name``; the error for an unknown name lists all of them."""
        try:
            return cls(str(getattr(name, "value", name)).lower())
        except ValueError:
            called = getattr(name, "__name__", "")
            if called in {op.value for op in cls}:
                raise InvalidArgumentError(f"{name!r} is a function; pass its name, {called!r}") from None
            known = ", ".join(op.value for op in cls)
            raise InvalidArgumentError(f"unknown operation {name!r}; there are {known}") from None


class ReduceOp(str, enum.Enum):
    """The reductions. ``and``/``or`` are logical, ``band``/``bor``/``bxor`` bitwise (as in MPI).

    ``adasum`` is Horovod's sum of gradients, which scales down components that point the same way.
    """

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AND = "and"
    OR = "or"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    ADASUM = "adasum"

    __hash__ = str.__hash__  # as in ``Op``

    @classmethod
    def parse(cls, op: object) -> ReduceOp:
        """Return the reduction for ``op``: a case-insensitive name, one of ours, or torch's ``ReduceOp``."""
        name = op.lower() if isinstance(op, str) else _name_in_torch(op)
        if name == "premul_sum":
            raise InvalidArgumentError(
                f"{op!r}: pass prescale=factor to all_reduce, with op='sum'; elsewhere multiply yourself"
            )
        found = _REDUCE_OPS.get(name)
        if found is None:
            known = ", ".join(_REDUCE_OPS)
            raise InvalidArgumentError(
                f"unknown reduction {op!r}; expected one of {known} (in any case), "
                "or a torch.distributed.ReduceOp"
            )
        return found


#: What a user may pass as ``op=`` (names are case-insensitive, which the type cannot express).
ReduceOpLike: TypeAlias = (
    ReduceOp
    | dist.ReduceOp
    | dist.ReduceOp.RedOpType
    | Literal[
        "sum", "avg", "mean", "product", "prod", "min", "max", "and", "or", "band", "bor", "bxor", "adasum"
    ]
)

_REDUCE_OPS: dict[str, ReduceOp] = {op.value: op for op in ReduceOp}
_REDUCE_OPS |= {"mean": ReduceOp.AVG, "average": ReduceOp.AVG, "prod": ReduceOp.PRODUCT}


def reduce_op(op: object) -> ReduceOp:
    """Return ``ReduceOp.parse(op)``, with a fast path for lower-case names: every reduction calls this."""
    return (_REDUCE_OPS.get(op) if isinstance(op, str) else None) or ReduceOp.parse(op)


def premul_factor(op: dist.ReduceOp) -> float | None:
    """Return the factor of a reduction made by torch's ``_make_nccl_premul_sum``; None for any other."""
    if _name_in_torch(op) != "premul_sum":
        return None
    _, factor = op.__getstate__()  # type: ignore[attr-defined]  # only its pickled state has the factor
    return float(factor)


def _name_in_torch(op: object) -> str:
    """Return the lower-case name of a torch reduction, such as ``"sum"``; "" if ``op`` is not one.

    ``dist.ReduceOp.SUM`` is a ``RedOpType``; a ``ReduceOp`` may be made from it. Both give ``"sum"``.
    """
    if not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return ""
    members = dist.ReduceOp.RedOpType.__members__
    return next((name.lower() for name, member in members.items() if op == member), "")


def described(x: torch.Tensor) -> tuple[torch.dtype | torch.Size | str, ...]:
    """Return what must be the same on all ranks: a tensor's dtype and shape, and whether it is sparse."""
    return (x.dtype, x.shape) if x.layout is torch.strided else (x.dtype, x.shape, "sparse")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of a tensor that planning depends on; it holds no data."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    device: str = "cpu"
    contiguous: bool = True
    sparse: bool = False

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorSpec:
        sparse = x.layout is not torch.strided
        return cls(x.dtype, tuple(x.shape), x.device.type, sparse or x.is_contiguous(), sparse)

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend does natively; ``dispatch`` knows nothing else about a backend.

    ``reduce``: by dtype, the reductions that it computes. ``move``: the dtypes that it can copy as
    they are (any other dtype is sent as bytes). ``ops``: the collectives that it has a usable call for.
    """

    backend: str
    ops: frozenset[Op]
    reduce: tuple[tuple[torch.dtype, frozenset[ReduceOp]], ...]
    move: frozenset[torch.dtype]
    devices: frozenset[str] = frozenset({"cpu"})
    #: whether sparse tensors can be summed: every rank gathers those of all ranks, and sums them locally
    sparse: bool = False
    #: collectives whose native call is slower than a composition, or cannot be awaited
    compose: frozenset[Op] = frozenset()
    #: collectives that its communicator builds from another native call: (collective, native call)
    built_of: tuple[tuple[Op, str], ...] = ()
    #: While a rank sends at most this many bytes, one exchange of all ranks' data and a local sum are faster
    #: than the native reduction, whose hops cost more than the bytes.
    exchange_bytes: int = 0
    #: The cost of a hop of an all_reduce, as the number of bytes that are sent within a node in that time. 0:
    #: an all_reduce is not composed by node, since the backend itself is node-aware, or no cost was measured.
    hop_bytes: int = 0
    #: What the steps of that composition cost in addition to their hops, in hops: Python starts each step.
    steps_hops: int = 0
    #: If the ranks of each node share memory: the total bytes at and above which a collective should go
    #: through that memory within nodes, and use this backend only between them. Others never do.
    near: tuple[tuple[Op, int], ...] = ()
    #: whether its all_to_all itself detects that a rank expects other sizes than its peers send
    compares_splits: bool = False
    #: reductions whose input need not be copied first, since they only read it: a reduce that writes only on
    #: its destination, an all_reduce that is better given a separate output (``all_reduce_into``)
    keeps_input: frozenset[Op] = frozenset()

    def reduces(self, dtype: torch.dtype, op: ReduceOp) -> bool:
        return any(op in ops for known, ops in self.reduce if known is dtype)


def size_class(numel: int) -> int:
    """Return the class of a size, on which plans depend: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7."""
    return numel.bit_length()


def equal_nodes(node_of: Sequence[int]) -> int:
    """Return the number of nodes of a group whose members are on the nodes ``node_of``.

    This is 1 unless each node can be reduced first: all nodes have the same number of members, at least two.
    """
    sizes = set(Counter(node_of).values())
    return len(set(node_of)) if len(sizes) == 1 and sizes != {1} else 1


def place_of(index: int, node_of: Sequence[int]) -> tuple[int, int]:
    """Return the number of the node of the member at ``index``, and the member's index on that node."""
    mine = node_of[index]
    return list(dict.fromkeys(node_of)).index(mine), list(node_of[:index]).count(mine)


@dataclass(frozen=True, slots=True)
class Topology:
    """The backend's capabilities, the size of the group, and its number of equal nodes (``equal_nodes``)."""

    capabilities: Capabilities
    world_size: int
    nodes: int = 1
    #: if the backend has several ways to send calls: which one is used, and why
    way: str = ""

    @property
    def backend(self) -> str:
        return self.capabilities.backend

    def exchanges(self, numel: int, itemsize: int) -> bool:
        """Whether an all_reduce of ``numel`` elements is done as an exchange. The same on every rank.

        Decided by powers of two, so that a plan holds for all sizes of a class (``size_class``). With fewer
        elements than ranks the native ring has almost nothing to send, and is faster.
        """
        least = 1 << size_class(numel) >> 1
        sent = least * itemsize * (self.world_size - 1)
        return 0 < sent <= self.capabilities.exchange_bytes and least >= self.world_size

    def goes_through_nodes(self, op: Op, size_bytes: int, wished: bool | None) -> bool:
        """Whether a call goes through shared memory within nodes, and by the backend between them.

        ``size_bytes``: of a rank's input. ``wished``: ``Policy.by_node``. Decided by powers of two, as
        ``exchanges`` is.
        """
        if self.nodes == 1 or not size_bytes or wished is False:
            return False
        whole = (1 << size_class(size_bytes) >> 1) * (self.world_size if op is Op.ALL_GATHER else 1)
        return any(op is one and (wished or whole >= least) for one, least in self.capabilities.near)

    def sums_nodes_first(self, numel: int, itemsize: int, wished: bool | None = None) -> bool:
        """Whether an all_reduce of ``numel`` elements is composed by node. The same on every rank.

        A ring of all ranks has 2(k-1)(N-1) more hops than rings within each of N nodes of k ranks and one
        between the nodes; but the smaller rings also send 2(k-1)/k times the bytes within nodes. ``wished``
        (``Policy.by_node``) decides for all sizes, except that a tensor must have an element for each rank.
        """
        least = 1 << size_class(numel) >> 1
        known = self.capabilities
        if self.nodes == 1 or not known.hop_bytes or least < self.world_size:
            return False
        if wished is not None:
            return wished
        others = self.world_size // self.nodes - 1
        saved_hops = 2 * others * (self.nodes - 1) - known.steps_hops
        return 2 * others * least * itemsize <= saved_hops * known.hop_bytes * (others + 1)


@dataclass(frozen=True, slots=True)
class Policy:
    """Choices of the caller, not of the backend.

    ``check``: compare all ranks' signatures first. ``by_node``: whether calls are composed by node; None:
    where that is expected to be faster.
    """

    check: bool = False
    by_node: bool | None = None


#: The dtypes that are reduced in float32, and rounded once.
HALF = frozenset({torch.float16, torch.bfloat16})


class Wire(str, enum.Enum):
    """How a tensor's elements are encoded while they are sent."""

    SAME = "same"  # as they are
    VIEW = "view"  # reinterpreted as another dtype: uint8 to copy, int64 to reduce uint64
    CAST = "cast"  # converted to a wider dtype that the backend can reduce, and back
    REAL = "real"  # complex as pairs of reals
    LOGICAL = "logical"  # (x != 0) as uint8, for logical reductions
    FLIPPED = "flipped"  # uint64 with its top bit flipped, so that int64 compares it correctly


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call will do, and why. ``native`` is the backend's call, ``via`` how it is used.

    ``via`` is ``"native"``, or a composition: ``"all_to_all"`` (reduce_scatter, or a small all_reduce,
    as an exchange and a local sum), ``"all_gather"`` or ``"gather"`` (reductions that the backend cannot
    compute, reduced locally in rank order) or ``"nodes"`` (within each node first, then between nodes).
    """

    op: Op
    backend: str
    native: str
    via: str = "native"
    wire: Wire = Wire.SAME
    wire_dtype: torch.dtype | None = None
    reduce: ReduceOp | None = None
    wire_reduce: ReduceOp = ReduceOp.SUM  # if the call reduces
    divide: bool = False
    stage: str | None = None
    why: tuple[str, ...] = field(default=(), compare=False)
    #: The operation's name, and whether nothing has to be encoded, staged or composed. Not properties, since
    #: every call reads them.
    name: str = field(init=False, compare=False, repr=False)
    direct: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        plain = self.wire is Wire.SAME and self.stage is None and not self.divide
        object.__setattr__(self, "name", self.op.value)
        object.__setattr__(self, "direct", plain and self.via == "native")

    def __str__(self) -> str:
        head = f"{self.op.value} on {self.backend}: {self.native}"
        if self.via != "native":
            head += f" (composed by {self.via})"
        return "\n".join([head, *(f"  - {reason}" for reason in self.why)])


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


#: Every dtype of torch by its name, except quantized ones, whose elements mean nothing without their scales.
DTYPES_BY_NAME = {
    dtype_name(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not dtype_name(value).startswith(("qint", "quint"))
}

#: Why a quantized tensor is refused, and what to do.
DEQUANTIZED = "since its scale is not sent with it; pass x.dequantize(), or x.int_repr() and the scale"


_LEAST_BUCKET_BYTES = 1 << 20
_MOST_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds that an all_reduce takes (``alpha + beta * bytes``), and packing one byte (``gamma``)."""

    alpha: float
    beta: float
    gamma: float

    def bucket_bytes(self, total_bytes: int) -> int:
        """Return the bucket size that sends ``total_bytes`` fastest.

        Each bucket costs ``alpha``. While one is in flight the next is packed, but nothing hides packing the
        first: ``total / size * alpha + size * gamma`` is minimal at ``size = sqrt(total * alpha / gamma)``.
        """
        best = int((total_bytes * max(self.alpha, 0.0) / self.gamma) ** 0.5) if self.gamma > 0 else 0
        return min(max(best, _LEAST_BUCKET_BYTES), _MOST_BUCKET_BYTES)

    def __str__(self) -> str:
        per_mib = self.beta * 2**20 * 1e6
        packing = self.gamma * 2**20 * 1e6
        return (
            f"a call costs {self.alpha * 1e6:.0f} us and {per_mib:.0f} us/MiB, packing {packing:.0f} us/MiB"
        )

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float], gamma: float) -> Cost:
        """Return the cost model with ``alpha`` and ``beta`` from two measurements (bytes, seconds)."""
        beta = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(max(1e-6, small[1] - beta * small[0]), beta, gamma)
