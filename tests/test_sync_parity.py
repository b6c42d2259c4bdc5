"""Every function of ``asynccoll.sync`` compared with the real ``ignite.distributed``, in lasting worlds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import parity
import worlds
from ranks import NATIVE

SIZES = [size for size in (1, 2, 4) if size in worlds.WORLD_SIZES]
PLACES = [(backend, size) for backend in worlds.BACKENDS for size in SIZES]
GROUPS = {1: [None, [0]], 2: [None, [0], [1, 0]], 4: [None, [1], [0, 1], [3, 1]]}

#: Made alike on every rank, except for the values.
TENSORS = {
    "float32": lambda r: torch.tensor([1.5, -2.0, 3.25]) + r,
    "float64 matrix": lambda r: torch.arange(6.0, dtype=torch.float64).view(2, 3) * (r + 1),
    "int64": lambda r: torch.tensor([3, 5, 6]) + r,
    "int32": lambda r: torch.tensor([3, -5], dtype=torch.int32) * (r + 1),
    "uint8": lambda r: torch.tensor([1, 2, 3], dtype=torch.uint8) + r,
    "bool": lambda r: torch.tensor([True, False, r % 2 == 0]),
    "float16": lambda r: torch.tensor([1.0, 2.0], dtype=torch.float16) + r,
    "bfloat16": lambda r: torch.tensor([1.0, 2.0], dtype=torch.bfloat16) + r,
    "int8": lambda r: torch.tensor([1, -2], dtype=torch.int8) * (r + 1),
    "complex64": lambda r: torch.tensor([1 + 2j, 3j]) * (r + 1),
    "0-d": lambda r: torch.tensor(2.5 + r),
    "0-d int64": lambda r: torch.tensor(5 + r),
    "transposed": lambda r: torch.arange(6.0).view(2, 3).t() + r,
    "of a slice": lambda r: torch.arange(10.0)[2:8:2] + r,
    "channels last": lambda r: torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last) + r,
    "empty": lambda r: torch.empty(0, 3),
    "needs a gradient": lambda r: torch.ones(2, requires_grad=True),
    "large": lambda r: torch.arange(300_000.0) % 50 + r,  # small: products are exact in any order
}
NUMBERS = {
    "int": lambda r: 3 + r,
    "negative": lambda r: -7 * (r + 1),
    "large int": lambda r: 2**40 + r,
    "float": lambda r: 0.1 + r,
    "large float": lambda r: 1e300,
    "bool": lambda r: r % 2 == 0,
    "complex": lambda r: 1 + 2j * r,
    "infinity": lambda r: float("inf"),
    "of NumPy": lambda r: np.float64(1.5 + r),
    "int of NumPy": lambda r: np.int64(3 + r),
}
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("AND", "OR")
WHOLE = ("int64", "int32", "int8", "uint8", "0-d int64", "bool", "int", "negative", "large int")
#: ignite's broadcast(safe_mode=True) delivers the elements of non-contiguous tensors in another order.
SCATTERED = ("transposed", "channels last")


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}", scope="module")
def world(request):
    """On every backend but gloo, ignite's calls use a gloo group that torch has in addition."""
    one = worlds.world(*request.param)
    one.run(parity.told)
    return one


def _called(idist, name):
    return getattr(idist, name)()


def _is_gloo(me):
    """Whether the backend is one that ignite has, too, with or without shared memory."""
    return NATIVE.get(me.backend, me.backend) == "gloo"


def queries(me):
    names = ["device", "get_world_size", "get_rank", "get_local_rank", "hostname"]
    names += ["get_nproc_per_node", "get_nnodes", "get_node_rank"]
    if _is_gloo(me):
        names += ["backend", "model_name", "available_backends"]
    else:
        _, ours = parity.modules()
        assert (ours.backend(), ours.model_name()) == (me.backend, f"{me.backend}-dist")
    for name in names:
        parity.compare(me, name, _called, name)


#: What is compared in groups: ignite makes a torch group for each such call, which is slow.
SOME = {"float32", "0-d", "int64", "int", "float", "bool", "word", "dict", "None"}


