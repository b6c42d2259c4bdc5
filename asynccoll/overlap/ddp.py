"""DDP's buckets on one of our lanes: ``ddp.register_comm_hook(ac.overlap.DDPState(), ac.overlap.ddp_hook)``.

DDP makes the buckets and waits for them. The reduction is an operation like any other: it is in timelines,
has a timeout, and if a peer is lost or refuses its call, the error names the peer.
"""

# No ``from __future__ import annotations``: DDP compares a hook's annotations with the types themselves.

import weakref

import torch
import torch.distributed as dist

from asynccoll import host
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.call_site import caller, on_behalf_of
from asynccoll.host.misfits import fitting
from asynccoll.host.timeouts import check_timeout
from asynccoll.host.uncopied import Uncopied
from asynccoll.ops.collectives import all_reduce
from asynccoll.ops.scopes import backward_lane
from asynccoll.runtime.process import get_world_size
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike

__all__ = ["DDPState", "ddp_hook"]

#: a reduction, the future that is set when it is over, and the error of waiting for it, if there is one
_Bucket = tuple[Work[torch.Tensor], "torch.futures.Future[None]", list[Exception]]
_Buckets = host.SimpleQueue["_Bucket | None"]


class DDPState(Uncopied):
    """The state of ``ddp_hook``: where the buckets of one ``DistributedDataParallel`` are sent.

    Args:
        group: the ranks of DDP's own process group; None is the world.
        lane: buckets are sent on the lane ``<lane>/backward``. Models that train concurrently need one each.
        timeout: seconds for each bucket's reduction.
    """

    _instead = (
        "copy or save the model itself (ddp.module), wrap the copy, and register a hook with a new state"
    )

    @fitting
    def __init__(self, *, group: GroupLike = None, lane: str = "ddp", timeout: float | None = None) -> None:
        check_timeout(timeout)
        self.group = group
        self.lane: str = backward_lane(lane)
        self.timeout = timeout
        self._spot = caller(1)
        self._out: _Buckets = host.SimpleQueue()
        # One thread waits for all buckets, so that a lost peer or a timeout is noticed as in any wait.
        waiter = host.Thread(target=_wait_for, args=(self._out,), name=f"asynccoll-{lane}", daemon=True)
        waiter.start()
        weakref.finalize(self, self._out.put, None)

    def reduce(self, flat: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        """Start to average ``flat`` over the group, in place; returns the future that DDP waits for."""
        flat.div_(get_world_size(self.group))
        with on_behalf_of(self._spot):
            work = all_reduce(flat, out=flat, group=self.group, lane=self.lane, timeout=self.timeout)
        devices: list[int | str | torch.device] | None = [flat.device] if flat.is_cuda else None
        over: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        failed: list[Exception] = []

        def result(_: object) -> torch.Tensor:
            # If a callback of a future raises, DDP raises an error with that text. With ``set_exception``
            # instead, DDP would take the exception for a tensor.
            if failed:
                raise failed.pop()
            return work.wait()

        reduced: torch.futures.Future[torch.Tensor] = over.then(result)
        self._out.put((work, over, failed))
        return reduced


def ddp_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average DDP's gradients by ``ac.all_reduce``, as a communication hook.

    >>> ddp = DistributedDataParallel(model)
    >>> ddp.register_comm_hook(ac.overlap.DDPState(), ac.overlap.ddp_hook)

    The gradients are bitwise the same as those of DDP alone. If a reduction fails, ``backward`` raises a
    ``RuntimeError`` with the error's text.

    Source: torch's "DDP Communication Hooks".
    """
    if not isinstance(state, DDPState):
        raise InvalidArgumentError(
            f"the state of ddp_hook must be an ac.overlap.DDPState, got {type(state).__name__}: "
            "ddp.register_comm_hook(ac.overlap.DDPState(), ac.overlap.ddp_hook)"
        )
    return state.reduce(bucket.buffer())


def _wait_for(out: _Buckets) -> None:
    while (bucket := out.get()) is not None:
        work, over, failed = bucket
        try:
            work.wait()
        except Exception as error:
            failed.append(error)
        over.set_result(None)
        del bucket, work, over, failed  # else they would live until the next bucket
