"""The number of a call in its lane's order, and how it is shown to users."""

from __future__ import annotations

#: More calls than a rank makes between two joins. After each join, all ranks continue counting at the next
#: multiple.
ROUND = 1 << 30
#: More calls than a child task of a task group makes. If the next child gets the same lane, all ranks
#: continue counting at the next multiple, so that no call of one child is taken for a call of the other.
CHILD = 1 << 40


def call_name(operation: str, sequence: int) -> str:
    """Return ``all_reduce #12``, or ``send`` for a message, which has no place (``sequence`` is 0)."""
    return f"{operation} {numbered(sequence)}" if sequence else operation


def message_name(operation: str, peer: int, tag: int) -> str:
    """Return ``send to rank 1 (tag 0)``."""
    return f"{operation} {'to' if operation.startswith('send') else 'from'} rank {peer} (tag {tag})"


def counterpart(operation: str) -> str:
    """Return what the other rank of a message calls; "" if ``operation`` is not a message."""
    of = operation.rpartition(" ")[2]  # an operation that follows a message is named "decode of recv_object"
    if of.startswith("send"):
        return of.replace("send", "recv", 1)
    return of.replace("recv", "send", 1) if of.startswith("recv") else ""


def numbered(sequence: int) -> str:
    """Return ``#12``, ``#12 after 2 joins``, or ``#12 of child task 3`` (the third child of its name)."""
    child, number = divmod(sequence, CHILD)
    joins, number = divmod(number, ROUND)
    of = f" of child task {child + 1}" if child else ""
    return f"#{number}{f' after {joins} join' if joins else ''}{'s' * (joins > 1)}{of}"