def reductions(me):
    for group in GROUPS[me.size]:
        for name, make in {**TENSORS, **NUMBERS}.items():
            for op in (*ARITHMETIC, *(BITWISE if name in WHOLE else ())):
                label = f"all_reduce {name} {op} {group}"
                if group is not None and (name not in SOME or (op != "SUM" and name != "int")):
                    continue
                if (name, op) == ("large int", "PRODUCT"):
                    continue  # overflows in ignite
                if name.startswith("complex") and op != "SUM":
                    continue  # torch has no other op for complex; we multiply
                parity.compare(
                    me, label, lambda i, x, op=op, g=group: i.all_reduce(x, op, group=g), make(me.rank)
                )
        parity.compare(me, f"default op {group}", lambda i, x, g=group: i.all_reduce(x, group=g), me.rank)


OBJECTS = {
    "dict": lambda r: {"rank": r, "nested": [1, (2.5, "x")], "none": None},
    "None": lambda r: None,
    "list": lambda r: list(range(r)),
    "path": lambda r: Path("a") / str(r),
    "bytes": lambda r: b"x" * r,
    "with tensors": lambda r: {"x": torch.full((2,), r), "y": [torch.tensor(1.5)]},
    "large": lambda r: {"text": "x" * 90_000, "rank": r},
    "an object": lambda r: slice(r, None),
}
STRINGS = {
    "word": lambda r: "abc",
    "of a length": lambda r: "x" * r,
    "long": lambda r: f"{r}" * 90_000,
}


def gatherings(me):
    for group in GROUPS[me.size]:
        for name, make in {**TENSORS, **NUMBERS, **STRINGS, **OBJECTS}.items():
            label = f"all_gather {name} {group}"
            if group is not None and name not in SOME:
                continue
            parity.compare(me, label, lambda i, x, g=group: i.all_gather(x, group=g), make(me.rank))
        shapes = [[r + 1, 3 - r % 2] for r in range(me.size)]
        mine = torch.full(shapes[me.rank], float(me.rank))
        members = shapes if group is None else [shapes[r] for r in sorted(group)]
        for dtype in (torch.float32, torch.int64, torch.bool):
            parity.compare(
                me,
                f"with shapes {group} {dtype}",
                lambda i, x, s, g=group: i.all_gather_tensors_with_shapes(x, s, group=g),
                mine.to(dtype),
                members,
            )
    for name, shape in {"1-d": (me.rank + 1,), "empty": (me.rank, 2), "equal": (2, 2)}.items():
        every = {"1-d": (lambda r: (r + 1,)), "empty": (lambda r: (r, 2)), "equal": (lambda r: (2, 2))}[name]
        parity.compare(
            me,
            f"with shapes, {name}",
            lambda i, x, s: i.all_gather_tensors_with_shapes(x, s),
            torch.full(shape, float(me.rank)),
            tuple(every(r) for r in range(me.size)),
        )


def broadcasts(me):
    texts = {"word": "abc", "empty": "", "long": "y" * 90_000}
    paths = {"path": Path("a/b"), "absolute": Path("/tmp/x")}
    numbers = {"float": 2.5, "negative": -0.125}  # exact in float32, which is all that ignite sends
    for src in range(me.size):
        for name, make in TENSORS.items():
            parity.compare(me, f"{name} {src}", lambda i, x, s=src: i.broadcast(x, src=s), make(me.rank))
        for name, value in {**texts, **paths, **numbers}.items():
            other = type(value)() if me.rank != src else value
            parity.compare(me, f"{name} {src}", lambda i, x, s=src: i.broadcast(x, src=s), other)
        for name, make in TENSORS.items():
            if name != "needs a gradient" and name not in SCATTERED:  # the former is a leaf in neither
                mine = make(me.rank) if me.rank == src else None
                parity.compare(
                    me, f"safe {name} {src}", lambda i, x, s=src: i.broadcast(x, s, safe_mode=True), mine
                )
        for name, value in {**texts, **paths, **numbers}.items():
            for other in (None, "unlike", 3, torch.ones(2)):
                mine = value if me.rank == src else other
                parity.compare(
                    me,
                    f"safe {name} {src} {other!r}",
                    lambda i, x, s=src: i.broadcast(x, src=s, safe_mode=True),
                    mine,
                )


