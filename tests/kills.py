"""Kill a rank at a random moment, repeatedly: which error the survivors get, how soon, and what is leaked.

``python tests/kills.py 1000 [SEED]`` prints one line of figures, and a line for each kill that went wrong.
Ranks are forked from this process, which has imported everything but started nothing.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import asynccoll as ac
from patience import patient

__all__ = ["Kills", "kill_many"]

#: Survivors that have not reported for this long are considered hanging.
HANG_SECONDS = 30.0
#: Elements to reduce and gather: one step, several in flight, many steps.
_SIZES = (1, 1000, 70_000, 400_000)


@dataclass
class Kills:
    """The outcome of a number of kills."""

    #: the time from the kill to the error, for each survivor
    seconds: list[float] = field(default_factory=list)
    #: descriptions of what went wrong
    wrong: list[str] = field(default_factory=list)

    def share_within(self, seconds: float) -> float:
        return sum(one <= seconds for one in self.seconds) / len(self.seconds)

    def __str__(self) -> str:
        ordered = sorted(self.seconds)
        median, high = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        return (
            f"{len(ordered)} survivors, {len(self.wrong)} wrong; ms: median {median * 1e3:.0f}, "
            f"99 % {high * 1e3:.0f}, longest {ordered[-1] * 1e3:.0f}; "
            f"{self.share_within(0.1):.1%} within 100 ms"
        )


def kill_many(count: int, seed: int, sizes: Sequence[int] = (2, 3, 4)) -> Kills:
    """Kill a rank in each of ``count`` worlds, of these sizes in turn."""
    kills = Kills()
    rng = random.Random(seed)
    for number in range(count):
        _kill_one(sizes[number % len(sizes)], rng, kills, f"kill {number} of seed {seed}")
    return kills


def _kill_one(size: int, rng: random.Random, kills: Kills, name: str) -> None:
    victim, work = rng.randrange(size), rng.randrange(1 << 30)
    pause = rng.choice((0.0, 0.02, 0.2)) * rng.random()
    before = _in_dev_shm()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [_fork(rank, size, Path(directory), work) for rank in range(size)]
        try:
            if any(_read(pipe) is None for _, pipe in ranks):
                said = "".join(
                    _last_words(pid, Path(directory, str(rank))) for rank, (pid, _) in enumerate(ranks)
                )
                kills.wrong.append(f"{name}: the world of {size} did not come together{said}")
                return
            time.sleep(pause)  # a random moment, not a wait for something
            start = time.monotonic()
            os.kill(ranks[victim][0], signal.SIGKILL)
            for rank, (pid, pipe) in enumerate(ranks):
                if rank == victim:
                    continue
                one = f"{name}: rank {rank} of {size}"
                if (said := _read(pipe)) is None:
                    words = _last_words(pid, Path(directory, str(rank)))
                    kills.wrong.append(f"{one} hangs, or has ended without a word{words}")
                else:
                    _judge(said, victim, start, kills, one)
        finally:
            for pid, pipe in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                os.close(pipe)
    if left := _in_dev_shm() - before:
        kills.wrong.append(f"{name}: left in /dev/shm: {sorted(left)}")


def _judge(said: Any, victim: int, start: float, kills: Kills, name: str) -> None:
    kills.seconds.append(said["at"] - start)
    if said["error"] != "PeerLostError" or said["ranks"] != [victim]:
        kills.wrong.append(f"{name}, of which rank {victim} was killed: {said}")
    if said["left"]:
        kills.wrong.append(f"{name} has open descriptors afterwards: {said['left']}")
    if kills.seconds[-1] > patient(1.0):
        kills.wrong.append(f"{name} was told after {kills.seconds[-1]:.2f} s: {said['text']}")


def _last_words(pid: int, written: Path) -> str:
    """Return what a rank raised, or the stacks of its threads; ends the rank."""
    os.kill(pid, signal.SIGUSR1)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return f"\n--- process {pid}:\n{written.read_text()}"


def _read(pipe: int) -> Any:
    """Return the next line that a rank reports; None if it reports none."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([pipe], [], [], HANG_SECONDS)[0]:
            return None
        got = os.read(pipe, 4096)
        if not got:
            return None
        line += got
    return json.loads(line)


def _fork(rank: int, size: int, directory: Path, seed: int) -> tuple[int, int]:
    """Fork a rank. Returns its process id, and the pipe by which it reports."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        return pid, reads
    try:
        os.close(reads)
        with Path(directory, str(rank)).open("w") as words:
            faulthandler.register(signal.SIGUSR1, words, chain=True)
            try:
                _be_rank(rank, size, f"{directory}/meet", seed, writes)
            except BaseException:
                traceback.print_exc(file=words)
    finally:
        os._exit(0)


def _be_rank(rank: int, size: int, meet: str, seed: int, pipe: int) -> None:
    def say(what: object) -> None:
        os.write(pipe, json.dumps(what).encode() + b"\n")

    warnings.simplefilter("ignore", ac.UnawaitedWorkWarning)  # the error drops operations in flight
    opened = _descriptors()
    ac.initialize("gloo", init_method=f"file://{meet}", rank=rank, world_size=size, timeout=20)
    try:
        asyncio.run(_work(random.Random(seed), lambda: say("up")))
    except ac.CollectiveError as error:
        said = {
            "at": time.monotonic(),
            "error": type(error).__name__,
            "ranks": list(getattr(error, "ranks", ())),
        }
        said["text"] = str(error)
    ac.finalize()
    gc.collect()  # the error's traceback referenced the frames that used the lanes
    said["left"] = [what for what in _descriptors() - opened if "asynccoll" in what or "pidfd" in what]
    say(said)


async def _work(rng: random.Random, ready: Any) -> None:
    """Make endless calls, the same on all ranks: several in flight, some not yet waited for."""
    await ac.barrier()
    ready()
    while True:
        x = torch.ones(rng.choice(_SIZES))
        flying: list[Any] = [
            rng.choice((ac.all_reduce, ac.all_gather))(x, lane=rng.choice(("default", "other")))
            for _ in range(rng.randrange(1, 5))
        ]
        flying.append(ac.all_gather_object(x.numel()))
        flying += _around(torch.ones(rng.choice(_SIZES)), rng.randrange(3))
        rng.shuffle(flying)
        for work in flying:
            await work


def _around(x: torch.Tensor, tag: int) -> list[Any]:
    """Start a message to the next rank, and one from the previous rank."""
    rank, size = ac.get_rank(), ac.get_world_size()
    return [
        ac.send(x, dst=(rank + 1) % size, tag=tag),
        ac.recv(torch.empty_like(x), src=(rank - 1) % size, tag=tag),
    ]


def _in_dev_shm() -> set[str]:
    """Return our and torch's files in /dev/shm, which other programs on this machine use, too."""
    return {name for name in os.listdir("/dev/shm") if "asynccoll" in name or "torch" in name}


def _descriptors() -> set[str]:
    """Return the open descriptors of this process, with the names of their files."""
    found = set()
    for one in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{one} {os.readlink(f'/proc/self/fd/{one}')}")
        except OSError:  # the descriptor of the listing itself
            continue
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    all_kills = kill_many(
        int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 30)
    )
    print("\n".join([*all_kills.wrong, str(all_kills)]), flush=True)
    sys.exit(bool(all_kills.wrong))
