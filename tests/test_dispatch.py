"""The planner: a pure function of frozen values, tested without any process group."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asynccoll as ac
import oracle
from asynccoll.backends.choosing import capabilities_of
from asynccoll.backends.memory.tables import MEMORY
from asynccoll.backends.serial.backend import SerialCommunicator
from asynccoll.plan import dispatch
from asynccoll.plan.spec import (
    Capabilities,
    Op,
    Plan,
    Policy,
    ReduceOp,
    TensorSpec,
    Topology,
    Wire,
)
from asynccoll.plan.texts import shown

ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX})
#: A backend that has everything for float32 and int64, and can copy those and bytes.
FULL = Capabilities(
    backend="full",
    ops=frozenset(Op),
    reduce=(
        (torch.float32, ARITHMETIC | {ReduceOp.AVG}),
        (torch.int32, ARITHMETIC),
        (torch.int64, ARITHMETIC),
        (torch.uint8, ARITHMETIC),
    ),
    move=frozenset({torch.float32, torch.int64, torch.uint8}),
)
#: One that can only move bytes.
MOVER = Capabilities(
    backend="mover",
    ops=frozenset({Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BROADCAST, Op.BARRIER}),
    reduce=(),
    move=frozenset({torch.uint8}),
)


def plan(
    op: Op,
    dtype: torch.dtype = torch.float32,
    *,
    known: Capabilities = FULL,
    reduce: str | None = None,
    shape: tuple[int, ...] = (4,),
    device: str = "cpu",
    check: bool = False,
) -> Plan:
    """Return the plan for four ranks."""
    spec = TensorSpec(dtype, shape, device)
    parsed = ReduceOp.parse(reduce) if reduce else None
    return dispatch.plan(op, spec, Topology(known, 4), Policy(check), parsed)


def test_what_is_native_is_called_directly() -> None:
    """Nothing is encoded, staged or composed: the tensor is sent as it is."""
    chosen = plan(Op.ALL_REDUCE, reduce="sum")
    assert chosen.direct
    assert (chosen.native, chosen.via, chosen.wire) == ("all_reduce", "native", Wire.SAME)
    assert plan(Op.BROADCAST).direct


@pytest.mark.parametrize("name", oracle.DTYPES)
def test_every_dtype_moves(name: str) -> None:
    """A dtype that the wire lacks is sent as an integer of the same width that it has, else as bytes."""
    dtype = oracle.DTYPES[name]
    chosen = plan(Op.ALL_GATHER, dtype)
    if dtype in FULL.move:
        assert chosen.wire is Wire.SAME
    else:
        same_width = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize)
        carrier = same_width if same_width in FULL.move else torch.uint8
        assert (chosen.wire, chosen.wire_dtype) == (Wire.VIEW, carrier)


@pytest.mark.parametrize("name", oracle.DTYPES)
@pytest.mark.parametrize("op", oracle.OPS)
def test_what_means_nothing_is_refused(name: str, op: str) -> None:
    """Exactly the undefined pairs of dtype and reduction raise, naming both."""
    dtype = oracle.DTYPES[name]
    for collective in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER):
        if op in oracle.reductions(dtype):
            assert plan(collective, dtype, reduce=op).reduce is ReduceOp(op)
        else:
            with pytest.raises(ac.PayloadTypeError) as caught:
                plan(collective, dtype, reduce=op)
            assert op in str(caught.value)
            assert name in str(caught.value)


def test_a_backend_without_arithmetic_gathers_and_reduces_locally() -> None:
    """Reductions are composed of data movements if the wire cannot compute."""
    assert plan(Op.ALL_REDUCE, known=MOVER, reduce="sum").via == "all_gather"
    assert plan(Op.REDUCE_SCATTER, known=MOVER, reduce="sum").via == "all_to_all"


def test_what_cannot_be_composed_is_refused() -> None:
    """The error names the operation and the backend that lacks it."""
    for collective, reduce in ((Op.SEND, None), (Op.GATHER, None), (Op.REDUCE, "sum")):
        with pytest.raises(ac.UnsupportedOpError) as caught:
            plan(collective, known=MOVER, reduce=reduce)
        assert collective.value in str(caught.value)
        assert "mover" in str(caught.value)


def test_compose_overrides_native() -> None:
    """A native call that is slower or cannot be awaited is not used."""
    known = dataclasses.replace(FULL, compose=frozenset({Op.REDUCE_SCATTER}))
    assert plan(Op.REDUCE_SCATTER, known=known, reduce="sum").via == "all_to_all"
    assert plan(Op.REDUCE_SCATTER, known=FULL, reduce="sum").via == "native"


def test_tensors_elsewhere_are_staged() -> None:
    """A tensor on a device that the backend does not support goes through one that it supports."""
    assert plan(Op.ALL_REDUCE, reduce="sum", device="cuda").stage == "cpu"
    known = dataclasses.replace(FULL, devices=frozenset({"cuda"}))
    assert plan(Op.ALL_REDUCE, known=known, reduce="sum").stage == "cuda"
    assert plan(Op.ALL_REDUCE, known=known, reduce="sum", device="cuda").stage is None


def test_half_precision_is_averaged_in_float32() -> None:
    """Its sum could overflow, so it is cast: on the wire if the backend reduces, else where it is reduced."""
    native = dataclasses.replace(
        FULL, reduce=(*FULL.reduce, (torch.float16, ARITHMETIC)), move=FULL.move | {torch.float16}
    )
    made = dispatch.plan(
        Op.ALL_REDUCE, TensorSpec(torch.float16, (4,)), Topology(native, 3), reduce=ReduceOp.AVG
    )
    assert (made.via, made.wire, made.wire_dtype) == ("native", Wire.CAST, torch.float32)
    assert (made.wire_reduce, made.divide) == (ReduceOp.SUM, True)
    gathers = dataclasses.replace(native, reduce=())
    made = dispatch.plan(
        Op.ALL_REDUCE, TensorSpec(torch.float16, (4,)), Topology(gathers, 3), reduce=ReduceOp.AVG
    )
    assert (made.via, made.wire, made.wire_reduce) == ("all_gather", Wire.SAME, ReduceOp.AVG)


@pytest.mark.parametrize("reduce", ["sum", "band"])
def test_what_is_reduced_locally_is_gathered_as_it_is(reduce: str) -> None:
    """A wider dtype, as which backends reduce small integers, would only send more bytes."""
    known = dataclasses.replace(MOVER, move=frozenset({torch.uint8, torch.int8, torch.int32}))
    made = plan(Op.ALL_REDUCE, torch.int8, known=known, reduce=reduce)
    assert (made.via, made.wire, made.wire_dtype) == ("all_gather", Wire.SAME, None)
    assert "int32" not in str(made)


def test_a_permute_is_an_all_to_all() -> None:
    made = plan(Op.PERMUTE)
    assert made.native == "all_to_all"
    assert "composed of all_to_all" in str(made)


#: For each backend, the operations for which its communicator makes another of its library's calls.
MADE_BY: dict[str, dict[str, str]] = {
    "serial": {},
    "memory": {},
    "gloo": {},
    "nccl": {},
    "mpi": {},
    "horovod": {
        "reduce": "all_reduce",
        "gather": "all_to_all",
        "scatter": "all_to_all",
        "barrier": "all_reduce",
    },
    "xla-tpu": {
        "reduce": "all_reduce",
        "broadcast": "all_reduce",
        "gather": "all_gather",
        "scatter": "reduce_scatter",
        "permute": "collective_permute",
        "barrier": "all_reduce",
    },
}


@pytest.mark.parametrize("backend", MADE_BY)
def test_what_a_backend_makes_by_another_call_is_not_called_native(backend: str) -> None:
    known = MEMORY if backend == "memory" else capabilities_of(backend, "cpu")
    made = {"permute": "all_to_all", **MADE_BY[backend]}
    for op in known.ops - known.compose:
        chosen = plan(op, known=dataclasses.replace(known, exchange_bytes=0))
        if chosen.via == "native":
            call = made.get(op.value, op.value)
            assert chosen.native == call
            assert (f"it is composed of {call}" in str(chosen)) is (call != op.value)


def test_planning_is_pure_and_cached() -> None:
    """Equal arguments give the same object; plans are frozen and hashable."""
    first = plan(Op.ALL_REDUCE, torch.int16, reduce="sum")
    assert plan(Op.ALL_REDUCE, torch.int16, reduce="sum") is first
    assert hash(first) == hash(dataclasses.replace(first))
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.native = "other"  # type: ignore[misc]


def test_plans_explain_themselves() -> None:
    """A printed plan names operation, backend, call and the reasons."""
    text = str(plan(Op.ALL_REDUCE, torch.float16, reduce="avg", check=True))
    assert text.splitlines()[0].startswith("all_reduce on full")
    assert "float16" in text
    assert "check" in text
    assert all(line.startswith("  - ") for line in text.splitlines()[1:])


def test_explain_is_the_plan_of_the_call() -> None:
    """ac.explain in the world of one names the serial backend."""
    assert ac.explain("barrier", group=None, lane="other").native == "barrier"
    chosen = ac.explain("all_reduce", torch.ones(4), op="max")
    assert isinstance(chosen, Plan)
    assert chosen.op is Op.ALL_REDUCE
    assert chosen.reduce is ReduceOp.MAX
    assert "serial" in str(chosen)
    with pytest.raises(ac.InvalidArgumentError, match="all_gather"):
        ac.explain("all_reduction", torch.ones(4))


def test_explain_knows_how_numbers_and_texts_travel() -> None:
    """They are gathered as bytes and reduced locally: an average of floats has a plan, of ints none."""
    for x, what in ((0.5, "1 number"), ({"loss": 0.5, "lr": 1e-3}, "2 numbers")):
        chosen = ac.explain("all_reduce", x, op="avg")
        assert (chosen.op, chosen.native, chosen.via) == (Op.ALL_REDUCE, "all_gather", "all_gather")
        assert chosen.reduce is ReduceOp.AVG
        assert f"{what} in one message" in str(chosen)
    assert ac.explain("broadcast", ["a", 1]).native == "broadcast"
    mixed = ac.explain("gather", {"x": torch.ones(2), "name": "a", "n": 1})
    assert mixed.native == "gather"
    assert "2 values in one message" in str(mixed)
    for refused, op in ((1, "avg"), ("text", "sum"), (0.5, "band")):
        with pytest.raises(ac.PayloadTypeError):
            ac.all_reduce({"x": refused}, op=op)
        with pytest.raises(ac.PayloadTypeError):
            ac.explain("all_reduce", {"x": refused}, op=op)


#: Payloads with a self-describing encoding, or sent like those.
IN_MESSAGES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "anything": ("broadcast", torch.ones(3), {"safe_mode": True}),
    "any tree": ("broadcast", {"x": torch.ones(3), "n": 1}, {"safe_mode": True}),
    "any shape": ("all_gather", torch.ones(3), {"uneven": True}),
    "any shape on one": ("gather", torch.ones(3), {"uneven": True}),
    "tree of any shapes": ("all_gather", {"x": torch.ones(3), "y": torch.ones(4)}, {"uneven": True}),
    "parts": ("scatter", [torch.ones(3)], {}),
    "rows": ("scatter", torch.ones(3), {}),
    "parts for all": ("all_to_all", [torch.ones(3)], {}),
    "number": ("all_reduce", 1.5, {}),
    "text": ("broadcast", "a", {}),
    "numbers": ("reduce", [1, 2], {}),
}


@pytest.mark.parametrize("case", IN_MESSAGES)
def test_explain_tells_of_messages_what_is_sent(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the native call with bytes, while the plain call sends the tensor itself."""
    name, x, call = IN_MESSAGES[case]
    sent: list[tuple[str, torch.dtype]] = []

    def spy(native: str, at: int) -> None:
        original = getattr(SerialCommunicator, native)

        def called(self: Any, *args: Any) -> Any:
            sent.append((native, args[at].dtype))
            return original(self, *args)

        monkeypatch.setattr(SerialCommunicator, native, called)

    for native, at in (("broadcast", 0), ("all_gather", 1), ("gather", 1), ("scatter", 0), ("all_to_all", 1)):
        spy(native, at)
    getattr(ac, name)(x, **call).wait()
    chosen = ac.explain(name, x, **call)
    assert (chosen.native, torch.uint8) in sent
    assert {chosen.native} == {native for native, _ in sent}  # for parts, their lengths are sent first
    assert "in a message" in str(chosen) or "in one message" in str(chosen)
    assert chosen.wire is Wire.SAME


