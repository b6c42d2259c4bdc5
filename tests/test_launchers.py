"""One training script under every launcher of torch, on one "host" or two on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import training
from patience import patient
from ports import free_port
from worlds import rank_environment

pytestmark = pytest.mark.slow

TRAINING = str(Path(training.__file__))
LIMIT_S = patient(90)


def launch(*lines: list[str]) -> None:
    """Run the launchers of one job concurrently; all must succeed in time, and leave no process behind."""
    environ = rank_environment()
    del environ["GLOO_SOCKET_IFNAME"]
    running = [
        subprocess.Popen(
            [sys.executable, *line],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for line in lines
    ]
    try:
        said = [one.communicate(timeout=LIMIT_S)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    assert [one.returncode for one in running] == [0] * len(lines), "\n".join(said)
    for one in running:
        with pytest.raises(ProcessLookupError):
            os.killpg(one.pid, 0)


ONE_HOST = {
    "launch": ["-m", "torch.distributed.launch", "--use_env", "--nproc_per_node", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "asynccoll-run": ["-m", "asynccoll", "run", "-n", "2"],
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("launch", "bare"),
        pytest.param("launch", "sync", marks=pytest.mark.nightly),
        pytest.param("torchrun", "parallel", marks=pytest.mark.nightly),
        ("torchrun", "sync"),
        pytest.param("asynccoll-run", "bare", marks=pytest.mark.nightly),
    ],
)
def test_one_host(tmp_path: Path, name: str, how: str) -> None:
    """The ranks find each other through the launcher's variables."""
    port = ["--master_port", str(free_port())] if name == "launch" else []
    launch([*ONE_HOST[name], *port, TRAINING, how, str(tmp_path)])
    training.check(tmp_path, [(0, 0), (0, 1)], backend="gloo")


def by_rendezvous(node: int, port: int) -> list[str]:
    """Agents that settle among themselves which one is the first."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    return ["--nnodes", "2", *where, "--local-addr", "127.0.0.1"]


def by_number(node: int, port: int) -> list[str]:
    """Agents that are given their number."""
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["--nnodes", "2", "--node-rank", str(node), *where]


@pytest.mark.parametrize(
    ("module", "meeting", "how"),
    [
        ("asynccoll run", by_number, "parallel"),
        ("torch.distributed.run", by_rendezvous, "sync"),
    ],
)
def test_two_agents(tmp_path: Path, module: str, meeting, how: str) -> None:
    """Each "host" has one agent with two ranks."""
    port = free_port()
    lines = [["-m", *module.split(), *meeting(node, port), "--nproc-per-node", "2"] for node in (0, 1)]
    launch(*([*line, TRAINING, how, str(tmp_path)] for line in lines))
    training.check(tmp_path, [(0, 0), (0, 1), (1, 0), (1, 1)], backend="gloo")
