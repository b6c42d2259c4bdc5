"""What a rank reports when its peer misbehaves: this library compared with those that users migrate from.

    python benchmarks/faults.py                    # the libraries that are installed here, on two ranks
    python benchmarks/faults.py --peers torch asynccoll --faults "kill -9" "other shape"

Each cell of the table is a separate job of two processes. Both make a call and a barrier; then rank 1 does
what the row is named after, and rank 0 makes the call that it expects. Every library that has a timeout is
set to ten seconds; a rank that has reported nothing after thirty is said to hang. A cell says what rank 0 got
(for an extra call: rank 1), after how many seconds, and whether the error names the peer.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

LIMIT, PATIENCE, STARTING = 10.0, 30.0, 120.0


# The libraries, each reduced to the few calls that the cells use


class Torch:
    """``torch.distributed`` on gloo."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
        self.dist, self.rank = dist, dist.get_rank()
        self.other = dist.new_group([0, 1])

    def all_reduce(self, x: torch.Tensor, op: str = "SUM", other: bool = False) -> object:
        self.dist.all_reduce(x, getattr(self.dist.ReduceOp, op), group=self.other if other else None)
        return x

    def broadcast(self, x: torch.Tensor, src: int = 0) -> object:
        self.dist.broadcast(x, src)
        return x

    def gather_objects(self, obj: object) -> object:
        found: list[object] = [None, None]
        self.dist.all_gather_object(found, obj)
        return found

    def barrier(self) -> object:
        return self.dist.barrier()


class Ignite(Torch):
    """``ignite.distributed`` on gloo."""

    def __init__(self) -> None:
        import ignite.distributed as idist

        idist.initialize("gloo", timeout=timedelta(seconds=LIMIT))
        self.idist, self.rank = idist, idist.get_rank()
        self.other = idist.new_group([0, 1])

    def all_reduce(self, x: torch.Tensor, op: str = "SUM", other: bool = False) -> object:
        return self.idist.all_reduce(x, op, group=self.other if other else None)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> object:
        return self.idist.broadcast(x, src)

    def gather_objects(self, obj: object) -> object:
        return self.idist.all_gather(str(obj))

    def barrier(self) -> object:
        return self.idist.barrier()


class Ours:
    """This library as installed; ``memory``: whether the ranks communicate through shared memory."""

    def __init__(self, memory: bool = True) -> None:
        import asynccoll as ac

        ac.initialize("gloo", timeout=LIMIT, memory=memory)
        self.ac, self.rank = ac, ac.get_rank()

    def all_reduce(self, x: torch.Tensor, op: str = "SUM", other: bool = False) -> object:
        return self.ac.all_reduce(x, op=op.lower(), lane="other" if other else None).wait()

    def broadcast(self, x: torch.Tensor, src: int = 0) -> object:
        return self.ac.broadcast(x, src=src).wait()

    def gather_objects(self, obj: object) -> object:
        return self.ac.all_gather_object(obj).wait()

    def barrier(self) -> object:
        return self.ac.barrier().wait()


class Horovod:
    """``horovod.torch``, configured to give up a stalled call."""

    def __init__(self) -> None:
        os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "5"
        os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(int(LIMIT))
        import horovod.torch as hvd

        hvd.init()
        self.hvd, self.rank = hvd, hvd.rank()

    def all_reduce(self, x: torch.Tensor, op: str = "SUM", other: bool = False) -> object:
        return self.hvd.allreduce(x, op={"SUM": self.hvd.Sum, "MAX": self.hvd.Max}[op], name=f"x{other}")

    def broadcast(self, x: torch.Tensor, src: int = 0) -> object:
        return self.hvd.broadcast(x, src, name="x")

    def gather_objects(self, obj: object) -> object:
        return self.hvd.allgather_object(obj)

    def barrier(self) -> object:
        return self.hvd.barrier()


