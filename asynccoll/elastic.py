"""Elastic Horovod jobs: training that continues when workers are lost or added.

Horovod does the work (``horovodrun`` with ``--min-np`` or a discovery script finds the workers,
``hvd.elastic`` keeps and restores the state). This module joins and leaves Horovod's world and ours together,
and turns our errors into the one that Horovod recovers from.
"""

from __future__ import annotations

import copy
import functools
import io
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast, overload

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from asynccoll.auto.data import Resumable
from asynccoll.auto.models import load_in_place
from asynccoll.backends.api import own_device
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
    """Return a ``horovod.common.elastic.State`` that survives a loss: models, optimizers, plain values.

    >>> state = ac.elastic.state(model=model, optimizer=optimizer, epoch=0, batch=0)

    It also keeps other objects that have ``state_dict`` and ``load_state_dict``: schedulers, gradient
    scalers, averages of weights, and our samplers, which share what is left of an epoch among the workers of
    the new world. These objects remain the same ones; plain values (numbers, lists, tensors) are replaced by
    copies, so read them from the state.

    ``state.commit()`` in the training loop keeps a copy, to which all workers return after a failure; new
    workers get rank 0's.
    """
    hvd = load()
    start(hvd, None)
    from horovod.common.elastic import State

    kind: Any = type("State", (_Kept, State), {})
    made = kind(hvd.broadcast_object, hvd.rank)
    vars(made).update(kept)
    made._names = [*kept]
    made.save()
    return made


class _Kept:
    """What Horovod's loop calls on a state: before a function, after a loss, and to commit."""

    _names: list[str]

    def save(self) -> None:
        """Keep a copy of everything."""
        with _Detaching():
            self._saved = copy.deepcopy({name: _saved(vars(self)[name]) for name in self._names})

    def restore(self) -> None:
        """Return to the copy, which stays as it is."""
        for name, kept in self._saved.items():
            value, saved = vars(self)[name], copy.deepcopy(kept)
            if isinstance(value, Optimizer):
                load_in_place(value, saved)
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                vars(self)[name] = saved

    def sync(self) -> None:
        """Give every worker what rank 0 has now; all keep a copy of it, if the next loss comes first."""
        hvd = load()
        if hvd.rank() == 0:
            self.save()
        self._saved = _from_first(hvd, self._saved)
        for name in self._names:
            if isinstance(sampler := vars(self)[name], Resumable):
                sampler.num_replicas, sampler.rank = hvd.size(), hvd.rank()
        self.restore()


class _Detaching(TorchFunctionMode):
    """Has deepcopy, which refuses tensors with a history of autograd, copy them without it."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            copied = args[1][id(args[0])] = copy.deepcopy(args[0].detach(), args[1])
            return copied
        return func(*args, **(kwargs or {}))


def _saved(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "load_state_dict") else value


def _from_first(hvd: Any, kept: T) -> T:
    """Return rank 0's ``kept``; its tensors on a GPU are on this worker's own.

    Horovod's ``broadcast_object`` takes seconds for megabytes, and fails from 2 GiB on.
    """
    from horovod.torch.functions import cloudpickle

    written = io.BytesIO()
    if hvd.rank() == 0:
        torch.save(kept, written, pickle_module=cloudpickle)
    size = int(hvd.broadcast(torch.tensor([written.tell()], device="cpu"), 0, name="asynccoll.elastic.size"))
    written.write(bytes(size - written.tell()))
    sent = torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
    hvd.broadcast_(sent, 0, name="asynccoll.elastic.state")
    own_device(hvd.local_rank())  # as in ``initialize``; else all workers of a host would use rank 0's
    if hvd.rank() == 0:
        return kept
    written.seek(0)
    return cast("T", torch.load(written, map_location=_to_own, weights_only=False))


def _to_own(storage: Any, place: str) -> Any:
    return storage if place == "cpu" else storage.cuda()


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
    ...     while state.epoch < 10:
    ...         ...                       # any collectives of ours, on the horovod backend
    ...         state.epoch += 1          # first: else the epoch would be repeated after a loss
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
                updates[0].skip_sync = False  # samplers have to share anew among fewer workers, too
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
