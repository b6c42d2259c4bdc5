"""A tree as text, node by node, so that an error can name the leaf on which ranks differ.

A larger tree does not fit in a line. So the text of a call (``texts.at_line``) ends with all nodes of its
tree, compressed; ``shown_part`` strips them for display, and ``differing`` says where trees differ. This
module must not know how texts are sent to other ranks.
"""

from __future__ import annotations

import base64
import keyword
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

import torch

from asynccoll.host.words import by_text, encoded
from asynccoll.plan.spec import described, dtype_name
from asynccoll.plan.trees import TreeSpec

#: Separates the displayed part of a text from the nodes of its tree.
_BETWEEN = "\x1f"
#: The most differences that are shown, and the most bytes that are unpacked of a peer's text.
_MOST, _MOST_BYTES = 3, 1 << 20
#: Larger trees would not fit anyway, and would take long to compress.
_MOST_LEAVES = 1000
#: The most characters that are shown of a path, and of the node there.
_MOST_CHARACTERS = 120


@dataclass(frozen=True)
class Outline:
    """A tree in the description of a call: ranks compare its structure, and errors show its leaves, too.

    Descriptions are kept, so an outline keeps nothing of the tree alive. All parts of the call share one.
    """

    spec: TreeSpec
    #: for each leaf, its dtype and shape if it is a tensor, else a word for what it is
    leaves: tuple[str | tuple[object, ...], ...]

    @classmethod
    def of(cls, spec: TreeSpec, leaves: Iterable[torch.Tensor | str]) -> Outline:
        """Return the outline of a tree with this structure. ``leaves``: a word for each that is not a tensor.

        Equal trees get the same object, as long as it is cached: comparing two outlines is slow.
        """
        return _known(
            cls(spec.bare, tuple([one if isinstance(one, str) else described(one) for one in leaves]))
        )

    def __str__(self) -> str:
        return str(self.spec)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.spec, self.leaves))

    @cached_property
    def packed(self) -> str:
        """The nodes, encoded as the end of a text; "" if there are too many."""
        if len(self.leaves) > _MOST_LEAVES:
            return ""
        leaves = iter(self.leaves)
        nodes = "\n".join(
            f"{path}\t{_said(next(leaves)) if kind == '*' else kind}" for path, kind in _paths(self.spec, "")
        )
        return _BETWEEN + base64.b85encode(zlib.compress(encoded(nodes))).decode()


@lru_cache(maxsize=64)
def _known(outline: Outline) -> Outline:
    return outline


def packed(what: object) -> str:
    """Return the end of the text of the call ``what``: the nodes of its tree; "" if it has none."""
    match what:
        case ((str(), Outline() as tree, *_), _):
            return tree.packed
    return ""


def shown_part(text: str) -> str:
    """Return ``text`` without the nodes of its tree."""
    return text.partition(_BETWEEN)[0]


def differing(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """Return where the trees of these texts differ, as a line of an error.

    ``(the trees differ at ['b']: float32 [4] on rank 0, but float32 [5] on rank 1)``;
    "" if one of the texts has no tree, or if all trees are the same.
    """
    trees = list(map(_unpacked, texts))
    if not all(trees):
        return ""
    paths = _topmost(trees)
    found = []
    for path in paths[:_MOST]:
        sides = by_text(ranks, [tree.get(path, "missing") for tree in trees])
        told = ", but ".join(f"{_short(said)} on {who}" for who, said in sides)
        found.append(f"{_short(path) or 'the tree itself'}: {told}")
    more = "; and elsewhere" * (len(paths) > _MOST)
    return f"\n(the trees differ at {'; '.join(found)}{more})" if found else ""


def leaf_path(spec: TreeSpec, place: int) -> str:
    """Return the path of the leaf at ``place`` in the list of leaves: ``['layers'][0].bias``."""
    paths = (path for path, kind in _paths(spec, "") if kind == "*")
    return _short(next(islice(paths, place, None)))


def _unpacked(text: str) -> dict[str, str]:
    data = text.partition(_BETWEEN)[2]
    if not data:
        return {}
    try:
        lines = zlib.decompressobj().decompress(base64.b85decode(data), _MOST_BYTES).decode()
    except (ValueError, zlib.error):  # truncated, or written by another version
        return {}
    parts = [line.partition("\t") for line in lines.split("\n")]
    return {path: said for path, _, said in parts}


def _topmost(trees: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the first paths at which trees differ, without those below another such path.

    Returns at most one more than ``_MOST``, from which the caller knows that there are more.
    """
    found, below = list[str](), tuple[str, ...]()
    for path in dict.fromkeys(path for tree in trees for path in tree):
        if len({tree.get(path) for tree in trees}) > 1 and not path.startswith(below):
            found.append(path)
            below += (f"{path}[", f"{path}.")
            if len(found) > _MOST:
                break
    return found


def _short(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: half - 3]}...{text[-half:]}"


def _said(leaf: str | tuple[object, ...]) -> str:
    match leaf:
        case (torch.dtype() as dtype, torch.Size() as shape, *layout):
            return " ".join((dtype_name(dtype), str(list(shape)), *map(str, layout)))
    return str(leaf)


def _paths(spec: TreeSpec, path: str) -> Iterator[tuple[str, str]]:
    yield path, spec.kind
    names = spec.names or [str(index) for index in range(len(spec.children))]
    for name, child in zip(names, spec.children, strict=True):
        field = name.isidentifier() and not keyword.iskeyword(name)
        yield from _paths(child, f"{path}.{name}" if field else f"{path}[{_one_line(name)}]")


def _one_line(name: str) -> str:
    return name.replace("\n", " ").replace("\t", " ").replace(_BETWEEN, " ")
