"""The mpi backend compared with bare mpi4py and with gloo, and how much of its communication is hidden.

Run it with plain python where mpi4py and an MPI library are installed: ``python benchmarks/mpi_latency.py``.
It starts two ranks on mpi and two on gloo, which run until the end. This process makes one pair work at a
time, in an order that changes from round to round, and compares within a round. It prints

(a) ``ac.all_reduce(x, out=x)`` (``wait()`` and ``await``) and the functional ``ac.all_reduce(x)`` against
    ``comm.Iallreduce(IN_PLACE, buffer).Wait()`` of bare mpi4py on the same memory, given as a NumPy view
    made beforehand and as the tensor itself;
(b) the same call on mpi and on gloo, through ``ac`` alone;
(c) the hidden fraction of a 16 MiB all_reduce, with the processor time it takes: while the main thread
    is off the processor (as with a device), and while it computes half of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

import asynccoll as ac
from asynccoll.launch import mpiexec

SIZES = {"4 B": 4, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
HIDDEN_BYTES = 16 << 20
OVERLAPPED = 5


def operations(size_bytes: int) -> int:
    """Return how many operations to time together: some milliseconds' worth."""
    return 200 if size_bytes <= 4096 else 100 if size_bytes <= 65536 else 20 if size_bytes <= 1 << 20 else 3


# ---------------------------------------------------------------- a rank