def made_groups(me):
    theirs, ours = parity.modules()
    for ranks in [group for group in GROUPS[me.size] if group is not None]:
        groups = {idist: idist.new_group(ranks) for idist in (theirs, ours)}
        named = {idist: idist.new_group(ranks, backend="gloo") for idist in (theirs, ours)}
        if _is_gloo(me):
            with me.case(f"what it is {ranks}"):
                assert type(groups[ours]) is type(groups[theirs])
        for made in (groups, named):
            for name, make in {**TENSORS, **NUMBERS}.items():
                parity.compare(
                    me,
                    f"all_reduce {name} {ranks}",
                    lambda i, x, g=made: i.all_reduce(x, group=g[i]),
                    make(me.rank),
                )
            for name, make in {**TENSORS, **NUMBERS, **OBJECTS}.items():
                parity.compare(
                    me,
                    f"all_gather {name} {ranks}",
                    lambda i, x, g=made: i.all_gather(x, group=g[i]),
                    make(me.rank),
                )
    world = torch.distributed.group.WORLD
    if _is_gloo(me):
        parity.compare(me, "the world's", lambda i, x: i.all_reduce(x, group=world), torch.tensor([me.rank]))
        parity.compare(me, "the world's", lambda i, x: i.all_gather(x, group=world), {"rank": me.rank})
    theirs.barrier()
    ours.barrier()


def errors(me):
    wrong = {
        "all_reduce of a str": lambda i: i.all_reduce("abc"),
        "all_reduce of None": lambda i: i.all_reduce(None),
        "all_reduce of a list": lambda i: i.all_reduce([1, 2]),
        "unknown op": lambda i: i.all_reduce(torch.ones(2), "avg"),
        "op in small letters": lambda i: i.all_reduce(1, "sum"),
        "group is a str": lambda i: i.all_reduce(torch.ones(2), group="abc"),
        "group is a list of str": lambda i: i.all_gather(torch.ones(2), group=["0"]),
        "group is an int": lambda i: i.all_gather({}, group=3),
        "no op": lambda i: i.all_reduce(1.5, None),
        "AVERAGE, which is Horovod's": lambda i: i.all_reduce(1.5, "AVERAGE"),
        "all_reduce of an array": lambda i: i.all_reduce(np.arange(3)),
        "group is a tuple": lambda i: i.all_reduce(torch.ones(2), group=(0,)),
        "group is a range": lambda i: i.all_gather(torch.ones(2), group=range(1)),
        "broadcast of a list": lambda i: i.broadcast([1]),
        "broadcast of bytes": lambda i: i.broadcast(b"abc"),
        "broadcast of a dict, any": lambda i: i.broadcast({}, safe_mode=True),
        "broadcast of None": lambda i: i.broadcast(None),
        "broadcast of None, any": lambda i: i.broadcast(None, src=me.rank, safe_mode=True),
        "new_group of str": lambda i: i.new_group(["a"]),
        "new_group of None": lambda i: i.new_group(None),
        "new_group of a tuple": lambda i: i.new_group((0,)),
        "one_rank_first of nobody": lambda i: i.one_rank_first(rank=me.size).__enter__(),
        "one_rank_first of -1": lambda i: i.one_rank_first(rank=-1, local=True).__enter__(),
    }
    if _is_gloo(me):  # the messages are torch's, or name the backends
        wrong["new_group of nobody"] = lambda i: i.new_group([me.size])
        wrong["unknown backend"] = lambda i: i.initialize("abc")
        wrong["spawn on an unknown backend"] = lambda i: i.spawn("abc", print, ())
    for label, call in wrong.items():
        parity.compare(me, label, call, fails=True)


def decorated(me):
    def only(idist, with_barrier):
        return idist.one_rank_only(rank=me.size - 1, with_barrier=with_barrier)(lambda x: x + 1)(1)

    def first(idist, local):
        with idist.one_rank_first(rank=me.size - 1, local=local):
            return idist.get_rank()

    for flag in (False, True):
        parity.compare(me, f"one_rank_only {flag}", only, flag)
        parity.compare(me, f"one_rank_first {flag}", first, flag)


@pytest.mark.parametrize(
    "case",
    [queries, reductions, gatherings, broadcasts, made_groups, errors, decorated],
    ids=lambda c: c.__name__,
)
def test_as_ignite(world, case):
    world.run(case, timeout=60.0)
