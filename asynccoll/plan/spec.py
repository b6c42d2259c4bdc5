"""The frozen values that describe a collective before any backend is involved.

Everything here is hashable and immutable, so that planning (``dispatch``) is a pure function and can
be cached and tested without a process group. Knows torch's dtypes and nothing else of the world.
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

__all__ = [
    "DTYPES_BY_NAME",
    "Capabilities",
    "Op",
    "Plan",
    "Policy",
    "ReduceOp",
    "ReduceOpLike",
    "TensorSpec",
    "Topology",
    "Wire",
    "equal_nodes",
    "place_of",
    "premul_factor",
    "reduce_op",
    "size_class",
]


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

    __hash__ = str.__hash__  # enum's own is Python; these are keys in every call

    @property
    def reduces(self) -> bool:
        """Whether the operation does arithmetic, so that bytes alone cannot carry it."""
        return self in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)

    @classmethod
    def parse(cls, name: object) -> Op:
        """The operation called ``name``; the error lists the names there are."""
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

    ``adasum`` is Horovod's sum of gradients that scales down what points the same way.
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

    __hash__ = str.__hash__  # as Op's

    @classmethod
    def parse(cls, op: object) -> ReduceOp:
        """The reduction named by ``op``: a name in any case, ours, or torch's ``ReduceOp``."""
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


#: What a user may write as ``op=`` (names in any case, which a type cannot say).
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
    """``ReduceOp.parse``, quick for names as they are: every reduction asks."""
    return (_REDUCE_OPS.get(op) if isinstance(op, str) else None) or ReduceOp.parse(op)


def premul_factor(op: dist.ReduceOp) -> float | None:
    """The factor of what torch's ``_make_nccl_premul_sum`` gives; None of any other reduction."""
    if _name_in_torch(op) != "premul_sum":
        return None
    _, factor = op.__getstate__()  # type: ignore[attr-defined]  # how torch pickles it, and where it tells this
    return float(factor)