class Mpi4py:
    """``mpi4py``, which has no time limit."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank = self.comm.rank
        self.second = self.comm.Dup()

    def all_reduce(self, x: torch.Tensor, op: str = "SUM", other: bool = False) -> object:
        out = torch.empty_like(x)
        comm = self.second if other else self.comm
        comm.Allreduce(x.numpy(), out.numpy(), getattr(self.mpi, op))
        return out

    def broadcast(self, x: torch.Tensor, src: int = 0) -> object:
        self.comm.Bcast(x.numpy(), src)
        return x

    def gather_objects(self, obj: object) -> object:
        return self.comm.allgather(obj)

    def barrier(self) -> object:
        return self.comm.Barrier()


#: For each library: its calls, the module that must be installed, and further environment variables.
PEERS: dict[str, tuple[Callable[[], Any], str, dict[str, str]]] = {
    "asynccoll": (Ours, "asynccoll", {}),
    "asynccoll, memory=False": (lambda: Ours(memory=False), "asynccoll", {}),
    "torch": (Torch, "torch", {}),
    "torch, DEBUG=DETAIL": (
        Torch,
        "torch",
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_FR_BUFFER_SIZE": "2000"},
    ),
    "ignite": (Ignite, "ignite", {}),
    "horovod": (Horovod, "horovod", {}),
    "mpi4py": (Mpi4py, "mpi4py", {}),
}


# The cells: what rank 0 calls, and what rank 1 does instead


def ones(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def _stopped(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raises(_: Any) -> None:
    raise ArithmeticError("no batch")


def _refuses(lib: Any) -> None:
    with suppress(Exception):
        lib.all_reduce("a string")
    time.sleep(60)


def _late(lib: Any) -> object:
    time.sleep(3)
    return lib.all_reduce(ones())


FAULTS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "kill -9": (lambda lib: lib.all_reduce(ones()), lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    "kill -9, in a barrier": (lambda lib: lib.barrier(), lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    "exit 0": (lambda lib: lib.all_reduce(ones()), lambda _: sys.exit(0)),
    "exit 1": (lambda lib: lib.all_reduce(ones()), lambda _: sys.exit(1)),
    "exception between calls": (lambda lib: lib.all_reduce(ones()), _raises),
    "Ctrl-C": (lambda lib: lib.all_reduce(ones()), lambda _: os.kill(os.getpid(), signal.SIGINT)),
    "SIGSTOP": (lambda lib: lib.all_reduce(ones()), _stopped),
    "skipped call": (lambda lib: lib.all_reduce(ones()), lambda _: time.sleep(60)),
    "skipped barrier": (lambda lib: lib.barrier(), lambda _: time.sleep(60)),
    "skipped call of objects": (lambda lib: lib.gather_objects("x"), lambda _: time.sleep(60)),
    "stuck in native code": (lambda lib: lib.all_reduce(ones()), lambda _: ctypes.PyDLL(None).sleep(60)),
    "refused call": (lambda lib: lib.all_reduce(ones()), _refuses),
    "extra call": (lambda _: time.sleep(60), lambda lib: lib.all_reduce(ones())),
    "another group or lane": (
        lambda lib: lib.all_reduce(ones()),
        lambda lib: lib.all_reduce(ones(), other=True),
    ),
    "other operation": (lambda lib: lib.all_reduce(ones()), lambda lib: lib.broadcast(ones())),
    "other order": (
        lambda lib: (lib.all_reduce(ones()), lib.broadcast(ones() * 5))[0],
        lambda lib: (lib.broadcast(ones() * 7), lib.all_reduce(ones()))[1],
    ),
    "other shape": (lambda lib: lib.all_reduce(ones(4)), lambda lib: lib.all_reduce(ones(5))),
    "other dtype": (
        lambda lib: lib.all_reduce(ones()),
        lambda lib: lib.all_reduce(ones(dtype=torch.int32)),
    ),
    "other reduction": (lambda lib: lib.all_reduce(ones()), lambda lib: lib.all_reduce(ones(), "MAX")),
    "other root": (lambda lib: lib.broadcast(ones(), 0), lambda lib: lib.broadcast(ones() * 3, 1)),
    "objects against a tensor": (
        lambda lib: lib.all_reduce(ones()),
        lambda lib: lib.gather_objects("x"),
    ),
    "three seconds late": (lambda lib: lib.all_reduce(ones()), _late),
}


# One rank


def rank(peer: str, fault: str, told: Path) -> None:
    """Run one rank of a cell, and write down the outcome."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background jobs ignore it
    lib = PEERS[peer][0]()
    lib.all_reduce(ones())
    lib.barrier()
    (told / "met").touch()
    expected, instead = FAULTS[fault]
    begun = time.monotonic()
    try:
        result: object = (instead if lib.rank else expected)(lib)
        text = "returned " + repr(result.tolist() if isinstance(result, torch.Tensor) else result)
    except ArithmeticError:  # raised by the cell itself, to end this rank
        raise
    except Exception as error:  # noqa: BLE001  # the outcome is whatever the library raises
        text = f"{type(error).__name__}: {error}"
    written = told / f"{lib.rank}.new"
    written.write_text(json.dumps([time.monotonic() - begun, text]))
    written.replace(told / f"{lib.rank}")
    os._exit(0) if lib.rank == 0 else time.sleep(60)