class Rank:
    """Executes the driver's requests; all ranks of a pair get the same request at the same time."""

    def __init__(self) -> None:
        self.buffers: dict[int, torch.Tensor] = {}
        self.bare: Any = None

    def buffer(self, size_bytes: int) -> torch.Tensor:
        if size_bytes not in self.buffers:
            self.buffers[size_bytes] = torch.zeros(size_bytes // 4)
        return self.buffers[size_bytes]

    def timed(self, peer: str, size_bytes: int) -> float:
        """Return the seconds per operation."""
        x, count = self.buffer(size_bytes), operations(size_bytes)
        ac.barrier().wait()
        if peer == "await":
            return asyncio.run(self._awaited(x, count)) / count
        call = self._peer(peer, x)
        call()
        start = perf_counter()
        for _ in range(count):
            call()
        return (perf_counter() - start) / count

    async def _awaited(self, x: torch.Tensor, count: int) -> float:
        await ac.all_reduce(x, out=x)
        start = perf_counter()
        for _ in range(count):
            await ac.all_reduce(x, out=x)
        return perf_counter() - start

    def _peer(self, peer: str, x: torch.Tensor) -> Callable[[], object]:
        if peer == "in place":
            return lambda: ac.all_reduce(x, out=x).wait()
        if peer == "functional":
            return lambda: ac.all_reduce(x).wait()
        from mpi4py import MPI

        if self.bare is None:
            self.bare = MPI.COMM_WORLD.Dup()
        bare, view = self.bare, x.numpy()
        if peer == "bare tensor":
            return lambda: bare.Iallreduce(MPI.IN_PLACE, x).Wait()
        return lambda: bare.Iallreduce(MPI.IN_PLACE, view).Wait()

    def hidden(self, how: str, size_bytes: int) -> tuple[float, float, float]:
        """Return the hidden fraction, and the processor seconds of an overlapped and a blocking operation.

        All are averages over a few operations.
        """
        x = self.buffer(size_bytes)
        ac.all_reduce(x, out=x).wait()
        ac.barrier().wait()
        used, start = process_time(), perf_counter()
        for _ in range(OVERLAPPED):
            ac.all_reduce(x, out=x).wait()
        alone = (perf_counter() - start) / OVERLAPPED
        alone_processor = (process_time() - used) / OVERLAPPED
        own = off_processor if how == "off the processor" else half_load
        own_seconds = 1.5 * alone
        ac.barrier().wait()
        own_used, start = process_time(), perf_counter()
        for _ in range(OVERLAPPED):
            own(own_seconds)
        own_alone = (perf_counter() - start) / OVERLAPPED
        own_processor = (process_time() - own_used) / OVERLAPPED
        # The first one is not timed: after a series of blocking ones it is not expected to run undisturbed.
        for turn in range(OVERLAPPED + 1):
            if turn == 1:
                ac.barrier().wait()
                used, start = process_time(), perf_counter()
            work = ac.all_reduce(x, out=x)
            own(own_seconds)
            work.wait()
        both = (perf_counter() - start) / OVERLAPPED
        processor = (process_time() - used) / OVERLAPPED - own_processor
        return 1.0 - max(0.0, both - own_alone) / alone, processor, alone_processor


def off_processor(seconds: float) -> None:
    """Sleep, as a main thread does while a device computes."""
    time.sleep(seconds)


def half_load(seconds: float) -> None:
    """Compute half of the time, in slices of a quarter of a millisecond."""
    a = torch.ones(64, 64)
    end = perf_counter() + seconds
    while (now := perf_counter()) < end:
        while perf_counter() < now + 2.5e-4:
            a @ a  # only to keep the processor busy
        time.sleep(2.5e-4)


def rank_main(address: str, backend: str) -> None:
    torch.set_num_threads(1)
    with Client(address, "AF_UNIX") as driver:
        ac.initialize(backend)
        me = Rank()
        driver.send(ac.get_rank())
        while (asked := driver.recv()) is not None:
            name, *args = asked
            driver.send(getattr(me, name)(*args))
        ac.finalize()


# ---------------------------------------------------------------- the driver


class Pair:
    """Two ranks on one backend."""

    def __init__(self, backend: str, directory: Path) -> None:
        address = str(directory / backend)
        program = [sys.executable, __file__, "--rank", address, backend]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if backend == "mpi":
            launcher = mpiexec.find()
            line, environ = launcher.command(2, program), launcher.environment(environ)
        else:
            line = [sys.executable, "-m", "asynccoll", "run", "-n", "2", *program[1:]]
        with Listener(address, "AF_UNIX") as listener:
            self.launcher = subprocess.Popen(line, env=environ)
            found = [listener.accept() for _ in range(2)]
        self.ranks: list[Connection] = [one for _, one in sorted((one.recv(), one) for one in found)]

    def ask(self, *what: Any) -> list[Any]:
        """Send a request to both ranks. Returns their answers."""
        for rank in self.ranks:
            rank.send(what)
        return [rank.recv() for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.send(None)
        self.launcher.wait(30)


def compare(
    pairs: dict[str, Pair], peers: list[tuple[str, str]], size_bytes: int, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds per operation of each (pair, peer): the slower rank's, one entry per round."""
    order, series = random.Random(0), {peer: [] for peer in peers}  # noqa: S311  # not a secret
    turns = list(peers)
    for _ in range(rounds):
        order.shuffle(turns)
        for pair, peer in turns:
            series[pair, peer].append(max(pairs[pair].ask("timed", peer, size_bytes)))
    return series


def ratio(mine: list[float], theirs: list[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def us(seconds: list[float]) -> str:
    """Format the median and the tenth percentile in microseconds."""
    low = sorted(seconds)[len(seconds) // 10]
    return f"{statistics.median(seconds) * 1e6:.1f} ({low * 1e6:.1f})"


def against_bare(pairs: dict[str, Pair], rounds: int) -> None:
    print(
        "\n(a) all_reduce, two ranks, us: median (tenth percentile); ratio and extra us of in place to bare"
    )
    names = ["bare view", "bare tensor", "in place", "await", "functional"]
    print(f"{'size':>7} " + " ".join(f"{name:>18}" for name in names) + f" {'to view':>12} {'to tensor':>12}")
    for label, size_bytes in SIZES.items():
        found = compare(pairs, [("mpi", name) for name in names], size_bytes, rounds)
        ours = found["mpi", "in place"]
        cells = [f"{us(found['mpi', name]):>18}" for name in names]
        for bare in (found["mpi", "bare view"], found["mpi", "bare tensor"]):
            extra = statistics.median(a - b for a, b in zip(ours, bare, strict=True)) * 1e6
            cells.append(f"{ratio(ours, bare):>5.2f} {extra:>+6.1f}")
        print(f"{label:>7} " + " ".join(cells), flush=True)


def against_gloo(pairs: dict[str, Pair], rounds: int) -> None:
    print("\n(b) the same call on mpi and gloo, us: median (tenth percentile); gloo's time over mpi's")
    print(f"{'size':>7} {'mpi in place':>20} {'gloo in place':>20} {'factor':>7} {'functional':>11}")
    for label, size_bytes in SIZES.items():
        peers = [(pair, peer) for pair in ("mpi", "gloo") for peer in ("in place", "functional")]
        found = compare(pairs, peers, size_bytes, rounds)
        factors = [ratio(found["gloo", peer], found["mpi", peer]) for peer in ("in place", "functional")]
        cells = " ".join(f"{us(found[pair, 'in place']):>20}" for pair in ("mpi", "gloo"))
        print(f"{label:>7} {cells} {factors[0]:>7.1f} {factors[1]:>11.1f}", flush=True)


def how_much_is_hidden(pairs: dict[str, Pair], rounds: int) -> None:
    print("\n(c) 16 MiB all_reduce: part hidden (median, lowest tenth), processor ms per operation and rank")
    print(f"{'main thread':>20} {'backend':>8} {'hidden':>14} {'overlapped':>11} {'blocking':>9}")
    for how in ("off the processor", "half load"):
        series: dict[str, list[Any]] = {name: [] for name in pairs}
        for _ in range(rounds):
            for name, pair in pairs.items():
                series[name] += pair.ask("hidden", how, HIDDEN_BYTES)
        for name, found in series.items():
            parts, beside, alone = ([one[i] for one in found] for i in range(3))
            low = sorted(parts)[len(parts) // 10]
            print(
                f"{how:>20} {name:>8} {statistics.median(parts):>7.2f} {low:>6.2f} "
                f"{statistics.median(beside) * 1e3:>11.1f} {statistics.median(alone) * 1e3:>9.1f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rank", nargs=2, metavar=("ADDRESS", "BACKEND"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--parts", default="abc", help="which of (a), (b), (c)")
    given = parser.parse_args()
    if given.rank:
        rank_main(*given.rank)
        return
    with tempfile.TemporaryDirectory() as directory:
        pairs = {backend: Pair(backend, Path(directory)) for backend in ("mpi", "gloo")}
        try:
            for part, run in (("a", against_bare), ("b", against_gloo), ("c", how_much_is_hidden)):
                if part in given.parts:
                    run(pairs, given.rounds)
        finally:
            for pair in pairs.values():
                pair.close()


if __name__ == "__main__":
    main()
