"""Elastic Horovod jobs: training that continues when workers are lost or added.

Horovod does the work (``horovodrun`` with ``--min-np`` or a discovery script finds the workers,
``hvd.elastic`` keeps and restores the state). This module joins and leaves Horovod's world and ours together,
and turns our errors into the one that Horovod recovers from.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, overload

import torch
from torch.optim import Optimizer

from asynccoll.auto.data import Resumable
from asynccoll.auto.models import load_in_place
from asynccoll.backends.horovod.library import load, start
from asynccoll.errors import CollectiveError, CollectiveMismatchError, PeerRefusedError
from asynccoll.host.endings import in_a_line, leaves
from asynccoll.launch.calling import complete
from asynccoll.runtime.process import finalize, initialize

__all__ = ["run", "state"]

T = TypeVar("T")

#: The errors, in a refusal's text, from which the rank that refused a call recovers: a child task of it has
#: failed because of a lost rank, say, and another one was cancelled.
_RECOVERS = re.compile(
    r"\b(PeerLostError|CollectiveTimeoutError|CollectiveError|HorovodInternalError|HostsUpdatedInterrupt)\b"
)


def state(**kept: object) -> Any:
    """Return a ``horovod.torch.elastic.TorchState`` that survives a loss: models, optimizers, plain values.

    >>> state = ac.elastic.state(model=model, optimizer=optimizer, epoch=0, batch=0)

    It also keeps other objects that have ``state_dict`` and ``load_state_dict``: schedulers, gradient
    scalers, and our samplers, which share what is left of an epoch among the workers of the new world.

    ``state.commit()`` in the training loop keeps a copy, to which all workers return after a failure; new
    workers get rank 0's.
    """
    hvd = load()
    start(hvd, None)
    made = hvd.elastic.TorchState(**kept)
    for handler in made._handlers.values():
        if isinstance(handler.value, Optimizer):
            handler.sync = functools.partial(_sync, hvd, handler)
            handler.restore = functools.partial(_restore, handler)
    for name in [name for name, value in made._saved_state.items() if hasattr(value, "load_state_dict")]:
        # Horovod would keep no copy, and give other workers a new object: a scheduler with its own optimizer.
        value = made._saved_state.pop(name)
        made._handlers[name] = hvd.elastic.state.SamplerStateHandler(value)
        if isinstance(value, Resumable):
            _share_anew(hvd, value)  # it may have been made before there was a world
            made.register_reset_callbacks([functools.partial(_share_anew, hvd, value)])
    return made


def _share_anew(hvd: Any, sampler: Any) -> None:
    """Have the next iteration of ``sampler``, one of ours, share what is left among the workers of now."""
    left = sampler.state_dict()
    sampler.num_replicas, sampler.rank = hvd.size(), hvd.rank()
    sampler.load_state_dict(left)


def _sync(hvd: Any, handler: Any) -> None:
    """Give every worker the state of rank 0's optimizer; a new worker has none.

    Horovod's own function makes a step on a new worker to get one, which decays its weights.
    """
    saved = io.BytesIO()
    if hvd.rank() == 0:
        torch.save(handler.value.state_dict(), saved)
    sent = io.BytesIO(hvd.broadcast_object(saved.getvalue(), root_rank=0))
    # On the CPU: else every worker of a host would load it on the first GPU.
    load_in_place(handler.value, torch.load(sent, map_location="cpu", weights_only=False))


def _restore(handler: Any) -> None:
    """Return to the state that was saved last; Horovod's own function cuts schedulers off."""
    load_in_place(handler.value, handler._saved_optimizer_state)


def _is_mistake(error: BaseException) -> bool:
    """Whether ``error`` is a mistake of the program, which a new world would only repeat."""
    refused = isinstance(error, PeerRefusedError) and not _RECOVERS.search(str(error))
    return refused or isinstance(error, CollectiveMismatchError)


@overload
def run(function: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]: ...
@overload
def run(function: Callable[..., T]) -> Callable[..., T]: ...
def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function(state, *args)`` as an elastic job: called again in each world that the workers form.

    >>> @ac.elastic.run
    ... def train(state):
    ...     for state.epoch in range(state.epoch, 10):
    ...         ...                       # any collectives of ours, on the horovod backend
    ...         state.commit()
    >>> train(state)

    Each call is made after a fresh ``initialize("horovod")``: ranks and sizes are those of the new world, and
    groups and lanes of the previous one are gone. When a worker is lost, the others return to the last
    commit; when hosts are added, they continue from the current state. It ends when the function returns. An
    ``async def`` is run by ``asyncio.run``.

    Start it with ``horovodrun -np 4 --min-np 2 --host-discovery-script ./hosts.sh python train.py``.

    Raises:
        CollectiveMismatchError, PeerRefusedError: mistakes of the program are not retried.
    """
    hvd = load()
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

    recoverable = (CollectiveError, HorovodInternalError)

    def life(state: object, *args: object, **kwargs: object) -> object:
        try:
            initialize("horovod")
            result = complete(function, state, *args, **kwargs)
        except BaseException as error:
            causes = leaves(error)  # Horovod does not look into the error of a task group
            is_mistake = all(map(_is_mistake, causes))
            finalize(abort=not is_mistake)  # peers must still hear of a mistake, and not take it for a loss
            if updates := [one for one in causes if isinstance(one, HostsUpdatedInterrupt)]:
                raise updates[0] from None
            if not is_mistake and all(isinstance(one, recoverable) for one in causes):
                raise HorovodInternalError(in_a_line(error)) from error
            raise
        finalize()
        return result

    elastic: Callable[..., Any] = hvd.elastic.run(life)

    @functools.wraps(function)
    def job(state: object, *args: object, **kwargs: object) -> Any:
        start(hvd, None)
        return elastic(state, *args, **kwargs)

    return job
