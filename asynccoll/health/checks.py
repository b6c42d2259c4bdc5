"""``check="full"``: the signatures of all ranks are compared before any data moves.

A signature describes a call (operation, reduction, dtype, shape, root). It is sent in one small all_gather
ahead of the call, on the same communicator, so that calls in different order are found as well. On a mismatch
every rank raises, nothing of the call has been sent, and the lane stays in step.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterable, Sequence

import torch

from asynccoll.errors import CollectiveMismatchError
from asynccoll.host.call_number import CHILD
from asynccoll.host.call_site import called_at, caller
from asynccoll.host.words import listed
from asynccoll.order.job import Program, Start
from asynccoll.order.lane import Lane
from asynccoll.plan.texts import at_line, shown
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import READY, Completion
from asynccoll.waiting.started import Started

__all__ = ["checked", "compare", "mismatch", "signature"]

_DIGEST_BYTES = 16
_ROW_BYTES = 512
#: The operations that have ``uneven=``.
_UNEVEN = ("all_gather", "gather")


def signature(name: str, dtype: str = "", shape: Sequence[int] | None = None, detail: str = "") -> str:
    """The signature of a call as one line: ``all_reduce sum float32[4, 8]``."""
    tensor = dtype + (shown(list(shape)) if shape is not None else "")
    return " ".join(part for part in (name, detail, tensor) if part)


def compare(lane: Lane, text: Callable[[], str]) -> list[Started[None]]:
    """With ``check="full"``, start a comparison of ``text`` without a call after it; else start nothing."""
    if not lane.compares_calls:
        return []
    operation = lane.run("check", checked(lane, text(), lambda _: READY))
    return [Started((operation,))]


def checked(lane: Lane, text: str, start: Start | None = None, program: Program | None = None) -> Program:
    """A program that compares ``text`` with every other rank's, and then runs ``start`` or ``program``.

    For calls that are sent together, the description of all of them is compared as well.
    """
    row = _row(f"{lane.sent_together} {text}" if lane.sent_together else text, lane.sequence // CHILD)
    size = lane.group.size

    def compared(communicator: Communicator) -> Generator[Completion, None, Completion]:
        rows = torch.empty(size * _ROW_BYTES, dtype=torch.uint8, device="cpu")
        yield communicator.all_gather(rows, row)
        _verify(lane, rows.view(size, _ROW_BYTES))
        if program is not None:
            return (yield from program(communicator))
        assert start is not None
        return start(communicator)

    return compared


def _row(text: str, child: int) -> torch.Tensor:
    digest = hashlib.blake2b(f"{child} {text}".encode(), digest_size=_DIGEST_BYTES).digest()
    said = at_line(text, (called_at.get() or caller()).place, _ROW_BYTES - _DIGEST_BYTES)
    return torch.frombuffer(bytearray((digest + said).ljust(_ROW_BYTES, b"\0")), dtype=torch.uint8)


def _verify(lane: Lane, rows: torch.Tensor) -> None:
    first = rows[0, :_DIGEST_BYTES]
    if all(torch.equal(first, row[:_DIGEST_BYTES]) for row in rows[1:]):
        return
    texts = [bytes(row[_DIGEST_BYTES:].tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
    raise mismatch(lane, lane.group.ranks, texts)


def mismatch(
    where: object, ranks: Sequence[int], texts: Sequence[str], begins: tuple[int, int] | None = None
) -> CollectiveMismatchError:
    """The error for ``ranks`` that called different ``texts``, found before anything was sent.

    ``begins``: place and part of the first of these calls.
    """
    sides = "\n".join(f"  {who}: {text}" for who, text in _grouped(ranks, texts))
    error = CollectiveMismatchError(
        f"ranks called different things on {where} (nothing was sent; the lane is still usable):\n{sides}"
        f"{_hint(texts)}"
    )
    error.begins = begins
    return error


def _hint(texts: Sequence[str]) -> str:
    """A hint at the likely cause, as far as the texts show it; else ""."""
    said = [text.rpartition(" at ") for text in texts]
    whats = [what or line for what, _, line in said]  # the line is not always known
    lines = {line for what, _, line in said if what}
    if len({_any_length(what) for what in whats}) == 1 and whats[0].startswith(_UNEVEN):
        return f"\n(with uneven=True, {whats[0].split()[0]} takes tensors of different shapes)"
    if len(set(said)) == 1:
        return (
            "\n(another call of that line: one of a block of calls, or of a child task that had this lane "
            "before, of which a rank has made more than the others; a deadline inside a child does that: "
            "put it around the task group)"
        )
    if len(lines) > 1:
        return (
            "\n(a rank may have skipped a call before this one, or made one more; if calls before it were "
            "alike, their results may be mixed)"
        )
    return ""


def _any_length(what: str) -> str:
    """``what`` with the first dimension of its shapes replaced by n."""
    return re.sub(r"\[\d+", "[n", what)


def _grouped(ranks: Iterable[int], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of ranks and text, one for each different text."""
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        by_text.setdefault(text, []).append(rank)
    return [(listed(members), text) for text, members in by_text.items()]
