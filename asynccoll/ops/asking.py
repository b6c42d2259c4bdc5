"""``who_is_missing``: which ranks a call in flight waits for."""

from __future__ import annotations

from asynccoll.errors import PayloadTypeError
from asynccoll.health.blame import Blame
from asynccoll.host.misfits import fitting
from asynccoll.waiting.work import Work


@fitting
def who_is_missing(work: Work[object], /) -> Blame:
    """Return which ranks ``work`` waits for, and what they report doing instead.

    ``found.ranks`` are the global ranks that have not made the call or cannot continue (stopped, gone). It is
    empty if every rank has made the call, or if the work is done. ``str(found)`` says what each of them
    called last, when and where, and what it is doing now, in the words of ``CollectiveTimeoutError``. Blocks
    until it has the answer: half a second, or several seconds if hosts cannot be reached.

    >>> work = ac.all_reduce(x)
    >>> print(ac.who_is_missing(work))
    rank 1 (host n1, pid 71) has not called all_reduce #41 on lane 'default'; its last call was broadcast #40
    on lane 'default' at train.py:88, 12.3 s ago, finished; it is now in load (data.py:17)
    """
    if not isinstance(work, Work):
        raise PayloadTypeError(
            f"who_is_missing takes a Work, as every call returns, got a {type(work).__name__}"
        )
    for operation in work.operations:
        if not operation.done():
            found: Blame = operation.lane.world.blame(operation)  # type: ignore[assignment]  # the context's
            return found
    return Blame("", "", (), ())