def test_explain_refuses_what_the_call_refuses() -> None:
    """It refuses a number or an object where only tensors are allowed."""
    for name, x in (("reduce_scatter", 5), ("all_gather", [torch.ones(1), object()]), ("send", "text")):
        with pytest.raises(ac.PayloadTypeError, match=name):
            ac.explain(name, x)


@pytest.mark.parametrize("op", oracle.OPS)
def test_reductions_are_named_in_any_way(op: str) -> None:
    """A reduction may be in any case, our enum, or torch's ReduceOp."""
    for spelling in (op, op.upper(), op.title(), ReduceOp(op)):
        assert ReduceOp.parse(spelling) is ReduceOp(op)
    if op not in ("and", "or"):
        theirs = getattr(dist.ReduceOp, op.upper())
        assert ReduceOp.parse(theirs) is ReduceOp.parse(dist.ReduceOp(theirs)) is ReduceOp(op)


@pytest.mark.parametrize("given", ["premul_sum", dist.ReduceOp.PREMUL_SUM, dist._make_nccl_premul_sum(0.5)])
def test_a_reduction_that_multiplies_first_says_how_else(given: object) -> None:
    with pytest.raises(ac.InvalidArgumentError, match="pass prescale=factor to all_reduce"):
        ReduceOp.parse(given)


