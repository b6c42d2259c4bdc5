"""A real SLURM cluster of two nodes on this machine, all in one directory.

Tests use `Cluster`: `cluster.call("srun", "-N2", ...)`. Its daemons (Debian's munged, slurmctld and a slurmd
per node) are children of a keeper, which is this file run as a program. The keeper lives until its standard
input is closed, and adopts the orphans of its children, so it can kill every process of the cluster and its
jobs even after the tests were interrupted or killed.

The nodes are named by loopback addresses, which need no host name entry.
"""

from __future__ import annotations

import os
import pwd
import random
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import asynccoll
from asynccoll.launch import child, processes
from patience import patient
from ports import free_ports

NODES = ("127.0.0.1", "127.0.0.2")
START_SECONDS = patient(60)
STOP_SECONDS = patient(20)
PORTS = range(25_000, 32_000, 8)

CONFIGURATION = """\
ClusterName=asynccoll
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
FirstJobId={job}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdSpoolDir={directory}/spool-%n
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# As many processors as the tests ask for, whatever this machine has.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
# Heterogeneous jobs wait for the backfill scheduler.
SchedulerParameters=batch_sched_delay=0,bf_interval=1
NodeName={first} NodeHostname={host} NodeAddr={first} Port={first_port} CPUs=4 Gres=gpu:2
NodeName={second} NodeHostname={host} NodeAddr={second} Port={second_port} CPUs=4 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES State=UP
"""

#: SLURM assigns GPUs by their device files. Any two files will do, since nothing opens them.
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"


@dataclass(frozen=True)
class Ended:
    """The exit code, output and duration of a command."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def said(self) -> str:
        return f"code {self.code} after {self.seconds:.1f} s\n{self.out}\n{self.err}"


class Cluster:
    """The cluster, from its start until `close`."""

    def __init__(self, path: str) -> None:
        self._made = tempfile.mkdtemp(prefix="asynccoll-slurm-")
        self.directory = Path(self._made)
        self.directory.chmod(0o711)  # munged requires that all users can reach its socket
        self._path = path
        self._log = self.directory.joinpath("keeper.log").open("wb")
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, self._made],
            env=self._environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C must reach only the tests; the keeper notices their end
        )
        self._await_ready()

    def call(self, *line: str, timeout: float = 90.0, **variables: str) -> Ended:
        """Run a command with the cluster's configuration, with a time limit."""
        start = time.monotonic()
        done = subprocess.run(
            line,
            env=self._environment(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patient(timeout),
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - start)

    def start(self, *line: str, terminal: int | None = None) -> subprocess.Popen[bytes]:
        """Start a command without waiting for it; it can be signalled, and given a terminal."""
        return subprocess.Popen(
            line,
            env=self._environment({}),
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=self._log if terminal is None else terminal,
            stderr=self._log if terminal is None else terminal,
        )

    def jobs(self) -> list[str]:
        """Return the jobs that are queued or running."""
        return self.call("squeue", "-h", "-o", "%i %T").out.split("\n")[:-1]

    def close(self) -> None:
        """Kill the daemons and whatever still runs on the nodes."""
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(STOP_SECONDS)
        finally:
            self._keeper.kill()
            self._keeper.stdout.close()
            self._log.close()

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return our environment with the package under test and its helpers, without launcher variables."""
        theirs = ("SLURM_", "SBATCH_", "SQUEUE_", "GLOO_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
        search = [str(Path(asynccoll.__file__).parent.parent), str(Path(__file__).parent)]
        return {
            **kept,
            "PATH": self._path,
            "PYTHONPATH": os.pathsep.join([*search, kept.get("PYTHONPATH", "")]),
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            **variables,
        }

    def _await_ready(self) -> None:
        assert self._keeper.stdout is not None
        readable, _, _ = select.select([self._keeper.stdout], [], [], 2 * START_SECONDS)
        said = self._keeper.stdout.readline() if readable else b"nothing at all"
        if said == b"ready\n":
            return
        said += self._keeper.stdout.read() if readable else b""
        self.close()
        raise RuntimeError(f"SLURM does not start: {said.decode(errors='replace')}")


# The keeper


def keep(directory: Path) -> None:
    """Start the cluster, report that, and kill all of it when standard input ends."""
    processes.adopt_orphans()
    try:
        start(directory)
        print("ready", flush=True)
        sys.stdin.buffer.read()
    except Exception as error:
        print(repr(error))
        for log in directory.glob("*.log"):
            print(f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}")
    finally:
        processes.kill_children()
        shutil.rmtree(directory, ignore_errors=True)


def start(directory: Path) -> None:
    """Write the configuration and start the daemons in order, as each needs the previous one."""
    directory.joinpath("state").mkdir()
    key = directory / "munge.key"
    key.touch(0o400)
    key.chmod(0o600)
    key.write_bytes(os.urandom(128))
    directory.joinpath("slurm.conf").write_text(configuration(directory))
    directory.joinpath("gres.conf").write_text(GPUS)
    names = {name: directory / name for name in ("munge.socket", "munge.seed", "munged.pid", "munge.log")}
    munge = ["munged", "-F", "--num-threads=1", f"--key-file={key}", f"--socket={names['munge.socket']}"]
    munge += [f"--seed-file={names['munge.seed']}", f"--pid-file={names['munged.pid']}"]
    running = [daemon(directory, "munged", [*munge, f"--log-file={names['munge.log']}"])]
    until(names["munge.socket"].exists, running)
    running.append(daemon(directory, "slurmctld", ["slurmctld", "-D"]))
    for node in NODES:
        directory.joinpath(f"spool-{node}").mkdir()
        running.append(daemon(directory, f"slurmd-{node}", ["slurmd", "-D", "-N", node]))
    until(lambda: states() == ["idle"] * len(NODES), running)


def configuration(directory: Path) -> str:
    """Return slurm.conf, with free ports."""
    port = free_ports(3, PORTS)
    return CONFIGURATION.format(
        directory=directory,
        host=socket.gethostname().partition(".")[0],
        user=pwd.getpwuid(os.geteuid()).pw_name,
        port=port,
        # Jobs meet at ports that follow from their numbers, and other clusters may run on this machine.
        job=random.SystemRandom().randrange(1, 9_000),
        first=NODES[0],
        first_port=port + 1,
        second=NODES[1],
        second_port=port + 2,
    )


def daemon(directory: Path, name: str, line: list[str]) -> subprocess.Popen[bytes]:
    """Start a daemon in the foreground; it dies with the keeper."""
    program = shutil.which(line[0])
    assert program is not None, f"{line[0]} is not on the path"
    with directory.joinpath(f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, child.__file__, "program", program, *line[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def states() -> list[str]:
    """Return the state of each node according to the controller."""
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, check=False)
    return done.stdout.split()


def until(true, running: list[subprocess.Popen[bytes]]) -> None:
    """Poll until ``true()``, since the daemons do not notify anyone when they are ready."""
    deadline = time.monotonic() + START_SECONDS
    while not true():
        ended = [one.args[3:] for one in running if one.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise TimeoutError(f"not ready after {START_SECONDS:.0f} s, or ended: {ended}")
        time.sleep(0.05)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
