"""Training programs, combined from models, loops, optimizers, and ways to average the gradients.

A program is drawn from tables, run by every rank on its own data, and once more by one process on the data of
all ranks. Both must end with the same parameters, which is all that is ever asserted.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, fields

import torch
from torch import Tensor

import asynccoll as ac
from asynccoll.auto.models import move
from ranks import Rank
from training_helpers import HELPERS, Alone, Helper
from training_loops import LOOPS, Run
from training_models import MODELS, OPTIMIZERS, made, rows

__all__ = ["LOOPS", "Alone", "Program", "differing", "drawn", "makes_sense", "same_as_alone", "trained"]

STEPS = 3
#: Helpers that never block the event loop to wait for other ranks, so two tasks may alternate in any order.
NEVER_BLOCKING = {
    "overlap_gradients",
    "overlap_gradients(op='sum')",
    "overlap_gradients(reduce_dtype)",
    "async_optim",
    "average_parameters",
    "InFlight",
    "prepare",
}
#: Helpers that require the same number of backwards on all ranks, since each backward is a reduction.
_ONE_ROUND_A_BACKWARD = {
    "auto_optim",
    "auto_model",
    "ddp_hook",
    "shard_layers",
    "shard_layers(reshard_after_forward)",
    "shard_layers, two sets",
}
#: Loops in which ranks wait for each other also outside of the gradients, so all ranks must run them.
JOINT = {"coalesced", "chained"}


@dataclass(frozen=True)
class Program:
    """A training program: what is trained, and how.

    `second` is another model that is trained on a separate lane: alternating with the first or, with
    `at_once`, concurrently in another task.
    """

    model: str
    loop: str
    helper: str
    optimizer: str
    second: str | None = None
    at_once: bool = False

    def __str__(self) -> str:
        words = [str(getattr(self, field.name)) for field in fields(self)[:5]]
        return ", ".join([*(word for word in words if word != "None"), *["at once"] * self.at_once])

    @property
    def models(self) -> set[str]:
        return {name for name in (self.model, self.second) if name is not None}


def makes_sense(program: Program, backend: str = "gloo") -> bool:
    """Whether the parts can be combined, according to what torch and the helpers promise."""
    return (
        _may_run_at_once(program)
        and _torch_can(program, backend)
        and _loop_means_the_same(program)
        and _helper_can(program)
    )


def _may_run_at_once(program: Program) -> bool:
    """Whether `at_once` cannot deadlock: ranks whose tasks block the loop in different orders would."""
    possible = program.second is not None and program.helper in NEVER_BLOCKING and program.loop not in JOINT
    return possible or not program.at_once


def _torch_can(program: Program, backend: str) -> bool:
    models, fused = program.models, "fused" in program.optimizer
    if program.loop == "checkpointed" and backend == "xla-tpu":
        return False  # torch.utils.checkpoint only supports torch's own devices, torch_xla's runs in pieces
    if models & {"complex"} and (fused or program.loop in {"scaled", "gradient penalty"}):
        return False
    if models & {"thawed", "unused", "LayerDrop"} and program.optimizer == "SGD fused":
        return False  # requires the momentum of all parameters or of none
    if models & {"shapes"} and (fused or program.loop == "scaled"):
        return False  # torch's kernels refuse the empty tensor
    # The kernels of LSTM and attention have no second derivative.
    return program.loop != "gradient penalty" or not models & {"LSTM", "attention"}


def _loop_means_the_same(program: Program) -> bool:
    """Whether the loop computes the same in one process and in many, up to rounding."""
    models = program.models
    if models & {"bfloat16"}:  # its rounding decides the direction of Adam's steps
        return program.optimizer == "SGD" and program.loop not in {*JOINT, "gradient penalty"}
    if program.loop == "added":
        return program.second is None
    return True


def _helper_can(program: Program) -> bool:
    models, loop, helper = program.models, program.loop, program.helper
    if loop == "uneven" and helper in _ONE_ROUND_A_BACKWARD:
        return False
    some_unused = bool(models & {"unused", "thawed", "freezing", "LayerDrop"})
    if not HELPERS[helper].recovers and loop in {"interrupted", "graph of gradients"}:
        return False
    if "LayerDrop" in models and loop == "graph of gradients" and helper.startswith("shard_layers"):
        return False  # with create_graph, every layer must get gradients on every rank
    match helper:
        case "overlap_gradients(reduce_dtype)":
            return models == {"bfloat16"}
        case "average_parameters":  # local steps: equal only if a step is linear in the gradient
            linear = loop not in {"clipped", "clipped, skipped", "cut short on some", "scaled", "added"}
            return program.optimizer == "SGD" and linear
        case "shard_layers" | "shard_layers(reshard_after_forward)":  # every rank must run all layers
            apart = {"without data", "added", "gradient penalty", "no_sync between"}
            strange = {"unused", "thawed", "freezing", "shapes"}
            zeros = "LayerDrop" not in models or program.optimizer == "SGD"  # not None
            return loop not in apart and not models & strange and zeros
        case "shard_layers, two sets":  # no norm over both sets
            of_both = {"clipped", "clipped, skipped", "cut short on some", "scaled", "interrupted"}
            apart = {"without data", "added", "gradient penalty", "no_sync between", *of_both}
            return loop not in apart and models <= {"deep", "LayerDrop"} and program.optimizer == "SGD"
        case "shard_optimizer" | "shard_optimizer, dropped":
            # Parameters that no rank used have a gradient of zeros, not None.
            return (
                loop != "added"
                and not models & {"thawed", "freezing"}
                and (not some_unused or program.optimizer == "SGD")
            )
        case "ddp_hook" | "auto_model":  # DDP cannot
            apart = {"without data", "gradient penalty", "checkpointed", "added", "no_sync between"}
            strange = {"thawed", "freezing", "bfloat16", "complex"}
            return loop not in apart and not models & strange
        case "InFlight" | "prepare":  # as above
            return not some_unused and not models & {"shapes"} and loop not in {"added", "no_sync on top"}
    return True


def drawn(seed: int, backend: str = "gloo") -> Program:
    """Return the program of that seed; DDP only works on gloo."""
    source = random.Random(seed)
    while True:
        program = Program(
            *(source.choice(list(table)) for table in (MODELS, LOOPS, HELPERS, OPTIMIZERS)),
            second=source.choice(list(MODELS)) if source.random() < 0.2 else None,
            at_once=source.random() < 0.5,
        )
        if makes_sense(program, backend) and (backend == "gloo" or program.helper != "ddp_hook"):
            return program


async def trained(
    program: Program,
    lane: str,
    mine: list[int],
    size: int,
    kind: type[Helper],
    seed: int,
    device: torch.device | None = None,
) -> list[Tensor]:
    """Train for some steps in a process that stands for the ranks in `mine`. Returns the parameters.

    Ranks compute on `device`, by default on `ac.device()`; one process for all ranks computes on the CPU.
    """
    where = (device or ac.device()) if kind.is_rank else torch.device("cpu")
    runs = [
        _begun(program, name, f"{lane} {index}", mine, size, kind, seed, where)
        for index, name in enumerate(filter(None, (program.model, program.second)))
    ]
    if program.at_once:
        await asyncio.gather(*(_steps(program, run, range(STEPS)) for run in runs))
    else:
        for step in range(STEPS):
            for run in runs:
                await _steps(program, run, range(step, step + 1))
    for run in runs:
        await run.helper.closed()
    return [parameter for run in runs for parameter in run.helper.result()]


def _begun(
    program: Program,
    name: str,
    lane: str,
    mine: list[int],
    size: int,
    kind: type[Helper],
    seed: int,
    device: torch.device,
) -> Run:
    """Make a model, its optimizer and its data."""
    dtype = _dtype(program, name)
    model = made(name, seed, dtype)
    move(model, device)
    parameters = list(model.parameters())
    if program.loop == "added":
        if kind.is_rank:
            ac.overlap.broadcast_parameters(model, lane=lane).wait()
        parameters = parameters[: len(parameters) // 2 + 1]

    def batch(step: int, part: int) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for rank in mine:
            idle = _has_no_data(program.loop, rank, size, step, part)
            x = None if idle else rows(rank, step, part).to(device, dtype)
            if x is not None:
                x.rank = rank  # type: ignore[attr-defined]
            found.append(x)
        return found

    return Run(kind(model, OPTIMIZERS[program.optimizer](parameters), lane), batch, size)


def _dtype(program: Program, name: str) -> torch.dtype:
    """Return the model's dtype; the scaler's kernel on XLA does not support float64."""
    if name == "bfloat16":
        return torch.bfloat16
    return torch.float32 if program.loop == "scaled" and ac.device().type == "xla" else torch.float64


async def _steps(program: Program, run: Run, steps: range) -> None:
    for step in steps:
        run.helper.model.at(step)
        run.helper.optimizer.zero_grad()
        await LOOPS[program.loop](run, step)


def _has_no_data(loop: str, rank: int, size: int, step: int, part: int) -> bool:
    """Whether a rank has no data for that part; rank 0 always has."""
    if loop == "without data":
        return step == 1 and rank == size - 1 and size > 1
    return loop == "uneven" and rank > 0 and (rank + step + part) % 2 == 0


def differing(got: list[Tensor], want: list[Tensor]) -> list[str]:
    """Describe the parameters that differ by more than rounding."""
    loose = {torch.bfloat16: 3e-2, torch.float32: 1e-5}
    return [
        f"parameter {index} by {(x - y).abs().max():.3g}"
        for index, (x, y) in enumerate(zip(got, want, strict=True))
        if x.numel() and not torch.allclose(x, y, rtol=1e-9, atol=loose.get(x.dtype, 1e-6))
    ]


async def same_as_alone(
    me: Rank, programs: list[tuple[str, Program]], device: torch.device | None = None
) -> None:
    """Check that each program ends on this rank as in one process; all programs use the same lanes."""
    for label, program in programs:
        me.at(f"{label}: {program}")
        alone = await trained(program, "", list(range(me.size)), me.size, Alone, seed=0)
        try:
            # Every rank starts from different parameters, which the helper sets to those of rank 0.
            kind = HELPERS[program.helper]
            got = await trained(program, "lane", [me.rank], me.size, kind, seed=me.rank, device=device)
        except Exception as error:
            error.add_note(f"in {label}: {program}")
            raise
        wrong = differing(got, alone)
        assert not wrong, f"{label}: {program}: {wrong}"
