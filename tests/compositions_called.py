"""Makes a call of a `compositions.Program`: in its form, with what it is told beside its payload."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import asynccoll as ac
import compositions_expected as expected
from compositions import Call
from compositions_compared import Record
from compositions_waited import TIMEOUTS


def issue(call: Call, record: Record, ranks: int, lane: str | None) -> Any:
    """The work of the call; on this lane where the context does not say which."""
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
        function = partial(_ring, call.group or tuple(range(ranks)), record.rank)
    if call.operation == "barrier":
        return ac.barrier(**keywords)
    if call.form == "in place twice":
        first = function(x, **keywords)
        if call.detached_first:
            first.detach()  # each rank sees for itself whether it is over when the second is made
    try:
        work = function(x, **keywords)
    finally:
        if call.form == "in place twice":
            first.detach()
    return work.map(_boxed) if call.form == "mapped" else work


def _permute(pairs: Any, x: Any, **keywords: Any) -> Any:
    return ac.permute(x, pairs, **keywords)


def _ring(members: tuple[int, ...], rank: int, x: Any, **keywords: Any) -> Any:
    """Each rank of the group sends to the next, and hears from the one before."""
    place = members.index(rank)
    following, before = members[(place + 1) % len(members)], members[place - 1]
    if not isinstance(x, torch.Tensor):
        ac.send_object(x, dst=following, **keywords).detach()
        return ac.recv_object(src=before, **keywords)
    ac.send(x, dst=following, **keywords).detach()
    return ac.recv(x, src=before, **keywords)


def _uneven(call: Call, place: int, size: int) -> dict[str, Any]:
    if call.operation == "all_gather":
        return {"uneven": True}
    going, coming = expected.splits(call, place, size)
    return {"input_split_sizes": going} | ({"output_split_sizes": coming} if coming is not None else {})


def _boxed(value: Any) -> tuple[Any]:
    return (value,)


def _keywords(call: Call, record: Record, ranks: int) -> dict[str, Any]:
    """What the call is told beside its payload."""
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
    if call.payload.endswith("uneven"):
        said |= _uneven(call, members.index(record.rank), len(members))
    return said
