"""Launcher detection: environments as tables, and host lists as properties."""

from __future__ import annotations

import dataclasses
import os
import stat
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import asynccoll as ac
from asynccoll.backends import choosing
from asynccoll.environment.slurm import (
    MAX_HOSTS,
    expand_hostlist,
    expand_tasks_per_node,
    expand_with_scontrol,
)
from asynccoll.errors import AsyncCollError, LaunchEnvironmentError
from asynccoll.launch import LaunchInfo, detect

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
}
TORCHRUN_INFO = LaunchInfo("torchrun", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)

SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
}
SLURM_INFO = LaunchInfo("slurm", 3, 4, 1, 2, 1, 2, "n1", 19567, job="slurm 1234567.0")
ONE_NODE = {
    **SLURM,
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
}

#: A task of a step across both groups of a hetjob: srun counts over the whole step.
HETJOB = {
    **SLURM,
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_NODEID": "1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "1234567",
    "SLURM_JOB_ID_HET_GROUP_1": "1234568",
    "SLURM_NTASKS_HET_GROUP_0": "1",
    "SLURM_NTASKS_HET_GROUP_1": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_GTIDS": "1,2",
}
#: The same with the groups' hosts set; the first group is on the second host, and this is rank 0.
HETJOB_FIRST = {
    **HETJOB,
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",  # ordered by the hosts' names, unlike the node number
    "SLURM_GTIDS": "0",
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n1",
}
#: A task of a step on the second group alone.
HET_GROUP = {
    **HETJOB,
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n2",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_GTIDS": "0,1",
}

SLURM_BATCH = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}

DAEMON = {**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
HOROVOD = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}


PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1",
}
FLUX = {"FLUX_TASK_RANK": "2", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "2"}
PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
INTERACTIVE = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": str(0xFFFFFFFA)}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


