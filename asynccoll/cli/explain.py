"""``asynccoll explain``: what a collective would do on a backend, and why."""

from __future__ import annotations

import argparse

from asynccoll.cli.common import Commands, at_least
from asynccoll.cli.output import add_json, print_json
from asynccoll.errors import InvalidArgumentError


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "explain",
        help="show what a collective would do on a backend, and why",
        example="asynccoll explain all_reduce --shape 4,4 --dtype bfloat16 --backend mpi",
    )
    parser.add_argument("operation", help="all_reduce, all_gather, reduce_scatter ...")
    parser.add_argument("--shape", default="", metavar="N,N,...", help="empty: a single number")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="default float32")
    parser.add_argument("--reduce-op", "--op", default="sum", metavar="NAME", help="default sum")
    parser.add_argument("--backend", default="gloo", metavar="NAME", help="default gloo")
    parser.add_argument("--world-size", type=at_least(1), default=2, metavar="N", help="default 2")
    parser.add_argument(
        "--nodes", type=at_least(1), default=1, metavar="N", help="with equally many ranks each, default 1"
    )
    parser.add_argument("--device", metavar="NAME", help="default cuda for nccl, xla for xla-tpu, else cpu")
    parser.add_argument("--check", action="store_true", help="with check='full'")
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether the ranks of a host share memory (ac.initialize(memory=...)); by default they do",
    )
    add_json(parser)
    parser.set_defaults(carry_out=_explain)


def _explain(given: argparse.Namespace) -> int:
    from asynccoll.backends.table import usual_device
    from asynccoll.ops.explaining import explain_offline

    plan = explain_offline(
        given.operation,
        backend=given.backend,
        world_size=given.world_size,
        shape=_shape(given.shape),
        dtype=given.dtype,
        device=given.device or usual_device(given.backend),
        op=given.reduce_op,
        check=given.check,
        memory=given.memory,
        nodes=given.nodes,
    )
    if given.json:
        print_json(
            {
                "operation": plan.op.value,
                "backend": plan.backend,
                "native": plan.native,
                "via": plan.via,
                "wire": plan.wire.name.lower(),
                "why": list(plan.why),
            }
        )
        return 0
    print(plan)
    if plan.backend == "memory":
        print(f"  - {given.backend} has it between hosts (--nodes 2) and without memory (--no-memory)")
    return 0


def _shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as ``4,4``; an empty text is the shape of a single number."""
    try:
        shape = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        shape = (-1,)
    if any(extent < 0 for extent in shape):
        raise InvalidArgumentError(
            f"shape {text!r} cannot be read; expected sizes separated by commas, such as 4,4"
        )
    return shape
