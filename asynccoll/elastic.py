"""Elastic Horovod jobs: training that continues when workers are lost or added.

Horovod does the work (``horovodrun`` with ``--min-np`` or a discovery script finds the workers,
``hvd.elastic`` keeps and restores the state). This module joins and leaves Horovod's world and ours together,
and turns our errors into the one that Horovod recovers from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from asynccoll.backends.horovod.library import load, start
from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerRefusedError
from asynccoll.runtime.process import finalize, initialize

__all__ = ["run", "state"]

T = TypeVar("T")

#: Mistakes of the program, which a new world would only repeat.
_MISTAKES = (CollectiveMismatchError, PeerRefusedError)


def state(**kept: object) -> Any:
    """Return a ``horovod.torch.elastic.TorchState`` that survives a loss: models, optimizers, plain values.

    >>> state = ac.elastic.state(model=model, optimizer=optimizer, epoch=0, batch=0)

    ``state.commit()`` in the training loop keeps a copy, to which all workers return after a failure; new
    workers get rank 0's.
    """
    hvd = load()
    start(hvd, None)
    return hvd.elastic.TorchState(**kept)


def run(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap ``function(state, *args)`` as an elastic job: called again in each world that the workers form.

    >>> @ac.elastic.run
    ... def train(state):
    ...     for state.epoch in range(state.epoch, 10):
    ...         ...                       # any collectives of ours, on the horovod backend
    ...         state.commit()
    >>> train(state)

    Each call is made after a fresh ``initialize("horovod")``: ranks and sizes are those of the new world, and
    groups and lanes of the previous one are gone. When a worker is lost, the others return to the last
    commit; when hosts are added, they continue from the current state. It ends when the function returns.

    Start it with ``horovodrun -np 4 --min-np 2 --host-discovery-script ./hosts.sh python train.py``.

    Raises:
        CollectiveMismatchError, PeerRefusedError: mistakes of the program are not retried.
    """
    hvd = load()
    from horovod.common.exceptions import HorovodInternalError

    def life(state: object, *args: object, **kwargs: object) -> T:
        try:
            initialize("horovod")
            result = function(state, *args, **kwargs)
        except _MISTAKES:
            finalize()  # not aborted: peers must still hear of it, and must not take it for a loss
            raise
        except CollectiveError as error:
            finalize(abort=True)
            raise HorovodInternalError(str(error)) from error
        except BaseException:  # among them the one by which Horovod reports new hosts
            finalize(abort=True)
            raise
        finalize()
        return result

    elastic: Callable[..., T] = hvd.elastic.run(life)

    @functools.wraps(function)
    def job(state: object, *args: object, **kwargs: object) -> T:
        start(hvd, None)
        return elastic(state, *args, **kwargs)

    return job
