"""``batch_isend_irecv``: many messages in one call, for programs that use torch's function of that name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from asynccoll.errors import InvalidArgumentError, PayloadTypeError
from asynccoll.host import misfits
from asynccoll.ops.collectives import recv, refuse_send, send
from asynccoll.ops.signatures import fitting
from asynccoll.waiting.work import Work
from asynccoll.world.group import GroupLike


class P2POp:
    """One message of a batch: ``ac.P2POp(ac.send, x, 1)``, ``ac.P2POp(ac.recv, buffer, 0)``.

    ``op`` may be torch's ``isend`` or ``irecv`` as well. ``peer`` is a global rank; ``group_peer`` is the
    index in the group instead. A receive fills its tensor in place, as in torch, and returns it.
    """

    __slots__ = ("group", "group_peer", "op", "peer", "tag", "tensor")

    @misfits.fitting
    def __init__(
        self,
        op: Callable[..., object],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (send, recv, dist.isend, dist.irecv):
            raise InvalidArgumentError(
                f"a P2POp's op is ac.send or ac.recv (or torch's isend, irecv), got {op!r}"
            )
        self.op: Callable[..., object] = send if op in (send, dist.isend) else recv
        self.tensor: torch.Tensor = tensor
        self.peer: int | None = peer
        self.group: GroupLike = group
        self.tag: int = tag
        self.group_peer: int | None = group_peer

    def start(self, lane: str | None, timeout: float | None) -> Work[Any]:
        """Start the send or receive."""
        common: dict[str, Any] = {"tag": self.tag, "group": self.group, "lane": lane, "timeout": timeout}
        if self.op is send:
            return send(self.tensor, dst=self.peer, group_dst=self.group_peer, **common)
        return recv(self.tensor, src=self.peer, group_src=self.group_peer, out=self.tensor, **common)

    def refuse(self, lane: str | None, error: Exception) -> None:
        """Notify the receiver of a send that is not made: ``error`` has ended the batch."""
        if self.op is send:
            to = {"dst": self.peer, "group_dst": self.group_peer}
            refuse_send(error, **to, tag=self.tag, group=self.group, lane=lane)


@fitting
def batch_isend_irecv(
    p2p_op_list: Iterable[P2POp], /, *, lane: str | None = None, timeout: float | None = None
) -> list[Work[object]]:
    """Start all messages in the list, and return their works in the same order. None waits for another.

    >>> following, previous = (rank + 1) % n, (rank - 1) % n
    >>> works = ac.batch_isend_irecv([ac.P2POp(ac.send, x, following), ac.P2POp(ac.recv, y, previous)])
    >>> await ac.wait_all(works)                      # y holds the x of the rank before

    Raises:
        PayloadTypeError: an item of the list is not a ``P2POp``; nothing was sent.
        InvalidArgumentError: an argument of a message is invalid; those before it in the list were sent, and
            those after it are refused: their receivers get a ``PeerRefusedError``.

    Source: ``torch.distributed.batch_isend_irecv``.
    """
    is_list = isinstance(p2p_op_list, Iterable)
    # A copy: a generator can be iterated only once.
    messages: list[Any] = list(p2p_op_list) if is_list else [p2p_op_list]
    for one in messages:
        if not isinstance(one, P2POp) or not is_list:
            kind = "torch.distributed.P2POp" if isinstance(one, dist.P2POp) else type(one).__name__
            where = " in it" if is_list else ""
            raise PayloadTypeError(
                f"batch_isend_irecv takes a list of ac.P2POp, got a {kind}{where}: write "
                "ac.P2POp(ac.send, x, 1) or ac.P2POp(ac.recv, x, 0)"
            )
    works: list[Work[object]] = []
    try:
        works.extend(one.start(lane, timeout) for one in messages)
    except BaseException as error:
        for work in works:
            work.detach()  # the caller does not get them, so they must not warn
        if isinstance(error, Exception):
            for one in messages[len(works) + 1 :]:
                one.refuse(lane, error)
        raise
    return works
