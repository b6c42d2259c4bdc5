"""Collectives of arbitrary objects, encoded by an explicit codec."""

from __future__ import annotations

from asynccoll.errors import InvalidArgumentError
from asynccoll.order.lane import Lane
from asynccoll.payload.codecs import Codec, get_codec
from asynccoll.payload.exchanging import check_tag, peer_of
from asynccoll.payload.messages import (
    Message,
    broadcast_message,
    gather_messages,
    recv_message,
    scatter_messages,
    send_message,
)
from asynccoll.payload.values import from_message, to_message
from asynccoll.waiting.started import Started


def all_gather_object(
    lane: Lane, obj: object, codec: Codec | str | None, timeout: float | None
) -> Started[list[object]]:
    chosen = get_codec(codec)
    message = to_message(obj, chosen)
    return gather_messages(
        lane,
        "all_gather_object",
        message,
        None,
        timeout,
        then=lambda found: [_decode(lane, row, chosen) for row in found],
    )


def gather_object(
    lane: Lane, obj: object, dst: int, codec: Codec | str | None, timeout: float | None
) -> Started[list[object] | None]:
    chosen = get_codec(codec)
    index = lane.group.index(dst, "dst")
    return gather_messages(
        lane,
        "gather_object",
        to_message(obj, chosen),
        index,
        timeout,
        then=lambda found: [_decode(lane, row, chosen) for row in found] or None,
        detail=f"dst={dst}",
    )


def broadcast_object(
    lane: Lane, obj: object, src: int, codec: Codec | str | None, timeout: float | None
) -> Started[object]:
    chosen = get_codec(codec)
    index = lane.group.index(src, "src")
    message = to_message(obj, chosen) if lane.group.rank == index else None
    return broadcast_message(
        lane,
        "broadcast_object",
        message,
        index,
        timeout,
        then=lambda found: _decode(lane, found, chosen),
        detail=f"src={src}",
    )


def scatter_object(
    lane: Lane, objs: object, src: int, codec: Codec | str | None, timeout: float | None
) -> Started[object]:
    chosen = get_codec(codec)
    index = lane.group.index(src, "src")
    messages: list[Message] | None = None
    if lane.group.rank == index:
        if not isinstance(objs, (list, tuple)) or len(objs) != lane.group.size:
            got = f"{len(objs)} objects" if isinstance(objs, (list, tuple)) else f"a {type(objs).__name__}"
            raise InvalidArgumentError(
                f"scatter_object: src must pass a list of {lane.group.size} objects, one for each rank; "
                f"got {got}"
            )
        messages = [to_message(obj, chosen) for obj in objs]
    return scatter_messages(
        lane,
        "scatter_object",
        messages,
        index,
        timeout,
        then=lambda found: _decode(lane, found, chosen),
        detail=f"src={src}",
    )


def send_object(
    lane: Lane, obj: object, dst: int, tag: int, codec: Codec | str | None, timeout: float | None
) -> Started[None]:
    peer, tag = peer_of(lane, dst, "dst"), check_tag(tag)
    return send_message(lane, to_message(obj, get_codec(codec)), peer, tag, timeout)


def recv_object(
    lane: Lane, src: int, tag: int, codec: Codec | str | None, timeout: float | None
) -> Started[object]:
    peer, tag = peer_of(lane, src, "src"), check_tag(tag)
    chosen = get_codec(codec)
    return recv_message(lane, peer, tag, timeout, then=lambda found: _decode(lane, found, chosen))


def _decode(lane: Lane, message: Message, codec: Codec) -> object:
    return from_message(message, lane.world.device, codec)