@pytest.mark.parametrize("given", ["median", "", 3, None, object()], ids=lambda given: type(given).__name__)
def test_an_unknown_reduction_lists_the_known(given: object) -> None:
    """The error says what was given, and lists all reductions."""
    with pytest.raises(ac.InvalidArgumentError) as caught:
        ReduceOp.parse(given)
    assert repr(given) in str(caught.value)
    assert all(op in str(caught.value) for op in oracle.OPS)


def test_specs_describe_tensors() -> None:
    """They have shape, dtype, size and contiguity, without the data."""
    spec = TensorSpec.of(torch.zeros(3, 4, dtype=torch.int16).t())
    assert (spec.shape, spec.dtype, spec.contiguous) == ((4, 3), torch.int16, False)
    assert (spec.numel, spec.size_bytes) == (12, 24)
    assert TensorSpec.of(torch.eye(2).to_sparse()).sparse
    assert (TensorSpec.of(torch.ones(())).numel, TensorSpec.of(torch.ones(0)).numel) == (1, 0)


def test_all_questions_have_an_answer() -> None:
    """On a full backend every operation, dtype and reduction gives a plan or a typed refusal."""
    for op, dtype, reduce in itertools.product(Op, oracle.DTYPES.values(), ReduceOp):
        try:
            chosen = plan(op, dtype, reduce=reduce.value if op.reduces else None)
        except (ac.PayloadTypeError, ac.UnsupportedOpError):
            continue
        assert chosen.op is op


def test_sources_import_no_moving_part() -> None:
    """dispatch.py, wire.py and spec.py import only each other and the errors."""
    for module in (dispatch, *(sys.modules[f"asynccoll.plan.{name}"] for name in ("wire", "spec"))):
        source = Path(str(module.__file__)).read_text()
        imported = {
            line.split()[1]
            for line in source.splitlines()
            if line.startswith(("from asynccoll", "import asynccoll"))
        }
        assert imported <= {"asynccoll.errors", "asynccoll.plan.spec", "asynccoll.plan.wire"}, imported


def test_shapes_are_written_as_lists():
    """This holds for one tensor, and for several that are sent as one."""
    assert shown((torch.float32, torch.Size([4, 8]))) == "float32 [4, 8]"
    assert shown([torch.Size([4]), torch.Size([8, 2])]) == "[[4], [8, 2]]"
