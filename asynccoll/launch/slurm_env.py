"""The place SLURM's srun gave a task, out of the variables of its job and step.

The step's own values go before those of the whole job, because a step may use fewer nodes. The
meeting point follows the custom of other tools: the first host, and a port made of the job's
number. The compressed notations are read in ``slurm.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from asynccoll.errors import LaunchEnvironmentError
from asynccoll.launch.info import LaunchInfo, Variables, checked, with_master
from asynccoll.launch.slurm import expand_tasks_per_node

__all__ = ["ExpandHosts", "from_slurm", "placed_by_slurm"]

#: SLURM jobs meet at this port plus the last four digits of the job's number.
BASE_PORT = 15000

#: What every task that srun started has.
REQUIRED = (
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
)

#: Turns a host list such as ``n[1-2]`` into the hosts' names.
ExpandHosts = Callable[[str], Sequence[str]]


def placed_by_slurm(variables: Variables) -> bool:
    """Whether SLURM says where this process is: it does for tasks, not for the shell of an allocation."""
    return variables.all(REQUIRED) and not _in_batch_script(variables)


def _in_batch_script(variables: Variables) -> bool:
    """Whether this is sbatch's own shell, which is told rank 0 of a job that nobody has started yet."""
    return variables.text("ENVIRONMENT") == "BATCH" and not variables.any(("SLURM_STEP_ID", "SLURM_STEPID"))


def from_slurm(variables: Variables, expand_hosts: ExpandHosts) -> LaunchInfo:
    """The place srun gave this task."""
    variables.require(
        "SLURM",
        REQUIRED,
        "Start the script with srun, or unset SLURM_JOB_ID to run it alone in this allocation",
    )
    if _in_batch_script(variables) and variables.integer("SLURM_NTASKS") > 1:
        raise LaunchEnvironmentError(
            f"this process was started by the batch script of job {variables.text('SLURM_JOB_ID')}, which is"
            f" for SLURM_NTASKS={variables.text('SLURM_NTASKS')!r} tasks, and not by srun: nobody has started"
            " the other ranks. Write `srun python script.py` in the batch script (or unset SLURM_JOB_ID to"
            " run it alone)"
        )
    nnodes = variables.first("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES") or 1
    world_size = variables.integer("SLURM_NTASKS")
    tasks = _tasks_per_node(variables, world_size, nnodes)
    rank, local_rank = variables.integer("SLURM_PROCID"), variables.integer("SLURM_LOCALID")
    node_rank = variables.first("SLURM_NODEID")
    if node_rank is None:
        node_rank = _node_of(rank, tasks)
    info = LaunchInfo(
        "slurm",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=tasks[min(node_rank, len(tasks) - 1)],
        node_rank=node_rank,
        nnodes=nnodes,
    )
    named = (*REQUIRED, "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE")
    info = with_master(checked(info, variables, named), variables)
    return _with_slurm_master(info, variables, expand_hosts)


def _tasks_per_node(variables: Variables, world_size: int, nnodes: int) -> list[int]:
    """How many tasks each node of the step runs."""
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


def _node_of(rank: int, tasks: Sequence[int]) -> int:
    """The node of ``rank`` where nodes are filled one after the other."""
    for node, count in enumerate(tasks):
        if rank < count:
            return node
        rank -= count
    return len(tasks)


def _with_slurm_master(info: LaunchInfo, variables: Variables, expand_hosts: ExpandHosts) -> LaunchInfo:
    """Meet on the first host of the step, at a port that all tasks derive from the job's number."""
    address, port = info.master_addr, info.master_port
    if address is None:
        nodes = variables.text("SLURM_STEP_NODELIST") or variables.text("SLURM_JOB_NODELIST") or ""
        address = expand_hosts(nodes)[0]
    if port is None:
        port = BASE_PORT + variables.integer("SLURM_JOB_ID") % 10_000
    return replace(info, master_addr=address, master_port=port)
