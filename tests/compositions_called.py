"""Makes a call of a `compositions.Program`, in its form and with its keyword arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import asynccoll as ac
import compositions_expected as expected
from compositions import Call
from compositions_compared import Record
from compositions_waited import TIMEOUTS


def issue(call: Call, record: Record, ranks: int, lane: str | None) -> Any:
    """Make the call, and return its work; on ``lane``, if given, instead of the context's."""
    keywords = _keywords(call, record, ranks)
    if lane is not None:
        keywords["lane"] = lane
    x = record.case.x
    if call.form == "prepared":
        return ac.prepare(call.operation, like=x, **keywords).start()
    function = getattr(ac, call.operation)
    if call.operation == "permute":
        function = partial(_permute, keywords.pop("pairs"))
    if call.operation.startswith("recv"):
        function = partial(_ring, call, record, call.group or tuple(range(ranks)))
    if call.operation == "barrier":
        return ac.barrier(**keywords)
    if call.form == "in place twice":
        first = function(x, **keywords)
        if call.detached_first:
            first.detach()  # ranks may disagree about whether it is complete when the second is made
    try:
        work = function(x, **keywords)
    finally:
        if call.form == "in place twice":
            first.detach()
    if call.payload == "overwritten":
        x.add_(1)
    return work.map(_boxed) if call.form == "mapped" else work


def _permute(pairs: Any, x: Any, **keywords: Any) -> Any:
    return ac.permute(x, pairs, **keywords)


#: The tags of messages, by seed: most are the same.
_TAGS = (0, 0, 0, 0, 1, 2)


def _ring(call: Call, record: Record, members: tuple[int, ...], x: Any, **keywords: Any) -> Any:
    """Send to the next rank of the group, and receive from the previous one; some ranks receive first."""
    place = members.index(record.rank)
    following, before = members[(place + 1) % len(members)], members[place - 1]
    keywords |= {"tag": _TAGS[call.seed % len(_TAGS)]}
    send: Callable[..., Any]
    receive: Callable[..., Any]
    if isinstance(x, torch.Tensor):
        sent_x: Any = "a text" if call.payload == "refused message" and place == call.root else x
        send, receive = partial(ac.send, sent_x), partial(ac.recv, x)
    else:
        send, receive = partial(ac.send_object, x), ac.recv_object
    first = receive(src=before, **keywords) if (place + call.seed) % 2 else None
    if call.payload == "refused message" and place == call.root:
        _refused(send, dst=following, **keywords)
    else:
        sent = send(dst=following, **keywords)
        sent.detach()
        record.sent = sent if call.seed % 2 else None
    return receive(src=before, **keywords) if first is None else first


def _refused(send: Callable[..., object], **keywords: Any) -> None:
    """Send something that cannot be sent; the receiver learns of the refusal."""
    try:
        send(**keywords)
    except expected.REFUSED:
        return
    raise AssertionError("it was sent")


def _uneven(call: Call, place: int, size: int) -> dict[str, Any]:
    if call.operation == "all_gather":
        return {"uneven": True}
    going, coming = expected.splits(call, place, size)
    return {"input_split_sizes": going} | ({"output_split_sizes": coming} if coming is not None else {})


def _boxed(value: Any) -> tuple[Any]:
    return (value,)


def _keywords(call: Call, record: Record, ranks: int) -> dict[str, Any]:
    """Return the keyword arguments of the call."""
    members = call.group or tuple(range(ranks))
    said: dict[str, Any] = {}
    if call.group:
        said["group"] = list(call.group)
    if call.operation in ("all_reduce", "reduce", "reduce_scatter"):
        said["op"] = call.op
    if record.case.call.payload.startswith("wrong"):
        meant = ac.PeerRefusedError in record.case.must_raise
        said["op"] = "sum" if meant or call.seed % 3 else "avg"
    if call.operation in ("broadcast", "broadcast_object", "scatter", "scatter_object"):
        said["src"] = members[call.root]
    if call.operation in ("reduce", "gather", "gather_object"):
        said["dst"] = members[call.root]
    if call.operation == "permute":
        said["pairs"] = [(rank, members[(place + 1) % len(members)]) for place, rank in enumerate(members)]
    if record.case.out is not None:
        said["out"] = record.case.out
    if call.form == "safe":
        said["safe_mode"] = True
    if call.form == "scaled":
        said |= {"prescale": 2.0, "postscale": 0.5}
    if call.form == "compressed":
        said |= {"compression": "fp16"}
    if call.dim:
        said["dim"] = call.dim
    if call.wait == "deadline":
        said["timeout"] = TIMEOUTS[call.seed % len(TIMEOUTS)]
    if call.payload.endswith(("uneven", "splits")):
        said |= _uneven(call, members.index(record.rank), len(members))
    return said
