"""``check="full"``: the signatures of all ranks are compared before any data moves.

A signature is a digest of the call's description (operation, reduction, dtype, shape, root). It is sent in
one small all_gather ahead of the call, on the same communicator, so calls in a different order are detected
as well. On a mismatch a second all_gather exchanges the descriptions, and every rank raises; nothing of the
call itself has been sent, and the lane stays in step.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Sequence

import torch

from asynccoll.errors import CollectiveMismatchError
from asynccoll.host.call_number import CHILD, ROUND, numbered
from asynccoll.host.call_site import site
from asynccoll.host.words import by_text, encoded, shortened
from asynccoll.order.job import Program, Start, What
from asynccoll.order.lane import Lane
from asynccoll.plan.texts import at_line, shown
from asynccoll.plan.tree_texts import differing, shown_part
from asynccoll.transport.communicator import Communicator
from asynccoll.transport.completion import Completion

_DIGEST_BYTES = 16
_TEXT_BYTES = 8192
#: How many characters of a call on a tree are shown if the error names the leaves that differ.
_BEGIN = 160
#: The operations that have ``uneven=``.
_UNEVEN = ("all_gather", "gather")


def checked(lane: Lane, what: What, start: Start | None = None, program: Program | None = None) -> Program:
    """Return a program that compares ``what`` with every other rank's, then runs ``start`` or ``program``.

    For calls that are sent together, the description of all of them is compared as well.
    """
    what, place, *_ = lane.upcoming(what)
    text = encoded(f"{place // CHILD} {shown(what)}")
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    line = site().place

    def compared(communicator: Communicator) -> Generator[Completion, None, Completion]:
        digests = _rows(lane, _DIGEST_BYTES)
        yield communicator.all_gather(digests.view(-1), _row(digest, _DIGEST_BYTES))
        if not torch.equal(digests, digests[:1].expand_as(digests)):  # as it then is on every rank
            texts = _rows(lane, _TEXT_BYTES)
            yield communicator.all_gather(texts.view(-1), _row(at_line(what, line, _TEXT_BYTES), _TEXT_BYTES))
            raise mismatch(lane, lane.group.ranks, list(map(_text, texts)), place=place)
        if program is not None:
            return (yield from program(communicator))
        assert start is not None
        return start(communicator)

    return compared


def _rows(lane: Lane, size_bytes: int) -> torch.Tensor:
    return torch.empty(lane.group.size, size_bytes, dtype=torch.uint8, device="cpu")


def _row(said: bytes, size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(said.ljust(size_bytes, b"\0")), dtype=torch.uint8)


def _text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")


def mismatch(
    where: object,
    ranks: Sequence[int],
    texts: Sequence[str],
    begins: tuple[int, int] | None = None,
    place: int = 0,
) -> CollectiveMismatchError:
    """Return the error for ``ranks`` that called different ``texts``, found before anything was sent.

    ``begins``: place and part of the first of these calls; ``place``: its place, if only that is known.
    """
    place = begins[0] if begins is not None else place
    number = f"as call {numbered(place)} " if place else ""
    trees = differing(ranks, texts)
    texts = list(map(shown_part, texts))
    # The leaves that differ say more than the rest of a long text.
    sides = by_text(ranks, map(_begins, texts) if trees else texts)
    said = "\n".join(f"  {who}: {text}" for who, text in sides)
    error = CollectiveMismatchError(
        f"ranks called different things {number}on {where} (nothing was sent; the lane is still usable):"
        f"\n{said}{trees}{_hint(texts, place)}"
    )
    error.begins, error.place = begins, place
    return error


def misfit(
    where: object, ranks: tuple[int, int], rows: int, expected: int, lines: Sequence[str], place: int = 0
) -> CollectiveMismatchError:
    """Return the error for an all_to_all: ``ranks[0]`` sends ``rows``, but ``ranks[1]`` expects ``expected``.

    ``lines`` are those of the two calls, "" where that is not known.
    """
    sender, receiver = ranks
    texts = (
        f"all_to_all, {rows} rows to rank {receiver}",
        f"all_to_all, {expected} rows expected from rank {sender}",
    )
    told = [f"{text} at {line}" if line else text for text, line in zip(texts, lines, strict=True)]
    return mismatch(where, ranks, told, place=place)


def _hint(texts: Sequence[str], place: int) -> str:
    """Return a hint at the likely cause, as far as the texts, and the place if known, show it; else ""."""
    said = [text.rpartition(" at ") for text in texts]
    whats = [what or line for what, _, line in said]  # the line is not always known
    lines = {line for what, _, line in said if what}
    if len({_any_length(what) for what in whats}) == 1 and whats[0].startswith(_UNEVEN):
        return f"\n(ac.{whats[0].split()[0]} with uneven=True takes tensors of different shapes)"
    if len(set(said)) == 1:
        return (
            "\n(different calls from one line: in a block of calls, or in a child task that used this lane "
            "before, a rank has made more calls than the others; a deadline inside a child can cause that: "
            "put it around the task group)"
        )
    before = place % ROUND - 1
    if len(lines) > 1 and before:
        which = "the call" if before == 1 else f"one of the {before} calls" if before > 0 else "a call"
        return (
            f"\n(a rank may have skipped {which} before this one, or made one more: do all ranks have "
            "the same number of batches, is a call under `if rank == 0`? If earlier calls were alike, their "
            "results may be mixed up)"
        )
    return ""


def _begins(text: str) -> str:
    """Return the beginning of a text, and its line."""
    what, at, line = text.rpartition(" at ")
    return f"{shortened(what, _BEGIN)}{at}{line}"


def _any_length(what: str) -> str:
    """Return ``what`` with the first dimension of its shapes replaced by n."""
    return re.sub(r"\[\d+", "[n", what)