def _name_in_torch(op: object) -> str:
    """``"sum"`` of ``dist.ReduceOp.SUM``, which is a ``RedOpType``, and of a ``ReduceOp`` made of it."""
    if not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return ""
    members = dist.ReduceOp.RedOpType.__members__
    return next((name.lower() for name, member in members.items() if op == member), "")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What planning needs to know of a tensor: no data, no storage."""

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
    """What a backend does natively. A row of this table is all that dispatch knows of a backend.

    ``reduce``: dtype -> the reductions its wire arithmetic has. ``move``: the dtypes it can copy as
    they are (any other dtype is sent as bytes). ``ops``: the collectives it has a usable call for.
    """

    backend: str
    ops: frozenset[Op]
    reduce: tuple[tuple[torch.dtype, frozenset[ReduceOp]], ...]
    move: frozenset[torch.dtype]
    devices: frozenset[str] = frozenset({"cpu"})
    #: sparse tensors have a sum
    sparse: bool = False
    #: ... which everybody works out, of what all ranks have gathered
    gathers_sparse: bool = False
    #: collectives whose native call is slower than, or not awaitable unlike, a composition
    compose: frozenset[Op] = frozenset()
    #: collectives that its communicator builds of another native call: (ours, what is called)
    built_of: tuple[tuple[Op, str], ...] = ()
    #: Up to so many bytes sent by a rank, a reduction is faster as one exchange of everybody's data
    #: and a local sum than as the native call: the hops cost more than the bytes.
    exchange_bytes: int = 0
    #: What a hop of an all_reduce costs, as the bytes that travel within a node in that time. 0: it is not
    #: composed by node; the backend knows nodes itself, or nothing of it was measured.
    hop_bytes: int = 0
    #: What the steps of that composition cost besides their own hops, in hops: each starts from Python.
    steps_hops: int = 0
    #: Where the ranks of each node share memory: from how many bytes in all a collective had better go
    #: through it within nodes, and by this backend only between them. Those that are not here never do.
    near: tuple[tuple[Op, int], ...] = ()
    #: its all_to_all finds out by itself where ranks do not expect what others send
    compares_splits: bool = False
    #: reductions that need no copy of what they only read: a reduce that changes nothing but on its
    #: destination, an all_reduce that had better fill another tensor (``all_reduce_into``)
    keeps_input: frozenset[Op] = frozenset()

    def reduces(self, dtype: torch.dtype, op: ReduceOp) -> bool:
        return any(op in ops for known, ops in self.reduce if known is dtype)


def size_class(numel: int) -> int:
    """All that planning knows of a size: 0 for none, 1 for one element, 2 for 2 and 3, 3 for 4 to 7."""
    return numel.bit_length()


def equal_nodes(node_of: Sequence[int]) -> int:
    """How many nodes a group has whose members are on the nodes ``node_of``.

    Counted are nodes that can be summed up first: with equally many members, at least two. Any other group
    is one node: ``1``.
    """
    sizes = set(Counter(node_of).values())
    return len(set(node_of)) if len(sizes) == 1 and sizes != {1} else 1


def place_of(index: int, node_of: Sequence[int]) -> tuple[int, int]:
    """Which of the nodes the member number ``index`` is on, and which of the members there it is."""
    mine = node_of[index]
    return list(dict.fromkeys(node_of)).index(mine), list(node_of[:index]).count(mine)


@dataclass(frozen=True, slots=True)
class Topology:
    """The backend's abilities, the size of the group, and how many equal nodes it is made of."""

    capabilities: Capabilities
    world_size: int
    nodes: int = 1
    #: which way its calls go, and why, where there are several
    way: str = ""

    @property
    def backend(self) -> str:
        return self.capabilities.backend

    def exchanges(self, numel: int, itemsize: int) -> bool:
        """Whether an all_reduce of so many elements is done as an exchange. The same on every rank.

        Decided by powers of two, so that a plan is good for all sizes of a class (``size_class``). With
        fewer elements than ranks the native ring has next to nothing to send, and wins.
        """
        least = 1 << size_class(numel) >> 1
        sent = least * itemsize * (self.world_size - 1)
        return 0 < sent <= self.capabilities.exchange_bytes and least >= self.world_size

    def goes_through_nodes(self, op: Op, size_bytes: int, wished: bool | None) -> bool:
        """Whether a call goes through memory within nodes, and by the backend between them.

        ``size_bytes``: of a rank's input. Decided by powers of two, as ``exchanges``.
        """
        if self.nodes == 1 or not size_bytes or wished is False:
            return False
        whole = (1 << size_class(size_bytes) >> 1) * (self.world_size if op is Op.ALL_GATHER else 1)
        return any(op is one and (wished or whole >= least) for one, least in self.capabilities.near)

    def sums_nodes_first(self, numel: int, itemsize: int, wished: bool | None = None) -> bool:
        """Whether an all_reduce of so many elements is composed by node. The same on every rank.

        A ring of all ranks has 2(k-1)(N-1) more hops than one in each of N nodes of k ranks and one of the
        nodes, which carry 2(k-1)/k times the bytes within nodes once more. ``wished`` is what the caller says
        of any size; a tensor of fewer elements than ranks has not a part for each.
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
    """Choices that are the caller's, not the backend's.

    ``by_node``: whether calls go node by node; None: where that is expected to be faster.
    """

    check: bool = False
    by_node: bool | None = None


#: Precisions that are reduced in float32, and rounded once.
HALF = frozenset({torch.float16, torch.bfloat16})


class Wire(str, enum.Enum):
    """How a tensor's elements look while they are in flight."""

    SAME = "same"  # as they are
    VIEW = "view"  # reinterpreted as another dtype: uint8 to copy, int64 to reduce uint64
    CAST = "cast"  # converted to a wider dtype that the backend can reduce, and back
    REAL = "real"  # complex as pairs of reals
    LOGICAL = "logical"  # (x != 0) as uint8, for logical reductions
    FLIPPED = "flipped"  # uint64 with its top bit flipped, so that int64 orders it rightly


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call will do, and why. ``native`` is the backend's call, ``via`` how it is used.

    ``via`` is ``"native"``, or a composition: ``"all_to_all"`` (reduce_scatter, and a small all_reduce,
    as an exchange and a local sum), ``"all_gather"`` (reductions that no backend arithmetic has,
    reduced locally in rank order) or ``"nodes"`` (within each node first, then between nodes).
    """

    op: Op
    backend: str
    native: str
    via: str = "native"
    wire: Wire = Wire.SAME
    wire_dtype: torch.dtype | None = None
    reduce: ReduceOp | None = None
    wire_reduce: ReduceOp = ReduceOp.SUM  # of a call that reduces
    divide: bool = False
    stage: str | None = None
    why: tuple[str, ...] = field(default=(), compare=False)
    #: The operation's name, and whether nothing has to be encoded, staged or composed: asked for in
    #: every call, so kept as plain values.
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
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


#: Every dtype of torch's by its name; of quantized elements none, which mean nothing without their scales.
DTYPES_BY_NAME = {
    dtype_name(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not dtype_name(value).startswith(("qint", "quint"))
}
