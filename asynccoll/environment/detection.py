"""Who started this process, as which rank of how many: a pure function of environment variables.

``detect`` reads a mapping and touches nothing else, so every launcher can be tested from a table.
It must not know about backends or process groups, and it never changes the environment. Launchers
are checked in the order of trust: the torch variables (``asynccoll run`` and torchrun set them),
SLURM, the launchers of MPI libraries, Horovod, TPU; else the process is a world of one. A process with marks
of a launcher that does not say how many ranks there are is refused, never taken for a world of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from asynccoll.environment.info import LaunchInfo, Variables, blockwise, checked, unplaced, with_master
from asynccoll.environment.slurm import expand_hostlist, expand_with_scontrol
from asynccoll.environment.slurm_steps import REQUIRED as SLURM_TASK
from asynccoll.environment.slurm_steps import ExpandHosts, from_slurm, placed_by_slurm
from asynccoll.errors import LaunchEnvironmentError

__all__ = ["MPI_LAUNCHERS", "PLACE", "LaunchInfo", "detect", "detect_here"]

_TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def detect(environ: Mapping[str, str], *, expand_hosts: ExpandHosts = expand_hostlist) -> LaunchInfo:
    """Return the launcher that started this process and the place it gave it.

    ``expand_hosts`` turns a SLURM host list into names.

    Raises:
        LaunchEnvironmentError: variables are missing, unreadable or contradict each other.
    """
    variables = Variables(environ)
    if variables.any(_TORCH):
        if variables.text("SLURM_JOB_ID") and not variables.text("TORCHELASTIC_RUN_ID"):
            return _torch_beside_slurm(variables, expand_hosts)
        return _from_torch(variables)
    if variables.text("SLURM_JOB_ID"):
        return _slurm_or_inner(variables, expand_hosts)
    return _inner(variables) or LaunchInfo("serial")


def detect_here() -> LaunchInfo:
    """Return what ``detect`` finds in this process's environment; SLURM itself expands its host lists."""
    return detect(os.environ, expand_hosts=expand_with_scontrol)


# --- torch variables ------------------------------------------------------------------------


