"""The memory of one lane as one of its ranks uses it: words, texts, and slots as tensors.

It may be any buffer of bytes: memory that processes share, or an array that simulated ranks share.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from asynccoll.backends.memory.layout import BLOCK_WORDS, SLOTS, TEXT_BYTES, Layout

#: For how many kinds of tensors a region keeps its views: making one takes as long as a small operation.
_MOST_VIEWS = 1024


class _PerSlot(dict[torch.dtype, int]):
    """How many elements of each dtype fit into a slot, at least one; computed when first asked for."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes

    def __missing__(self, dtype: torch.dtype) -> int:
        held = self[dtype] = max(1, self._slot_bytes // dtype.itemsize)
        return held


class Region:
    """``buffer`` with ``layout``, as the rank with that ``index`` uses it."""

    def __init__(self, buffer: Any, layout: Layout, index: int) -> None:
        self.layout = layout
        self.index = index
        self.size: int = layout.size
        self.bytes: memoryview = memoryview(buffer).cast("B")
        self.per_slot: dict[torch.dtype, int] = _PerSlot(layout.slot_bytes)
        self.words: memoryview[int] = self.bytes[: layout.texts].cast("Q")
        #: where this rank's control block begins, and those of the others, in rank order
        self.mine: int = index * BLOCK_WORDS
        self.others: list[int] = [rank * BLOCK_WORDS for rank in range(layout.size) if rank != index]
        with torch.inference_mode(False):
            self._memory = torch.frombuffer(buffer, dtype=torch.uint8)
        self._views: dict[tuple[torch.dtype, int, int, int], list[torch.Tensor]] = {}
        self._texts: list[bytes | None] = [None] * SLOTS

    def views(self, slot: int, dtype: torch.dtype, count: int, offset: int = 0) -> list[torch.Tensor]:
        """Return, for each rank, ``count`` elements of its slot from the byte ``offset``."""
        key = (dtype, count, slot, offset)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[key] = [
                self._view(rank, slot, dtype, count, offset) for rank in range(self.size)
            ]
        return found

    def _view(self, rank: int, slot: int, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        start = self.layout.slot(rank, slot) + offset
        with torch.inference_mode(False):  # else only threads in inference mode could write to it
            return self._memory[start : start + count * dtype.itemsize].view(dtype)

    def write_note(self, slot: int, note: Sequence[int]) -> None:
        """Describe what this rank has put into that slot, in two words for each rank of the region.

        For an all_to_all these are the lengths of the parts that this rank takes from each rank, then of
        those that it gives to each; for a point-to-point message they say what it is (``pair``).
        """
        start = self._notes(slot) + self.index * 2 * self.size
        self.words[start : start + 2 * self.size] = memoryview(array("Q", note))

    def note(self, rank: int, slot: int) -> list[int]:
        """Return the note of ``rank`` for that slot."""
        start = self._notes(slot) + rank * 2 * self.size
        return self.words[start : start + 2 * self.size].tolist()

    def misfit(self, slot: int) -> tuple[int, int, int, int] | None:
        """Return two ranks of which the second takes more or less than the first gives to it, or None.

        After the ranks follow what the first one gives, and what the second one takes.
        """
        start, size = self._notes(slot), self.size
        told = self.words[start : start + self.layout.notes_words].tolist()
        row = 2 * size  # the note of one rank: what it takes from each, then what it gives to each
        for rank in range(size):
            taken, given = told[rank * row : rank * row + size], told[size + rank :: row]
            if taken != given:
                other = next(other for other in range(size) if taken[other] != given[other])
                return other, rank, given[other], taken[other]
        return None

    def _notes(self, slot: int) -> int:
        return self.layout.notes // 8 + slot * self.layout.notes_words

    def write_text(self, slot: int, text: bytes) -> None:
        """Write the text for this rank's call in that slot, unless it is there already, as nearly always."""
        if self._texts[slot] is text:
            return
        start = self.layout.text(self.index, slot)
        shown = text[: TEXT_BYTES - 1]
        self.bytes[start : start + len(shown) + 1] = shown + b"\0"
        self._texts[slot] = text  # last: if Ctrl-C comes earlier, the text is written again next time

    def text(self, rank: int, slot: int) -> str:
        """Return the text of ``rank`` for its call in that slot."""
        start = self.layout.text(rank, slot)
        raw = bytes(self.bytes[start : start + TEXT_BYTES])
        return raw.partition(b"\0")[0].decode(errors="replace")