# All cells


def _command(peer: str, fault: str, told: Path) -> list[list[str]]:
    own = [sys.executable, __file__, "--rank", peer, fault, str(told)]
    if peer == "mpi4py":
        return [
            [shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec", "-n", "2", *own]
        ]
    if peer == "horovod":
        return [[str(Path(sys.executable).with_name("horovodrun")), "-np", "2", *own]]
    return [own, own]


def cell(peer: str, fault: str, port: int) -> str:
    """Run one cell. Returns its outcome in a few words."""
    watched = "1" if fault == "extra call" else "0"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        told = Path(folder)
        environ = os.environ | PEERS[peer][2] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        commands = _command(peer, fault, told)
        if len(commands) == 1:
            environ = {
                name: value
                for name, value in environ.items()
                if name not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
            }
        processes = [
            subprocess.Popen(
                command,
                env=environ | ({"RANK": str(n), "LOCAL_RANK": str(n)} if len(commands) == 2 else {}),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for n, command in enumerate(commands)
        ]
        try:
            return _outcome(processes, told / watched, int(watched), output)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _outcome(processes: list[subprocess.Popen[bytes]], told: Path, watched: int, output: Any) -> str:
    mine = processes[min(watched, len(processes) - 1)]
    until, have_met = time.monotonic() + STARTING, False
    while time.monotonic() < until:
        if not have_met and told.with_name("met").exists():
            until, have_met = time.monotonic() + PATIENCE, True
        ended = mine.poll()
        if told.exists():
            seconds, text = json.loads(told.read_text())
            if text.startswith("returned"):
                return f"{text}, {seconds:.1f} s"
            names = (
                re.search(rf"\brank:? ?{1 - watched}\b|\[{1 - watched}\]", text, re.IGNORECASE) is not None
            )
            return f"{text.partition(':')[0]}{', names it' if names else ''}, {seconds:.1f} s"
        if ended is not None:
            output.seek(0)
            names = re.search(r"\brank 1\b|<stderr>.*1:", output.read()) is not None
            how = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
            return f"process ended ({how}){', names it' if names else ''}"
        time.sleep(0.05)
    return "hangs" if have_met else "did not start"


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="PEER")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS, metavar="FAULT")
    parser.add_argument("--jobs", type=int, default=3, help="cells at a time")
    parser.add_argument("--port", type=int, default=21000, help="the first port")
    given = parser.parse_args()
    peers = [peer for peer in given.peers if importlib.util.find_spec(PEERS[peer][1])]
    cells = [(peer, fault) for fault in given.faults for peer in peers]
    with ThreadPoolExecutor(given.jobs) as pool:
        found = dict(
            zip(
                cells, pool.map(lambda one: cell(*one[1], given.port + one[0]), enumerate(cells)), strict=True
            )
        )
    print("| rank 1 | " + " | ".join(peers) + " |")
    print("|---" * (len(peers) + 1) + "|")
    for fault in given.faults:
        print(f"| {fault} | " + " | ".join(found[peer, fault] for peer in peers) + " |")


if __name__ == "__main__":
    main()