#: Torch variables that say something about the node.
_TORCH_NODE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def _from_torch(variables: Variables) -> LaunchInfo:
    """Return the place given by RANK and WORLD_SIZE, with or without LOCAL_RANK and its siblings."""
    if not variables.any(_TORCH_NODE):
        return _from_bare_torch(variables)
    variables.require(
        "torchrun",
        _TORCH,
        "Set RANK and WORLD_SIZE, and with any of LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK also"
        " LOCAL_RANK, or none of them: `asynccoll run` and torchrun set all; with one process per node"
        " LOCAL_RANK is 0 and LOCAL_WORLD_SIZE is 1",
    )
    rank, local_rank, world_size = (variables.integer(name) for name in _TORCH)
    local_world_size = variables.first("LOCAL_WORLD_SIZE")
    if local_world_size is None:
        # Without it only one node can be meant, and there the two ranks are equal.
        if local_rank != rank:
            variables.require(
                "torchrun",
                (*_TORCH, "LOCAL_WORLD_SIZE"),
                "RANK and LOCAL_RANK differ, so there are several nodes: set LOCAL_WORLD_SIZE to"
                " the number of processes on this one",
            )
        local_world_size = world_size
    named = (*_TORCH, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
    info = blockwise("torchrun", rank, world_size, local_rank, local_world_size)
    node_rank = variables.first("GROUP_RANK", "NODE_RANK")
    info = replace(
        info,
        node_rank=info.node_rank if node_rank is None else node_rank,
        nnodes=variables.first("GROUP_WORLD_SIZE") or info.nnodes,
    )
    return checked(with_master(info, variables), variables, named)


def _from_bare_torch(variables: Variables) -> LaunchInfo:
    """Return the place of a process with no more than torch's ``env://`` needs, as in a Kubernetes job."""
    named = ("RANK", "WORLD_SIZE")
    variables.require(
        "torch", named, "Set both or none; a Kubernetes job sets them with MASTER_ADDR and MASTER_PORT"
    )
    info = unplaced("torchrun", *(variables.integer(name) for name in named))
    return checked(with_master(info, variables), variables, named)


def _torch_beside_slurm(variables: Variables, expand_hosts: ExpandHosts) -> LaunchInfo:
    """Return the place in a SLURM job with torch variables from a container hook or script, not torchrun.

    On one node they take precedence if they ask for at least as many ranks as SLURM started (the task then
    starts more processes itself); on several nodes they have to agree.
    """
    if not placed_by_slurm(variables):
        return _from_torch(variables)
    slurm = from_slurm(variables, expand_hosts)
    theirs = {"RANK": slurm.rank, "LOCAL_RANK": slurm.local_rank, "WORLD_SIZE": slurm.world_size}
    ours = {name: variables.integer(name) for name in _TORCH if variables.any((name,))}
    if slurm.nnodes == 1 and variables.all(_TORCH):
        agrees = all(ours[name] >= theirs[name] for name in ours)
        wanted = "at least SLURM's"
    else:
        agrees = all(ours[name] == theirs[name] for name in ours)
        wanted = "equal to SLURM's"
    if not agrees:
        raise LaunchEnvironmentError(
            f"torch variables contradict SLURM's: given {variables.show(_TORCH)} and "
            f"{variables.show(SLURM_TASK)}; with {slurm.nnodes} node(s) each must be {wanted} ({theirs}). "
            "Unset RANK, LOCAL_RANK and WORLD_SIZE to follow SLURM, or use torchrun"
        )
    if ours == theirs or not variables.all(_TORCH):
        return slurm
    return _from_torch(variables)


# --- SLURM ----------------------------------------------------------------------------------


def _slurm_or_inner(variables: Variables, expand_hosts: ExpandHosts) -> LaunchInfo:
    """Return SLURM's place for this process, unless another launcher placed it within the allocation."""
    if not placed_by_slurm(variables):
        return _inner(variables) or from_slurm(variables, expand_hosts)
    slurm = from_slurm(variables, expand_hosts)
    for launcher in _LAUNCHERS:
        names = launcher.place()
        if not variables.all(names):
            continue
        if slurm.local_world_size == 1 and variables.any(launcher.local_rank):
            # mpiexec has srun start its daemon on each node, which then starts the ranks.
            return _from_launcher(launcher, variables)
        rank, world_size = (variables.integer(name) for name in names)
        if (rank, world_size) != (slurm.rank, slurm.world_size):
            raise LaunchEnvironmentError(
                f"SLURM and {launcher.name} contradict each other: given"
                f" {variables.show(SLURM_TASK)} and {variables.show(names)}. Start the job"
                f" with srun; to run {launcher.command} inside an allocation, start it as"
                " `env -u SLURM_JOB_ID ...`"
            )
    return slurm


# --- launchers that place processes one by one ----------------------------------------------


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables in which one launcher gives rank, size, local rank and local size."""

    name: str
    rank: str
    world_size: str
    #: Alternatives. If a launcher says nothing about the node, the ranks find that out together.
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    command: str
    node_rank: str | None = None
    nnodes: str | None = None

    def place(self) -> tuple[str, str]:
        """Return the two that every place needs."""
        return self.rank, self.world_size

    def local(self) -> tuple[str, ...]:
        """Return those that are only about the node, not the job."""
        return (*self.local_rank, *self.local_world_size)


def _siblings(name: str, prefix: str, command: str) -> _Launcher:
    """Return a launcher whose variables differ in their endings only."""
    return _Launcher(
        name,
        rank=f"{prefix}_RANK",
        world_size=f"{prefix}_SIZE",
        local_rank=(f"{prefix}_LOCAL_RANK",),
        local_world_size=(f"{prefix}_LOCAL_SIZE",),
        command=command,
    )


#: Launchers of programs that use an MPI library. Some also set the variables of others: the first match wins.
_OF_MPI = (
    _siblings("jsrun", "JSM_NAMESPACE", "jsrun"),
    _siblings("openmpi", "OMPI_COMM_WORLD", "Open MPI's mpiexec"),
    _siblings("mvapich", "MV2_COMM_WORLD", "MVAPICH's mpirun_rsh"),
    _siblings("mvapich", "MVP_COMM_WORLD", "MVAPICH's mpirun_rsh"),
    _Launcher(
        "flux",
        rank="FLUX_TASK_RANK",
        world_size="FLUX_JOB_SIZE",
        local_rank=("FLUX_TASK_LOCAL_ID",),
        local_world_size=(),
        command="flux run",
    ),
    _Launcher(
        "mpich",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        command="MPICH's mpiexec",
    ),
)

#: Their names, as in ``LaunchInfo.launcher``.
MPI_LAUNCHERS = frozenset(launcher.name for launcher in _OF_MPI)

_LAUNCHERS = (
    *_OF_MPI,
    replace(
        _siblings("horovod", "HOROVOD", "horovodrun"),
        node_rank="HOROVOD_CROSS_RANK",
        nnodes="HOROVOD_CROSS_SIZE",
    ),
)

#: Marks of launchers that give rank and size to their own library only.
_MUTE = {
    "PMIx": ("PMIX_RANK", "PMIX_NAMESPACE"),
    "PALS": ("PALS_RANKID", "PALS_APID"),
    "aprun": ("ALPS_APP_PE",),
    "mpiexec -pmi-port": ("PMI_ID",),
}

#: Every variable that says where this process is among others.
PLACE: frozenset[str] = frozenset(
    {*_TORCH, *_TORCH_NODE, "NODE_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}
    | {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"}
    | {name for one in _LAUNCHERS for name in (*one.place(), *one.local())}
    | {name for one in _LAUNCHERS for name in (one.node_rank, one.nnodes) if name is not None}
    | {name for marks in _MUTE.values() for name in marks}
)

#: Not marks of a launcher: they remain if ``PMI*`` was removed to start a process alone, and for MPI it then
#: is alone. Torch's LOCAL_WORLD_SIZE and GROUP_RANK likewise remain without RANK, LOCAL_RANK and WORLD_SIZE.
_LEFT_BEHIND = frozenset({"MPI_LOCALRANKID", "MPI_LOCALNRANKS"})


def _inner(variables: Variables) -> LaunchInfo | None:
    """Return the place an MPI launcher, horovodrun or a TPU runtime gave this process, if one did."""
    for launcher in _LAUNCHERS:
        if variables.any(launcher.place()):
            return _from_launcher(launcher, variables)
    for launcher in _LAUNCHERS:
        if variables.any([name for name in launcher.local() if name not in _LEFT_BEHIND]):
            return _from_launcher(launcher, variables)  # which raises, as they are incomplete
    for name, marks in _MUTE.items():
        if variables.any(marks):
            raise LaunchEnvironmentError(
                f"{name} started this process ({variables.show(marks)}), but the environment does not say "
                "how many ranks there are. Set RANK and WORLD_SIZE (and MASTER_ADDR and MASTER_PORT) for "
                "each rank, pass rank= and world_size= to ac.initialize, or start the ranks with mpiexec, "
                "srun or `asynccoll run`"
            )
    return _from_tpu(variables)


def _from_launcher(launcher: _Launcher, variables: Variables) -> LaunchInfo:
    if not launcher.local_world_size or not variables.any(launcher.local()):
        place = launcher.place()
        names = (*place, *(name for name in launcher.local() if variables.any((name,))))
        variables.require(launcher.name, names, f"{launcher.command} sets all of them; unset the stale ones")
        info = unplaced(launcher.name, *(variables.integer(name) for name in place))
        return checked(with_master(info, variables), variables, names)
    local_rank, local_world_size = (
        next((name for name in names if variables.any((name,))), names[0])
        for names in (launcher.local_rank, launcher.local_world_size)
    )
    names = (*launcher.place(), local_rank, local_world_size)
    variables.require(launcher.name, names, f"{launcher.command} sets all of them; unset the stale ones")
    info = blockwise(launcher.name, *(variables.integer(name) for name in names))
    if launcher.node_rank and launcher.nnodes:
        nodes = (launcher.node_rank, launcher.nnodes)
        if variables.all(nodes):
            node_rank, nnodes = (variables.integer(name) for name in nodes)
            info = replace(info, node_rank=node_rank, nnodes=nnodes)
            names += nodes
    return checked(with_master(info, variables), variables, names)


def _from_tpu(variables: Variables) -> LaunchInfo | None:
    """Return a TPU runtime's place: within its list of processes, else as the one process of a TPU host."""
    addresses = variables.text("TPU_PROCESS_ADDRESSES")
    hosts = variables.text("TPU_WORKER_HOSTNAMES")
    if addresses is not None:
        names = ("CLOUD_TPU_TASK_ID", "TPU_PROCESS_ADDRESSES")
        listed = [entry.rpartition(":")[0] or entry for entry in addresses.split(",")]
    elif hosts is not None:
        names = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
        listed = hosts.split(",")
    else:
        on_tpu = variables.text("PJRT_DEVICE") == "TPU"
        return LaunchInfo("tpu") if on_tpu else None
    variables.require("TPU", names, "The TPU runtime sets both; unset the stale one")
    rank = variables.integer(names[0])
    if rank >= len(listed):
        return checked(LaunchInfo("tpu", rank=rank, world_size=len(listed)), variables, names)
    node_names = list(dict.fromkeys(listed))
    info = LaunchInfo(
        "tpu",
        rank=rank,
        world_size=len(listed),
        local_rank=listed[:rank].count(listed[rank]),
        local_world_size=listed.count(listed[rank]),
        node_rank=node_names.index(listed[rank]),
        nnodes=len(node_names),
        master_addr=listed[0],
    )
    return checked(with_master(info, variables), variables, names)
