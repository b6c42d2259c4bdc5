"""The number of a call in its lane's order, and how people read it."""

from __future__ import annotations

__all__ = ["ROUND", "call_name", "counterpart", "message_name", "numbered"]

#: More calls than a rank makes between two joins: after each, all ranks count on from the next multiple.
ROUND = 1 << 30


def call_name(operation: str, sequence: int) -> str:
    """``all_reduce #12``; of a message, which has no place in the order (0), ``send``."""
    return f"{operation} {numbered(sequence)}" if sequence else operation


def message_name(operation: str, peer: int, tag: int) -> str:
    """``send to rank 1 (tag 0)``."""
    return f"{operation} {'to' if operation.startswith('send') else 'from'} rank {peer} (tag {tag})"


def counterpart(operation: str) -> str:
    """What the other rank of a message calls; "" of what is no message."""
    of = operation.rpartition(" ")[2]  # what follows on a message is named "decode of recv_object"
    if of.startswith("send"):
        return of.replace("send", "recv", 1)
    return of.replace("recv", "send", 1) if of.startswith("recv") else ""


def numbered(sequence: int) -> str:
    """``#12``, or ``#12 after 2 joins``."""
    joins, number = divmod(sequence, ROUND)
    return f"#{number} after {joins} join{'s' * (joins > 1)}" if joins else f"#{number}"
