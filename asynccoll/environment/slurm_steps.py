"""The place SLURM's srun gave a task, from the variables of its job and step.

The step's own values take precedence over those of the whole job, because a step may use fewer nodes. The
meeting point follows the custom of other tools: the first host, and a port derived from the job's number,
here also from the step's, since steps of one job may run side by side. ``slurm.py`` reads the compressed
notations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from asynccoll.environment.info import LaunchInfo, Variables, checked, with_master
from asynccoll.environment.slurm import expand_tasks_per_node
from asynccoll.errors import LaunchEnvironmentError

#: The first step of a SLURM job meets at this port plus the last four digits of the job's number.
BASE_PORT = 15000
_PORTS = 10_000
#: From one step's port to the next; coprime to the number of ports, so that no port is reused soon.
_STEP = 2003

#: Step numbers from the first on are not steps of srun; the second is that of a shell that salloc opened.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_INTERACTIVE_STEP = 0xFFFFFFFA

#: The variables that every task started by srun has.
REQUIRED = (
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
)

_STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")

#: Turns a host list such as ``n[1-2]`` into the hosts' names.
ExpandHosts = Callable[[str], Sequence[str]]


def placed_by_slurm(variables: Variables) -> bool:
    """Whether SLURM says where this process is, as it does for tasks, not for the shell of an allocation."""
    return variables.all(REQUIRED) and _shell(variables) is None


def _shell(variables: Variables) -> str | None:
    """Say whose shell this is, if it is one that SLURM calls rank 0 of a job whose ranks are not started."""
    step = variables.first(*_STEP_ID)
    if step == _INTERACTIVE_STEP:
        return "the shell that salloc opened for"
    return "the batch script of" if step is None and variables.text("ENVIRONMENT") == "BATCH" else None


def from_slurm(variables: Variables, expand_hosts: ExpandHosts) -> LaunchInfo:
    """Return the place srun gave this task."""
    variables.require(
        "SLURM",
        REQUIRED,
        "Start the script with srun, or unset SLURM_JOB_ID to run it alone in this allocation",
    )
    _refuse_shell(variables)
    nnodes = variables.first("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES") or 1
    world_size = variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 0
    tasks = _tasks_per_node(variables, world_size, nnodes)
    rank, local_rank = variables.integer("SLURM_PROCID"), variables.integer("SLURM_LOCALID")
    node_rank = variables.first("SLURM_NODEID")
    if node_rank is None:
        node_rank = _node_of(rank, tasks)
    here = _tasks_here(variables, tasks[min(node_rank, len(tasks) - 1)])
    info = LaunchInfo(
        "slurm",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=here,
        node_rank=node_rank,
        nnodes=nnodes,
        own_gpus=_has_own_gpus(variables, here),
    )
    of_step = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE")
    named = (*REQUIRED, "SLURM_NODEID", *of_step)
    info = with_master(checked(info, variables, named), variables)
    return _with_slurm_master(info, variables, expand_hosts)


def _refuse_shell(variables: Variables) -> None:
    """Raise in the shell of a job whose ranks have not been started, unless it has one task only."""
    shell = _shell(variables)
    groups = variables.first("SLURM_HET_SIZE") or 1
    if shell is None or (groups == 1 and variables.integer("SLURM_NTASKS") == 1):
        return
    size, parts, srun = "SLURM_NTASKS", "tasks", "srun"
    if groups > 1:
        size, parts = "SLURM_HET_SIZE", "groups of nodes"
        srun = f"srun --het-group={','.join(map(str, range(groups)))}"
    raise LaunchEnvironmentError(
        f"this process was started by {shell} job {variables.text('SLURM_JOB_ID')}, which is for"
        f" {variables.show([size])} {parts}, and not by srun: nothing has started the other ranks. Write"
        f" `{srun} python script.py` there (or unset SLURM_JOB_ID to run it alone)"
    )


def _tasks_per_node(variables: Variables, world_size: int, nnodes: int) -> list[int]:
    """Return how many tasks each node of the step runs."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        text = variables.text(name)
        if text is not None:
            tasks = expand_tasks_per_node(text)
            if len(tasks) == nnodes and sum(tasks) == world_size:
                return tasks
    if world_size % max(nnodes, 1):
        variables.require(
            "SLURM",
            ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"),
            "The tasks do not divide evenly among the nodes, so that variable has to tell how"
            " they are spread; srun sets it",
        )
        raise LaunchEnvironmentError(
            f"the SLURM environment contradicts itself: {world_size} tasks on {nnodes} nodes, but"
            f" {variables.show(('SLURM_STEP_TASKS_PER_NODE', 'SLURM_TASKS_PER_NODE'))}. Start the"
            " script with srun, which sets these together"
        )
    return [world_size // nnodes] * nnodes


def _tasks_here(variables: Variables, counted: int) -> int:
    """Return how many tasks this node runs: ``counted``, but a hetjob orders counts and nodes differently."""
    ids = variables.text("SLURM_GTIDS") if (variables.first("SLURM_HET_SIZE") or 1) > 1 else None
    return len(ids.split(",")) if ids else counted


def _has_own_gpus(variables: Variables, tasks: int) -> bool:
    """Whether each task sees only its own GPUs, as with ``--gpus-per-task``, not all of the node's."""
    if variables.any(("SLURM_GPUS_PER_TASK",)) or "gres/gpu" in (variables.text("SLURM_TRES_PER_TASK") or ""):
        return True
    visible, on_node = variables.text("CUDA_VISIBLE_DEVICES"), variables.first("SLURM_GPUS_ON_NODE")
    return bool(visible and on_node and tasks > 1 and len(visible.split(",")) * tasks <= on_node)


def _node_of(rank: int, tasks: Sequence[int]) -> int:
    """Return the node of ``rank`` where nodes are filled one after the other."""
    for node, count in enumerate(tasks):
        if rank < count:
            return node
        rank -= count
    return len(tasks)


def _with_slurm_master(info: LaunchInfo, variables: Variables, expand_hosts: ExpandHosts) -> LaunchInfo:
    """Meet on the first host of the step, at a port that all tasks derive from the job's number."""
    if info.master_addr is None:
        info = replace(info, master_addr=_first_host(info.rank, variables, expand_hosts))
    if info.master_port is None:
        job, step = variables.integer("SLURM_JOB_ID"), variables.first(*_STEP_ID) or 0
        later = step * _STEP if step < _FIRST_SPECIAL_STEP else 0
        info = replace(info, master_port=BASE_PORT + (job + later) % _PORTS, job=f"slurm {job}.{step}")
    return info


def _first_host(rank: int, variables: Variables, expand_hosts: ExpandHosts) -> str:
    """Return the host of rank 0: the first, but in a step over groups of a hetjob the first group's.

    SLURM counts ranks and nodes group by group, and lists the hosts of all groups by name.
    """
    hosts = expand_hosts(variables.text("SLURM_STEP_NODELIST") or variables.text("SLURM_JOB_NODELIST") or "")
    told = [
        f"SLURM_JOB_NODELIST_HET_GROUP_{index}" for index in range(variables.first("SLURM_HET_SIZE") or 1)
    ]
    groups = [expand_hosts(variables.text(name) or "") for name in told if variables.any([name])]
    for host in itertools.chain.from_iterable(groups):
        if host in hosts:
            return host
    mine = variables.text("SLURMD_NODENAME")
    if rank == 0 and len(told) > 1 and mine in hosts[1:]:
        raise LaunchEnvironmentError(
            f"rank 0 of this hetjob is on {mine}, but all that SLURM tells the other ranks is a list of hosts"
            f" that begins with {hosts[0]}, where they look for it. Set MASTER_ADDR={mine} for all ranks, or"
            " start them with `srun --het-group=0,1` in an allocation, where each group's hosts are told"
        )
    return hosts[0]
