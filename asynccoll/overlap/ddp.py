"""DDP's buckets on a lane of ours: ``ddp.register_comm_hook(ac.overlap.DDPState(), ac.overlap.ddp_hook)``.

DDP makes the buckets and waits for them; the reduction is an operation as any other: it has its place in
a timeline, its timeout, and a peer that is lost or refuses is an error that names it.
"""

# Without postponed annotations: DDP compares those of a hook with the types themselves.

import contextlib
import weakref

import torch
import torch.distributed as dist

from asynccoll import host
from asynccoll.errors import InvalidArgumentError
from asynccoll.host.call_site import caller, on_behalf_of
from asynccoll.host.misfits import fitting
from asynccoll.host.timeouts import check_timeout
from asynccoll.ops.collectives import all_reduce
from asynccoll.ops.scopes import backward_lane
from asynccoll.runtime.process import get_world_size
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike

__all__ = ["DDPState", "ddp_hook"]

_Bucket = tuple[Work[torch.Tensor], "torch.futures.Future[None]"]
_Buckets = host.SimpleQueue["_Bucket | None"]


class DDPState:
    """Where the buckets of one ``DistributedDataParallel`` travel: the state of ``ddp_hook``.

    Args:
        group: the ranks that DDP's own process group has; None is the world.
        lane: buckets are sent on the lane ``<lane>/backward``; models that train side by side need one each.
        timeout: seconds for each bucket's reduction.
    """

    @fitting
    def __init__(self, *, group: GroupLike = None, lane: str = "ddp", timeout: float | None = None) -> None:
        check_timeout(timeout)
        self.group = group
        self.lane: str = backward_lane(lane)
        self.timeout = timeout
        self._spot = caller(1)
        self._out: _Buckets = host.SimpleQueue()
        # One thread waits for all of them, so that a lost peer or a timeout is noticed as in any wait.
        waiter = host.Thread(target=_wait_for, args=(self._out,), name=f"asynccoll-{lane}", daemon=True)
        waiter.start()
        weakref.finalize(self, self._out.put, None)

    def reduce(self, flat: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        """The average of ``flat`` over the group, in place."""
        flat.div_(get_world_size(self.group))
        with on_behalf_of(self._spot):
            work = all_reduce(flat, out=flat, group=self.group, lane=self.lane, timeout=self.timeout)
        devices: list[int | str | torch.device] | None = [flat.device] if flat.is_cuda else None
        over: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        # What a callback raises DDP raises, with its text; an exception that is set it takes for a tensor.
        reduced: torch.futures.Future[torch.Tensor] = over.then(lambda _: work.wait())
        self._out.put((work, over))
        return reduced


def ddp_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: DDP's gradients, averaged by ``ac.all_reduce``.

    >>> ddp = DistributedDataParallel(model)
    >>> ddp.register_comm_hook(ac.overlap.DDPState(), ac.overlap.ddp_hook)

    The gradients are bit for bit those of DDP alone. A reduction that fails is a ``RuntimeError`` out of
    ``backward`` with the error's text.

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
        work, over = bucket
        with contextlib.suppress(Exception):  # DDP's future waits for the same work, and raises it there
            work.wait()
        over.set_result(None)
        del bucket, work, over  # or they lived until the next one
