"""Bad input gives a typed error that says what was given and what is allowed; peers are unharmed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import asynccoll as ac
from ranks import Rank, raising
from worlds import World

Call = Callable[[], Any]

#: name -> the call in a world of two, the kind of error, words that its text contains.
BAD: dict[str, tuple[Call, type[Exception], tuple[str, ...]]] = {
    "object": (lambda: ac.all_reduce(object()), TypeError, ("object", "tensor")),
    "bytes": (lambda: ac.all_reduce(b"raw"), TypeError, ("bytes",)),
    "set": (lambda: ac.all_reduce({1, 2}), TypeError, ("set",)),
    "string summed": (lambda: ac.all_reduce("text"), TypeError, ("str", "all_reduce")),
    "in a tree": (lambda: ac.all_reduce({"a": [object()]}), TypeError, ("object",)),
    "big int": (lambda: ac.all_reduce(2**64), ValueError, ("an int of 66 bits", "64")),
    "meta": (lambda: ac.all_reduce(torch.ones(2, device="meta")), TypeError, ("meta",)),
    "meta gathered": (lambda: ac.all_gather(torch.ones(2, device="meta")), TypeError, ("meta",)),
    "unknown op": (lambda: ac.all_reduce(1, op="median"), ValueError, ("median", "sum", "bxor")),
    "op of a type": (lambda: ac.all_reduce(1, op=3), ValueError, ("3", "sum")),
    "avg of ints": (lambda: ac.all_reduce(1, op="avg"), TypeError, ("avg", "int")),
    "avg of integers": (
        lambda: ac.all_reduce(torch.ones(2, dtype=torch.int64), op="avg"),
        TypeError,
        ("avg", "int64"),
    ),
    "band of floats": (
        lambda: ac.all_reduce(torch.ones(2), op="band"),
        TypeError,
        ("band", "float32"),
    ),
    "max of complex": (lambda: ac.all_reduce(1j, op="max"), TypeError, ("max", "complex")),
    "src": (lambda: ac.broadcast(1, src=2), ValueError, ("src=2", "0 to 1")),
    "src negative": (lambda: ac.broadcast(1, src=-1), ValueError, ("src=-1", "0 to 1")),
    "src of a type": (lambda: ac.broadcast(1, src="zero"), TypeError, ("src", "'zero'")),
    "src bool": (lambda: ac.broadcast(1, src=True), TypeError, ("src", "True")),
    "dst": (lambda: ac.reduce(1, dst=5), ValueError, ("dst=5", "0 to 1")),
    "dst of gather": (lambda: ac.gather(1, dst=5), ValueError, ("dst=5", "0 to 1")),
    "dim": (lambda: ac.all_gather(torch.ones(2), dim=1), ValueError, ("dim", "1")),
    "dim negative": (lambda: ac.gather(torch.ones(2), dim=-2), ValueError, ("dim", "-2")),
    "dim of a type": (
        lambda: ac.all_gather(torch.ones(2), dim="rows"),
        (TypeError, ValueError),
        ("dim", "rows"),
    ),
    "indivisible": (lambda: ac.reduce_scatter(torch.ones(3)), ValueError, ("3", "2")),
    "indivisible dim": (
        lambda: ac.reduce_scatter(torch.ones(2, 3), dim=1),
        ValueError,
        ("3", "2", "dim"),
    ),
    "splits": (
        lambda: ac.all_to_all(torch.ones(4), input_split_sizes=[1, 1], output_split_sizes=[2, 2]),
        ValueError,
        ("input_split_sizes", "[1, 1]", "4"),
    ),
    "too many splits": (
        lambda: ac.all_to_all(torch.ones(4), input_split_sizes=[1, 1, 2]),
        ValueError,
        ("input_split_sizes", "[1, 1, 2]", "2"),
    ),
    "output splits": (
        lambda: ac.all_to_all(torch.ones(4), input_split_sizes=[2, 2], output_split_sizes=[-1, 2]),
        ValueError,
        ("output_split_sizes", "-1"),
    ),
    "indivisible exchange": (lambda: ac.all_to_all(torch.ones(3)), ValueError, ("3", "2")),
    "0-d exchange": (lambda: ac.all_to_all(torch.ones(())), (TypeError, ValueError), ("0-d",)),
    "pairs": (lambda: ac.permute(torch.ones(1), [(0, 2)]), ValueError, ("2", "0 to 1")),
    "pairs twice": (lambda: ac.permute(torch.ones(1), [(0, 1), (1, 1)]), ValueError, ("1",)),
    "send text": (lambda: ac.send("text", dst=1 - ac.get_rank(), tag=990), TypeError, ("str", "send")),
    "out shape": (
        lambda: ac.all_reduce(torch.ones(2), out=torch.ones(3)),
        ValueError,
        ("out", "[3]", "[2]"),
    ),
    "out dtype": (
        lambda: ac.all_reduce(torch.ones(2), out=torch.ones(2, dtype=torch.float64)),
        (ValueError, TypeError),
        ("out", "float64", "float32"),
    ),
    "out of a type": (
        lambda: ac.all_reduce(torch.ones(2), out=[1.0, 2.0]),
        (ValueError, TypeError),
        ("out", "list"),
    ),
    "out of a number": (
        lambda: ac.all_reduce(1, out=torch.ones(1)),
        (ValueError, TypeError),
        ("out",),
    ),
    "group": (lambda: ac.all_reduce(1, group="all"), TypeError, ("group", "str")),
    "group ranks": (lambda: ac.all_reduce(1, group=[0, 7]), ValueError, ("7", "0 to 1")),
    "lane": (lambda: ac.all_reduce(1, lane=7), (TypeError, ValueError), ("lane", "7")),
    "empty lane": (lambda: ac.all_reduce(1, lane=""), ValueError, ("lane",)),
    "timeout": (lambda: ac.all_reduce(1, timeout=-1), ValueError, ("timeout", "-1")),
    "timeout of a type": (
        lambda: ac.all_reduce(1, timeout="soon"),
        (TypeError, ValueError),
        ("timeout", "soon"),
    ),
    "codec": (
        lambda: ac.all_gather_object(1, codec="xml"),
        ValueError,
        ("xml", "pickle"),
    ),
    **{
        f"sparse {name}": (
            lambda call=call: call(torch.eye(2).to_sparse()),
            ac.UnsupportedOpError,
            ("sparse", name),
        )
        for name, call in {
            "all_gather": ac.all_gather,
            "all_to_all": ac.all_to_all,
            "broadcast": ac.broadcast,
            "gather": ac.gather,
            "permute": lambda x: ac.permute(x, [(0, 1), (1, 0)]),
            "reduce": ac.reduce,
            "reduce_scatter": ac.reduce_scatter,
        }.items()
    },
    **{
        f"nested {call.__name__}": (
            lambda call=call: call(
                torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
            ),
            ac.PayloadTypeError,
            ("nested", call.__name__),
        )
        for call in (ac.all_gather, ac.all_reduce, ac.broadcast, ac.reduce, ac.reduce_scatter)
    },
    **{
        f"{layout} {call.__name__}": (
            lambda call=call, make=make: call(make()),
            ac.UnsupportedOpError,
            (layout, call.__name__),
        )
        for layout, make in {
            "sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
            "_mkldnn": lambda: torch.eye(2).to_mkldnn(),
        }.items()
        for call in (ac.all_gather, ac.all_reduce, ac.broadcast, ac.reduce, ac.reduce_scatter)
    },
    **{
        f"sparse out of {call.__name__}": (
            lambda call=call: call(torch.eye(2), out=torch.eye(2).to_sparse()),
            ValueError,
            ("out", "sparse_coo"),
        )
        for call in (ac.all_reduce, ac.all_to_all, ac.broadcast)
    },
    "gradient of a sparse sum": (
        lambda: ac.all_reduce(torch.eye(2).to_sparse().requires_grad_()),
        ac.UnsupportedOpError,
        ("sparse", "no gradient", "x.detach()"),
    ),
    "out of a sparse sum": (
        lambda: ac.all_reduce(torch.eye(2).to_sparse(), out=torch.eye(2).to_sparse()),
        ValueError,
        ("out", "sparse"),
    ),
    "out of unknown rows": (
        lambda: ac.all_to_all(torch.ones(4), input_split_sizes=[1, 3], out=torch.ones(4)),
        ValueError,
        ("out", "output_split_sizes"),
    ),
    **{
        f"sparse sum of {dtype}": (
            lambda dtype=dtype: ac.all_reduce(torch.eye(2).to_sparse().to(dtype)),
            ac.UnsupportedOpError,
            ("sparse", str(dtype).removeprefix("torch.")),
        )
        for dtype in (torch.float8_e4m3fn, torch.uint16)
    },
    "sparse leaf": (
        lambda: ac.permute({"x": torch.ones(2), "y": torch.eye(2).to_sparse()}, [(0, 1), (1, 0)]),
        ac.UnsupportedOpError,
        ("sparse", "permute"),
    ),
}


async def bad(me: Rank, name: str) -> None:
    call, error, says = BAD[name]
    if name == "out of a sparse sum" and me.backend == "xla-tpu":  # which has no such sum
        error, says = ac.UnsupportedOpError, ("sparse", "all_reduce")
    await me.refuses(name, error, call, says=says)
    await me.check("afterwards", ac.all_reduce, 1, expect=me.size)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(pair: World, name: str) -> None:
    """The error says what was given and what is allowed, and the lane still works."""
    pair.run(bad, name)


@pytest.mark.parametrize("name", ["object", "unknown op", "src", "meta"])
def test_raises_at_the_call_alone(name: str) -> None:
    """The serial world refuses the same input at the call, before anything is awaited."""
    call, error, _ = BAD[name]
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, ac.AsyncCollError)


#: our error -> its built-in base class, so that code that knows nothing of us can catch it.
ALSO = {
    ac.NotInitializedError: RuntimeError,
    ac.InvalidArgumentError: ValueError,
    ac.PayloadTypeError: TypeError,
    ac.UnsupportedOpError: NotImplementedError,
    ac.CollectiveTimeoutError: TimeoutError,
    ac.BackendNotFoundError: ImportError,
    ac.LaunchEnvironmentError: ValueError,
    ac.CollectiveMismatchError: ac.CollectiveError,
    ac.PeerLostError: ac.CollectiveError,
    ac.PeerRefusedError: ac.CollectiveError,
    ac.LaneOrderError: RuntimeError,
    ac.WorkNotDoneError: RuntimeError,
}


@pytest.mark.parametrize("error", ALSO, ids=lambda error: error.__name__)
def test_every_error_is_ours_and_a_builtin(error: type[Exception]) -> None:
    """All have one base class, and the built-in one that a caller would expect."""
    assert issubclass(error, ac.AsyncCollError)
    assert issubclass(error, ALSO[error])


@pytest.mark.parametrize("timeout", [timedelta(seconds=3), 0, -1.0, float("nan"), "3"])
def test_a_timeout_is_a_positive_number_of_seconds(timeout) -> None:
    """For torch's ``timedelta`` the error says how to write it."""
    says = f"seconds, got {timeout!r}" + "; write timeout=3" * isinstance(timeout, timedelta)
    with raising(ac.InvalidArgumentError, "None or a positive", says):
        ac.all_reduce(1, timeout=timeout)
    with raising(ac.InvalidArgumentError, "must be a positive", says):
        ac.initialize(timeout=timeout)
