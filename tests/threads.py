"""Worlds whose ranks are threads of the test's process, over a `HashStore`."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import asynccoll as ac
from patience import patient
from ranks import Place, Rank, none_dropped, run_case


class ThreadsError(AssertionError):
    """A case failed or hung on some of the threads."""


def run(
    size: int,
    case: Callable[..., Any],
    *args: Any,
    runner: str = "asyncio",
    timeout: float = 20.0,
    **kwargs: Any,
) -> list[Any]:
    """Run `case(me, *args, **kwargs)` on `size` threads, the ranks of one world. Returns their results."""
    store = dist.HashStore()
    failures: dict[int, list[str]] = {rank: [] for rank in range(size)}
    results: list[Any] = [None] * size
    signs = Path(tempfile.mkdtemp(prefix="asynccoll-signs-"))

    def rank_thread(rank: int) -> None:
        def report(kind: str, *message: Any) -> None:
            if kind == "failed":
                failures[rank].append(f"case {message[0]!r}\n{message[1]}")

        try:
            ac.initialize("gloo", store=store, rank=rank, world_size=size, timeout=patient(60))
            me = Rank(Place("gloo", rank, size), runner, signs, report)
            results[rank] = run_case(me, case, args, kwargs)
        except BaseException:
            failures[rank].append(traceback.format_exc())
        finally:  # later tests need this, too: while ranks are threads, the process has no world of one
            ac.finalize()

    threads = [
        threading.Thread(target=rank_thread, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    gc.collect()  # so that handles that earlier tests left in reference cycles do not count here
    with none_dropped():
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout)
            if thread.is_alive():
                frame = sys._current_frames().get(thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame else ""
                failures[rank].append(f"not done after {timeout} s\n{stack}")
        texts = [f"--- rank {rank}: {text}" for rank in failures for text in failures[rank]]
        shutil.rmtree(signs, ignore_errors=True)
        if texts:  # takes precedence: handles may have been dropped because of these failures
            raise ThreadsError("\n".join([f"{case.__qualname__} on {size} threads failed", *texts]))
    return results
