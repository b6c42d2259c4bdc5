"""A native call that may never return, within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def within(seconds: float, call: Callable[[], _T], what: str) -> _T:
    """Return what ``call()`` returns, or raise what it raises. It runs in a thread of its own.

    So Ctrl-C is handled while the caller waits. A call that takes longer than ``seconds`` is left running,
    and its result is lost.

    Raises:
        TimeoutError: ``call`` took longer; names it as ``what``.
    """
    ended: Future[_T] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # for the caller to raise
            ended.set_exception(error)

    thread = threading.Thread(target=run, name=f"asynccoll {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended.done():
        raise TimeoutError(f"{what} did not return within {seconds:g} s")
    return ended.result()