FOUND = {
    "nothing": ({}, LaunchInfo("serial")),
    "unrelated": ({"PATH": "/bin", "MASTER_ADDR": "h"}, LaunchInfo("serial")),
    "empty-is-unset": ({"RANK": "", "SLURM_JOB_ID": "", "PMI_RANK": ""}, LaunchInfo("serial")),
    "torchrun": (TORCHRUN, TORCHRUN_INFO),
    "asynccoll-run": (
        {**TORCHRUN, **dict(zip(PLACES, "112201", strict=True)), "MASTER_ADDR": "127.0.0.1"},
        LaunchInfo("torchrun", 1, 2, 1, 2, 0, 1, "127.0.0.1", 29500),
    ),
    "torchrun-uneven-nodes": (
        {**TORCHRUN, "RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "1"},
        LaunchInfo("torchrun", 4, 5, 0, 1, 1, 2, "10.0.0.1", 29500),
    ),
    "torch-by-hand": (
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        LaunchInfo("torchrun", 1, 2, 1, 2, 0, 1),
    ),
    "torch-by-hand-two-nodes": (
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        LaunchInfo("torchrun", 3, 4, 1, 2, 1, 2),
    ),
    "kubernetes": (
        PYTORCHJOB,
        LaunchInfo("torchrun", 1, 2, 0, 1, 1, 2, "job-master-0", 23456, placed=False),
    ),
    "kubernetes-one-rank": (
        {**PYTORCHJOB, "RANK": "0", "WORLD_SIZE": "1"},
        LaunchInfo("torchrun", 0, 1, 0, 1, 0, 1, "job-master-0", 23456, placed=False),
    ),
    "kubernetes-before-the-pods-own-launchers": (
        {**PYTORCHJOB, "NODE_RANK": "1", "PET_NNODES": "2"},
        LaunchInfo("torchrun", 1, 2, 0, 1, 1, 2, "job-master-0", 23456, placed=False),
    ),
    "slurm": (SLURM, SLURM_INFO),
    "slurm-second-step": (
        {**SLURM, "SLURM_STEP_ID": "1"},
        dataclasses.replace(SLURM_INFO, master_port=15000 + (1234567 + 2003) % 10_000, job="slurm 1234567.1"),
    ),
    "slurm-later-step-under-its-old-name": (
        {**SLURM, "SLURM_STEPID": "6"},
        dataclasses.replace(
            SLURM_INFO, master_port=15000 + (1234567 + 6 * 2003) % 10_000, job="slurm 1234567.6"
        ),
    ),
    "slurm-step-of-fewer-tasks": (
        {**SLURM, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"},
        SLURM_INFO,
    ),
    "slurm-step-of-one-task-in-an-allocation-of-many": (
        {**ONE_NODE, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"},
        LaunchInfo("slurm", 0, 1, 0, 1, 0, 1, "n1", 19567, job="slurm 1234567.0"),
    ),
    "slurm-pty": (
        {**ONE_NODE, "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "4000", "SLURM_PTY_WIN_COL": "80"},
        LaunchInfo("slurm", 0, 1, 0, 1, 0, 1, "n1", 19567, job="slurm 1234567.0"),
    ),
    "slurm-hetjob": (HETJOB, LaunchInfo("slurm", 2, 3, 1, 2, 1, 2, "n1", 19567, job="slurm 1234567.0")),
    "slurm-hetjob-from-the-second-host": (
        HETJOB_FIRST,
        LaunchInfo("slurm", 0, 3, 0, 1, 0, 2, "n2", 19567, job="slurm 1234567.0"),
    ),
    "slurm-group-of-a-hetjob": (
        HET_GROUP,
        LaunchInfo("slurm", 1, 2, 1, 2, 0, 1, "n2", 19567, job="slurm 1234567.0"),
    ),
    "slurm-gpus-per-task": (
        {**SLURM, "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"},
        dataclasses.replace(SLURM_INFO, own_gpus=True),
    ),
    "slurm-gpus-per-task-as-tres": (
        {**SLURM, "SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1"},
        dataclasses.replace(SLURM_INFO, own_gpus=True),
    ),
    "slurm-each-task-sees-a-part-of-the-gpus": (
        {**SLURM, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0"},
        dataclasses.replace(SLURM_INFO, own_gpus=True),
    ),
    "slurm-each-task-sees-all-gpus": (
        {**SLURM, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
        SLURM_INFO,
    ),
    "jsrun": (JSRUN, LaunchInfo("jsrun", 3, 4, 1, 2, 1, 2)),
    "jsrun-with-spectrum-mpi": (
        {**JSRUN, **OPENMPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        LaunchInfo("jsrun", 3, 4, 1, 2, 1, 2),
    ),
    "mvapich2": (
        {f"MV2_COMM_WORLD_{name}": value for name, value in zip(PLACE, "2402", strict=True)},
        LaunchInfo("mvapich", 2, 4, 0, 2, 1, 2),
    ),
    "mvapich": (
        {f"MVP_COMM_WORLD_{name}": value for name, value in zip(PLACE, "2402", strict=True)},
        LaunchInfo("mvapich", 2, 4, 0, 2, 1, 2),
    ),
    "intel-mpi": (
        {**MPICH, "I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_RANK": "1"},
        LaunchInfo("mpich", 1, 2, 1, 2),
    ),
    "flux": (FLUX, LaunchInfo("flux", 2, 4, 0, 1, 2, 4, placed=False)),
    "flux-with-pmi": (
        {**FLUX, "PMI_RANK": "2", "PMI_SIZE": "4"},
        LaunchInfo("flux", 2, 4, 0, 1, 2, 4, placed=False),
    ),
    "flux-inside-slurm": (
        {**DAEMON, "SLURM_PROCID": "0", **FLUX},
        LaunchInfo("flux", 2, 4, 0, 1, 2, 4, placed=False),
    ),
    "pmi-alone": (
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        LaunchInfo("mpich", 1, 2, 0, 1, 1, 2, placed=False),
    ),
    "pals": (
        {
            "PALS_RANKID": "1",
            "PALS_NODEID": "0",
            "PALS_LOCAL_RANKID": "1",
            "PALS_APID": "x",
            "PMI_RANK": "1",
            "PMI_SIZE": "2",
            "PMI_LOCAL_RANK": "1",
            "PMI_LOCAL_SIZE": "2",
        },
        LaunchInfo("mpich", 1, 2, 1, 2),
    ),
    "srun-with-pmix": ({**SLURM, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1.0"}, SLURM_INFO),
    "openmpi-with-pmix": ({**OPENMPI, "PMIX_RANK": "2"}, LaunchInfo("openmpi", 2, 4, 0, 2, 1, 2)),
    "slurm-short-job-id": (
        {**SLURM, "SLURM_JOB_ID": "7"},
        dataclasses.replace(SLURM_INFO, master_port=15007, job="slurm 7.0"),
    ),
    "slurm-uneven": (
        {
            **SLURM,
            "SLURM_NTASKS": "5",
            "SLURM_PROCID": "4",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "4,1",
        },
        LaunchInfo("slurm", 4, 5, 0, 1, 1, 2, "n1", 19567, job="slurm 1234567.0"),
    ),
    "slurm-cyclic": (
        {**SLURM, "SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"},
        LaunchInfo("slurm", 2, 4, 1, 2, 0, 2, "n1", 19567, job="slurm 1234567.0"),
    ),
    "slurm-step-on-fewer-nodes": (
        {
            **SLURM,
            "SLURM_JOB_NODELIST": "n[1-8]",
            "SLURM_JOB_NUM_NODES": "8",
            "SLURM_STEP_NODELIST": "n[5-6]",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_TASKS_PER_NODE": "1(x8)",
        },
        dataclasses.replace(SLURM_INFO, master_addr="n5"),
    ),
    "slurm-with-chosen-master": (
        {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "29400"},
        dataclasses.replace(SLURM_INFO, master_addr="head", master_port=29400, job=None),
    ),
    "torchrun-inside-slurm": ({**SLURM, **TORCHRUN}, TORCHRUN_INFO),
    "torch-agrees-with-slurm": (
        {**SLURM, "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n9"},
        dataclasses.replace(SLURM_INFO, master_addr="n9"),
    ),
    "torch-partly-beside-slurm": ({**SLURM, "WORLD_SIZE": "4"}, SLURM_INFO),
    "torch-asks-for-more-on-one-node": (
        {**ONE_NODE, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        LaunchInfo("torchrun", 1, 2, 1, 2, 0, 1),
    ),
    "torch-in-an-allocation-shell": (
        {"SLURM_JOB_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        LaunchInfo("torchrun", 1, 2, 1, 2, 0, 1),
    ),
    "mpiexec-in-an-allocation-shell": (
        {"SLURM_JOB_ID": "1", **MPICH},
        LaunchInfo("mpich", 1, 2, 1, 2),
    ),
    "torch-in-a-batch-script": (
        {**SLURM_BATCH, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        LaunchInfo("torchrun", 1, 2, 1, 2, 0, 1),
    ),
    "mpiexec-in-a-batch-script": ({**SLURM_BATCH, **MPICH}, LaunchInfo("mpich", 1, 2, 1, 2)),
    "batch-script-of-one": (
        {**ONE_NODE, "ENVIRONMENT": "BATCH"},
        LaunchInfo("slurm", 0, 1, 0, 1, 0, 1, "n1", 19567, job="slurm 1234567.0"),
    ),
    "srun-in-a-batch-script": ({**SLURM, "ENVIRONMENT": "BATCH", "SLURM_STEP_ID": "0"}, SLURM_INFO),
    "mpich-in-an-allocation": (  # its daemons are SLURM's tasks, one per node
        {**DAEMON, "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        LaunchInfo("mpich", 3, 4, 1, 2, 1, 2),
    ),
    "openmpi-in-an-allocation": (  # the ranks of the first node are not SLURM tasks
        {**DAEMON, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1", **OPENMPI},
        LaunchInfo("openmpi", 2, 4, 0, 2, 1, 2),
    ),
    "srun-with-pmi2": ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, SLURM_INFO),
    "openmpi": (OPENMPI, LaunchInfo("openmpi", 2, 4, 0, 2, 1, 2)),
    "mpich": (MPICH, LaunchInfo("mpich", 1, 2, 1, 2)),
    "cray-pmi": (
        {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"},
        LaunchInfo("mpich", 0, 2, 0, 1, 0, 2),
    ),
    "openmpi-before-pmi": ({**OPENMPI, **MPICH}, LaunchInfo("openmpi", 2, 4, 0, 2, 1, 2)),
    "torch-before-openmpi": ({**TORCHRUN, **OPENMPI}, TORCHRUN_INFO),
    "mpi-with-master": (
        {**MPICH, "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        LaunchInfo("mpich", 1, 2, 1, 2, 0, 1, "h", 1),
    ),
    "horovod": (HOROVOD, LaunchInfo("horovod", 1, 2, 0, 1, 1, 2)),
    "horovod-without-nodes": (
        without(HOROVOD, "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
        LaunchInfo("horovod", 1, 2, 0, 1, 1, 2),
    ),
    "tpu-pod": (
        {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t0,t1"},
        LaunchInfo("tpu", 1, 2, 0, 1, 1, 2, "t0"),
    ),
    "tpu-processes": (
        {"CLOUD_TPU_TASK_ID": "3", "TPU_PROCESS_ADDRESSES": "a:1,a:2,b:1,b:2"},
        LaunchInfo("tpu", 3, 4, 1, 2, 1, 2, "a"),
    ),
    "tpu-alone": ({"PJRT_DEVICE": "TPU"}, LaunchInfo("tpu")),
    # How users start a process of a job as a world of one: the variables that are left say nothing.
    "torchrun-without-the-three-that-are-all-or-none": (
        without(TORCHRUN, "RANK", "LOCAL_RANK", "WORLD_SIZE"),
        LaunchInfo("serial"),
    ),
    "srun-without-the-job": (without(SLURM, "SLURM_JOB_ID"), LaunchInfo("serial")),
    "mpiexec-without-pmi": (without(MPICH, "PMI_RANK", "PMI_SIZE"), LaunchInfo("serial")),
    # MVAPICH's variable to choose a GPU, set by hand from SLURM's.
    "local-rank-of-mvapich-beside-srun": ({**SLURM, "MV2_COMM_WORLD_LOCAL_RANK": "1"}, SLURM_INFO),
    "local-rank-of-another-launcher": (
        {**MPICH, "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        LaunchInfo("mpich", 1, 2, 1, 2),
    ),
}


@pytest.mark.parametrize(("environ", "expected"), FOUND.values(), ids=FOUND)
def test_a_process_learns_its_place(environ, expected):
    assert detect(environ) == expected


REFUSED = {
    "torch-without-local-rank": (
        without(TORCHRUN, "LOCAL_RANK"),
        ["RANK='5'", "WORLD_SIZE='8'", "missing LOCAL_RANK"],
    ),
    "torch-world-size-alone": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE='2'", "missing RANK", "Set both or none"]),
    "torch-rank-alone": ({"RANK": "0", "MASTER_ADDR": "h"}, ["RANK='0'", "missing WORLD_SIZE"]),
    "torch-local-rank-alone": (
        {"LOCAL_RANK": "0"},
        ["missing RANK, WORLD_SIZE", "with one process per node LOCAL_RANK is 0 and LOCAL_WORLD_SIZE is 1"],
    ),
    "kubernetes-rank-too-big": ({**PYTORCHJOB, "RANK": "2"}, ["RANK='2'", "rank 2 of 2"]),
    "kubernetes-empty-world": ({**PYTORCHJOB, "WORLD_SIZE": "0"}, ["WORLD_SIZE='0'"]),
    "slurm-interactive-shell": (
        INTERACTIVE,
        ["shell that salloc opened for job 1234567", "SLURM_NTASKS='4'", "srun python"],
    ),
    "pmix-alone": (
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"},
        ["PMIx started this process (PMIX_RANK='0', PMIX_NAMESPACE='job')", "how many", "mpiexec"],
    ),
    "pals-without-pmi": ({"PALS_RANKID": "0"}, ["PALS started this process", "RANK and WORLD_SIZE"]),
    "aprun": ({"ALPS_APP_PE": "0"}, ["aprun started this process", "ALPS_APP_PE='0'"]),
    "mpiexec-with-pmi-port": (  # as MPICH sets them
        {"PMI_ID": "1", "PMI_PORT": "n1:38611", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        ["mpiexec -pmi-port started this process (PMI_ID='1')", "how many ranks"],
    ),
    "jsrun-partly": (without(JSRUN, "JSM_NAMESPACE_SIZE"), ["missing JSM_NAMESPACE_SIZE", "jsrun sets"]),
    "mvapich-partly": ({"MV2_COMM_WORLD_RANK": "0"}, ["missing MV2_COMM_WORLD_SIZE", "mpirun_rsh"]),
    "flux-partly": ({"FLUX_TASK_RANK": "0"}, ["missing FLUX_JOB_SIZE", "flux run"]),
    "flux-against-slurm": ({**SLURM, **FLUX}, ["SLURM_PROCID='3'", "FLUX_TASK_RANK='2'", "contradict"]),
    "torch-nodes-unknown": (
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        ["missing LOCAL_WORLD_SIZE"],
    ),
    "torch-rank-too-big": ({**TORCHRUN, "RANK": "8"}, ["RANK='8'", "rank 8 of 8"]),
    "torch-node-too-small": ({**TORCHRUN, "LOCAL_RANK": "4"}, ["local rank 4 of 4"]),
    "torch-node-bigger-than-job": (
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
        ["LOCAL_WORLD_SIZE='9'"],
    ),
    "torch-not-a-number": ({**TORCHRUN, "RANK": "one"}, ["RANK='one'", "decimal"]),
    "torch-negative": ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'"]),
    "torch-port-too-big": ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT='70000'", "up to 65535"]),
    "torch-too-many-digits": ({**TORCHRUN, "WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE='99", "decimal"]),
    "torch-bad-port": ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
    "slurm-batch-shell": (
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"},
        ["given SLURM_JOB_ID='1'", "missing SLURM_PROCID", "srun"],
    ),
    "slurm-batch-script": (
        SLURM_BATCH,
        ["batch script of job 1234567", "SLURM_NTASKS='4'", "srun python"],
    ),
    "slurm-hetjob-that-does-not-say-where-its-groups-are": (
        {name: value for name, value in HETJOB_FIRST.items() if "NODELIST_HET" not in name},
        ["rank 0 of this hetjob is on n2", "begins with n1", "Set MASTER_ADDR=n2"],
    ),
    "slurm-batch-script-of-a-hetjob": (
        {**ONE_NODE, "ENVIRONMENT": "BATCH", "SLURM_HET_SIZE": "2"},
        ["batch script of job 1234567", "for SLURM_HET_SIZE='2' groups", "`srun --het-group=0,1 python"],
    ),
    "slurm-uneven-and-silent": (
        {**SLURM, "SLURM_NTASKS": "5"},
        ["missing SLURM_STEP_TASKS_PER_NODE"],
    ),
    "slurm-uneven-and-wrong": (
        {**SLURM, "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        ["5 tasks on 2 nodes", "SLURM_STEP_TASKS_PER_NODE='2(x2)'"],
    ),
    "slurm-rank-too-big": ({**SLURM, "SLURM_PROCID": "4"}, ["rank 4 of 4"]),
    "slurm-bad-hosts": ({**SLURM, "SLURM_JOB_NODELIST": "n[2-1]"}, ["n[2-1]", "backwards"]),
    "slurm-bad-tasks": ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x"}, ["'2x'", "2(x3),1"]),
    "slurm-against-torch": (
        {**SLURM, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
        ["RANK='0'", "SLURM_PROCID='3'", "equal to SLURM's"],
    ),
    "slurm-against-part-of-torch": ({**SLURM, "WORLD_SIZE": "8"}, ["WORLD_SIZE='8'"]),
    "torch-asks-for-less-on-one-node": (
        {**ONE_NODE, "SLURM_NTASKS": "2", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        ["WORLD_SIZE='1'", "at least SLURM's"],
    ),
    "slurm-against-openmpi": ({**SLURM, **OPENMPI}, ["SLURM_PROCID='3'", "RANK='2'", "env -u"]),
    "openmpi-partly": (
        without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ["OMPI_COMM_WORLD_RANK='2'", "missing OMPI_COMM_WORLD_LOCAL_SIZE"],
    ),
    "jsrun-local-alone": (
        {"JSM_NAMESPACE_LOCAL_RANK": "0"},
        ["given JSM_NAMESPACE_LOCAL_RANK='0'", "missing JSM_NAMESPACE_RANK, JSM_NAMESPACE_SIZE"],
    ),
    "openmpi-local-alone": (
        without(OPENMPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ["given OMPI_COMM_WORLD_LOCAL_RANK='0'", "missing OMPI_COMM_WORLD_RANK", "unset the stale ones"],
    ),
    "mvapich2-local-alone": ({"MV2_COMM_WORLD_LOCAL_RANK": "0"}, ["missing MV2_COMM_WORLD_RANK"]),
    "mvapich-local-alone": ({"MVP_COMM_WORLD_LOCAL_SIZE": "2"}, ["missing MVP_COMM_WORLD_RANK"]),
    "flux-local-alone": (
        {"FLUX_TASK_LOCAL_ID": "0"},
        ["given FLUX_TASK_LOCAL_ID='0'", "missing FLUX_TASK_RANK, FLUX_JOB_SIZE"],
    ),
    "cray-pmi-local-alone": (
        {"PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "2"},
        ["given PMI_LOCAL_RANK='0', PMI_LOCAL_SIZE='2'", "missing PMI_RANK, PMI_SIZE"],
    ),
    "horovod-local-alone": (
        {"HOROVOD_LOCAL_RANK": "0"},
        ["given HOROVOD_LOCAL_RANK='0'", "missing HOROVOD_RANK, HOROVOD_SIZE"],
    ),
    "pmi-size-alone": ({"PMI_SIZE": "2"}, ["missing PMI_RANK"]),
    "horovod-partly": (without(HOROVOD, "HOROVOD_SIZE"), ["missing HOROVOD_SIZE"]),
    "tpu-without-id": ({"TPU_WORKER_HOSTNAMES": "a,b"}, ["missing TPU_WORKER_ID"]),
    "tpu-id-too-big": (
        {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "a,b"},
        ["TPU_WORKER_ID='2'", "rank 2 of 2"],
    ),
}


@pytest.mark.parametrize(("environ", "texts"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_true_is_refused_by_name(environ, texts):
    with pytest.raises(LaunchEnvironmentError) as caught:
        detect(environ)
    assert isinstance(caught.value, AsyncCollError)
    assert isinstance(caught.value, ValueError)
    for text in texts:
        assert text in str(caught.value)


NOWHERE = {
    "no-address": ({"MASTER_PORT": "29500"}, "MASTER_ADDR=unset, MASTER_PORT=29500"),
    "no-port": ({"MASTER_ADDR": "n1"}, "MASTER_ADDR=n1, MASTER_PORT=unset"),
    "any-port": ({"MASTER_ADDR": "n1", "MASTER_PORT": "0"}, "MASTER_ADDR=n1, MASTER_PORT=unset"),
    "neither": ({}, "MASTER_ADDR=unset, MASTER_PORT=unset"),
}


@pytest.mark.parametrize(("meeting", "text"), NOWHERE.values(), ids=NOWHERE)
@pytest.mark.parametrize("place", [{}, {"LOCAL_RANK": "1"}], ids=["bare", "placed"])
def test_ranks_that_do_not_know_where_they_meet_are_refused(monkeypatch, place, meeting, text):
    """The error says what the rank was told, and what to do; a single rank meets no other."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **place, **meeting}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchEnvironmentError) as caught:
        ac.initialize("gloo")
    assert f"rank 1 of 2 does not know where the ranks meet: {text}; set both" in str(caught.value)
    assert "asynccoll run" in str(caught.value)
    assert not ac.is_initialized()


@pytest.mark.parametrize(
    ("launch", "gpus", "backend"),
    [
        (LaunchInfo("slurm", 1, 4, 1, 4, own_gpus=True), 1, "nccl"),
        (LaunchInfo("slurm", 1, 4, 1, 4), 4, "nccl"),
        (LaunchInfo("slurm", 1, 4, 1, 4), 1, "gloo"),
        (LaunchInfo("slurm", 1, 4, 1, 4, own_gpus=True), 0, "gloo"),
    ],
    ids=["one-of-its-own", "one-for-each", "one-for-all", "none"],
)
def test_nccl_is_chosen_where_each_rank_has_a_gpu(monkeypatch, launch, gpus, backend):
    """With ``srun --gpus-per-task=1`` each rank sees only its own GPU; there are as many GPUs as ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert choosing._choose(launch) == backend


def test_detection_leaves_the_environment_alone_and_asks_the_given_expander():
    environ = dict(SLURM)
    asked = []

    def expand(text):
        asked.append(text)
        return ["first", "second"]

    assert detect(environ, expand_hosts=expand).master_addr == "first"
    assert asked == ["n[1-2]"]
    assert environ == SLURM


@given(st.dictionaries(st.sampled_from([*TORCHRUN, *SLURM, *OPENMPI, *MPICH, *HOROVOD, *JSRUN, *FLUX]),
                       st.sampled_from(["", "0", "1", "2", "4", "x", "n[1-2]"])))  # fmt: skip
def test_any_environment_gives_a_possible_place_or_a_typed_error(environ):
    try:
        info = detect(environ)
    except LaunchEnvironmentError:
        return
    assert 0 <= info.rank < info.world_size
    assert 0 <= info.local_rank < info.local_world_size <= info.world_size
    assert 0 <= info.node_rank < info.nnodes


# --- host lists -----------------------------------------------------------------------------

HOSTLISTS = {
    "n1": ["n1"],
    "n1,m2": ["n1", "m2"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[08-10]": ["n08", "n09", "n10"],
    "n[1,3,5-6]": ["n1", "n3", "n5", "n6"],
    "n[3,1]": ["n3", "n1"],
    "n[1-2]-ib,login": ["n1-ib", "n2-ib", "login"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
    "[1-2]": ["1", "2"],
    " a , b ": ["a", "b"],
    "gpu-a-[7]": ["gpu-a-7"],
}


@pytest.mark.parametrize(("text", "hosts"), HOSTLISTS.items(), ids=list(HOSTLISTS))
def test_host_lists_expand_in_order(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "n[", "n]", "n[1-]", "n[]", "n[a-b]", "n[2-1]", "n[[1]]", "n1,,n2", "a b",
     f"n[1-{MAX_HOSTS + 1}]", "n[0-9999]m[0-9999]"],
)  # fmt: skip
def test_malformed_host_lists_are_refused_with_the_text(text):
    with pytest.raises(LaunchEnvironmentError, match="host list"):
        expand_hostlist(text)


names = st.text(string.ascii_lowercase + "-", min_size=1, max_size=5)
ranges = st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(1, 4))


@st.composite
def hostlists(draw):
    """Draw a host list and what it stands for, computed by the simplest means."""
    texts, expected = [], []
    for prefix in draw(st.lists(names, min_size=1, max_size=4)):
        groups = draw(st.lists(st.lists(ranges, min_size=1, max_size=3), max_size=2))
        text, hosts = prefix, [prefix]
        for group in groups:
            written, numbers = [], []
            for first, more, width in group:
                last = first + more
                written.append(f"{first:0{width}}" + (f"-{last:0{width}}" if more else ""))
                pad = max(width, len(str(first)))
                numbers += [f"{number:0{pad}}" for number in range(first, last + 1)]
            text += f"[{','.join(written)}]"
            hosts = [host + number for host in hosts for number in numbers]
        texts.append(text)
        expected += hosts
    return ",".join(texts), expected


@given(hostlists())
def test_host_lists_expand_as_counted_by_hand(case):
    text, expected = case
    assert expand_hostlist(text) == expected


@given(st.text("n[]-,0123456789 ", max_size=20))
def test_any_text_gives_hosts_or_a_typed_error(text):
    try:
        hosts = expand_hostlist(text)
    except LaunchEnvironmentError:
        return
    assert hosts
    assert not any(set("[], ") & set(host) for host in hosts)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=6))
def test_tasks_per_node_expand_as_counted_by_hand(runs):
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in runs)
    assert expand_tasks_per_node(text) == [t for t, nodes in runs for _ in range(nodes)]


def fake_scontrol(directory, body):
    path = directory / "scontrol"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"{directory}{os.pathsep}/bin{os.pathsep}/usr/bin"


def test_scontrol_is_asked_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_scontrol(tmp_path, 'echo "$1-$2-$3"; echo other'))
    assert expand_with_scontrol("n[1-2]") == ["show-hostnames-n[1-2]", "other"]


@pytest.mark.parametrize("body", ["exit 1", "true"])
def test_a_scontrol_that_fails_is_replaced_by_the_parser(tmp_path, monkeypatch, body):
    monkeypatch.setenv("PATH", fake_scontrol(tmp_path, body))
    assert expand_with_scontrol("n[1-2]") == ["n1", "n2"]


def test_without_scontrol_the_parser_does_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert expand_with_scontrol("n[1-2]") == ["n1", "n2"]
