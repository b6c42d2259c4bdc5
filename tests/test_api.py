"""The public API is complete, sorted and documented, and has the promised signatures."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import asynccoll as ac
from asynccoll.host import elsewhere
from patience import patient

TAIL = ("group=None", "lane=None", "timeout=None")
OUT = (*TAIL, "out=None")
#: name -> positional parameters, then the keyword-only ones with their defaults.
SIGNATURES: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "all_reduce": (
        ("x",),
        {"op='sum'", "prescale=1.0", "postscale=1.0", "compression=None", *OUT},
    ),
    "reduce": (("x",), {"dst=0", "group_dst=None", "op='sum'", *OUT}),
    "broadcast": (("x",), {"src=0", "group_src=None", "safe_mode=False", *OUT}),
    "all_gather": (("x",), {"dim=0", "uneven=False", *OUT}),
    "gather": (("x",), {"dst=0", "dim=0", "uneven=False", "group_dst=None", *OUT}),
    "scatter": (("x",), {"src=0", "group_src=None", *OUT}),
    "reduce_scatter": (("x",), {"op='sum'", "dim=0", *OUT}),
    "all_to_all": (("x",), {"input_split_sizes=None", "output_split_sizes=None", *OUT}),
    "permute": (("x", "pairs"), {*OUT}),
    "send": (("x",), {"dst=None", "tag=0", "group_dst=None", *TAIL}),
    "recv": (("like",), {"src=None", "tag=0", "group_src=None", *OUT}),
    "barrier": ((), {*TAIL}),
    "recv_any": (("like",), {"sources=None", "tag=0", *TAIL}),
    "recv_any_object": ((), {"sources=None", "tag=0", "codec=None", *TAIL}),
    "monitored_barrier": ((), {"wait_all_ranks=False", *TAIL}),
    "join": ((), {"lane=None", "timeout=None"}),
    "all_gather_object": (("obj",), {"codec=None", *TAIL}),
    "gather_object": (("obj",), {"dst=0", "group_dst=None", "codec=None", *TAIL}),
    "broadcast_object": (("obj",), {"src=0", "group_src=None", "codec=None", *TAIL}),
    "scatter_object": (("obj",), {"src=0", "group_src=None", "codec=None", *TAIL}),
    "send_object": (("obj",), {"dst=None", "tag=0", "codec=None", "group_dst=None", *TAIL}),
    "recv_object": ((), {"src=None", "tag=0", "codec=None", "group_src=None", *TAIL}),
    "initialize": (
        ("backend=None",),
        {
            "stall_warning=None",
            "memory=None",
            "init_method=None",
            "store=None",
            "rank=None",
            "world_size=None",
            "timeout=1800.0",
            "check=None",
        },
    ),
    "finalize": ((), {"abort=False"}),
    "is_initialized": ((), set()),
    "get_rank": (("group=None",), set()),
    "get_world_size": (("group=None",), set()),
    "get_local_rank": ((), set()),
    "get_nproc_per_node": ((), set()),
    "get_nnodes": ((), set()),
    "get_node_rank": ((), set()),
    "device": ((), set()),
    "backend": ((), set()),
    "hostname": ((), set()),
    "available_backends": ((), set()),
    "new_group": (("ranks",), set()),
    "new_subgroups": (("group_size=None",), set()),
    "is_main": ((), {"local=False"}),
    "batch_isend_irecv": (("p2p_op_list",), {"lane=None", "timeout=None"}),
    "new_lane": (("kind",), set()),
    "may_overlap": (("x", "y"), set()),
    "wait_all": (("works",), set()),
}
WORK = (
    "wait",
    "done",
    "result",
    "exception",
    "map",
    "add_done_callback",
    "on_host",
    "detach",
    "as_future",
)
ALSO_PUBLIC = {"Work", "as_completed", "close_lane", "create_task_group", "explain", "lane", "scope"}
ERRORS = {
    "AsyncCollError",
    "BackendNotFoundError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DiscardedResultWarning",
    "InvalidArgumentError",
    "LaneOrderError",
    "LaunchEnvironmentError",
    "NotInitializedError",
    "PayloadTypeError",
    "PeerLostError",
    "PeerRefusedError",
    "UnawaitedWorkWarning",
    "UnsupportedOpError",
    "WorkNotDoneError",
}


def shown(parameter: inspect.Parameter) -> str:
    """Return `name` or `name=default`."""
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """Positional parameters come first, all others are keyword-only, with the documented defaults."""
    positional, keywords = SIGNATURES[name]
    parameters = inspect.signature(getattr(ac, name)).parameters.values()
    kinds = inspect.Parameter
    by_place = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    got = tuple(shown(one) for one in parameters if one.kind in by_place)
    if name == "broadcast_object":  # only src has an object to pass
        got = tuple(one.removesuffix("=None") for one in got)
    assert got == positional
    assert {shown(one) for one in parameters if one.kind is kinds.KEYWORD_ONLY} == keywords


@pytest.mark.parametrize(
    "name", [name for name, (_, keywords) in SIGNATURES.items() if "lane=None" in keywords]
)
def test_payload_is_positional_only(name: str) -> None:
    """The tensor has no keyword name, so that it can be renamed."""
    parameters = list(inspect.signature(getattr(ac, name)).parameters.values())
    expected = len(SIGNATURES[name][0])
    only = [one for one in parameters if one.kind is inspect.Parameter.POSITIONAL_ONLY]
    assert len(only) == expected


def test_all_is_sorted_and_complete() -> None:
    """`__all__` is a sorted tuple of names that exist, and it has everything promised."""
    names = ac.__all__
    assert isinstance(names, tuple)
    assert list(names) == sorted(names)
    assert len(set(names)) == len(names)
    assert {*SIGNATURES, *ALSO_PUBLIC, *ERRORS} <= set(names)
    assert [name for name in names if not hasattr(ac, name)] == []


def test_everything_public_is_in_all() -> None:
    """Every function and class of ours that the package exports is public."""
    ours = {
        name
        for name, value in vars(ac).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and str(getattr(value, "__module__", "")).startswith("asynccoll")
    }
    assert ours - set(ac.__all__) == set()


@pytest.mark.parametrize("name", ac.__all__)
def test_everything_public_is_documented(name: str) -> None:
    """Each has its own docstring, whose first line is a sentence."""
    value = getattr(ac, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        first = (value.__doc__ or "").strip().splitlines()
        assert first, f"{name} has no docstring"
        assert len(first[0]) > 15, f"{name}: {first[0]!r}"


@pytest.mark.parametrize("name", WORK)
def test_work_has_its_methods(name: str) -> None:
    """Each method of the handle exists and has a docstring."""
    assert (getattr(ac.Work, name).__doc__ or "").strip()


def test_version() -> None:
    """`__version__` starts with a number."""
    assert ac.__version__.split(".")[0].isdigit()


LAZY = """
import sys
import asynccoll
import asynccoll.sync
heavy = {"mpi4py", "horovod", "torch_xla", "matplotlib", "trio", "pandas", "torch._dynamo", "sympy"}
print(sorted(heavy & {*sys.modules, *(name.partition(".")[0] for name in sys.modules)}))
"""


def test_import_loads_no_optional_package() -> None:
    """`import asynccoll` loads no package of a backend or of the command line, and not torch's compiler."""
    done = subprocess.run(
        [sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


PLAIN = """
import sys

for absent in ("sniffio", "trio", "outcome", "uvloop", "pytest", "hypothesis", "matplotlib", "opentelemetry"):
    sys.modules[absent] = None  # importing it fails, as where it is not installed

import anyio
import torch

import asynccoll as ac
from asynccoll.testing import explore, simulate


async def main(rank):
    total = await ac.all_reduce(torch.ones(2) * rank)
    return await anyio.to_thread.run_sync(total.tolist)


if __name__ == "__main__":
    report = simulate(main, world_size=3)
    report.check()
    explore(main, seeds=range(3), jobs=1).check()
    print(sorted(report.results.items()))
"""


def test_the_simulated_world_needs_what_a_plain_install_brings(tmp_path: Path) -> None:
    """Developers have trio and with it sniffio; a user may have neither."""
    program = tmp_path / "plain.py"
    program.write_text(PLAIN)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert done.stdout.strip() == str([(rank, [3.0, 3.0]) for rank in range(3)]), done.stdout + done.stderr


def test_help_of_a_collective_tells_of_the_arguments_that_it_has() -> None:
    for call in (ac.all_reduce, ac.barrier, ac.send, ac.recv, ac.gather_object):
        told = re.findall(r"^- ``(\w+)``:", call.__doc__ or "", re.MULTILINE)
        taken = inspect.signature(call).parameters
        assert told == [name for name in ("group", "lane", "timeout", "out") if name in taken]


MEANT = {
    "rank": "ac.get_rank()",  # Horovod's
    "init_process_group": 'ac.initialize("gloo")',  # torch's
    "Average": 'op="avg"',  # Horovod's, too
    "one_rank_first": "ac.main_first()",  # ignite's
    "world_size": "ac.get_world_size()",
    "shard_optimizer": "ac.overlap.shard_optimizer",
}


@pytest.mark.parametrize("name", MEANT)
def test_what_others_call_otherwise_is_told(name: str) -> None:
    with pytest.raises(
        AttributeError, match=f"^{re.escape(f'asynccoll has no {name!r}: write {MEANT[name]}')}$"
    ):
        getattr(ac, name)
    assert not hasattr(ac, name)


def test_what_was_put_in_place_of_a_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first name that is used loads all names; looking up another one does not load them again."""
    monkeypatch.setattr(ac, "all_reduce", "another")
    assert not hasattr(ac, "no_such_name")
    assert ac.all_reduce == "another"


def test_what_is_told_is_there() -> None:
    """Every replacement in the table exists; no key is a public name of ours, as that would be found."""
    for name, told in elsewhere._HERE.items():
        assert name not in ac.__all__
        for ours in re.findall(r"\bac\.([\w.]+)", told):
            attrgetter(ours)(ac)


@pytest.mark.parametrize(
    ("name", "meant"), [("get_rnak", "get_rank"), ("overlap_gradient", "overlap_gradients")]
)
def test_python_still_suggests_what_is_misspelt(name: str, meant: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import asynccoll\nasynccoll.{name}"],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last == f"AttributeError: module 'asynccoll' has no attribute '{name}'. Did you mean: '{meant}'?"
